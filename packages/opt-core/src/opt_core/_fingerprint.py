"""Equality of things that were built the same way.

An optimizer definition is static data of a pytree, so JAX compares and hashes it on every call of
a compiled function. Optax transformations are closures, which Python compares by identity: two
built from the same arguments differ, and everything is recompiled. A fingerprint looks inside: two
functions are the same when their code, defaults, captured values and globals are.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict

from opt_core._closures import attributes, globals_read, opened, rebound_names, slots


class _Same:
    """Stands for an object that is equal only to itself."""

    __slots__ = ("_object",)

    def __init__(self, obj: Any) -> None:
        self._object = obj  # kept alive, so that its id is not reused

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._object is self._object

    def __hash__(self) -> int:
        return id(self._object)


def fingerprint(obj: Any) -> Hashable:
    """Returns a hashable value that is equal for objects built the same way."""
    # Numbers compare with their type, arrays by content, containers by elements, dataclasses and
    # plain objects by attributes, functions by code and captured values. So do the globals that a
    # function names, if they are numbers, containers, arrays or functions of the same module; other
    # globals compare by identity. An opaque object (a tracer, a compiled function) is equal only to
    # itself.
    return _fingerprint(obj, {})


def _fingerprint(obj: Any, seen: dict[int, int]) -> Hashable:
    match obj:
        case None | bool() | int() | str() | bytes() | type() | types.ModuleType():
            return (type(obj), obj)
        case float():
            return (type(obj), float(obj).hex())  # nan equals nan, -0.0 is not 0.0
        case complex():
            return (type(obj), obj.real.hex(), obj.imag.hex())
        case types.CodeType() | types.BuiltinFunctionType():
            return obj
        case enum.Enum():
            return (type(obj), obj)
        case jax.core.Tracer():
            return _Same(obj)
    if id(obj) in seen:  # a cycle, or a function that many share
        return ("seen", seen[id(obj)])
    seen[id(obj)] = len(seen)
    value = _composite(obj, seen)
    if isinstance(obj, tuple | list | Mapping | np.ndarray):
        del seen[id(obj)]  # whether two places share an equal container makes no difference
    return value


def _composite(obj: Any, seen: dict[int, int]) -> Hashable:
    each = functools.partial(_fingerprint, seen=seen)
    match obj:
        case np.ndarray() | np.generic() | jax.Array():
            return _array(obj)
        case dict() | FrozenDict() | types.MappingProxyType():
            held = attributes(obj) if isinstance(obj, dict) else {}
            is_ordered = isinstance(obj, OrderedDict)
            items = obj.items() if is_ordered else _in_order(obj)
            pairs = [(each(key), each(value)) for key, value in items]
            both = tuple(pairs) if is_ordered else frozenset(pairs)
            return (type(obj), _named(held.items(), seen), both)
        case set() | frozenset():
            return (type(obj), _named(attributes(obj).items(), seen), frozenset(map(each, obj)))
        case types.FunctionType():
            return (_parts(obj, seen), tuple(_globals(obj, seen)))
        case tuple() | list() | functools.partial() | types.MethodType():
            return _parts(obj, seen)
    is_value = _defines_equality(type(obj))
    is_record = dataclasses.is_dataclass(obj) or isinstance(obj, types.SimpleNamespace)
    if is_value and not is_record:
        return (type(obj), obj) if _is_hashable(obj) else _Same(obj)
    if not _is_plain(type(obj)):
        return _Same(obj)
    # What holds nothing and says nothing of equality may be a sentinel.
    return _parts(obj, seen) if attributes(obj) or is_value else _Same(obj)


def _parts(obj: Any, seen: dict[int, int]) -> Hashable:
    parts = opened(obj)
    assert parts is not None, "only what has no parts is opened to `None`"
    children = parts.children
    if isinstance(obj, types.FunctionType) and (rebound := rebound_names(obj)):
        # Of the same value: Optax's cosine schedule makes 100 100.0 when it is called.
        children = [
            (name, float(x) if name in rebound and isinstance(x, int | float) else x)
            for name, x in children
        ]
    return (parts.kind, _named(children, seen))


def _named(items: Iterable[tuple[Any, Any]], seen: dict[int, int]) -> tuple[Hashable, ...]:
    return tuple((name, _fingerprint(value, seen)) for name, value in items)


def _in_order(mapping: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """The items in a canonical order: shared objects are numbered as they are seen."""
    items = list(mapping.items())
    if all(isinstance(key, str | int) for key in mapping):
        items.sort(key=lambda item: (type(item[0]).__name__, str(item[0])))
    return items


def _is_hashable(obj: Any) -> bool:
    try:
        hash(obj)
    except TypeError:
        return False
    return True


def _defines_equality(cls: type) -> bool:
    return any("__eq__" in base.__dict__ for base in cls.__mro__ if base is not object)


class _Plain:
    """A class whose instances keep everything in `__dict__`."""


def _is_plain(cls: type) -> bool:
    """Whether all that an instance keeps is in attributes: a bigger one keeps state in C."""
    if cls is types.SimpleNamespace:
        return True
    count = sum(len(slots(base)) for base in cls.__mro__)
    pointer = np.dtype(np.intp).itemsize
    sizes = (object.__basicsize__, _Plain.__basicsize__)
    return cls.__basicsize__ - count * pointer in sizes


def _globals(function: types.FunctionType, seen: dict[int, int]) -> Iterator[Hashable]:
    # Without them a function that is defined again, after a global got a new value, would pass
    # for the old one, and the old compiled step would run.
    for name, value in globals_read(function).items():
        yield (name, _fingerprint(value, seen) if _is_data(value, function) else _Same(value))


def _is_data(value: Any, function: types.FunctionType) -> bool:
    """Whether a global may change its content, or was made from something that may."""
    if isinstance(value, types.FunctionType):
        return value.__globals__ is function.__globals__
    if dataclasses.is_dataclass(value):
        return not isinstance(value, type)
    return isinstance(value, _DATA)


_DATA = (
    *(type(None), bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset),
    *(np.ndarray, np.generic, jax.Array, functools.partial, types.SimpleNamespace),
)


def _array(array: np.ndarray[Any, Any] | np.generic | jax.Array) -> Hashable:
    if isinstance(array, np.ndarray) and type(array) is not np.ndarray:
        return _Same(array)  # a mask or the like besides the data
    if isinstance(array, jax.Array):
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            with jax.ensure_compile_time_eval():  # inside a trace too
                return (str(array.dtype), _array(jax.random.key_data(array)))
        if array.is_deleted() or not array.is_fully_addressable:
            return _Same(array)
    content = np.asarray(array)
    if content.dtype == object:
        return _Same(array)
    weak = bool(getattr(array, "weak_type", False))
    return (type(array), weak, str(content.dtype), content.shape, content.tobytes())
