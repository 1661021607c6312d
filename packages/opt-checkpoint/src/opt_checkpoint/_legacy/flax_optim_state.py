"""Putting the states that `flax.optim` kept for each parameter where Optax keeps them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from opt_core import Optimizer, children, flatten_with_paths
from opt_optax_bridge import OptaxWrapper

from opt_checkpoint._legacy.flax_optim import EQUALS, Equal, Slot, equal_of
from opt_checkpoint._naming.schema import Names, leaf_name
from opt_checkpoint.errors import EquivalenceError, LoadError

_WEIGHT_NORM = frozenset({"direction_state", "scale_state", "direction", "scale"})
# Before Flax 0.2.3, RMSProp did not centre.
_FIELDS = {equal.fields for equal in EQUALS.values()} | {frozenset({"v"}), _WEIGHT_NORM}
_HEAD = "state/param_states"


def get_at(tree: Any, names: Names) -> Any:
    """Returns what nested dicts have at a path, `None` where there is nothing."""
    for name in names:
        if not isinstance(tree, Mapping) or name not in tree:
            return None
        tree = tree[name]
    return tree


def set_at(tree: dict[str, Any], names: Names, value: Any) -> None:
    """Sets what nested dicts have at a path, making those that are not there."""
    for name in names[:-1]:
        tree = tree.setdefault(name, {})
    tree[names[-1]] = value


def is_per_parameter(target: Any, param_states: Any) -> bool:
    """Whether a state dict has, at each parameter's path, what `flax.optim` kept for it, or `None`.

    Args:
      target: the parameters, nested dicts.
      param_states: the states.
    """
    entries = [get_at(param_states, names) for names, _ in flatten_with_paths(target)]
    found = [entry for entry in entries if entry is not None]
    return bool(found) and all(
        isinstance(entry, Mapping) and frozenset(entry) in _FIELDS for entry in found
    )


def entries_of(optimizer: Optimizer, param_states: Any) -> dict[Names, Any]:
    """Returns what a state dict has for each parameter of an optimizer."""
    names = [names for names, leaf in flatten_with_paths(optimizer.target) if leaf is not None]
    return {path: get_at(param_states, path) for path in names}


def check_name(name: str) -> None:
    """Raises an `EquivalenceError` unless `flax.optim` had an optimizer of that name."""
    if name not in EQUALS:
        raise EquivalenceError(f"`written_by`: {name!r} is none of {', '.join(EQUALS)}.")


def written_by(definition: OptaxWrapper, name: str | None, where: str) -> Equal:
    """Returns the optimizer of `flax.optim` that a definition stands for.

    Args:
      definition: the target's.
      name: what the caller says, if anything.
      where: of the optimizer, for messages: empty, or its group.

    Raises:
      EquivalenceError: nobody says, both say otherwise, or there is no such optimizer.
    """
    known = equal_of(definition)
    if name is not None:
        check_name(name)
    if name is None and known is None:
        raise EquivalenceError(
            f"a checkpoint of `flax.optim` does not say which optimizer wrote it{where}, and their "
            "states look alike (Adam, LAMB and AdaBelief; Momentum and LARS). Restore into "
            "`flax_optim_equivalent('Adam', learning_rate=...)`, or say `written_by='Adam'`."
        )
    if known is not None and name not in (None, known.name):
        raise EquivalenceError(
            f"the optimizer{where} stands for `flax.optim.{known.name}`, and `written_by` says "
            f"{name!r}."
        )
    return known or EQUALS[str(name)]


def optax_state(
    optimizer: Optimizer, equal: Equal, entries: Mapping[Names, Any], step: int
) -> dict[str, Any]:
    """Returns the entry `param_states` that a wrapped Optax optimizer restores.

    Args:
      optimizer: the target.
      equal: which optimizer of `flax.optim` wrote the entries.
      entries: what it kept for each parameter of `optimizer`.
      step: how many updates it had made: Optax's counts.

    Raises:
      LoadError: something has no place, or a place has nothing to fill it; lists all.
    """
    problems = list(_entry_problems(equal, entries))
    if not problems:
        filler = _Filler(equal, entries, np.asarray(step, np.int32))
        filled = filler.fill(optimizer.state.param_states, ())
        problems = [*filler.problems, *filler.unused()]
    if problems:
        listed = "\n".join(f"  {line}" for line in problems)
        raise LoadError(
            f"the state that `flax.optim.{equal.name}` wrote does not fit this Optax optimizer:\n"
            f"{listed}\n`flax_optim_equivalent('{equal.name}', ...)` builds one that it fits."
        )
    return filled if isinstance(filled, dict) else {}


def _entry_problems(equal: Equal, entries: Mapping[Names, Any]) -> Iterator[str]:
    """Yields what of the entries is not as the optimizer wrote it."""
    accepted = {equal.fields, frozenset({"v"})} if equal.name == "RMSProp" else {equal.fields}
    for names, entry in entries.items():
        path = f"{_HEAD}/{leaf_name(names)}"
        if not isinstance(entry, Mapping):
            yield f"{path}: has no state: frozen when it was saved, and trained here"
        elif frozenset(entry) == _WEIGHT_NORM:
            yield f"{path}: was written by `WeightNorm`, of which Optax has no equal"
        elif frozenset(entry) not in accepted:
            fields = ", ".join(sorted(equal.fields)) or "none"
            yield f"{path}: has the fields {', '.join(sorted(entry))}; expected {fields}"


class _Filler:
    """One walk over Optax's state, which makes a state dict of it."""

    def __init__(self, equal: Equal, entries: Mapping[Names, Any], step: np.ndarray) -> None:
        self.equal = equal
        self.entries = entries
        self.step = step
        self.problems: list[str] = []
        self._used: set[str] = set()

    def fill(self, state: Any, path: Names) -> Any:
        """Returns the entry of a part of Optax's state."""
        node = children(state)
        if node is None:
            return self._leaf(state, path)
        slots = self._slots(state)
        return {
            name: self._filled(slots[name], child, (*path, name))
            if name in slots
            else self.fill(child, (*path, name))
            for name, child in node.children
        }

    def _slots(self, state: Any) -> dict[str, Slot]:
        name = type(state).__name__
        return {slot.field: slot for slot in self.equal.slots if slot.state == name}

    def _leaf(self, leaf: Any, path: Names) -> Any:
        if leaf is None:
            return None
        is_count = path[-1:] == ("count",) and leaf.shape == () and _is_integer(leaf)
        if not is_count:
            self.problems.append(f"{_HEAD}/{leaf_name(path)}: nothing that was saved is for this")
        return self.step

    def _filled(self, slot: Slot, tree: Any, path: Names) -> Any:
        """A tree like the parameters, with one field of each one's entry."""
        self._used.add(slot.entry)
        filled: dict[str, Any] = {}
        for names, _ in flatten_with_paths(tree):
            if names not in self.entries:
                where = leaf_name((*path, *names))
                self.problems.append(f"{_HEAD}/{where}: is at no parameter's path")
                continue
            value: Any = self.entries[names].get(slot.entry)
            if not isinstance(value, np.ndarray | np.generic | jax.Array):
                where = f"{_HEAD}/{leaf_name(names)}"
                self.problems.append(f"{where}: has no array `{slot.entry}`, which is needed here")
                continue
            signed: Any = value if slot.sign > 0 else np.negative(value)
            if not names:  # the only parameter is the tree itself
                return signed
            set_at(filled, names, signed)
        return filled

    def unused(self) -> Iterator[str]:
        """Yields the fields that were saved and have no place, unless nothing was in them."""
        for names, entry in self.entries.items():
            for field in entry.keys() - self._used:
                value = entry[field]
                if value is not None and not _is_placeholder(value):
                    where = leaf_name((*names, field))
                    yield f"{_HEAD}/{where}: has no place in this optimizer's state"


def _is_placeholder(value: Any) -> bool:
    """Whether it is what Adafactor has in a field that it does not use."""
    return np.shape(value) == (1,) and not np.any(value)


def _is_integer(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, np.integer))


def sequence_of(value: Any) -> Sequence[Any] | None:
    """Returns the items of a list, or of `{'0': ..., '1': ...}`; `None` of anything else."""
    if isinstance(value, list):
        return value
    if isinstance(value, Mapping) and set(value) == {str(i) for i in range(len(value))}:
        return [value[str(i)] for i in range(len(value))]
    return None
