"""The arguments of a constructor: which of them are hyper-parameters, and the definitions in them.

A hyper-parameter is an argument that is a float or a schedule. `adam(0.1)` has `learning_rate`,
`b1`, `b2`, `eps` and `eps_root`; its `nesterov` is structural, as is an argument that is an integer
by design. They are the fields of a frozen dataclass; those of two parts are called `part.name`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from opt_core import OptimizerDef


def is_number(value: Any) -> bool:
    """Whether a value is a real number or a scalar array of one, not a bool."""
    if isinstance(value, int | float):
        return not isinstance(value, bool)
    if not isinstance(value, np.ndarray | np.generic | jax.Array):
        return False
    is_real = jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)
    return value.shape == () and is_real


def is_hyper_param(value: Any, parameter: inspect.Parameter | None) -> bool:
    """Whether an argument can be overridden at run time; `parameter` is its declaration."""
    if callable(value):
        return _is_schedule(value, parameter)
    if not is_number(value):
        return False
    if isinstance(value, float) or (not isinstance(value, int) and _is_floating(value)):
        return True
    # `weight_decay=0` is meant as a float; an argument that is an integer by design is structural.
    return parameter is not None and not (
        parameter.annotation is int or isinstance(parameter.default, int)
    )


def _is_schedule(value: Any, parameter: inspect.Parameter | None) -> bool:
    """Whether a callable argument is a schedule: a map from a step count to a float."""
    # The value alone does not show it: `jnp.float32` maps a count to a float too.
    annotation = parameter.annotation if parameter else Any
    if annotation in (inspect.Parameter.empty, Any, "Any"):  # no information
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


def map_argument(fn: Callable[[str | None, Any], Any], value: Any, keyword: str | None) -> Any:
    """Returns an argument with `fn(keyword, item)` for every item of its containers."""
    if type(value) is dict:
        return {key: map_argument(fn, item, str(key)) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_argument(fn, item, None) for item in value)
    return fn(keyword, value)


def snapshot(value: Any) -> Any:
    """Returns copies of containers and NumPy arrays."""
    return map_argument(_copied, value, None)


def _copied(_: str | None, value: Any) -> Any:
    if isinstance(value, Iterator):
        raise TypeError("an argument is an iterator, which can be used only once; pass a list")
    return value.copy() if type(value) in (set, np.ndarray) else value


def definitions_in(arguments: Mapping[str, Any]) -> dict[str, OptimizerDef]:
    """Returns the definitions among arguments by unique names."""
    pairs: list[tuple[str | None, OptimizerDef]] = []

    def collect(keyword: str | None, value: Any) -> None:
        if isinstance(value, OptimizerDef):
            pairs.append((keyword, value))

    for name, value in arguments.items():
        map_argument(collect, value, name)
    named: dict[str, OptimizerDef] = {}
    taken = {keyword for keyword, _ in pairs if keyword is not None}
    for keyword, definition in pairs:
        name = _unused(definition, taken) if keyword is None or keyword in named else keyword
        taken.add(name)
        named[name] = definition
    return named


def _unused(definition: OptimizerDef, taken: Iterable[str]) -> str:
    recipe = getattr(definition, "recipe", None)
    base = recipe.name if recipe else type(definition).__name__
    numbered = (f"{base}_{n}" for n in itertools.count(1))
    return next(name for name in itertools.chain([base], numbered) if name not in taken)


def make_hyper_params(
    class_name: str, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> Any:
    """Returns a frozen dataclass and pytree; its constructor fills in missing `defaults`."""
    cls = _hyper_params_class(class_name, tuple(values), tuple((defaults or {}).items()))
    return cls(**values)


@functools.cache
def _hyper_params_class(
    class_name: str, fields: tuple[str, ...], defaults: tuple[tuple[str, Any], ...]
) -> type:
    body = {
        **dict(defaults),
        "__annotations__": dict.fromkeys(fields, Any),
        "__doc__": "The arguments that can be overridden at run time.",
        "__module__": __name__,
    }
    cls = types.new_class(class_name, (_HyperParams,), {}, lambda ns: ns.update(body))
    return flax.struct.dataclass(cls, kw_only=True, init=False, repr=False, eq=False)


class _HyperParams:
    """What `dataclasses` would generate as source, where field names cannot contain a dot."""

    def __init__(self: Any, **values: Any) -> None:
        names = [field.name for field in dataclasses.fields(self)]
        values = {**self._defaults(), **values}
        if values.keys() != set(names):
            raise TypeError(f"{type(self).__name__} has the fields {names}; got {[*values]}")
        vars(self).update({name: values[name] for name in names})

    def _defaults(self: Any) -> dict[str, Any]:
        fields = dataclasses.fields(self)
        return {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({values})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).items()))

    def __reduce__(self) -> Any:
        return make_hyper_params, (type(self).__name__, dict(vars(self)), self._defaults())


def changed_fields(defaults: Any, hyper_params: Any) -> dict[str, Any]:
    """Returns the fields of `hyper_params` that differ from those of `defaults`."""
    return {
        name: value
        for name, value in field_values(hyper_params).items()
        if not _is_same(getattr(defaults, name), value)
    }


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, float) and isinstance(b, float) and a == b)


def field_values(record: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass by name."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
