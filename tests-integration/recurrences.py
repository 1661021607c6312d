"""What the leaves of Optax's states obey, read from Optax itself and from nothing of ours.

A slot is the record that a leaf is in, its field and its parameter. Several constructors of Optax
keep other things in one class of records: those are distinguished by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

# What `ScaleByAdamState` and the like are of, where that is not Adam or AdaBelief.
_OTHERS = {
    "adamax": "adamax",
    "adamaxw": "adamax",
    "yogi": "yogi",
    "radam": "radam",
    "adopt": "adopt",
    "acprop": "acprop",
}
_SHARED = {"ScaleByAdamState": "adam", "ScaleByBeliefState": "belief"}
# Classes that differ in a field besides: what they have in common obeys one recurrence.
_ALIKE = {
    "ScaleByAmsgradState": "adam",
    "ScaleByRmsWithCountState": "ScaleByRmsState",
    "ScaleByRStdDevWithCountState": "ScaleByRStdDevState",
    "InjectHyperparamsState": "InjectStatefulHyperparamsState",
    "MultiTransformState": "PartitionState",
}


class Slot(NamedTuple):
    """Equal for two leaves that the same recurrence makes of the same inputs.

    Attributes:
      family: what keeps the leaf.
      field: the names below the record, without those of the parameter.
      parameter: the top-level parameter that it is for; empty if it is for all.
    """

    family: str
    field: tuple[str, ...]
    parameter: str


def slots(constructor: str, params: Any, state: Any) -> list[Slot]:
    """Returns the slot of every leaf of a state, in the order of JAX.

    Args:
      constructor: the name of what made the transformation, as in `optax_table`.
      params: a flat dict.
      state: that belongs to them.
    """
    return list(_slots(constructor, frozenset(params), state))


def _slots(constructor: str, params: frozenset[str], state: Any) -> Iterator[Slot]:
    base = constructor.partition(":")[0].rpartition(".")[2].removeprefix("scale_by_")
    for path, _ in jax.tree_util.tree_leaves_with_path(state):
        names = [jax.tree_util.keystr((key,), simple=True) for key in path]
        record, depth = _record(state, path)
        family = _ALIKE.get(record, record)
        if record in _SHARED:
            family = _OTHERS.get(base, _SHARED[record])
        inside = [name for name in names if name in params]
        field = tuple(name for name in names[depth:] if name not in params)
        yield Slot(family, field, inside[0] if inside else "")


def _record(state: Any, path: Sequence[Any]) -> tuple[str, int]:
    """The class of the innermost record above a leaf, and how deep that is."""
    node, found = state, ("", 0)
    for depth, key in enumerate(path):
        if isinstance(key, jax.tree_util.GetAttrKey):
            found = type(node).__name__, depth
            node = getattr(node, key.name)
        elif isinstance(key, jax.tree_util.DictKey):
            node = node[key.key]
        elif isinstance(key, jax.tree_util.SequenceKey):
            node = node[key.idx]
        else:
            break
    return found
