"""Dataclasses as JSON data and back, with every field checked against its annotation."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

__all__ = ["read_record", "record_data"]

_Record = TypeVar("_Record")


def record_data(value: Any) -> Any:
    """Returns a dataclass as JSON data: dicts, lists, strings, numbers, booleans and `None`.

    Examples:
      >>> @dataclasses.dataclass
      ... class Point:
      ...     at: tuple[int, ...]
      >>> record_data(Point((1, 2))), read_record(Point, {'at': [1, 2]}, 'point', ValueError)
      ({'at': [1, 2]}, Point(at=(1, 2)))
    """
    if dataclasses.is_dataclass(value):
        return {f.name: record_data(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: record_data(child) for name, child in value.items()}
    return list(map(record_data, value)) if isinstance(value, tuple) else value


def read_record(kind: type[_Record], data: Any, where: str, error: type[ValueError]) -> _Record:
    """Returns the dataclass that `record_data` was called on.

    Args:
      kind: its class; fields are strings, numbers, booleans, `Literal`s, tuples and mappings of
        these, other such dataclasses, or `Any`.
      data: the JSON data.
      where: its name in errors.
      error: raised for data of another form; says where.
    """
    if not isinstance(data, Mapping):
        raise error(f"`{where}`: expected a mapping, found {_shown(data)}")
    hints = _hints(typing.cast(Any, kind))
    if unknown := sorted(map(str, data.keys() - hints.keys())):
        raise error(f"`{where}`: expected the fields {sorted(hints)}, found `{unknown[0]:.40}`")
    given = {
        name: _value(hints[name], data[name], f"{where}/{name}", error)
        for name in hints
        if name in data
    }
    try:
        return kind(**given)
    except (TypeError, ValueError) as wrong:
        raise error(f"`{where}`: {wrong}") from None


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _value(hint: Any, data: Any, where: str, error: type[ValueError]) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return _frozen(data)
    if origin is typing.Literal:
        if data in args:
            return data
        raise error(f"`{where}`: expected one of {', '.join(args)}, found {_shown(data)}")
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in args:
            return None
        (inner,) = (arg for arg in args if arg is not type(None))
        return _value(inner, data, where, error)
    if origin is tuple and isinstance(data, list | tuple):
        return tuple(_value(args[0], x, f"{where}/{i}", error) for i, x in enumerate(data))
    if origin is Mapping and isinstance(data, Mapping):
        keys = (_value(str, key, where, error) for key in data)
        return {key: _value(args[1], data[key], f"{where}/{key}", error) for key in keys}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return read_record(hint, data, where, error)
    if isinstance(hint, type) and type(data) is hint:
        return data
    names = {tuple: "a list", Mapping: "a mapping", int: "an integer", str: "a string"}
    expected = names.get(origin or hint, str(hint))
    raise error(f"`{where}`: expected {expected}, found {_shown(data)}")


def _frozen(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _frozen(child) for key, child in data.items()}
    return tuple(map(_frozen, data)) if isinstance(data, list) else data


def _shown(data: Any) -> str:
    return f"{data!r:.40}" if isinstance(data, bool | int | float | str) else type(data).__name__
