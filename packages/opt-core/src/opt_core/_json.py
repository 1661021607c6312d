"""Records and settings as JSON data, and records back, every field checked by its annotation."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict

from opt_core._closures import attributes, closure_vars, factory_of, unwrapped
from opt_core.errors import DescriptionError

_DEPTH = 5
_DIGITS = 16
_LARGE = 2**16
_MANY = 64

_Record = TypeVar("_Record")


def record_data(value: Any) -> Any:
    """Returns a dataclass as JSON data: dicts, lists, strings, numbers, booleans and `None`."""
    if dataclasses.is_dataclass(value):
        return {f.name: record_data(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: record_data(child) for name, child in value.items()}
    return list(map(record_data, value)) if isinstance(value, tuple) else value


def read_record(kind: type[_Record], data: Any, where: str, error: type[ValueError]) -> _Record:
    """Returns the dataclass that `record_data` was called on."""
    if not isinstance(data, Mapping):
        raise error(f"`{where}`: expected a mapping, found {_shown(data)}")
    hints = _hints(typing.cast(Any, kind))
    if unknown := sorted(map(str, data.keys() - hints.keys())):
        raise error(f"`{where}`: expected the fields {sorted(hints)}, found `{unknown[0]:.40}`")
    fields = {
        name: _value(hints[name], data[name], f"{where}/{name}", error)
        for name in hints
        if name in data
    }
    try:
        return kind(**fields)
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


def json_value(value: Any, where: str) -> Any:
    """Returns a value as hashable JSON: mappings are `FrozenDict`s, sequences tuples."""
    # Numbers that JSON lacks become the strings `'nan'`, `'inf'` and `'-inf'`.
    match value:
        case None | bool() | str() | int():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case np.bool_() | np.integer() | np.floating():
            return json_value(value.item(), where)
        case tuple() | list():
            return tuple(json_value(x, f"{where}/{i}") for i, x in enumerate(value))
        case Mapping():
            return FrozenDict({str(k): json_value(x, f"{where}/{k}") for k, x in value.items()})
    raise DescriptionError(f"`{where}`: expected a JSON value, found a {type(value).__name__}")


def json_settings(settings: Any, *, functions: bool = False) -> dict[str, Any]:
    """Returns settings as JSON values, by name."""
    # Numbers, booleans, strings, `None`, dtypes and containers of them are kept, and so are arrays
    # of one number. A function becomes its name, anything else the name of its type in angle
    # brackets.
    if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        settings = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    if not isinstance(settings, Mapping):
        return {}
    return {str(name): _setting(value, functions, 0) for name, value in settings.items()}


def _setting(value: Any, functions: bool, depth: int) -> Any:
    if depth > _DEPTH:
        return f"<{type(value).__name__}>"
    inner = functools.partial(_setting, functions=functions, depth=depth + 1)
    match value:
        case None | bool() | int() | float() | str():
            return value
        case jax.core.Tracer():
            return f"<{type(value).__name__}>"
        case np.dtype():
            return str(value.name)
        case np.generic() | np.ndarray() | jax.Array() if _is_number(value):
            return np.asarray(value).item()
        case np.ndarray() | jax.Array() if functions:
            return _array(value)
        case tuple() | list() | Mapping():
            if len(value) > _MANY:
                inner = functools.partial(inner, functions=False)
            if isinstance(value, Mapping):
                return {str(name): inner(child) for name, child in value.items()}
            return [inner(child) for child in value]
    if isinstance(value, type) and issubclass(value, np.generic):
        return str(np.dtype(value).name)
    is_record = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if is_record and not (functions and callable(value)):
        return inner({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    if functions and (contents := _function(value, depth)) is not None:
        return contents
    dtype = getattr(value, "dtype", None)
    if isinstance(dtype, np.dtype) and callable(value):
        return str(dtype.name)  # `jnp.float32`
    name = getattr(value, "__qualname__", None)
    if not callable(value) or not isinstance(name, str):
        return f"<{type(value).__name__}>"
    return {"function": name} if functions else name


def _function(value: Any, depth: int) -> Any:
    """A function by its factory and what it has captured; `None` for anything else."""
    plain = unwrapped(value)
    if isinstance(plain, types.FunctionType | types.MethodType):
        name, held = factory_of(plain), closure_vars(value)
    elif isinstance(value, functools.partial):
        name, held = _setting(plain, False, 0), closure_vars(value)
    elif isinstance(value, types.BuiltinMethodType):
        name, held = value.__qualname__, {"of": value.__self__}
        if isinstance(value.__self__, types.ModuleType):
            return None
    elif callable(value) and not isinstance(value, type) and (held := attributes(value)):
        name = type(value).__name__
    else:
        return None
    inner = {k: _setting(child, True, depth + 1) for k, child in held.items() if child is not value}
    return {"function": name} | inner


def _is_number(value: Any) -> bool:
    if np.shape(value) != () or not getattr(value, "is_fully_addressable", True):
        return False
    is_real = any(
        jnp.issubdtype(value.dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating)
    )
    return is_real and not (isinstance(value, jax.Array) and value.is_deleted())


def _array(value: Any) -> str:
    kind = f"{value.dtype}{list(value.shape)}"
    if isinstance(value, jax.Array):
        if value.is_deleted() or not value.is_fully_addressable:
            return kind
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
    if value.dtype == object or value.nbytes > _LARGE:
        return kind
    return f"{kind}:{hashlib.sha256(np.asarray(value).tobytes()).hexdigest()[:_DIGITS]}"
