"""Hyper-parameters: frozen dataclasses, whose fields may be called `part.name`."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.struct


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
        "_names": fields,
        "_defaults": dict(defaults),
        "__annotations__": dict.fromkeys(fields, Any),
        "__doc__": "The arguments that can be overridden at run time.",
        "__module__": __name__,
    }
    cls = types.new_class(class_name, (_HyperParams,), {}, lambda ns: ns.update(body))
    return flax.struct.dataclass(cls, kw_only=True, init=False, repr=False, eq=False)


class _HyperParams:
    """What `dataclasses` would generate as source, where field names cannot contain a dot."""

    _names: ClassVar[tuple[str, ...]]
    _defaults: ClassVar[Mapping[str, Any]]

    def __init__(self, **values: Any) -> None:
        values = {**self._defaults, **values}
        if values.keys() != set(self._names):
            raise TypeError(f"{type(self).__name__} has the fields {self._names}; got {[*values]}")
        vars(self).update({name: values[name] for name in self._names})

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({values})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).items()))

    def __reduce__(self) -> Any:
        return make_hyper_params, (type(self).__name__, dict(vars(self)), self._defaults)


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
