"""Hyper-parameters as JSON values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def json_settings(settings: Any) -> dict[str, Any]:
    """Returns what can be written down of settings, by name.

    Numbers, booleans, strings, `None`, dtypes and containers of them are kept, arrays of one number
    too. Of a function there is its name, of anything else the name of its type in angle brackets.

    Args:
      settings: a mapping, or a dataclass; anything else has none.

    Examples:
      >>> json_settings({'b1': np.float32(0.5), 'dtype': np.dtype('float32'), 'mask': object()})
      {'b1': 0.5, 'dtype': 'float32', 'mask': '<object>'}
    """
    if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        settings = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    if not isinstance(settings, Mapping):
        return {}
    return {str(name): _json(value) for name, value in settings.items()}


def _json(value: Any) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case jax.core.Tracer():
            return f"<{type(value).__name__}>"
        case np.dtype():
            return str(value.name)
        case np.generic() | np.ndarray() | jax.Array() if _is_number(value):
            return np.asarray(value).item()
        case tuple() | list():
            return [_json(child) for child in value]
        case Mapping():
            return {str(name): _json(child) for name, child in value.items()}
    if isinstance(value, type) and issubclass(value, np.generic):
        return str(np.dtype(value).name)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return json_settings(value)
    dtype = getattr(value, "dtype", None)
    if isinstance(dtype, np.dtype) and callable(value):
        return str(dtype.name)  # `jnp.float32`
    name = getattr(value, "__qualname__", None)
    return name if callable(value) and isinstance(name, str) else f"<{type(value).__name__}>"


def _is_number(value: Any) -> bool:
    if np.shape(value) != () or not getattr(value, "is_fully_addressable", True):
        return False
    is_real = any(
        jnp.issubdtype(value.dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating)
    )
    return is_real and not (isinstance(value, jax.Array) and value.is_deleted())
