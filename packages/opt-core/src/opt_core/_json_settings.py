"""Settings as JSON values: numbers, names, and optionally the contents of functions."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import types
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from opt_core.closures import (
    attributes,
    closure_vars,
    code_values,
    factory_of,
    globals_read,
    package_of,
    unwrapped,
)

_DEPTH = 5
_DIGITS = 16
_LARGE = 2**16
_MANY = 64
_NAMED = (types.ModuleType, type)
_FUNCTIONS = (types.FunctionType, types.MethodType)


def json_settings(settings: Any, *, known: Collection[str] | None = None) -> dict[str, Any]:
    """Returns settings as JSON values, by name.

    Numbers, booleans, strings, `None`, dtypes and containers of them are kept, and so are arrays of
    one number. A function becomes its name, anything else the name of its type in angle brackets.

    Args:
      settings: a mapping or a dataclass; anything else has no settings.
      known: packages whose functions are described by their factory and captured variables. If
        given, other functions are described likewise, with a digest of their code, and arrays by
        their type and a digest of their values.

    Examples:
      >>> json_settings({'b1': np.float32(0.5), 'dtype': np.dtype('float32'), 'mask': object()})
      {'b1': 0.5, 'dtype': 'float32', 'mask': '<object>'}
      >>> def scale(factor):
      ...     return lambda x: factor * x
      >>> json_settings({'rate': scale(2.0)}, known={'opt_core'})
      {'rate': {'function': 'scale', 'factor': 2.0}}
    """
    if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        settings = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    if not isinstance(settings, Mapping):
        return {}
    return {str(name): _json(value, known, 0) for name, value in settings.items()}


def _json(value: Any, known: Collection[str] | None, depth: int) -> Any:
    if depth > _DEPTH:
        return f"<{type(value).__name__}>"
    inner = functools.partial(_json, known=known, depth=depth + 1)
    match value:
        case None | bool() | int() | float() | str():
            return value
        case jax.core.Tracer():
            return f"<{type(value).__name__}>"
        case np.dtype():
            return str(value.name)
        case np.generic() | np.ndarray() | jax.Array() if _is_number(value):
            return np.asarray(value).item()
        case np.ndarray() | jax.Array() if known is not None:
            return _array(value)
        case tuple() | list() | Mapping():
            if len(value) > _MANY:
                inner = functools.partial(inner, known=None)
            if isinstance(value, Mapping):
                return {str(name): inner(child) for name, child in value.items()}
            return [inner(child) for child in value]
    if isinstance(value, type) and issubclass(value, np.generic):
        return str(np.dtype(value).name)
    is_record = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if is_record and (known is None or not callable(value)):
        return inner({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    if known is not None and (contents := _function(value, known, depth)) is not None:
        return contents
    dtype = getattr(value, "dtype", None)
    if isinstance(dtype, np.dtype) and callable(value):
        return str(dtype.name)  # `jnp.float32`
    name = getattr(value, "__qualname__", None)
    if not callable(value) or not isinstance(name, str):
        return f"<{type(value).__name__}>"
    return name if known is None else {"function": name}


def _function(value: Any, known: Collection[str], depth: int) -> Any:
    """The contents of a function or callable object; `None` for anything else."""
    inner = functools.partial(_json, known=known, depth=depth + 1)
    if isinstance(value, types.BuiltinMethodType):
        is_bound = not isinstance(value.__self__, types.ModuleType)
        return {"function": value.__qualname__, "of": inner(value.__self__)} if is_bound else None
    plain = unwrapped(value)
    if not isinstance(plain, _FUNCTIONS):
        if isinstance(value, functools.partial):
            return {"function": _json(plain, None, 0)} | _contents(closure_vars(value), inner)
        held = {} if isinstance(value, type) or not callable(value) else attributes(value)
        return {"function": type(value).__name__} | _contents(held, inner) if held else None
    function: Any = getattr(plain, "__func__", plain)
    held = {name: child for name, child in closure_vars(value).items() if child is not value}
    found = {"function": factory_of(function, known)}
    if package_of(function) not in known:
        parts = code_values(function), function.__defaults__, function.__kwdefaults__
        found["code"] = hashlib.sha256(repr(parts).encode()).hexdigest()[:_DIGITS]
        read = globals_read(function).items()
        found |= _contents({name: x for name, x in read if not isinstance(x, _NAMED)}, inner)
    return found | _contents(held, inner)


def _contents(held: Mapping[str, Any], inner: Any) -> dict[str, Any]:
    return {name: inner(child) for name, child in held.items()}


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
