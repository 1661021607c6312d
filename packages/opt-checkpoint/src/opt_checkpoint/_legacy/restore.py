"""Restoring legacy checkpoints into today's optimizers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from opt_core import GroupStates, MultiOptimizer, Optimizer
from opt_optax_bridge import OptaxWrapper

from opt_checkpoint._legacy import flax_optim_state as flax_optim
from opt_checkpoint._legacy import layouts
from opt_checkpoint._legacy.optax_history import migrate
from opt_checkpoint._legacy.read import read_legacy
from opt_checkpoint._legacy.windows import check_windows
from opt_checkpoint._naming.schema import Names
from opt_checkpoint.errors import EquivalenceError, LoadError

Source = bytes | bytearray | memoryview | str | os.PathLike[str] | Mapping[str, Any]


def restore_legacy(
    optimizer: Optimizer,
    source: Source,
    *,
    written_by: str | Mapping[str, str] | None = None,
) -> Optimizer:
    """Returns an optimizer with the parameters and the state of a legacy checkpoint.

    It reads the checkpoints of T5X, of `flax.optim` (before and since 0.3.3), and of Flax's
    `TrainState`, and states of Optax whose fields have changed since. The state of `flax.optim`'s
    optimizers goes where their equals in Optax keep it, see `flax_optim_equivalent`.

    A file with states of Optax does not say which optimizer wrote it: the target decides. States of
    the same fields and shapes are taken for one another, Adam's for those of AdaBelief, Yogi, NAdam
    or AdaMax; so restore into the optimizer that wrote it. Nor does it say how many mini-steps a
    window of `MultiSteps` had.

    Args:
      optimizer: an optimizer as it is to go on: it gives the containers, shapes, dtypes, and where
        arrays lie. Anything that `opt_core` restores: wrapped Optax optimizers, Adafactor, groups
        of such.
      source: the bytes of a checkpoint, the path of a file, or what `read_legacy` returned.
      written_by: which optimizer of `flax.optim` wrote it, by the class's name, where `optimizer`
        was not built by `flax_optim_equivalent`; of groups a mapping from their names. An error
        where nobody needs to know: the file is not of `flax.optim`, or nothing in `optimizer` is
        wrapped Optax.

    Returns:
      The restored optimizer. No array of `source` is aliased.

    Raises:
      LoadError: it is no legacy checkpoint, or its state has no place in this optimizer, or it was
        saved in a window of `MultiSteps` that could not end in this one; says what.
      EquivalenceError: nobody says which optimizer of `flax.optim` wrote it, or `written_by` says
        what is not so, or is for a file to which it does not apply.
      VersionError: it was written by an Optax whose state meant something else.
      opt_core.errors.RestoreError: something is missing, extra, or of another shape or dtype;
        lists every path.

    Examples:
      >>> import flax.serialization, jax.numpy as jnp
      >>> from opt_checkpoint import flax_optim_equivalent
      >>> moments = {'grad_ema': jnp.ones(2), 'grad_sq_ema': jnp.ones(2)}
      >>> data = flax.serialization.msgpack_serialize({
      ...     'target': {'w': jnp.zeros(2)},
      ...     'state': {'step': 7, 'param_states': {'w': moments}}})
      >>> optimizer = flax_optim_equivalent('Adam', learning_rate=0.1).create({'w': jnp.ones(2)})
      >>> restored = restore_legacy(optimizer, data)
      >>> int(restored.state.step), restored.state.param_states[0].mu['w'].tolist()
      (7, [1.0, 1.0])
    """
    contents = source if isinstance(source, Mapping) else read_legacy(source)
    part = layouts.optimizer_part(contents)
    part = layouts.with_one_state(part, optimizer)
    restored = optimizer.restore_state(_todays(optimizer, part, written_by))
    check_windows(restored)
    return restored


def _todays(
    optimizer: Optimizer, part: dict[str, Any], written_by: str | Mapping[str, str] | None
) -> dict[str, Any]:
    """The state dict that the optimizer itself would have written."""
    target, state = part["target"], part["state"]
    if not isinstance(state, Mapping):
        raise LoadError("`state`: is no dict: this is no optimizer's state.")
    step = layouts.step_of(state)
    found = state.get("param_states", {})
    is_per_parameter = flax_optim.is_per_parameter(target, found)
    if written_by is not None:
        _check_writers(written_by, is_per_parameter, _has_wrapper(optimizer))
    if not is_per_parameter or not _has_wrapper(optimizer):
        found = migrate(optimizer.state.param_states, found, ("state", "param_states"))
    elif isinstance(optimizer.optimizer_def, MultiOptimizer):
        found = _groups(optimizer, part, written_by)
    else:
        found = _wrapped(optimizer, state, written_by, "")
    return {"target": target, "state": {"step": step, "param_states": found}}


def _check_writers(
    written_by: str | Mapping[str, str], is_per_parameter: bool, has_wrapper: bool
) -> None:
    """An error where `written_by` names no optimizer, or says what nobody needs to know."""
    names = written_by.values() if isinstance(written_by, Mapping) else (written_by,)
    for name in names:
        flax_optim.check_name(name)
    if not is_per_parameter:
        raise EquivalenceError(
            "`written_by` is for files of `flax.optim`. This one has no state of each parameter as "
            "`flax.optim` kept it, but states as Optax has them, in the order of its "
            "transformations: the target decides what they are. Leave `written_by` out."
        )
    if not has_wrapper:
        raise EquivalenceError(
            "`written_by` is for restoring into wrapped Optax. This optimizer restores the state "
            "that `flax.optim` kept of each parameter as it is. Leave `written_by` out."
        )


def _has_wrapper(optimizer: Optimizer) -> bool:
    definition = optimizer.optimizer_def
    parts = definition.sub_optimizers if isinstance(definition, MultiOptimizer) else (definition,)
    return any(isinstance(part, OptaxWrapper) for part in parts)


def _wrapped(
    optimizer: Optimizer,
    state: Mapping[str, Any],
    written_by: str | Mapping[str, str] | None,
    where: str,
) -> dict[str, Any]:
    if isinstance(written_by, Mapping):
        raise EquivalenceError("`written_by`: this optimizer has no groups; pass one name.")
    definition = optimizer.optimizer_def
    assert isinstance(definition, OptaxWrapper)
    equal = flax_optim.written_by(definition, written_by, where)
    entries = flax_optim.entries_of(optimizer, state["param_states"])
    return flax_optim.optax_state(optimizer, equal, entries, layouts.step_of(state))


def _groups(
    optimizer: Optimizer, part: Mapping[str, Any], written_by: str | Mapping[str, str] | None
) -> dict[str, Any]:
    """An entry per group, by name."""
    assert isinstance(optimizer.optimizer_def, MultiOptimizer)
    assert isinstance(optimizer.state.param_states, GroupStates)
    state = part["state"]
    groups = optimizer.optimizer_def.split(optimizer)
    names = written_by if isinstance(written_by, Mapping) else dict.fromkeys(groups, written_by)
    if unknown := sorted(set(names) - set(groups)):
        raise EquivalenceError(
            f"`written_by`: there is no group {', '.join(unknown)} that trains; there are "
            f"{', '.join(groups)}."
        )
    found: dict[str, Any] = {}
    trained: set[Names] = set()
    for name, group in groups.items():
        entries = flax_optim.entries_of(group, state["param_states"])
        trained |= set(entries)
        if isinstance(group.optimizer_def, OptaxWrapper):
            found[name] = _wrapped(group, state, names.get(name), f" (group `{name}`)")
        elif isinstance(written_by, Mapping) and name in written_by:
            raise EquivalenceError(
                f"`written_by`: the group `{name}` is no wrapped Optax, and restores what "
                "`flax.optim` kept as it is. Leave it out."
            )
        else:
            found[name] = _nested(entries)
    if frozen := layouts.frozen_states(part, trained):
        raise LoadError(
            "states were saved for parameters that are frozen here: "
            f"{', '.join(frozen)}. Restore into groups that train them, and freeze them then: "
            "`opt_core.freeze`."
        )
    return found


def _nested(entries: Mapping[Names, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for names, entry in entries.items():
        if entry is not None:
            flax_optim.set_at(nested, names, entry)
    return nested
