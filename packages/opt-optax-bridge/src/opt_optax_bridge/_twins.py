"""Wrapped constructors: a twin of each optimizer of the installed Optax, and of your own."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import optax
import optax.contrib

from opt_optax_bridge._recipe import Recipe
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


def chain_sequence(
    transformations: Sequence[optax.GradientTransformation],
) -> optax.GradientTransformation:
    """Chains transformations, given as one sequence.

    Args:
      transformations: Optax transformations, applied in order.

    Returns:
      A definition that applies all of them. To override hyper-parameters of its parts at run time,
      write a constructor with those as arguments and wrap it with `wrap_optax_optimizer`.
    """
    return optax.chain(*transformations)


chain = wrap_into(OptaxWrapper, chain_sequence, "chain")


def optimizer_names() -> tuple[str, ...]:
    """Returns the names of the optimizers of the installed Optax, attributes of this package.

    Examples:
      >>> {'adamw', 'sgd', 'lion', 'muon'} <= set(optimizer_names())
      True
    """
    return tuple(sorted(_constructors()))


@functools.cache
def twin(name: str) -> Callable[..., OptaxWrapper]:
    """Returns the wrapped constructor of that name; an `AttributeError` if there is none."""
    return wrap_into(OptaxWrapper, constructor(name, "opt_optax_bridge"), name)


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
