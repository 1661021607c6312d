"""The leaves of anyone's optimizer by name, and what a restore makes of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from opt_core.extend import (
    NamedState,
    Permissions,
    Plan,
    Request,
    Rule,
    Schema,
    Source,
    leaf_info,
    leaf_path,
    make_plan,
    named_view,
)

from opt_checkpoint._targets.view import view_of
from opt_checkpoint.errors import PlanError

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


def plan_restore(
    checkpoint: Source,
    target: _Target,
    *,
    allow: Iterable[str] = (),
    rules: Sequence[Rule] = (),
    placement: Any = None,
) -> Plan[_Target]:
    r"""Returns what restoring a checkpoint into an optimizer would do with every leaf.

    Leaves are paired by name. A leaf whose parameter has moved to another group is found there.
    What a group keeps for all its parameters, such as a count, is kept if all the groups that they
    come from agree about it; otherwise that transformation is reinitialised in the group.

    Args:
      checkpoint: a step of a `Checkpointer`, a `NamedState`, or any other `Source`.
      target: the optimizer to restore, of any kind that `named_state` takes; its leaves may be
        `jax.ShapeDtypeStruct`s with shardings. Parameters that the checkpoint lacks need arrays.
      allow: what has to be asked for, as in `opt_core.regroup`: `'initialise'`, moments that begin
        at zero for parameters that were trained, and parameters that the checkpoint lacks;
        `'drop'`, trained state and parameters that the target has no place for; `'cast'`, another
        dtype of anything but moments, where every value fits; `'reshape'`, another shape of the
        same size; `'optimizer'`, moments that go on under other mathematics. What cannot harm,
        such as a clip, a schedule or another group, is reported and needs no word.
      rules: pairs of a regular expression, which has to match a whole name, and an `Action`; the
        first that matches decides, and admits what it says.
      placement: where leaves go that the target itself does not place, that is, abstract ones
        without shardings and arrays that are not committed to devices: a `MemoryPlan` or a `Layout`
        of opt-partition, anything else with trees of shardings as `params` and `state` or
        `opt_state`, one such tree for the state or the parameters, or one sharding for all leaves.
        Without it, they go where the checkpoint had them, if those devices are here.

    Returns:
      The plan. Only the schema has been read; `plan.apply()` restores, and returns the same kind as
      `target`.

    Raises:
      LeafError: `placement` was made for other leaves; names one.
      TypeError: `target` is of another kind, or `checkpoint` cannot be read from.
      TypeError, ValueError: `allow` or `rules` are invalid, or a rule matches no leaf.

    Examples:
      >>> import jax.numpy as jnp
      >>> from opt_checkpoint import named_state
      >>> import opt_optax_bridge as opt
      >>> params = {'w': jnp.ones(2)}
      >>> saved = named_state(opt.adam(1e-3).create(params))
      >>> print(plan_restore(saved, opt.sgd(1e-3, momentum=0.9).create(params)))
      2 kept (12 bytes), 1 initialised (8 bytes), 3 dropped (20 bytes)
       * `adam` is gone
       * `trace` is new
      !+ state/trace/trace/w float32[2]
      !- state/adam/mu/w float32[2]
      !- state/adam/nu/w float32[2]
       - state/adam/count int32[]
    """
    if not isinstance(checkpoint, Source):
        raise TypeError(
            "`checkpoint` must be a step (`Checkpointer.at`, `latest_valid`, `open_step`) or a "
            f"`NamedState`; found {type(checkpoint).__name__}"
        )
    request = Request(Permissions.make(allow, rules), error=PlanError)
    plan: Plan[_Target] = make_plan(checkpoint, view_of(target), request, placement)
    return plan


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
    if not isinstance(named, NamedState):
        named = _without_schema(target, named)
    return plan_restore(named, target).apply()


def _without_schema(target: Any, named: Mapping[str, Any]) -> NamedState:
    """Leaves without a schema: each is what the target has under its name."""
    known = named_state(target).schema.by_name
    paths = {name: known[name].path if name in known else leaf_path(name) for name in named}
    infos = [
        leaf_info(leaf, paths[name], "params" if paths[name][0] == "params" else "state")
        for name, leaf in named.items()
    ]
    return NamedState(dict(named), Schema(tuple(infos)))
