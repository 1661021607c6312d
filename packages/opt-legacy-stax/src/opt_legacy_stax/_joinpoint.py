"""States as a single tree, with join points marking where each parameter's state begins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from opt_legacy_stax._optimizers import OptimizerState, pack
from opt_legacy_stax._states import check_state
from opt_legacy_stax._trees import first_lines, path_str
from opt_legacy_stax.errors import JoinPointError


class JoinPoint:
    """Marks the place of a parameter in a tree, and holds its optimizer state.

    JAX treats a join point as a leaf.

    Attributes:
      subtree: the state of the parameter, a pytree.
    """

    subtree: Any

    def __init__(self, subtree: Any) -> None:
        self.subtree = subtree

    def __iter__(self) -> Iterator[Any]:
        """Yields the subtree, as the class in JAX's module does."""
        yield self.subtree


def unpack_optimizer_state(opt_state: OptimizerState) -> Any:
    """Returns a state as a tree with the structure of the parameters and a `JoinPoint` per leaf.

    Args:
      opt_state: a state of an optimizer of this module or of JAX's.

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
    """Inverts `unpack_optimizer_state`.

    Args:
      marked_pytree: a tree whose leaves are join points of this module or of JAX's.

    Raises:
      JoinPointError: a leaf is not a join point; the message lists the first paths.
    """
    keyed, tree_def = jax.tree_util.tree_flatten_with_path(marked_pytree)
    strangers = [
        f"{path_str(path)}: expected a JoinPoint, found {type(leaf).__name__}"
        for path, leaf in keyed
        if not _is_join_point(leaf)
    ]
    if strangers:
        raise JoinPointError(
            "`marked_pytree` must have a JoinPoint in place of every leaf:\n"
            f"{first_lines(strangers)}\nPass a tree returned by `unpack_optimizer_state`."
        )
    return pack(tree_def, [join_point.subtree for _, join_point in keyed])


def _is_join_point(leaf: Any) -> bool:
    # Matched by name: the module of JAX's own class depends on the version of JAX.
    return isinstance(leaf, JoinPoint) or (
        type(leaf).__name__ == "JoinPoint" and vars(leaf).keys() == {"subtree"}
    )
