"""What can be told of the values that a function has captured, the same in every process."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

OWN = frozenset({"optax", "opt_accumulate"})
"""The packages whose functions are known by their names, beside JAX and NumPy."""
_DEPTH = 8
_LARGE = 2**20
_MANY = 10_000
_DIGITS = 16


class UnseenError(Exception):
    """A value cannot be told from others."""


def digest_of(value: Any) -> str | None:
    """Returns a digest of a value, `None` where it cannot be told from others.

    Told are numbers, strings, arrays of up to a MiB, containers and dataclasses of such, and
    functions: those of JAX, NumPy and Optax by their names, others by their code and by what they
    have captured and use.

    Args:
      value: what a function has captured.

    Examples:
      >>> digest_of(lambda x: x + 1) == digest_of(lambda x: x * 2)
      False
      >>> digest_of(jnp.ones(2)) == digest_of(jnp.ones(2)), digest_of(object())
      (True, None)
    """
    try:
        return shortened(_Reader(_LARGE, _MANY).seen(value))
    except UnseenError:
        return None


def shortened(seen: Any) -> str:
    """Returns a digest of what `seen_value` returned."""
    return hashlib.sha256(repr(seen).encode()).hexdigest()[:_DIGITS]


def seen_value(value: Any) -> Any:
    """Returns a value, however large, in parts whose `repr` is the same in every process.

    Raises:
      UnseenError: it cannot be told from others.
    """
    return _Reader(None, None).seen(value)


def package_of(function: types.FunctionType) -> str:
    """Returns the outermost package of the module of a function."""
    return (function.__module__ or "").partition(".")[0]


def filled_cells(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yields what a function has captured, by name."""
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # captured before it was assigned
            continue


class _Reader:
    """One walk through a value; an array or a number of parts above its limits is not told."""

    def __init__(self, largest: int | None, most: int | None) -> None:
        self.largest, self.most, self.count = largest, most, 0

    def seen(self, value: Any, depth: int = 0) -> Any:
        self.count += 1
        if depth > _DEPTH or (self.most is not None and self.count > self.most):
            raise UnseenError
        inner = functools.partial(self.seen, depth=depth + 1)
        match value:
            case bool() | int() | float() | complex() | str() | bytes() | None:
                return repr(value)
            case types.ModuleType():
                return value.__name__
            case types.CodeType():
                return value.co_code.hex(), value.co_names, [inner(x) for x in value.co_consts]
            case types.FunctionType():
                return self._function(value, depth)
            case types.BuiltinFunctionType() if not isinstance(value.__self__, types.ModuleType):
                return value.__qualname__, inner(value.__self__)
            case types.BuiltinFunctionType() | type():
                return value.__module__, value.__qualname__
            case functools.partial():
                keywords = sorted(value.keywords.items())
                return inner(value.func), [inner(x) for x in value.args], inner(keywords)
            case types.MethodType():
                return inner(value.__func__), inner(value.__self__)
            case np.ndarray() | np.generic() | jax.Array():
                return self._array(value)
            case tuple() | list() | frozenset() | set():
                is_set = isinstance(value, frozenset | set)
                items = sorted(value, key=repr) if is_set else value
                return [inner(x) for x in items]
            case Mapping():
                return [(repr(key), inner(child)) for key, child in value.items()]
            case np.ufunc():
                return "numpy", value.__name__
            case np.dtype():
                return "dtype", str(value)
            case enum.Enum():
                return type(value).__qualname__, value.name
        if isinstance(wrapped := getattr(value, "__wrapped__", None), types.FunctionType):
            return inner(wrapped)  # of a compiled function
        is_own = type(value) is not object and "__reduce__" in vars(type(value))
        if self.largest is not None and is_own:
            return inner(_reduced(value))
        call = vars(type(value)).get("__call__")
        if isinstance(call, types.FunctionType):
            return type(value).__qualname__, inner(call), inner(getattr(value, "__dict__", {}))
        if dataclasses.is_dataclass(value):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            return type(value).__qualname__, inner(fields)
        raise UnseenError

    def _function(self, function: types.FunctionType, depth: int) -> Any:
        inner = functools.partial(self.seen, depth=depth + 1)
        cells = [(name, inner(child)) for name, child in filled_cells(function)]
        if package_of(function) in {*OWN, "jax", "numpy"}:
            return package_of(function), function.__qualname__, cells
        names = function.__code__.co_names
        used = [
            (name, inner(function.__globals__[name])) for name in names if _is_used(function, name)
        ]
        defaults = inner(function.__defaults__), inner(function.__kwdefaults__)
        return inner(function.__code__), cells, used, defaults

    def _array(self, value: Any) -> Any:
        if isinstance(value, jax.core.Tracer) or not getattr(value, "is_fully_addressable", True):
            raise UnseenError
        if isinstance(value, jax.Array) and value.is_deleted():
            raise UnseenError
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        if value.dtype.hasobject or (self.largest is not None and value.nbytes > self.largest):
            raise UnseenError
        array = np.asarray(value)
        return str(array.dtype), array.shape, array.tobytes().hex()


def _reduced(value: Any) -> Any:
    """What makes it again; its attributes may be slots."""
    try:
        return value.__reduce__()
    except Exception as error:  # of any kind: its class does not want to be pickled
        raise UnseenError from error


def _is_used(function: types.FunctionType, name: str) -> bool:
    return name in function.__globals__ and function.__globals__[name] is not function
