"""Who made a function: what Optax's transformations are called after."""

from __future__ import annotations

import types
from collections import deque
from typing import Any, NamedTuple

import jax
import numpy as np
from opt_core.closures import captured, code_of, package_of, unwrapped


class Half(NamedTuple):
    """One half of a transformation, or both: what `optax.chain` keeps of its members."""

    init: Any
    update: Any


def is_transformation(value: Any) -> bool:
    """Whether a value has Optax's `init` and `update`."""
    if isinstance(value, type | types.ModuleType | np.ndarray | jax.Array):
        return False
    return callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))


def captured_with_helpers(function: Any) -> dict[str, Any]:
    """Returns what a function and the helpers of its factory have captured, by name.

    Examples:
      >>> def scale(factor):
      ...     def times(x):
      ...         return factor * x
      ...     return lambda x: times(x)
      >>> captured_with_helpers(scale(2.0))['factor']
      2.0
    """
    factory, found = factory_of(function), captured(function)
    helpers = deque(found.values())
    seen: set[int] = set()
    while helpers:
        helper = helpers.popleft()
        if isinstance(helper, types.FunctionType) and id(helper) not in seen:
            seen.add(id(helper))
            if factory_of(helper) == factory:
                inner = captured(helper)
                found = inner | found
                helpers += inner.values()
    return found


def factory_of(function: Any) -> str:
    """Returns the name of the function that a function was defined in, or of its object's class.

    Examples:
      >>> import optax
      >>> factory_of(optax.trace(0.9).init), factory_of(optax.MultiSteps(optax.sgd(1.0), 2).init)
      ('trace', 'MultiSteps')
    """
    plain = unwrapped(function)
    if isinstance(plain, types.FunctionType):
        return definer_of(plain)
    return type(plain.__self__ if isinstance(plain, types.MethodType) else function).__name__


def definer_of(function: Any) -> str:
    """Returns the same, but of a method the class that defines it: a subclass may inherit `init`.

    Examples:
      >>> import optax
      >>> class Mine(optax.MultiSteps): ...
      >>> definer_of(Mine(optax.sgd(1.0), 2).init)
      'MultiSteps'
    """
    code = code_of(function)
    if code is None:
        return factory_of(function)
    scopes = code.co_qualname.split(".<locals>.")
    if "." in scopes[-1]:
        return scopes[-1].split(".")[-2]
    if len(scopes) == 1:
        return scopes[0]
    # A factory of Optax's is no local function, but may have some.
    scope = scopes[0] if package_of(function) == "optax" else scopes[-2]
    return scope.rpartition(".")[2]


def own_name(function: Any) -> str:
    """Returns the name that a function was defined with."""
    code = code_of(function)
    return str(code.co_name if code is not None else getattr(unwrapped(function), "__name__", ""))


def is_same(one: Any, other: Any) -> bool:
    """Whether two functions are one: the same object, or the same method of the same object."""
    if isinstance(one, types.MethodType) and isinstance(other, types.MethodType):
        return one.__func__ is other.__func__ and one.__self__ is other.__self__
    return one is other
