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

from opt_core._closures import attributes, closure_vars, factory_of, unwrapped

_DEPTH = 5
_DIGITS = 16
_LARGE = 2**16
_MANY = 64


def json_settings(settings: Any, *, known: Collection[str] | None = None) -> dict[str, Any]:
    """Returns settings as JSON values, by name.

    Numbers, booleans, strings, `None`, dtypes and containers of them are kept, and so are arrays of
    one number. A function becomes its name, anything else the name of its type in angle brackets.

    Args:
      settings: a mapping or a dataclass; anything else has no settings.
      known: packages whose factories are module-level functions. If given, functions are described
        by their factory and captured variables, and arrays by their type and a digest of their
        values. The code of a function is not described.

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
    """A function by its factory and what it has captured; `None` for anything else."""
    plain = unwrapped(value)
    if isinstance(plain, types.FunctionType | types.MethodType):
        name, held = factory_of(plain, known), closure_vars(value)
    elif isinstance(value, functools.partial):
        name, held = _json(plain, None, 0), closure_vars(value)
    elif isinstance(value, types.BuiltinMethodType):
        name, held = value.__qualname__, {"of": value.__self__}
        if isinstance(value.__self__, types.ModuleType):
            return None
    elif callable(value) and not isinstance(value, type) and (held := attributes(value)):
        name = type(value).__name__
    else:
        return None
    inner = {k: _json(child, known, depth + 1) for k, child in held.items() if child is not value}
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
