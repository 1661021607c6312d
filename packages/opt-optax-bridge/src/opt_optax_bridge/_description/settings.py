"""The settings that a transformation was made with, as JSON values."""

from __future__ import annotations

import inspect
import types
from typing import Any, Final

from opt_core.extend import (
    closure_vars,
    factory_of,
    json_settings,
    origin_of,
    package_of,
    unwrapped,
)

from opt_optax_bridge._description.nodes import OWN, Node, injected_by, occurrences

UPDATED_BY: Final = "update"
"""The setting that names the factory of the update function if another one made the state."""

INJECTED: Final = "injected"
"""The setting that holds what `optax.inject_hyperparams` injects into a transformation."""

_PER_PARAMETER = ("mask", "labels")  # leaves and `parameters` show the selection
_KNOWN = OWN | {"jax", "numpy"}


def settings_of(node: Node) -> dict[str, Any]:
    """Returns the settings of a transformation, by the names of its arguments.

    Examples:
      >>> import optax
      >>> from opt_optax_bridge._description.nodes import open_transformation
      >>> settings_of(open_transformation(optax.trace(0.9)))
      {'accumulator_dtype': None, 'decay': 0.9, 'nesterov': False}
    """
    if (named := node.declared.get("settings")) is None:
        held = injected_by(node.held) if node.injects else node.held
        known = _arguments(node) if node.is_own else None
        # Attributes are named after arguments, up to underscores.
        bare = {name.strip("_"): value for name, value in held.items()}
        named = {k: _number(v) for k, v in bare.items() if _is_setting(k, v, node, known)}
    injected = {INJECTED: node.injected} if node.injected else {}
    found = json_settings({**dict(sorted(named.items())), **injected}, known=_KNOWN)
    if _is_updated_by_another(node):
        found[UPDATED_BY] = node.updated_by
    return found


def _number(value: Any) -> Any:
    """Unwraps a number that `optax.MultiSteps` has turned into a function."""
    is_own = isinstance(value, types.FunctionType) and package_of(value) in OWN
    held = closure_vars(value) if is_own else {}
    return held["every_k_schedule"] if held.keys() == {"every_k_schedule"} else value


def _is_updated_by_another(node: Node) -> bool:
    """Whether one factory's function updates a state that another's, or nobody known, has made."""
    if node.shares_init or node.tx.update is None:
        return False
    is_optax = node.is_own and package_of(node.tx.init) in OWN
    if not node.maker:
        return not is_optax and not node.is_stateless
    makes, updates = (origin_of(f) for f in (node.tx.init, node.tx.update))
    return (node.maker, makes) != (node.factory, updates) and not is_optax


def _arguments(node: Node) -> frozenset[str] | None:
    """The argument names of the constructor in which its functions are defined."""
    made_by = unwrapped(node.tx.init if node.tx.update is None else node.tx.update)
    plain = getattr(made_by, "__func__", made_by)
    constructor = getattr(plain, "__globals__", {}).get(node.factory)
    if not callable(constructor):
        return None
    return frozenset(inspect.signature(constructor).parameters)


def _is_setting(name: str, value: Any, node: Node, known: frozenset[str] | None) -> bool:
    lone: list[Any] = []  # halves of transformations
    if name.endswith(_PER_PARAMETER) or any(occurrences(value, node.factory, lone)) or lone:
        return False
    if not node.injects and known is not None and name not in known:
        return False
    plain = unwrapped(value)
    is_helper = isinstance(plain, types.FunctionType) and factory_of(plain, OWN) == node.factory
    return not is_helper or name in (known or ())
