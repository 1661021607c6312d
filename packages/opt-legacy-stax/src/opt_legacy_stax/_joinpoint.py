"""States as one tree, in which join points mark where what is kept for a parameter begins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from opt_legacy_stax._optimizers import OptimizerState, pack
from opt_legacy_stax._states import check_state
from opt_legacy_stax._trees import first_lines, path_str
from opt_legacy_stax.errors import JoinPointError


class JoinPoint:
    """Marks the place of a parameter in a tree; holds what is kept for it.

    For JAX it is a leaf.

    Attributes:
      subtree: what is kept for the parameter, a pytree.
    """

    subtree: Any

    def __init__(self, subtree: Any) -> None:
        self.subtree = subtree

    def __iter__(self) -> Iterator[Any]:
        """Yields the subtree: a leaf that is a container looks like one."""
        yield self.subtree


def unpack_optimizer_state(opt_state: OptimizerState) -> Any:
    """Returns a state as a tree like the parameters, with a `JoinPoint` for each of them.

    Args:
      opt_state: a state of this module's optimizers, or of JAX's.

    Examples:
      >>> from opt_legacy_stax import momentum
      >>> marked = unpack_optimizer_state(momentum(0.1, 0.9).init_fn({'w': jax.numpy.ones(2)}))
      >>> [leaf.tolist() for leaf in marked['w'].subtree]
      [[1.0, 1.0], [0.0, 0.0]]
    """
    check_state(opt_state)
    packed, tree_def, subtree_defs = opt_state
    subtrees = map(jax.tree.unflatten, subtree_defs, packed)
    return jax.tree.unflatten(tree_def, [JoinPoint(subtree) for subtree in subtrees])


def pack_optimizer_state(marked_pytree: Any) -> OptimizerState:
    """Returns the state that `unpack_optimizer_state` made a tree of.

    Args:
      marked_pytree: a tree whose leaves are join points: this module's, or those of JAX's.

    Raises:
      JoinPointError: a leaf is none; names the first paths.
    """
    keyed, tree_def = jax.tree_util.tree_flatten_with_path(marked_pytree)
    strangers = [
        f"{path_str(path)}: expected a JoinPoint, found {type(leaf).__name__}"
        for path, leaf in keyed
        if not _is_join_point(leaf)
    ]
    if strangers:
        raise JoinPointError(
            f"`marked_pytree` must have a JoinPoint in place of every leaf:\n"
            f"{first_lines(strangers)}\nPass what `unpack_optimizer_state` returned."
        )
    return pack(tree_def, [join_point.subtree for _, join_point in keyed])


def _is_join_point(leaf: Any) -> bool:
    # JAX's own class is another one, wherever the running version of JAX has it.
    return isinstance(leaf, JoinPoint) or (
        type(leaf).__name__ == "JoinPoint" and vars(leaf).keys() == {"subtree"}
    )
