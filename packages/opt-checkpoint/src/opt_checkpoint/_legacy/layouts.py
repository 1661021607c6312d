"""The layouts of legacy checkpoints, converted to the one that `restore_state` reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from opt_core import MultiOptimizer, Optimizer
from opt_core.extend import Names, flatten_with_paths, leaf_name

from opt_checkpoint.errors import LoadError, VersionError

_T5X_VERSION = 3
_NAMED_TUPLE = {"name", "fields", "values"}
PLACEHOLDER = "PLACEHOLDER://"
DYNAMIC_SCALE = (
    "it is not an optimizer. It lives on as `flax.training.dynamic_scale.DynamicScale`, which "
    "takes its file: `flax.serialization.from_state_dict(DynamicScale(), read_legacy(file))`"
)


def optimizer_part(contents: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `{'target': ..., 'state': {'step': ..., 'param_states': ...}}` of a checkpoint.

    The contents are those of T5X (`version`, `optimizer`), of `flax.optim` (`target`, `state`), or
    of a `TrainState` (`params`, `opt_state`, `step`). Named tuples become dicts. Others, such as
    `flax_mutables` or `batch_stats`, are left out.
    """
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
        return f"this is a `flax.optim.DynamicScale`: {DYNAMIC_SCALE}."
    keys = ", ".join(sorted(contents)[:10]) or "nothing"
    return (
        "expected the keys `target` and `state` (`flax.optim`), `params`, `opt_state` and `step` "
        f"(`TrainState`), or `optimizer` (T5X); found {keys}. Restore a part of it: "
        "`restore_legacy(optimizer, read_legacy(file)['...'])`."
    )


def is_elsewhere(value: Any) -> bool:
    """Whether an entry stands for an array in a TensorStore folder next to the file."""
    if isinstance(value, Mapping):
        return value.keys() >= {"driver", "kvstore", "metadata"}
    return isinstance(value, str) and value.startswith(PLACEHOLDER)


def _plain(value: Any, path: Names) -> Any:
    """Named tuples, as Flax 0.3.3 and 0.3.4 wrote them, as dicts by field."""
    if is_elsewhere(value):
        raise LoadError(
            f"`{leaf_name(path)}`: the array is not in this file but in a folder next to it, where "
            "T5X stores what is partitioned: open the folder of both by `open_foreign`."
        )
    if not isinstance(value, Mapping):
        return value
    if set(value) == _NAMED_TUPLE and isinstance(value["name"], str):
        fields, values = sequence_of(value["fields"]), sequence_of(value["values"])
        if fields is None or values is None or len(fields) != len(values):
            raise LoadError(f"`{leaf_name(path)}`: expected a named tuple as Flax 0.3.3 wrote it.")
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


def sequence_of(value: Any) -> list[Any] | None:
    """Returns the items of a list, or of `{'0': ..., '1': ...}`; `None` for anything else."""
    if isinstance(value, Mapping) and set(value) == {str(i) for i in range(len(value))}:
        value = [value[str(i)] for i in range(len(value))]
    return value if isinstance(value, list) else None


def step_of(state: Mapping[str, Any], path: str = "state/step") -> int:
    """Returns how many updates were made."""
    step = state.get("step")
    is_array = isinstance(step, np.ndarray | np.generic | jax.Array) and np.shape(step) == ()
    number = np.asarray(step).item() if is_array else step
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 2**31:
        raise LoadError(f"`{path}`: expected a non-negative int32, found {step!r}.")
    return number
