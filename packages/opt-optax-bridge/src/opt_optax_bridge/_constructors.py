"""Wrapped constructors: of what the installed Optax exports, and of user functions."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import optax
import optax.contrib
from opt_core import OptimizerDef
from opt_core.protocols import Transformation

from opt_optax_bridge._recipe import Recipe
from opt_optax_bridge._transformation import as_optax
from opt_optax_bridge._wrapper import OptaxWrapper

P = ParamSpec("P")
W = TypeVar("W", bound=OptaxWrapper)


def wrap_optax_optimizer(optax_optimizer: Callable[P, Any]) -> Callable[P, OptaxWrapper]:
    """Turns a constructor of Optax optimizers into a constructor of definitions.

    Args:
      optax_optimizer: a function that returns a `GradientTransformation` (or `optax.MultiSteps`):
        Optax's or your own.

    Returns:
      A function with the same signature and docstring that returns an `OptaxWrapper`. The
      definition remembers constructor and arguments: every float-valued argument can be overridden
      at run time.

    Examples:
      >>> import jax.numpy as jnp
      >>> @wrap_optax_optimizer
      ... def clipped_sgd(learning_rate, clip=1.0):
      ...     return optax.chain(optax.clip(clip), optax.sgd(learning_rate))
      >>> optimizer = clipped_sgd(0.1).create({'w': jnp.ones(2)})
      >>> optimizer.apply_gradient({'w': jnp.full(2, 5.0)}).target['w'].tolist()
      [0.9, 0.9]
      >>> optimizer.apply_gradient({'w': jnp.full(2, 5.0)}, clip=2.0).target['w'].tolist()
      [0.8, 0.8]
    """
    return wrap_into(OptaxWrapper, optax_optimizer)


def wrap_into(
    definition: type[W], constructor: Callable[P, Any], name: str | None = None
) -> Callable[P, W]:
    """Returns `constructor` with its signature, making definitions of the given class."""
    if not callable(constructor):
        raise TypeError(
            f"expected a constructor, a function that returns a transformation; got a "
            f"{type(constructor).__name__}. Wrap a transformation with `OptaxWrapper(tx)`."
        )

    @functools.wraps(constructor)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> W:
        return definition.from_recipe(Recipe(constructor, args, dict(kwargs)))

    if name is not None:  # a partial has none
        wrapped.__name__ = wrapped.__qualname__ = name
    return wrapped


Part = OptimizerDef | Transformation


def chain(*parts: Part | Sequence[Part], **named_parts: Part) -> OptaxWrapper:
    """Chains definitions and transformations, applied in order.

    The hyper-parameters of definitions made by wrapped constructors become those of the chain. One
    that two parts have is addressed by part and name, as `adam.learning_rate`; a part is named
    after its keyword, or else after its constructor (repeated: `adam_1`).

    Args:
      *parts: definitions (`opt_optax_bridge.adamw(...)`), Optax transformations, or one sequence of
        them. An Optax transformation is already built, and has nothing to override.
      **named_parts: more parts, applied after `parts`.

    Returns:
      The definition of `optax.chain` of their transformations: its state, its compiled step.

    Raises:
      TypeError: a part is neither a definition nor a transformation.
      ValueError: a part has a precision, which belongs around the chain.

    Examples:
      >>> import jax.numpy as jnp
      >>> sgd = wrapped_constructor('sgd')
      >>> clip = wrapped_constructor('clip_by_global_norm')
      >>> optimizer = chain(clip(1.0), sgd(0.5)).create({'w': jnp.zeros(1)})
      >>> grads = {'w': jnp.full(1, 8.0)}
      >>> optimizer.apply_gradient(grads, max_norm=2.0, learning_rate=0.25).target['w'].tolist()
      [-0.5]
      >>> optimizer = chain(sgd(0.5), late=sgd(1.0)).create({'w': jnp.zeros(1)})
      >>> stepped = optimizer.apply_gradient(grads, **{'late.learning_rate': 0.25})
      >>> stepped.target['w'].tolist()
      [1.0]
    """
    if len(parts) == 1 and not isinstance(parts[0], Part) and isinstance(parts[0], Sequence):
        parts = tuple(parts[0])
    for part in (*parts, *named_parts.values()):
        if not isinstance(part, Part):
            raise TypeError(
                "`chain` takes definitions and transformations; got a "
                f"{type(part).__name__}. Call its constructor first."
            )
        if isinstance(part, OptimizerDef) and part.precision is not None:
            raise ValueError(
                f"`chain`: a part has a precision ({part.precision}), and what follows it would "
                "change updates that are rounded. Write `chain(...).with_precision(...)`."
            )
    return OptaxWrapper.from_recipe(Recipe(_chained, parts, named_parts))


def _chained(*parts: Any, **named_parts: Any) -> optax.GradientTransformation:
    return optax.chain(*map(as_optax, (*parts, *named_parts.values())))


_chained.__name__ = "chain"  # the name of a nested chain as a part


def chain_sequence(
    transformations: Sequence[optax.GradientTransformation],
) -> optax.GradientTransformation:
    """Chains transformations given as one sequence, as in T5X."""
    return optax.chain(*transformations)


def optimizer_names() -> tuple[str, ...]:
    """Returns the names of the optimizers of the installed Optax, attributes of this package.

    Examples:
      >>> {'adamw', 'sgd', 'lion', 'muon'} <= set(optimizer_names())
      True
    """
    return tuple(sorted(name for name, entry in _exported().items() if entry.is_optimizer))


def building_block_names() -> tuple[str, ...]:
    """Returns the names of the other constructors, which are attributes of this package too.

    They make parts of a chain, or wrap other transformations.

    Examples:
      >>> {'clip_by_global_norm', 'scale_by_adam', 'masked'} <= set(building_block_names())
      True
    """
    return tuple(sorted(name for name, entry in _exported().items() if not entry.is_optimizer))


@functools.cache
def wrapped_constructor(name: str) -> Callable[..., OptaxWrapper]:
    """Returns the wrapped constructor of that name, or raises an `AttributeError`."""
    return wrap_into(OptaxWrapper, constructor(name, "opt_optax_bridge"), name)


def constructor(name: str, module: str, *, is_optimizer: bool = False) -> Callable[..., Any]:
    """Returns Optax's constructor of that name, or raises the `AttributeError` of `module`."""
    entry = _exported().get(name)
    if entry is None or is_optimizer > entry.is_optimizer:
        why = (
            f"what `optax.contrib` exports is here without it: write `{module}.muon(...)` for "
            "`optax.contrib.muon(...)`"
            if name == "contrib"
            else f"optax {optax.__version__} exports no optimizer of that name "
            "(`opt_optax_bridge.optimizer_names()` lists them)"
        )
        raise AttributeError(f"module {module!r} has no attribute {name!r}: {why}")
    return entry.function


