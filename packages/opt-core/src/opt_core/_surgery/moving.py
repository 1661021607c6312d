"""Carrying leaves over: values, dtypes and placement, and the counts of schedules."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from opt_core._description.values import LeafDescription
from opt_core._dtypes import all_survive, convert_held
from opt_core._optimizer import Optimizer
from opt_core._surgery.changes import Action, leaf_path
from opt_core._surgery.hazards import Move
from opt_core._surgery.pairing import STEP
from opt_core._surgery.placement import is_abstract, is_tracer, placed
from opt_core.errors import GroupError


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a caller.

    Attributes:
      allow: the allowed changes.
      joins: whether leaves without moments join others at their count.
      schedules: whether their counts continue.
      shardings: see `regroup`.
      is_asked: whether the caller has asked to discard state.
    """

    allow: frozenset[str] = frozenset()
    joins: bool = False
    schedules: Literal["continue", "restart"] = "continue"
    shardings: Any = None
    is_asked: bool = False

    def misfit(self, old: Any, new: Any) -> str:
        """Returns why a leaf cannot be converted to another; empty if it can."""
        before, after = np.shape(old), np.shape(new)
        if before != after and not (
            "reshape" in self.allow and math.prod(before) == math.prod(after)
        ):
            return f"its shape was {list(before)}"
        one, other = (jnp.result_type(leaf) for leaf in (old, new))
        return "" if one == other or _is_like(one, other) else f"its dtype was {one}"

    def placed(self, taken: Mapping[int, Any], given: Sequence[Any]) -> dict[int, Any]:
        """Returns leaves placed as a caller wants them."""
        return {i: placed(leaf, given[i]) for i, leaf in taken.items()}

    def action(self, move: Move, i: int, leaf: Any) -> Action:
        """Returns what became of a leaf of the new state."""
        pair, description = move.pairs[i], move.new.descriptions[i]
        if not pair.sources:
            return "initialised"
        first = pair.sources[0]
        if _form(move.old.leaves[first]) != _form(leaf):
            return "converted"
        return "kept" if move.old.descriptions[first].key == description.key else "renamed"


def _form(leaf: Any) -> Any:
    return np.shape(leaf), jnp.result_type(leaf)


def _is_like(one: Any, other: Any) -> bool:
    kinds = (jnp.floating, jnp.complexfloating, jnp.signedinteger, jnp.unsignedinteger)
    return any(jnp.issubdtype(one, kind) and jnp.issubdtype(other, kind) for kind in kinds)


def moved_leaves(
    optimizer: Optimizer, move: Move, options: Options
) -> tuple[dict[int, Any], dict[int, str]]:
    """Returns the leaves of the new state that `init` does not make, with notes on some.

    Args:
      optimizer: holds the old state.
      move: the pairs of leaves.
      options: those of the caller.
    """
    found: dict[int, Any] = {}
    notes: dict[int, str] = {}
    for i, (pair, description) in enumerate(zip(move.pairs, move.new.descriptions, strict=True)):
        if pair.sources:
            source = move.old.leaves[pair.sources[0]]
            found[i] = _converted(
                source, move.new.leaves[i], move.old.descriptions[pair.sources[0]]
            )
        elif pair.counts is not None and options.schedules == "continue":
            count, name = optimizer.state.step, STEP
            if pair.counts != STEP:
                count, name = move.old.leaves[pair.counts], move.old.names[pair.counts]
            notes[i] = f"continues from `{name}`"
            count = count if hasattr(count, "dtype") else jnp.asarray(count)
            if np.shape(count) == move.new.leaves[i].shape:
                found[i] = _converted(count, move.new.leaves[i], description)
    return found, notes


def _converted(leaf: Any, like: Any, description: LeafDescription) -> Any:
    """Returns a leaf in the shape and dtype of another.

    Raises:
      GroupError: a value does not fit.
    """
    dtype, shape = like.dtype, like.shape
    if not hasattr(leaf, "dtype"):
        return leaf
    if is_abstract(leaf):
        return leaf if _form(leaf) == (shape, dtype) else jax.ShapeDtypeStruct(shape, dtype)
    if np.shape(leaf) != shape:
        leaf = leaf.reshape(shape)
    if leaf.dtype == dtype:
        return leaf
    if isinstance(leaf, np.ndarray):
        converted, lost = convert_held(leaf, dtype)
        if lost is not None:
            raise GroupError(_does_not_fit(leaf, dtype, description, f" with {lost}"))
        return converted
    cast = leaf.astype(dtype)
    if not is_tracer(leaf) and not bool(jax.jit(all_survive)(leaf, cast)):
        raise GroupError(_does_not_fit(leaf, dtype, description, ""))
    return cast


def _does_not_fit(leaf: Any, dtype: Any, description: LeafDescription, value: str) -> str:
    return (
        f"`{leaf_path(description)}` is {leaf.dtype}{list(leaf.shape)}{value}, which does not fit "
        f"the {dtype} of the new state. Give it a wider dtype (64 bits need `jax_enable_x64`), or "
        "convert the state first."
    )
