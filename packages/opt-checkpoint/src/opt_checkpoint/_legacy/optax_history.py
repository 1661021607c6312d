"""What Optax has changed about its states, and how an old one becomes today's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from opt_core import children, to_state_dict

from opt_checkpoint._naming.schema import leaf_name
from opt_checkpoint.errors import VersionError

Found = Mapping[str, Any]
# Given what was found, and today's state: the entry in today's layout; `None` if it is that, or
# something else altogether.
Convert = Callable[[Found, Any], dict[str, Any] | None]


def migrate(state: Any, found: Any, path: tuple[str, ...] = ()) -> Any:
    """Returns an entry of a state dict in the layout that today's state has.

    What is not known to have changed stays as it is: `restore_state` says what is wrong with it.

    Args:
      state: an Optax state as the installed Optax makes it, or any pytree of such.
      found: what a checkpoint has in its place.
      path: where that is, for messages.
    """
    node = children(state)
    if node is None or not isinstance(found, Mapping):
        return found
    if convert := CHANGED.get(type(state).__name__):
        try:
            found = convert(found, state) or found
        except VersionError as error:
            raise VersionError(f"`{leaf_name(path)}`: {error}") from None
    parts = dict(node.children)
    return {
        key: migrate(parts[key], value, (*path, key)) if key in parts else value
        for key, value in found.items()
    }


def _renamed(names: Mapping[str, str], new: Mapping[str, float]) -> Convert:
    """Fields that are called otherwise, and fields that were not there, with their first value."""

    def convert(found: Found, state: Any) -> dict[str, Any] | None:
        kept = set(state._fields) - set(names.values()) - set(new)
        if set(found) != kept | set(names):
            return None
        filled = {key: _filled(getattr(state, key), value) for key, value in new.items()}
        return {names.get(key, key): value for key, value in found.items()} | filled

    return convert


def _filled(tree: Any, value: float) -> Any:
    return to_state_dict(jax.tree.map(lambda leaf: np.full(leaf.shape, value, leaf.dtype), tree))


def _scheduled(found: Found, state: Any) -> dict[str, Any] | None:
    """`inject_hyperparams`: each schedule has a count of its own, where there was one for all."""
    if set(found) != {"count", "hyperparams", "inner_state"}:
        return None
    counts = jax.tree.map(lambda _: found["count"], state.hyperparams_states)
    return {**found, "hyperparams_states": to_state_dict(counts)}


def _without_report(found: Found, state: Any) -> dict[str, Any] | None:
    """What the last search found out, for the user to see; no update reads it."""
    if "info" in found or set(found) != set(state._fields) - {"info"}:
        return None
    first = {"num_linesearch_steps": 0, "decrease_error": np.inf}
    report = {k: np.asarray(v, getattr(state.info, k).dtype) for k, v in first.items()}
    return {**found, "info": report}


def _started(found: Found, state: Any) -> dict[str, Any] | None:
    """After the first step the fields mean what they do today; before, they meant nothing."""
    names = {"first_step": "is_init_step", "estim_dist": "max_dist"}
    if "first_step" in found and np.any(found["first_step"]):
        raise VersionError(
            "until Optax 0.2.5 the state of `dog` did not hold the first parameters before the "
            "first step, and this one was saved then: create the optimizer anew, with the "
            "parameters of the checkpoint."
        )
    return _renamed(names, {})(found, state)


def _without_momentum(found: Found, state: Any) -> dict[str, Any] | None:
    """The base optimizer of schedule-free Adam: RMSProp since then, not Adam with `b1=0`."""
    base: Any = found.get("base_optimizer_state")
    first = base.get("0") if isinstance(base, Mapping) else None
    if not isinstance(first, Mapping) or set(first) != {"count", "mu", "nu"}:
        return None
    if type(state.base_optimizer_state[0]).__name__ != "ScaleByRmsWithCountState":
        return None
    kept = {key: value for key, value in first.items() if key != "mu"}  # the last gradient
    b1: Any = found.get("b1")
    if isinstance(b1, np.ndarray) and b1.size == 1:
        b1 = b1.reshape(state.b1.shape)
    return dict(found) | {"b1": b1, "base_optimizer_state": {**base, "0": kept}}


def _noise_first(found: Found, state: Any) -> dict[str, Any] | None:
    """`noisy_sgd`: the noise comes before the learning rate, and so does its state."""
    is_noisy_sgd = len(state) == 2 and type(state[0]).__name__ == "AddNoiseState"
    filled = {k: value for k, value in found.items() if not _is_empty(value)}
    noise = filled.get("1")
    if not is_noisy_sgd or len(filled) != 1 or not isinstance(noise, Mapping):
        return None
    return {"0": noise} if set(noise) == set(state[0]._fields) else None


def _is_empty(value: Any) -> bool:
    return isinstance(value, Mapping) and not value


# By the type of the state, with the first version of Optax that has today's layout.
CHANGED: Mapping[str, Convert] = {
    "MultiStepsState": _renamed({}, {"skip_state": 0}),  # 0.1.3
    "tuple": _noise_first,  # 0.1.4
    "InjectStatefulHyperparamsState": _scheduled,  # 0.1.8
    "ReduceLROnPlateauState": _renamed(  # 0.2.2
        {"best_loss": "best_value", "lr": "scale", "cooldown_counter": "cooldown_count"},
        {"count": 0, "avg_value": 0},
    ),
    "ScaleByBacktrackingLinesearchState": _without_report,  # 0.2.4
    "ScheduleFreeState": _without_momentum,  # 0.2.4
    "DoGState": _started,  # 0.2.6
}