class _Constructor(NamedTuple):
    function: Callable[..., Any]
    is_optimizer: bool  # not a building block


@functools.cache
def _exported() -> Mapping[str, _Constructor]:
    """The constructors of transformations that `optax` and `optax.contrib` export."""
    # A function that takes an optimizer makes one in `contrib` (`mechanize`, `sam`), but a building
    # block in `optax` (`selective_transform`).
    marks = {optax: ("learning_rate",), optax.contrib: ("learning_rate", "optimizer")}
    exported = (
        (name, _as_constructor(name, obj, words))
        for module, words in marks.items()
        for name, obj in vars(module).items()
        if not name.startswith("_") and name not in _NOT_HERE
    )
    return {name: entry for name, entry in exported if entry is not None}


# `chain` is replaced by ours; the other returns its argument.
_NOT_HERE = {"chain", "with_extra_args_support"}


def _as_constructor(name: str, obj: Any, words: tuple[str, ...]) -> _Constructor | None:
    """Returns `obj` if it makes a transformation: an optimizer if an argument is in `words`."""
    if not isinstance(obj, types.FunctionType | functools.partial):  # `nadam` is a partial
        return None
    try:
        signature = inspect.signature(obj)
    except (TypeError, ValueError):
        return None
    result = signature.return_annotation
    is_block = name.startswith("scale_by_")
    is_optimizer = not is_block and any(w in name for name in signature.parameters for w in words)
    if result is signature.empty:  # of `dog`, of `scale_by_factored_rms`
        is_constructor = is_block or is_optimizer
    else:
        is_constructor = "GradientTransformation" in str(result) and "Callable" not in str(result)
    return _Constructor(obj, is_optimizer) if is_constructor else None
