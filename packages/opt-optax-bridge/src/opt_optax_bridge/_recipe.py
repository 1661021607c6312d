"""A constructor of Optax optimizers with its arguments, some of which can change at run time."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a transformation was built, and can be built again with other numbers.

    Attributes:
      constructor: the function that was called.
      args: its positional arguments.
      kwargs: its keyword arguments.
    """

    constructor: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __post_init__(self) -> None:
        # A list that changes later would not change what was built, only what is built again.
        object.__setattr__(self, "args", _snapshot(self.args))
        object.__setattr__(self, "kwargs", _snapshot(self.kwargs))

    def __reduce__(self) -> Any:
        return Recipe, (self.constructor, self.args, self.kwargs)

    @property
    def name(self) -> str:
        """The constructor's name."""
        constructor = getattr(self.constructor, "func", self.constructor)  # of a partial
        return getattr(constructor, "__name__", type(constructor).__name__)

    @functools.cached_property
    def _bound(self) -> inspect.BoundArguments | None:
        try:
            return inspect.signature(self.constructor).bind(*self.args, **self.kwargs)
        except (TypeError, ValueError):  # no signature, or arguments that the call will refuse
            return None

    @property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return self._bound.signature.parameters if self._bound else {}

    @functools.cached_property
    def _complete(self) -> dict[str, Any]:
        """Every argument as the signature has it, defaults included."""
        if self._bound is None:
            return {}
        bound = copy.copy(self._bound)
        bound.arguments = copy.copy(bound.arguments)
        bound.apply_defaults()
        return dict(bound.arguments)

    @functools.cached_property
    def arguments(self) -> Mapping[str, Any]:
        """Every named argument with its value, defaults included."""
        named = dict(self._complete)
        for name, parameter in self._parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                named |= named.pop(name)
            elif parameter.kind is parameter.VAR_POSITIONAL:
                del named[name]
        return named

    @functools.cached_property
    def hyper_params(self) -> Any:
        """A frozen dataclass of the arguments that are a float or a schedule."""
        values = {
            name: value
            for name, value in self.arguments.items()
            if _is_hyper_param(value, self._parameters.get(name))
        }
        defaults = {
            name: parameter.default
            for name, parameter in self._parameters.items()
            if name in values and isinstance(parameter.default, int | float)
        }
        return make_hyper_params(f"{self.name}_hyper_params", values, defaults)

    @property
    def identity(self) -> Any:
        """What two recipes for the same thing have in common, however the arguments were given."""
        given = (self.args, self.kwargs) if self._bound is None else (self._complete,)
        return (self.constructor, *given)

    def build(self, **overrides: Any) -> Any:
        """Calls the constructor, with some arguments replaced.

        Args:
          **overrides: new values by argument name. A number in the place of a schedule becomes a
            constant schedule, so that the state keeps its count.
        """
        if not overrides or self._bound is None:
            return self.constructor(*self.args, **self.kwargs)
        for name, value in overrides.items():
            if callable(self.arguments[name]) and not callable(value):
                overrides[name] = functools.partial(_constant_schedule, value)
        bound = copy.copy(self._bound)
        own = {name: overrides.pop(name) for name in self._parameters if name in overrides}
        bound.arguments = type(bound.arguments)(bound.arguments, **own)
        return self.constructor(*bound.args, **{**bound.kwargs, **overrides})


def make_hyper_params(
    class_name: str, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> Any:
    """Returns a frozen dataclass, a pytree; of `defaults` its constructor takes what is missing."""
    cls = _hyper_params_class(class_name, tuple(values), tuple((defaults or {}).items()))
    return cls(**values)


@functools.cache
def _hyper_params_class(
    class_name: str, fields: tuple[str, ...], defaults: tuple[tuple[str, Any], ...]
) -> type:
    def reduce(self: Any) -> tuple[Any, ...]:
        values = {name: getattr(self, name) for name in fields}
        return make_hyper_params, (class_name, values, dict(defaults))

    body = {
        **dict(defaults),
        "__annotations__": dict.fromkeys(fields, Any),
        "__doc__": "The arguments that can be overridden at run time.",
        "__module__": __name__,
        "__reduce__": reduce,
    }
    cls = types.new_class(class_name, (), {}, lambda ns: ns.update(body))
    return flax.struct.dataclass(cls, kw_only=True)


def _snapshot(value: Any) -> Any:
    """Returns containers and NumPy arrays as they are now."""
    if isinstance(value, Iterator):
        raise TypeError("an argument is an iterator, which can be used only once; pass a list")
    if type(value) is dict:
        return {key: _snapshot(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_snapshot, value))
    return value.copy() if type(value) in (set, np.ndarray) else value


def _constant_schedule(value: Any, count: Any) -> Any:
    del count
    return value


def is_number(value: Any) -> bool:
    """Whether it is a real number or a scalar array of one; no bool."""
    if isinstance(value, int | float):
        return not isinstance(value, bool)
    if not isinstance(value, np.ndarray | np.generic | jax.Array):
        return False
    is_real = jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)
    return value.shape == () and is_real


def _is_hyper_param(value: Any, parameter: inspect.Parameter | None) -> bool:
    if callable(value):
        return _is_schedule(value, parameter)
    if not is_number(value):
        return False
    if isinstance(value, float) or (not isinstance(value, int) and _is_floating(value)):
        return True
    # An integer where a float is meant: `weight_decay=0`. Where one is meant it is structural.
    return parameter is not None and not (
        parameter.annotation is int or isinstance(parameter.default, int)
    )


def _is_schedule(value: Any, parameter: inspect.Parameter | None) -> bool:
    """Whether a callable argument maps a step count to a float, and is meant to.

    The value alone does not tell: `jnp.float32` maps a count to a float too.
    """
    annotation = parameter.annotation if parameter else Any
    if annotation in (inspect.Parameter.empty, Any, "Any"):  # says nothing
        if isinstance(value, type) or hasattr(value, "dtype"):
            return False
    elif not _admits_schedule(annotation):
        return False
    try:
        rate = jax.eval_shape(value, jax.ShapeDtypeStruct((), jnp.int32))
    except Exception:
        return False
    leaves = jax.tree.leaves(rate)
    return len(leaves) == 1 and leaves[0].shape == () and _is_floating(leaves[0])


def _is_floating(value: Any) -> bool:
    return bool(jnp.issubdtype(value.dtype, jnp.floating))


def _admits_schedule(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return "Schedule" in annotation
    if annotation == optax.Schedule:
        return True
    members = typing.get_args(annotation)
    return float in members and any(typing.get_origin(m) is Callable for m in members)
