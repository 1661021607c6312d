"""The leaves of anyone's optimizer by name, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from opt_checkpoint._naming import names as _names
from opt_checkpoint._naming.names import NamedState
from opt_checkpoint._naming.schema import Schema, leaf_path
from opt_checkpoint._targets.view import View, view_of

_Target = TypeVar("_Target")


def named_state(target: Any, *, param_axes: Any = None) -> NamedState:
    """Returns the leaves of an optimizer by name.

    A parameter is `params/<path>`. What a transformation keeps is `state/<transformation>/<field>`,
    with the path of its parameter, if it follows one: `state/adam/mu/decoder/kernel`,
    `state/schedule/count`. In a group it is `state/groups/<group>/<transformation>/...`, whether
    the groups are a `MultiOptimizer`'s or `optax.partition`'s. The name of the transformation is
    that of the function that made the state (`scale_by_adam`: `adam`), so it does not depend on its
    place in a chain or on wrappers around it; the second one, in the order of updates, is `adam#2`.
    If the function has no name, as with a `lambda` for `init`, it is that of the state's type, and
    plain containers are distinguished by their place only.

    Args:
      target: an `opt_core.Optimizer` of any definition; a `TrainingState` of plain Optax; a Flax
        `TrainState`, without the fields that a subclass adds; or the pair of a model and its
        `nnx.Optimizer`, where variables that the optimizer does not update are `params/<path>` too.
        Leaves may be abstract.
      param_axes: logical axes of the parameters, recorded for every leaf where the definition
        derives them.

    Returns:
      The leaves and their schema; nothing is copied.

    Raises:
      LeafError: two leaves would have the same name.
      TypeError: `target` is of another kind.

    Examples:
      >>> import jax.numpy as jnp
      >>> import opt_optax_bridge as opt
      >>> list(named_state(opt.adam(1e-3).create({'w': jnp.ones(2)})))
      ['params/w', 'state/step', 'state/adam/count', 'state/adam/mu/w', 'state/adam/nu/w']
    """
    return named_view(view_of(target), param_axes=param_axes)


def named_view(view: View, *, param_axes: Any = None) -> NamedState:
    """Returns the leaves of what the planner sees: parameters, then others, then the state."""
    return _names.named_state(view.optimizer, view.others, param_axes)


def restore_named(target: _Target, named: Mapping[str, Any]) -> _Target:
    """Returns an optimizer with the leaves that `named_state` returned.

    Args:
      target: of any kind that `named_state` takes; determines containers, shapes, dtypes and
        shardings; its leaves may be abstract.
      named: the leaves by name; the schema of a `NamedState` is compared too.

    Returns:
      An optimizer of the same kind; it shares no buffer with `named`.

    Raises:
      PlanError: a name is missing or unknown, a shape or dtype differs, or the optimizer is another
        one; `plan_restore` admits changes.
      TypeError: `target` is of another kind.

    Examples:
      >>> import jax.numpy as jnp
      >>> import opt_optax_bridge as opt
      >>> optimizer = opt.adam(1e-3).create({'w': jnp.ones(2)})
      >>> again = restore_named(optimizer, named_state(optimizer))
      >>> bool((again.target['w'] == optimizer.target['w']).all())
      True
    """
    from opt_checkpoint._planning.match import plan_restore

    if not isinstance(named, NamedState):
        named = _without_schema(target, named)
    return plan_restore(named, target).apply()


def _without_schema(target: Any, named: Mapping[str, Any]) -> NamedState:
    """Leaves without a schema: each is what the target has under its name."""
    known = named_state(target).schema.by_name
    paths = {name: known[name].path if name in known else leaf_path(name) for name in named}
    infos = [
        _names.leaf_info(leaf, paths[name], "params" if paths[name][0] == "params" else "state")
        for name, leaf in named.items()
    ]
    return NamedState(dict(named), Schema(tuple(infos)))
