"""Windows of accumulated gradients: those that could never end are refused."""

from __future__ import annotations

import jax
import optax
from opt_core import Optimizer

from opt_checkpoint._naming.names import named_state
from opt_checkpoint._naming.schema import LeafInfo, Schema
from opt_checkpoint.errors import LoadError


def check_windows(optimizer: Optimizer) -> None:
    """Raises a `LoadError` where as many mini-steps were made as the target's windows have.

    Args:
      optimizer: restored. Where its windows have a length that depends on the step, nothing is
        known.
    """
    states = jax.tree.leaves(optimizer.state, is_leaf=_is_window)
    if not any(map(_is_window, states)):
        return
    schema = named_state(optimizer).schema
    for leaf in schema.leaves:
        length = _length(leaf, schema)
        if length is not None and leaf.value is not None and leaf.value >= length:
            raise LoadError(
                f"`{leaf.name}`: {leaf.value} mini-steps of a window were made, and here a window "
                f"has {length}: it would not end where it should. Restore with the number of "
                "mini-steps that wrote it, or save at the end of a window."
            )


def _is_window(node: object) -> bool:
    return isinstance(node, optax.MultiStepsState)


def _length(leaf: LeafInfo, schema: Schema) -> int | None:
    """How many mini-steps a window has, where that is one number for the whole group."""
    kind = leaf.transformation.partition("#")[0]
    if leaf.path[-1] != "mini_step" or kind != "multi_steps":
        return None
    lengths = [
        made.settings.get("every_k_schedule")  # a mapping where it is a function
        for made in schema.transformations
        if made.name == kind and made.group == leaf.group
    ]
    first = lengths[0] if lengths else None
    return first if isinstance(first, int) and lengths == [first] * len(lengths) else None
