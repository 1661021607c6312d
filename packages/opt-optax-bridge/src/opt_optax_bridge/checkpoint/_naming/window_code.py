"""What a function is that says how long windows of accumulation are."""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

_OWN = frozenset({"optax", "opt_accumulate"})
_DEPTH = 8


class _UnseenError(Exception):
    pass


def window_code(captured: Mapping[str, Any]) -> dict[str, str]:
    """Returns a digest of the function in `every_k_schedule` of a `MultiSteps`, by `every_k_code`.

    Nothing for a number, which is a setting, and for what cannot be seen through: a function of
    which more than code, numbers and arrays is captured.

    Args:
      captured: attributes of the `MultiSteps` of Optax or of `opt_accumulate`.
    """
    given = captured.get("_every_k_schedule", captured.get("_every_k"))
    while isinstance(given, types.FunctionType) and _package(given) in _OWN:
        inner = dict(_cells(given))
        if "every_k_schedule" not in inner:
            break
        given = inner["every_k_schedule"]
    if given is None or isinstance(given, int | np.integer):
        return {}
    try:
        text = repr(_seen(given))
    except _UnseenError:
        return {}
    return {"every_k_code": hashlib.sha256(text.encode()).hexdigest()[:16]}


def _seen(value: Any, depth: int = 0) -> Any:
    """A value in parts whose `repr` is the same in every process."""
    if depth > _DEPTH:
        raise _UnseenError
    inner = functools.partial(_seen, depth=depth + 1)
    match value:
        case bool() | int() | float() | complex() | str() | bytes() | None:
            return repr(value)
        case types.ModuleType():
            return value.__name__
        case types.CodeType():
            return value.co_code.hex(), value.co_names, [inner(x) for x in value.co_consts]
        case types.FunctionType():
            return _function(value, depth)
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
            return _array(value)
        case tuple() | list() | frozenset():
            items = sorted(value, key=repr) if isinstance(value, frozenset) else value
            return [inner(x) for x in items]
        case Mapping():
            return [(repr(key), inner(child)) for key, child in value.items()]
    if isinstance(wrapped := getattr(value, "__wrapped__", None), types.FunctionType):
        return inner(wrapped)  # of a compiled function
    call = vars(type(value)).get("__call__")
    if isinstance(call, types.FunctionType):
        return type(value).__qualname__, inner(call), inner(getattr(value, "__dict__", {}))
    raise _UnseenError


def _function(function: types.FunctionType, depth: int) -> Any:
    inner = functools.partial(_seen, depth=depth + 1)
    cells = [(name, inner(child)) for name, child in _cells(function)]
    if _package(function) in {*_OWN, "jax", "numpy"}:
        return function.__module__.partition(".")[0], function.__qualname__, cells
    names = function.__code__.co_names
    used = [(name, inner(function.__globals__[name])) for name in names if _is_used(function, name)]
    defaults = inner(function.__defaults__), inner(function.__kwdefaults__)
    return inner(function.__code__), cells, used, defaults


def _is_used(function: types.FunctionType, name: str) -> bool:
    return name in function.__globals__ and function.__globals__[name] is not function


def _array(value: Any) -> Any:
    if isinstance(value, jax.core.Tracer) or not getattr(value, "is_fully_addressable", True):
        raise _UnseenError
    array = np.asarray(value)
    return str(array.dtype), array.shape, array.tobytes().hex()


def _cells(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # captured before it was assigned
            continue


def _package(function: types.FunctionType) -> str:
    return (function.__module__ or "").partition(".")[0]
