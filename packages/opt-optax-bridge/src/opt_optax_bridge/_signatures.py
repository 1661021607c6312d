"""What a transformation takes: the arguments of the functions that it captured, however deep."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
from opt_core.closures import parts
from opt_core.errors import HyperParamError


def named_arguments(function: Callable[..., Any]) -> frozenset[str]:
    """Returns the names of all arguments of `function` and of the functions that it captured.

    A chain takes any keyword and hands it on; what counts is whether one of its parts names it.
    """
    return frozenset(
        parameter.name
        for parameter in _parameters(function)
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    )


@contextlib.contextmanager
def required_keywords_named(function: Callable[..., Any]) -> Iterator[None]:
    """Says in a `HyperParamError` which keyword `function`, or one that it captured, lacks."""
    try:
        yield
    except TypeError as error:
        required = {
            parameter.name
            for parameter in _parameters(function)
            if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
        }
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


def _parameters(function: Any) -> Iterator[inspect.Parameter]:
    for reached in _reached(function, set()):
        if isinstance(reached, types.FunctionType | types.MethodType):
            signature = inspect.signature(reached, follow_wrapped=False)
            yield from signature.parameters.values()


def _reached(value: Any, seen: set[int]) -> Iterator[Any]:
    if id(value) not in seen:
        seen.add(id(value))
        yield value
        for part in parts(value):
            yield from _reached(part, seen)
