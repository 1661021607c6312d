"""Anyone's optimizer as an `opt_core.Optimizer` and back: named, planned, restored.

The planner and the disk know only that kind. `view_of` presents a target as one, with a function
that puts restored leaves back into what the caller gave. Kinds are distinguished by `isinstance`,
never by attributes.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from opt_core import Optimizer, OptimizerDef, OptimizerState
from opt_core.errors import TreeMismatchError
from opt_core.extend import (
    NamedState,
    Names,
    Plan,
    Request,
    Rule,
    Schema,
    Source,
    View,
    differences,
    leaf_info,
    local,
    make_plan,
    named_leaves,
    named_view,
    path_str,
    shown,
    split_path,
    strip_weak_type,
    update_counts,
)
from opt_core.protocols import Transformation
from opt_optax_bridge import OptaxWrapper

from opt_checkpoint.errors import PlanError

_Target = TypeVar("_Target")
_FIELDS = frozenset({"step", "params", "opt_state"})


@struct.dataclass
class TrainingState:
    """What a training loop of plain Optax carries, as one pytree.

    It is saved, planned and restored like any other optimizer, and goes through `jax.jit` and
    `jax.eval_shape`; `tx` is static. Frozen: `replace` makes another.

    Attributes:
      tx: the transformation.
      params: pytree of parameters; arrays or `jax.ShapeDtypeStruct`s.
      opt_state: what `tx.init(params)` returns, or `tx.update` since.
      step: how many updates have been made. `None` takes the `count` of the state: 0 if it has
        none, an error if it has several that differ or counts mini-steps.

    Examples:
      >>> import optax
      >>> from opt_checkpoint import named_state
      >>> tx, params = optax.adam(0.1), {'w': jnp.ones(2)}
      >>> list(named_state(TrainingState(tx, params, tx.init(params))))
      ['params/w', 'state/step', 'state/adam/count', 'state/adam/mu/w', 'state/adam/nu/w']
    """

    tx: optax.GradientTransformation | optax.MultiSteps = struct.field(pytree_node=False)
    params: Any
    opt_state: Any
    step: Any = 0


def named_state(target: Any) -> NamedState:
    """Returns the leaves of an optimizer by name.

    A parameter is `params/<path>`. What a transformation keeps is `state/<transformation>/<field>`,
    with the path of its parameter, if it follows one: `state/adam/mu/decoder/kernel`,
    `state/schedule/count`. In a group, of a `MultiOptimizer` or of `optax.partition`, it is
    `state/groups/<group>/<transformation>/...`. A transformation is named after the function that
    made its state (`scale_by_adam`: `adam`), whatever its place in a chain; the second one, in the
    order of updates, is `adam#2`. See `OptaxWrapper.describe_state`.

    Args:
      target: an `opt_core.Optimizer`; a `TrainingState` of plain Optax; a Flax `TrainState`,
        without the fields that a subclass adds; or the pair of a model and its `nnx.Optimizer`,
        where variables that the optimizer does not update are `params/<path>` too. Leaves may be
        abstract.

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
    return named_view(view_of(target))


