"""Putting the states that `flax.optim` kept for each parameter where Optax keeps them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from opt_core import Optimizer, describe_state, to_state_dict
from opt_core.extend import Names, flatten_with_paths, leaf_name, named_leaves
from opt_optax_bridge import OptaxWrapper

from opt_checkpoint._legacy.flax_optim import EQUALS, Equal, equal_of
from opt_checkpoint.errors import EquivalenceError, LoadError

_WEIGHT_NORM = frozenset({"direction_state", "scale_state", "direction", "scale"})
_NOT_CENTERED = frozenset({"v"})  # RMSProp until Flax 0.2.2
_FIELDS = {equal.fields for equal in EQUALS.values()} | {_NOT_CENTERED, _WEIGHT_NORM}
_HEAD = "state/param_states"


def get_at(tree: Any, names: Names) -> Any:
    """Returns the entry of nested dicts at a path, or `None`."""
    for name in names:
        if not isinstance(tree, Mapping) or name not in tree:
            return None
        tree = tree[name]
    return tree


def is_per_parameter(target: Any, param_states: Any) -> bool:
    """Whether states have, at each parameter's path, what `flax.optim` kept for it, or `None`."""
    entries = [get_at(param_states, names) for names, _ in flatten_with_paths(target)]
    kept = [entry for entry in entries if entry is not None]
    return bool(kept) and all(
        isinstance(entry, Mapping) and frozenset(entry) in _FIELDS for entry in kept
    )


def entries_of(optimizer: Optimizer, param_states: Any) -> dict[Names, Any]:
    """Returns the dict that a state dict has for each parameter of an optimizer, or `None`."""
    entries = {path: get_at(param_states, path) for path, _ in named_leaves(optimizer.target)}
    return {path: entry if isinstance(entry, Mapping) else None for path, entry in entries.items()}


def writer_of(definition: OptaxWrapper, name: str | None, where: str) -> Equal:
    """Returns the optimizer of `flax.optim` that a definition stands for, or the caller says."""
    known = equal_of(definition)
    if name is None and known is None:
        raise EquivalenceError(
            f"a checkpoint of `flax.optim` does not say which optimizer wrote it{where}: restore "
            "into `flax_optim_equivalent('Adam', ...)`, or say `written_by='Adam'`."
        )
    if known is not None and name not in (None, known.name):
        says = f"stands for `flax.optim.{known.name}`, and `written_by` says {name!r}"
        raise EquivalenceError(f"the optimizer{where} {says}.")
    return known or EQUALS[str(name)]


def optax_state(optimizer: Optimizer, equal: Equal, entries: Mapping[Names, Any], step: int) -> Any:
    """Returns the entry `param_states` that a wrapped Optax optimizer restores.

    The `entries` are what `equal` kept for each parameter, `step` becomes Optax's counts.
    """
    values: list[Any] = []
    problems = list(_entry_problems(equal, entries))
    problems = problems or list(
        _placed(optimizer, equal, entries, np.asarray(step, np.int32), values)
    )
    if problems:
        listed = "\n".join(f"  {_HEAD}/{line}" for line in problems)
        raise LoadError(
            f"the state that `flax.optim.{equal.name}` wrote does not fit this Optax optimizer:\n"
            f"{listed}\n`flax_optim_equivalent('{equal.name}', ...)` builds one that it fits."
        )
    structure = jax.tree.structure(optimizer.state.param_states)
    return to_state_dict(jax.tree.unflatten(structure, values))


def _entry_problems(equal: Equal, entries: Mapping[Names, Any]) -> Iterator[str]:
    """Yields the entries that the optimizer cannot have written."""
    accepted = {equal.fields} | ({_NOT_CENTERED} if equal.name == "RMSProp" else set())
    for names, entry in entries.items():
        path = leaf_name(names)
        if not isinstance(entry, Mapping):
            yield f"{path}: has no state: frozen when it was saved, and trained here"
        elif frozenset(entry) == _WEIGHT_NORM:
            yield f"{path}: was written by `WeightNorm`, which Optax lacks"
        elif frozenset(entry) not in accepted:
            fields = ", ".join(sorted(equal.fields)) or "none"
            yield f"{path}: has the fields {', '.join(sorted(entry))}; expected {fields}"


def _placed(
    optimizer: Optimizer,
    equal: Equal,
    entries: Mapping[Names, Any],
    step: np.ndarray,
    values: list[Any],
) -> Iterator[str]:
    """Appends a value for each leaf of Optax's state; yields what lacks a value or a place."""
    left = {(names, field): entry[field] for names, entry in entries.items() for field in entry}
    for leaf in describe_state(optimizer).leaves:
        field = equal.slots.get("/".join((leaf.transformation, *leaf.field)), "")
        if leaf.parameter is not None and (leaf.parameter, field) in left:
            value = left.pop((leaf.parameter, field))
            if isinstance(value, np.ndarray | np.generic | jax.Array):
                values.append(value if equal.sign > 0 else np.negative(value))
            else:
                yield f"{leaf_name(leaf.parameter)}: has no array `{field}`, which is needed here"
        elif leaf.field == ("count",) and leaf.role in ("count", "schedule_count"):
            values.append(step)
        else:
            yield f"{leaf_name(leaf.path)}: the file has nothing for this"
    for (names, field), value in left.items():
        if value is not None and not _is_placeholder(value):
            yield f"{leaf_name((*names, field))}: has no place in this optimizer's state"


def _is_placeholder(value: Any) -> bool:
    """Whether it is Adafactor's placeholder of an unused field."""
    return np.shape(value) == (1,) and not np.any(value)
