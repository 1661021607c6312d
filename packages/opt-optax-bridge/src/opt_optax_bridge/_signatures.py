"""The arguments of a transformation's functions and of everything they have captured."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
from opt_core.closures import reached
from opt_core.errors import HyperParamError

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def named_arguments(function: Callable[..., Any]) -> frozenset[str]:
    """Returns the names of all arguments of `function` and of the functions that it captured.

    A chain accepts any keyword and passes it on; what counts is whether one of its parts names it.
    """
    return frozenset(p.name for p in _parameters(function) if p.kind not in _VARIADIC)


@contextlib.contextmanager
def required_keywords_named(function: Callable[..., Any]) -> Iterator[None]:
    """Raises a `HyperParamError` that names the missing keyword of `function` or its parts."""
    try:
        yield
    except TypeError as error:
        words = str(error)
        missing = sorted(
            {
                p.name
                for p in _parameters(function)
                if p.kind is p.KEYWORD_ONLY and p.default is p.empty and repr(p.name) in words
            }
        )
        if not missing or "missing" not in words:
            raise
        names = ", ".join(f"`{name}`" for name in missing)
        example = ", ".join(f"{name}=..." for name in missing)
        raise HyperParamError(
            f"{names}: the update of this transformation needs it; call "
            f"`apply_gradient(grads, {example})`"
        ) from error


def captured_arrays(function: Callable[..., Any]) -> list[jax.Array]:
    """Returns the arrays that `function` captured, such as a PRNG key for noise."""
    return [value for value in reached(function) if isinstance(value, jax.Array)]


def takes_any_keyword(function: Callable[..., Any]) -> bool:
    """Whether the function itself has `**kwargs`."""
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _parameters(function: Any) -> Iterator[inspect.Parameter]:
    for value in reached(function):
        if isinstance(value, types.FunctionType | types.MethodType):
            yield from inspect.signature(value, follow_wrapped=False).parameters.values()