def plan_restore(
    checkpoint: Source | Mapping[str, Any],
    target: _Target,
    *,
    allow: Iterable[str] = (),
    rules: Sequence[Rule] = (),
    placement: Any = None,
) -> Plan[_Target]:
    r"""Returns what restoring a checkpoint into an optimizer would do with every leaf.

    Leaves are paired by name; one whose parameter has moved to another group is found there. What
    a group keeps for all its parameters, such as a count, is kept if all the groups that they come
    from agree about it; otherwise that transformation is reinitialised in the group.

    Args:
      checkpoint: a step of a `Checkpointer`, a `NamedState`, or any other `Source`; or leaves by
        name alone, each of which is taken for what the target has under its name.
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
      placement: where leaves go that the target does not place (abstract without shardings, or
        not committed to devices): a `MemoryPlan` or a `Layout` of opt-partition, anything else with
        trees of shardings as `params` and `state` or `opt_state`, one such tree for the state or
        the parameters, or one sharding for all leaves. Without it, they go where the checkpoint had
        them, if those devices are here.

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
    if isinstance(checkpoint, Mapping) and not isinstance(checkpoint, NamedState):
        checkpoint = _without_schema(checkpoint)
    if not isinstance(checkpoint, Source):
        raise TypeError(
            "`checkpoint` must be a step (`Checkpointer.at`, `latest_valid`, `open_step`) or a "
            f"`NamedState`; found {type(checkpoint).__name__}"
        )
    request = Request.make(allow, rules, error=PlanError)
    plan: Plan[_Target] = make_plan(checkpoint, view_of(target), request, placement)
    return plan


def _without_schema(named: Mapping[str, Any]) -> NamedState:
    """Leaves by name as a source: what they follow and mean is not known."""
    for name, leaf in named.items():
        if isinstance(leaf, Mapping | list | tuple):
            raise TypeError(
                f"`checkpoint` must have an array for each name, such as `params/w`; "
                f"`{name!s:.80}` is a {type(leaf).__name__}"
            )
    infos = (
        leaf_info(leaf, path := split_path(name), "params" if path[0] == "params" else "state")
        for name, leaf in named.items()
    )
    # Counts have no value: without settings they do not say whether a window is open.
    uncounted = tuple(dataclasses.replace(info, value=None) for info in infos)
    return NamedState(dict(named), Schema(uncounted))


def view_of(target: Any, *, argument: str = "target") -> View:
    """Returns what the planner sees of a target, which errors call `argument`."""
    if isinstance(target, Optimizer):
        return View(target)
    if isinstance(target, TrainingState):
        return _view_of_fields(target)
    # Without the module imported, there are no objects of its classes; Flax NNX takes a second to
    # import.
    if "flax.training.train_state" in sys.modules:
        from flax.training.train_state import TrainState

        if isinstance(target, TrainState):
            return _view_of_fields(target)
    if "flax.nnx" in sys.modules:
        from flax import nnx

        from opt_checkpoint._nnx import view_of_pair

        if isinstance(target, nnx.Optimizer):
            raise TypeError(
                f"`{argument}`: an `nnx.Optimizer` holds no parameters: give the pair "
                "`(model, optimizer)`"
            )
        if type(target) is tuple and len(target) == 2 and isinstance(target[1], nnx.Optimizer):
            return view_of_pair(*target)
    raise TypeError(
        f"`{argument}`: expected an `opt_core.Optimizer`, a "
        "`TrainingState(tx, params, opt_state)` of plain Optax, a `flax.training.train_state."
        "TrainState`, or the pair `(model, nnx.Optimizer)`; found "
        f"{_kind(target)}"
    )


def _kind(target: Any) -> str:
    """What a target is instead, and what to write where it makes the state of one."""
    if type(target) is tuple:
        return f"a tuple of ({', '.join(type(part).__name__ for part in target)})"
    kind = type(target).__name__
    if isinstance(target, OptimizerDef):
        return f"{kind}: pass what `create(params)` of this definition returns"
    if isinstance(target, Transformation):
        return f"{kind}: pass `TrainingState(tx, params, tx.init(params))`"
    return kind


def _view_of_fields(target: Any) -> View:
    """A `TrainingState` or a `TrainState`, which have the same fields, and subclasses more."""

    def put_back(optimizer: Optimizer, others: Mapping[Names, Any]) -> Any:
        return target.replace(
            step=step_like(target.step, optimizer.state.step),
            params=optimizer.target,
            opt_state=optimizer.state.param_states,
        )

    fields = [f.name for f in dataclasses.fields(target) if f.metadata.get("pytree_node", True)]
    more = [
        name for name in fields if name not in _FIELDS and jax.tree.leaves(getattr(target, name))
    ]
    optimizer = optimizer_of(target.tx, target.params, target.opt_state, target.step)
    return View(optimizer, put_back, unsaved=tuple(more))


def optimizer_of(tx: Any, params: Any, opt_state: Any, step: Any) -> Optimizer:
    """Returns the optimizer with the fields of a `TrainingState`; `tx` may be a definition."""
    # e.g. `opt_nnx.Optimizer` has a definition in place of a transformation
    if not isinstance(tx, optax.GradientTransformation | optax.MultiSteps | OptimizerDef):
        raise TypeError(
            f"`tx`: expected an `optax.GradientTransformation`, found {type(tx).__name__}"
        )
    if wrong := [
        f"\n  `{path_str(names)}`: found {type(leaf).__name__}"
        for names, leaf in named_leaves(params)
        if not isinstance(leaf, int | float | complex) and not hasattr(leaf, "dtype")
    ]:
        raise TypeError(
            "`params`: expected arrays; for an Equinox module, pass `eqx.filter(model, "
            "eqx.is_array)`, and `eqx.combine` what is restored with the rest:" + "".join(wrong)
        )
    definition = tx if isinstance(tx, OptimizerDef) else OptaxWrapper(tx)
    leaves, structure = jax.tree.flatten(params)
    kinds = tuple((np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
    expected = _initial(definition, structure, kinds, bool(jax.config.read("jax_enable_x64")))
    opt_state = jax.tree.map(_array, opt_state)
    if problems := differences(expected, opt_state, shown):
        raise TreeMismatchError(
            "`opt_state` is not a state of `tx` for these `params`:\n"
            + "\n".join(problems)
            + "\nGive the transformation that made it, and the parameters that it was made for."
        )
    state = OptimizerState(jnp.zeros((), jnp.int32), strip_weak_type(opt_state))
    optimizer = Optimizer(definition, state, params)
    step = _step(_count(optimizer) if step is None else step)
    return optimizer.replace(state=state.replace(step=step))


def step_like(target: Any, step: Any) -> Any:
    """Returns a restored step as the target has it: a Python number, or an array of its dtype."""
    if isinstance(target, int) and isinstance(step, jax.Array):
        return int(local(step))
    return step.astype(target.dtype) if hasattr(target, "dtype") else step


def _step(step: Any) -> Any:
    """The step as int32, on its own devices."""
    if np.shape(step) or not jnp.issubdtype(getattr(step, "dtype", type(step)), jnp.integer):
        raise TypeError(f"`step`: expected how many updates have been made, found {step!r:.80}")
    if isinstance(step, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((), jnp.int32, sharding=step.sharding)
    return strip_weak_type(jnp.asarray(step, jnp.int32))


@functools.lru_cache(maxsize=16)  # every save of a run asks for it
def _initial(
    definition: OptimizerDef, structure: Any, kinds: tuple[Any, ...], has_64_bits: bool
) -> Any:
    params = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*kind) for kind in kinds])
    return jax.eval_shape(definition.init_state, params).param_states


def _array(leaf: Any) -> Any:
    return leaf if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else jnp.asarray(leaf)


def _count(optimizer: Optimizer) -> Any:
    """The count that the state keeps."""
    named = named_state(optimizer)
    counts, is_clear = update_counts(named.schema.leaves)
    if None in counts.values():
        return named[next(iter(counts))]  # abstract: nothing to compare
    if not is_clear:
        counted = ", ".join(f"`{name}` {value}" for name, value in counts.items())
        raise ValueError(
            "`step`: give the number of updates, which the state does not determine: "
            f"{counted or 'it counts mini-steps'}"
        )
    return next(iter(counts.values()), 0)
