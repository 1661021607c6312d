"""What was fixed when a transformation was made, as JSON values."""

from __future__ import annotations

import functools
import hashlib
import inspect
import types
from collections.abc import Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from opt_core import json_settings
from opt_core.closures import (
    attributes,
    captured,
    code_values,
    globals_read,
    package_of,
    unwrapped,
)

from opt_optax_bridge._description.factories import factory_of, is_transformation
from opt_optax_bridge._description.nodes import OWN, Node, injected_by

UPDATED_BY: Final = "update"
"""The setting that names what updates a state, where that is not what made it."""

INJECTED: Final = "injected"
"""The setting of what `optax.inject_hyperparams` injects into a transformation."""

_PER_PARAMETER = ("mask", "labels")  # which parameters are meant, the leaves say
_DEPTH = 5
_DIGITS = 16
_LARGE = 2**16
_MANY = 64
_NAMED = (types.ModuleType, type)


def settings_of(node: Node) -> dict[str, Any]:
    """Returns the settings of a transformation, by the names of its arguments.

    A function is its name with what it has captured; one that is not Optax's or JAX's has a digest
    of its code besides. An array is its type and a digest of its values.

    Args:
      node: a transformation.

    Examples:
      >>> import optax
      >>> from opt_optax_bridge._description.nodes import open_transformation
      >>> settings_of(open_transformation(optax.trace(0.9)))
      {'accumulator_dtype': None, 'decay': 0.9, 'nesterov': False}
    """
    if (named := node.told.get("settings")) is None:
        held = injected_by(node.held) if node.factory_argument is not None else node.held
        known = _arguments(node) if node.is_own else None
        # Attributes are called as arguments are, but for a `_`.
        bare = {name.strip("_"): value for name, value in held.items()}
        named = {k: v for k, v in bare.items() if _is_setting(k, v, node, known)}
    found = {name: _json(value, 0) for name, value in sorted(named.items())}
    if node.injected:
        found[INJECTED] = _json(node.injected, 0)
    if _is_updated_by_another(node):
        found[UPDATED_BY] = node.factory
    return found


def _is_updated_by_another(node: Node) -> bool:
    """Whether a state that one function makes is updated by that of another."""
    if not node.maker or node.shares_init or node.tx.update is None:
        return False
    is_optax = node.is_own and package_of(node.tx.init) in OWN
    return node.maker != node.factory and not is_optax


def _arguments(node: Node) -> frozenset[str] | None:
    """The names of the arguments of a constructor, which is where its functions are defined."""
    made_by = unwrapped(node.tx.init if node.tx.update is None else node.tx.update)
    plain = getattr(made_by, "__func__", made_by)
    constructor = getattr(plain, "__globals__", {}).get(node.factory)
    if not callable(constructor):
        return None
    return frozenset(inspect.signature(constructor).parameters)


def _is_setting(name: str, value: Any, node: Node, known: frozenset[str] | None) -> bool:
    if name.endswith(_PER_PARAMETER) or _holds_transformations(value, 0):
        return False
    if node.factory_argument is None and known is not None and name not in known:
        return False
    plain = unwrapped(value)
    is_function = isinstance(plain, types.FunctionType)
    return not (is_function and factory_of(plain) == node.factory and name not in (known or ()))


def _holds_transformations(value: Any, depth: int) -> bool:
    if is_transformation(value):
        return not hasattr(value, "schedule_fn")  # a wrapped schedule has both names too
    match value:
        case tuple() | list():
            inside = list(value)
        case Mapping():
            inside = list(value.values())
        case types.FunctionType() | types.MethodType():
            return value.__name__.startswith(("init", "update"))
        case _:
            inside = list(attributes(value).values())
    return (
        depth < 2
        and len(inside) <= _MANY
        and any(_holds_transformations(child, depth + 1) for child in inside)
    )


def _json(value: Any, depth: int) -> Any:
    if depth > _DEPTH:
        return f"<{type(value).__name__}>"
    inner = functools.partial(_json, depth=depth + 1)
    schedule = getattr(value, "schedule_fn", None)
    if callable(schedule):
        return inner(schedule)
    match value:
        case jax.core.Tracer():
            return f"<{type(value).__name__}>"
        case np.ndarray() | jax.Array() if np.shape(value) or _is_key(value):
            return _array(value)
        case tuple() | list() if len(value) <= _MANY:
            return [inner(child) for child in value]
        case Mapping() if len(value) <= _MANY:
            return {str(name): inner(child) for name, child in value.items()}
        case types.FunctionType() | functools.partial() | types.MethodType():
            return _function(value, depth)
        case types.BuiltinMethodType() if not isinstance(value.__self__, types.ModuleType):
            return {"function": value.__qualname__, "of": inner(value.__self__)}
    if isinstance(unwrapped(value), types.FunctionType):
        return _function(value, depth)  # a compiled one
    if not isinstance(value, type) and callable(value) and attributes(value):
        return {"function": type(value).__name__} | {
            name: inner(child) for name, child in attributes(value).items()
        }
    return json_settings({"": value})[""]


def _function(value: Any, depth: int) -> Any:
    plain = unwrapped(value)
    if not isinstance(plain, types.FunctionType | types.MethodType):
        held = {name: _json(child, depth + 1) for name, child in captured(value).items()}
        name = json_settings({"": plain})[""]
        return {"function": name} | held if held else name
    plain = getattr(plain, "__func__", plain)
    name = factory_of(plain)
    held = {n: _json(x, depth + 1) for n, x in captured(value).items() if x is not value}
    if package_of(plain) in OWN and set(held) == {"every_k_schedule"}:
        return held["every_k_schedule"]  # a number, as a function
    told: dict[str, Any] = {"function": name}
    if package_of(plain) not in {*OWN, "jax", "numpy"}:
        told["code"] = _digest(code_values(plain), plain.__defaults__, plain.__kwdefaults__)
        read = {k: x for k, x in globals_read(plain).items() if not isinstance(x, _NAMED)}
        told |= {name: _json(child, depth + 1) for name, child in read.items()}
    return told | held


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:_DIGITS]


def _is_key(value: Any) -> bool:
    return bool(jnp.issubdtype(value.dtype, jax.dtypes.prng_key))


def _array(value: Any) -> str:
    kind = f"{value.dtype}{list(value.shape)}"
    if isinstance(value, jax.Array):
        if value.is_deleted() or not value.is_fully_addressable:
            return kind
        if _is_key(value):
            value = jax.random.key_data(value)
    if value.dtype == object or value.nbytes > _LARGE:
        return kind
    return f"{kind}:{hashlib.sha256(np.asarray(value).tobytes()).hexdigest()[:_DIGITS]}"
