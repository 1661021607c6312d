"""Restoring legacy checkpoints into today's optimizers.

With what Optax has changed about its states since, and how to migrate old ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from opt_core import MultiOptimizer, Optimizer, describe_state, to_state_dict
from opt_core.errors import RestoreError
from opt_core.extend import Names, children, flatten_with_paths, listed, path_str
from opt_optax_bridge import OptaxWrapper

from opt_checkpoint._flax_optim import entries_of, is_per_parameter, optax_state
from opt_checkpoint._read_legacy import is_elsewhere, read_legacy, sequence_of
from opt_checkpoint.errors import LoadError, VersionError

Saved = Mapping[str, Any]


class Change(NamedTuple):
    """How a state differs from what it was."""

    renamed: Mapping[str, str] = {}  # today's names of fields by the former ones
    new: Mapping[str, Any] = {}  # by field: the initial value, or the name of the field that has it


def migrate(state: Any, saved: Any, path: tuple[str, ...] = ()) -> Any:
    """Returns what a checkpoint has in place of a state, in the layout of the installed Optax."""
    node = children(state)
    if node is None or not isinstance(saved, Mapping):
        return saved
    name = type(state).__name__
    if name == "DoGState" and "first_step" in saved and np.any(saved["first_step"]):
        raise VersionError(
            f"`{path_str(path)}`: this state of `dog` was saved before its first step by an Optax "
            "until 0.2.5: create a new optimizer with the parameters of the checkpoint."
        )
    if name in _CHANGED:
        saved = _changed(saved, state, _CHANGED[name])
    elif name in _MOVED:
        saved = _MOVED[name](saved, state) or saved
    parts = dict(node.children)
    return {
        key: migrate(parts[key], value, (*path, key)) if key in parts else value
        for key, value in saved.items()
    }


def _changed(saved: Saved, state: Any, change: Change) -> Saved:
    """The fields of today, if it has exactly those of before."""
    renamed, new = change
    if set(saved) != {*state._fields} - {*renamed.values()} - new.keys() | renamed.keys():
        return saved
    filled = {key: _filled(getattr(state, key), value, saved) for key, value in new.items()}
    return {renamed.get(key, key): value for key, value in saved.items()} | filled


def _filled(tree: Any, value: Any, saved: Saved) -> Any:
    if isinstance(value, Mapping):
        return {key: _filled(getattr(tree, key), child, saved) for key, child in value.items()}
    if isinstance(value, str):
        return to_state_dict(jax.tree.map(lambda _: saved[value], tree))
    return to_state_dict(jax.tree.map(lambda leaf: np.full(leaf.shape, value, leaf.dtype), tree))


def _without_momentum(saved: Saved, state: Any) -> Saved | None:
    """The base optimizer of schedule-free Adam: RMSProp since then, not Adam with `b1=0`."""
    base: Any = saved.get("base_optimizer_state")
    first = base.get("0") if isinstance(base, Mapping) else None
    if not isinstance(first, Mapping) or set(first) != {"count", "mu", "nu"}:
        return None
    if type(state.base_optimizer_state[0]).__name__ != "ScaleByRmsWithCountState":
        return None
    kept = {key: value for key, value in first.items() if key != "mu"}  # only the last gradient
    b1: Any = saved.get("b1")
    if isinstance(b1, np.ndarray) and b1.size == 1:
        b1 = b1.reshape(state.b1.shape)
    return {**saved, "b1": b1, "base_optimizer_state": {**base, "0": kept}}


def _noise_first(saved: Saved, state: Any) -> Saved | None:
    """`noisy_sgd`: the noise comes before the learning rate, and so does its state."""
    filled = {key: value for key, value in saved.items() if not _is_empty(value)}
    is_noisy_sgd = len(state) == 2 and type(state[0]).__name__ == "AddNoiseState"
    if not is_noisy_sgd or filled.keys() != {"1"} or not isinstance(filled["1"], Mapping):
        return None
    return {"0": filled["1"]} if set(filled["1"]) == set(state[0]._fields) else None


def _is_empty(value: Any) -> bool:
    return isinstance(value, Mapping) and not value


# By the type of the state, with the first version of Optax that has today's layout.
_CHANGED = {
    "MultiStepsState": Change(new={"skip_state": 0}),  # 0.1.3
    "InjectStatefulHyperparamsState": Change(new={"hyperparams_states": "count"}),  # 0.1.8
    "ReduceLROnPlateauState": Change(  # 0.2.2
        {"best_loss": "best_value", "lr": "scale", "cooldown_counter": "cooldown_count"},
        {"count": 0, "avg_value": 0},
    ),
    "ScaleByBacktrackingLinesearchState": Change(  # 0.2.4; no update reads it
        new={"info": {"num_linesearch_steps": 0, "decrease_error": np.inf}}
    ),
    "DoGState": Change({"first_step": "is_init_step", "estim_dist": "max_dist"}),  # 0.2.6
}
_MOVED: Mapping[str, Callable[[Saved, Any], Saved | None]] = {
    "tuple": _noise_first,  # 0.1.4
    "ScheduleFreeState": _without_momentum,  # 0.2.4
}


Source = bytes | bytearray | memoryview | str | os.PathLike[str] | Mapping[str, Any]
Writers = str | Mapping[str, str] | None
_T5X_VERSION = 3
_NAMED_TUPLE = {"name", "fields", "values"}
_THEN_CHANGE = (
    "the definition that wrote the file, then change it: `opt_core.regroup`, or save it and "
    "`plan_restore`."
)


def restore_legacy(
    optimizer: Optimizer, source: Source, *, written_by: Writers = None
) -> Optimizer:
    """Returns an optimizer with the parameters and the state of a legacy checkpoint.

    It reads the checkpoints of T5X, of `flax.optim` (before and since 0.3.3), and of Flax's
    `TrainState`, and states of Optax whose fields have changed since. The state of `flax.optim`'s
    optimizers goes where their equals in Optax keep it.

    A file with states of Optax does not say which optimizer wrote it, nor how long a window of
    `MultiSteps` was. States of the same fields and shapes, such as those of Adam, AdaBelief, Yogi,
    NAdam and AdaMax, cannot be distinguished: restore into the optimizer that wrote it.

    Args:
      optimizer: the optimizer to go on with; determines containers, shapes, dtypes, shardings.
      source: the bytes of a checkpoint, the path of a file, or what `read_legacy` returned.
      written_by: which optimizer of `flax.optim` wrote it, by the class's name, such as `'Adam'`;
        of groups a mapping from their names. An error if it is not needed: the file is not of
        `flax.optim`, or nothing in `optimizer` is wrapped Optax.

    Returns:
      The restored optimizer. No array of `source` is aliased.

    Raises:
      LoadError: it is not a legacy checkpoint, or its state does not fit this optimizer, or it was
        saved in a window of `MultiSteps` that could not end in this one; says what. Or `written_by`
        is missing or wrong, or does not apply to the file.
      VersionError: it was written by an Optax whose state meant something else.
      opt_core.errors.RestoreError: something is missing, extra, or of another shape or dtype;
        lists every path.

    Examples:
      >>> import flax.serialization, jax.numpy as jnp
      >>> import opt_optax_bridge as opt
      >>> moments = {'grad_ema': jnp.ones(2), 'grad_sq_ema': jnp.ones(2)}
      >>> data = flax.serialization.msgpack_serialize({
      ...     'target': {'w': jnp.zeros(2)},
      ...     'state': {'step': 7, 'param_states': {'w': moments}}})
      >>> optimizer = opt.adamw(0.1, weight_decay=0.0).create({'w': jnp.ones(2)})
      >>> restored = restore_legacy(optimizer, data, written_by='Adam')
      >>> int(restored.state.step), restored.state.param_states[0].mu['w'].tolist()
      (7, [1.0, 1.0])
    """
    contents = source if isinstance(source, Mapping) else read_legacy(source)
    part = with_one_state(optimizer_part(contents), optimizer)
    try:
        restored = optimizer.restore_state(_todays(optimizer, part, written_by))
    except RestoreError as error:
        raise RestoreError(error.mismatches, f"Restore into {_THEN_CHANGE}") from None
    _check_windows(restored)
    return restored


def _todays(optimizer: Optimizer, part: Mapping[str, Any], written_by: Writers) -> dict[str, Any]:
    """The state dict that the optimizer itself would have written."""
    target, state = part["target"], part["state"]
    if not isinstance(state, Mapping):
        raise LoadError("`state`: expected the state of an optimizer, a dict.")
    step, states = step_of(state), state.get("param_states", {})
    groups: Mapping[str, Optimizer] = {"": optimizer}
    if isinstance(definition := optimizer.optimizer_def, MultiOptimizer):
        groups = definition.split(optimizer)
    definitions = {name: group.optimizer_def for name, group in groups.items()}
    wrapped = {name: x for name, x in definitions.items() if isinstance(x, OptaxWrapper)}
    if wrapped and is_per_parameter(entries_of(target, states)):
        writers = written_by if isinstance(written_by, Mapping) else {}
        if unknown := sorted(writers.keys() - wrapped.keys()):
            raise LoadError(
                f"`written_by`: {listed(unknown)} is not a group of wrapped Optax that trains: "
                f"{listed(filter(None, wrapped), 'this optimizer has no groups; pass one name')}."
            )
        _check_trained(optimizer, groups, states)
        placed = {}
        for name, group in groups.items():
            entries = entries_of(group.target, states)
            if name in wrapped:
                who = writers.get(name) if isinstance(written_by, Mapping) else written_by
                where = f" (group `{name}`)" if name else ""
                placed[name] = optax_state(group, who, where, entries, step)
            else:
                kept = {path: entry for path, entry in entries.items() if entry is not None}
                placed[name] = unflatten_dict(kept)
        states = placed.get("", placed)
    elif written_by is not None:
        raise LoadError(
            "`written_by` is for restoring the state of `flax.optim` into wrapped Optax. Here the "
            "optimizer decides what the state in the file is: leave it out."
        )
    else:
        states = migrate(optimizer.state.param_states, states, ("state", "param_states"))
    return {"target": target, "state": {"step": step, "param_states": states}}


def _check_trained(optimizer: Optimizer, groups: Mapping[str, Optimizer], states: Any) -> None:
    """Raises an error if the file has states of what is frozen."""
    trained = {path for group in groups.values() for path in entries_of(group.target, states)}
    saved = entries_of(optimizer.target, states)
    if frozen := [path for path, entry in saved.items() if entry and path not in trained]:
        raise LoadError(
            "the file has states of parameters that are frozen here: "
            f"{', '.join(map(path_str, frozen))}. Restore into groups that train them, then freeze "
            "them: `opt_core.freeze`."
        )


def _check_windows(optimizer: Optimizer) -> None:
    """Raises an error if the mini-steps that were made fill windows of the target's length."""
    described = describe_state(optimizer)
    lengths = {
        (t.group, t.name, t.number): t.settings.get("every_k_schedule")
        for t in described.transformations
    }
    values = jax.tree.leaves(optimizer.state.param_states)
    for leaf, value in zip(described.leaves, values, strict=True):
        length = lengths.get((leaf.group, leaf.transformation, leaf.number))
        if leaf.field == ("mini_step",) and isinstance(length, int) and int(value) >= length:
            raise LoadError(
                f"`{path_str(('state', 'param_states', *leaf.path))}`: {value} mini-steps were "
                f"saved in a window; the target's window is {length}. Restore with the length that "
                "wrote it, or save at the end of a window."
            )


