"""What a transformation consists of: the functions and arrays that it captured, however deep."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax


def named_arguments(function: Callable[..., Any]) -> frozenset[str]:
    """Returns the names of all arguments of `function` and of the functions that it captured.

    A chain takes any keyword and hands it on; what counts is whether one of its parts names it.
    """
    names: set[str] = set()
    for reached in _reached(function, set()):
        if isinstance(reached, types.FunctionType):
            code = reached.__code__
            names.update(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    return frozenset(names)


def captured_arrays(function: Callable[..., Any]) -> list[jax.Array]:
    """Returns the arrays that `function` captured, such as the key of a noise."""
    return [reached for reached in _reached(function, set()) if isinstance(reached, jax.Array)]


def takes_any_keyword(function: Callable[..., Any]) -> bool:
    """Whether the function itself has a `**kwargs`."""
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _reached(obj: Any, seen: set[int]) -> Iterator[types.FunctionType | jax.Array]:
    if id(obj) in seen:
        return
    seen.add(id(obj))
    inside: list[Any] = []
    match obj:
        case jax.Array():
            yield obj
        case types.FunctionType():
            yield obj
            inside = [c.cell_contents for c in obj.__closure__ or () if _is_filled(c)]
        case types.MethodType():
            inside = [obj.__func__, obj.__self__]
        case functools.partial():
            inside = [obj.func, *obj.args, *obj.keywords.values()]
        case tuple() | list():
            inside = list(obj)
        case Mapping():
            inside = list(obj.values())
        case _ if hasattr(obj, "update") and hasattr(obj, "__dict__"):  # such as MultiSteps
            inside = list(vars(obj).values())
    for part in inside:
        yield from _reached(part, seen)


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
