"""What Optax has changed about its states, and how to migrate old ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from opt_core import to_state_dict
from opt_core.extend import children, path_str

from opt_checkpoint.errors import VersionError

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