def optimizer_part(contents: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parts `target` and `state` of a checkpoint of T5X, `flax.optim` or Flax."""
    if "optimizer" in contents:
        version = contents.get("version", _T5X_VERSION)
        if not np.array_equal(version, _T5X_VERSION):
            raise VersionError(
                f"`version`: this is version {version!r} of T5X's checkpoints; {_T5X_VERSION} is "
                "read. Convert it with T5X."
            )
        contents = contents["optimizer"]
    if not isinstance(contents, Mapping):
        raise LoadError("`optimizer`: expected a dict, as in a checkpoint of T5X.")
    if {"target", "state"} <= set(contents):
        part = {"target": contents["target"], "state": contents["state"]}
    elif {"params", "opt_state", "step"} <= set(contents):
        state = {"step": contents["step"], "param_states": contents["opt_state"]}
        part = {"target": contents["params"], "state": state}
    else:
        raise LoadError(_unknown(contents))
    return {key: _plain(value, (key,)) for key, value in part.items()}


def _unknown(contents: Mapping[str, Any]) -> str:
    if set(contents) == {"fin_steps", "scale"}:
        return (
            "this is a `flax.optim.DynamicScale`, which is not an optimizer. It lives on as "
            "`flax.training.dynamic_scale.DynamicScale`, which takes its file: "
            "`flax.serialization.from_state_dict(DynamicScale(), read_legacy(file))`."
        )
    keys = ", ".join(sorted(contents)[:10]) or "nothing"
    return (
        "expected the keys `target` and `state` (`flax.optim`), `params`, `opt_state` and `step` "
        f"(`TrainState`), or `optimizer` (T5X); found {keys}. Restore a part of it: "
        "`restore_legacy(optimizer, read_legacy(file)['...'])`."
    )


def _plain(value: Any, path: Names) -> Any:
    """Named tuples, as Flax 0.3.3 and 0.3.4 wrote them, as dicts by field."""
    if is_elsewhere(value):
        raise LoadError(
            f"`{path_str(path)}`: the array is not in this file but in a folder next to it, where "
            "T5X stores what is partitioned: open the folder of both by `open_foreign`."
        )
    if not isinstance(value, Mapping):
        return value
    if set(value) == _NAMED_TUPLE and isinstance(value["name"], str):
        fields, values = sequence_of(value["fields"]), sequence_of(value["values"])
        if fields is None or values is None or len(fields) != len(values):
            raise LoadError(f"`{path_str(path)}`: expected a named tuple as Flax 0.3.3 wrote it.")
        value = dict(zip(map(str, fields), values, strict=True))
    return {key: _plain(child, (*path, key)) for key, child in value.items()}


def with_one_state(part: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Returns a state dict in which the groups share one state, as Flax wrote them since 0.3.3.

    Before, there was a list of `{'step', 'param_states'}`, one per group, and the states of a group
    were a list too, in the order of the parameters' paths, compared component by component.
    """
    entries = sequence_of(part["state"])
    if not entries or not all(isinstance(e, Mapping) and "step" in e for e in entries):
        return dict(part)
    definition = optimizer.optimizer_def
    groups = definition.split(optimizer) if isinstance(definition, MultiOptimizer) else {}
    if len(groups) != len(entries):
        raise LoadError(
            f"`state`: {len(entries)} states, one per group of a `MultiOptimizer` of Flax until "
            f"0.3.2; this optimizer has {len(groups)} groups that train."
        )
    states: dict[Names, Any] = {}
    for i, (entry, group) in enumerate(zip(entries, groups.values(), strict=True)):
        if step_of(entry, f"state/{i}/step") != step_of(entries[0], "state/0/step"):
            steps = f"{entry['step']}, and {entries[0]['step']} in the first group"
            raise LoadError(f"`state/{i}/step`: {steps}; groups share one step.")
        listed = sequence_of(entry.get("param_states", {}))
        names = sorted(names for names, _ in flatten_with_paths(group.target))
        if listed is None or len(listed) != len(names):
            expected = f"expected one state for each of {len(names)} parameters"
            count = "something else" if listed is None else len(listed)
            raise LoadError(f"`state/{i}/param_states`: {expected}, found {count}.")
        states |= zip(names, listed, strict=True)
    state = {"step": entries[0]["step"], "param_states": unflatten_dict(states)}
    return {"target": part["target"], "state": state}


def step_of(state: Mapping[str, Any], path: str = "state/step") -> int:
    """Returns how many updates were made."""
    step = state.get("step")
    is_array = isinstance(step, np.ndarray | np.generic | jax.Array) and np.shape(step) == ()
    number = np.asarray(step).item() if is_array else step
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 2**31:
        raise LoadError(f"`{path}`: expected a non-negative int32, found {step!r}.")
    return number
