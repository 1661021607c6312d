"""What a transformation consists of: the functions and arrays that it captured, however deep."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from opt_core.errors import HyperParamError


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


@contextlib.contextmanager
def required_keywords_named(function: Callable[..., Any]) -> Iterator[None]:
    """Says in a `HyperParamError` which keyword `function`, or one that it captured, lacks."""
    try:
        yield
    except TypeError as error:
        required: set[str] = set()
        for reached in _reached(function, set()):
            if isinstance(reached, types.FunctionType):
                code, first = reached.__code__, reached.__code__.co_argcount
                keywords = code.co_varnames[first : first + code.co_kwonlyargcount]
                required.update(set(keywords) - (reached.__kwdefaults__ or {}).keys())
        said = str(error)
        missing = sorted(name for name in required if repr(name) in said and "missing" in said)
        if not missing:
            raise
        listed = ", ".join(f"`{name}`" for name in missing)
        example = ", ".join(f"{name}=..." for name in missing)
        raise HyperParamError(
            f"{listed}: the update of this transformation needs it; call "
            f"`apply_gradient(grads, {example})`"
        ) from error


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
