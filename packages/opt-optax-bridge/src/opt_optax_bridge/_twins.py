"""Wrapped constructors: twins of what the installed Optax exports, and of your own functions."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import optax
import optax.contrib
from opt_core import OptimizerDef
from opt_core.protocols import Transformation

from opt_optax_bridge._recipe import Recipe, as_optax
from opt_optax_bridge._wrapper import OptaxWrapper

P = ParamSpec("P")
W = TypeVar("W", bound=OptaxWrapper)


def wrap_optax_optimizer(optax_optimizer: Callable[P, Any]) -> Callable[P, OptaxWrapper]:
    """Makes a constructor of Optax optimizers one of optimizer definitions.

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
            f"a constructor is wrapped, a function that returns a transformation; got a "
            f"{type(constructor).__name__}. Wrap a transformation with `OptaxWrapper(tx)`."
        )

    @functools.wraps(constructor)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> W:
        return definition.from_recipe(Recipe(constructor, args, dict(kwargs)))

    if name is not None:  # a partial has none
        wrapped.__name__ = wrapped.__qualname__ = name
    return wrapped


def chain(*parts: Any, **named_parts: Any) -> OptaxWrapper:
    """Chains definitions and transformations, applied in order.

    The hyper-parameters of definitions made by twins are those of the whole. What two parts have is
    called by part and name, as `adam.learning_rate`; a part is named after its constructor
    (repeated: `adam_1`), or by the keyword that it is given by.

    Args:
      *parts: definitions (`opt_optax_bridge.adamw(...)`), Optax transformations, or one sequence of
        them. A transformation has been built already, and nothing of it can be overridden.
      **named_parts: more of them, applied after `parts`.

    Returns:
      The definition of `optax.chain` of their transformations: its state, its compiled step.

    Raises:
      TypeError: a part is neither.

    Examples:
      >>> import jax.numpy as jnp
      >>> sgd, clip = twin('sgd'), twin('clip_by_global_norm')
      >>> optimizer = chain(clip(1.0), sgd(0.5)).create({'w': jnp.zeros(1)})
      >>> grads = {'w': jnp.full(1, 8.0)}
      >>> optimizer.apply_gradient(grads, max_norm=2.0, learning_rate=0.25).target['w'].tolist()
      [-0.5]
      >>> optimizer = chain(sgd(0.5), late=sgd(1.0)).create({'w': jnp.zeros(1)})
      >>> stepped = optimizer.apply_gradient(grads, **{'late.learning_rate': 0.25})
      >>> stepped.target['w'].tolist()
      [1.0]
    """
    is_one = len(parts) == 1 and not named_parts
    if is_one and isinstance(parts[0], Sequence) and not isinstance(parts[0], _TRANSFORMATION):
        parts = tuple(parts[0])
    for part in (*parts, *named_parts.values()):
        if not isinstance(part, OptimizerDef | Transformation):
            raise TypeError(
                "`chain` takes definitions and transformations; got a "
                f"{type(part).__name__}. Call its constructor first."
            )
    return OptaxWrapper.from_recipe(Recipe(_chained, parts, named_parts))


_TRANSFORMATION = optax.GradientTransformation  # a tuple itself


def _chained(*parts: Any, **named_parts: Any) -> optax.GradientTransformation:
    return optax.chain(*map(as_optax, (*parts, *named_parts.values())))


_chained.__name__ = "chain"  # what a part of a chain that is one is called


def chain_sequence(
    transformations: Sequence[optax.GradientTransformation],
) -> optax.GradientTransformation:
    """Chains transformations, given as one sequence, as T5X does.

    Args:
      transformations: Optax transformations, applied in order.
    """
    return optax.chain(*transformations)


def optimizer_names() -> tuple[str, ...]:
    """Returns the names of the optimizers of the installed Optax, attributes of this package.

    Examples:
      >>> {'adamw', 'sgd', 'lion', 'muon'} <= set(optimizer_names())
      True
    """
    return tuple(sorted(_constructors()))


def building_block_names() -> tuple[str, ...]:
    """Returns the names of what else makes a transformation, attributes of this package too.

    They are parts of a chain, or wrap others.

    Examples:
      >>> {'clip_by_global_norm', 'scale_by_adam', 'masked'} <= set(building_block_names())
      True
    """
    return tuple(sorted(_blocks()))


@functools.cache
def twin(name: str) -> Callable[..., OptaxWrapper]:
    """Returns the wrapped constructor of that name; an `AttributeError` if there is none."""
    found = _blocks().get(name) or constructor(name, "opt_optax_bridge")
    return wrap_into(OptaxWrapper, found, name)


def constructor(name: str, module: str) -> Callable[..., Any]:
    """Returns Optax's constructor of that name, looked for as an attribute of `module`.

    Raises:
      AttributeError: the installed Optax has no such optimizer.
    """
    if name not in (constructors := _constructors()):
        raise AttributeError(
            f"module {module!r} has no attribute {name!r}: optax {optax.__version__} exports no "
            "optimizer of that name (`opt_optax_bridge.optimizer_names()` lists them)"
        )
    return constructors[name]


@functools.cache
def _constructors() -> Mapping[str, Callable[..., Any]]:
    # What takes an optimizer is one itself in `contrib` (`mechanize`, `sam`); in `optax` it is a
    # building block (`selective_transform`).
    marks = {optax: ("learning_rate",), optax.contrib: ("learning_rate", "optimizer")}
    return {
        name: obj
        for module, words in marks.items()
        for name, obj in vars(module).items()
        if _is_optimizer(name, obj, words)
    }


@functools.cache
def _blocks() -> Mapping[str, Callable[..., Any]]:
    # `chain` is ours; the others return no transformation, or one that is there already.
    left_out = {"chain", "with_extra_args_support", *_constructors()}
    return {
        name: obj
        for module in (optax, optax.contrib)
        for name, obj in vars(module).items()
        if not name.startswith("_") and name not in left_out and _makes_transformation(name, obj)
    }


def _makes_transformation(name: str, obj: Any) -> bool:
    if not isinstance(obj, types.FunctionType):
        return False
    try:
        result = inspect.signature(obj).return_annotation
    except (TypeError, ValueError):
        return False
    if result is inspect.Signature.empty:  # of `scale_by_factored_rms`
        return name.startswith("scale_by_")
    words = result if isinstance(result, str) else getattr(result, "__name__", "")
    return words.rpartition(".")[2].startswith("GradientTransformation")


def _is_optimizer(name: str, obj: Any, words: tuple[str, ...]) -> bool:
    """Whether it makes a transformation out of an argument with one of these words in its name."""
    if name.startswith(("_", "scale_by_")):
        return False
    if not isinstance(obj, types.FunctionType | functools.partial):  # `nadam` is a partial
        return False
    try:
        signature = inspect.signature(obj)
    except (TypeError, ValueError):
        return False
    result = signature.return_annotation  # of `dog` it is missing
    makes_one = result is signature.empty or "GradientTransformation" in str(result)
    return makes_one and any(word in name for name in signature.parameters for word in words)
