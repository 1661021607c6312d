"""States as a single tree, with join points marking where each parameter's state begins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from opt_legacy_stax._optimizers import OptimizerState, check_state, is_state, pack, unpacked
from opt_legacy_stax._trees import first_lines, leaf_paths, path_str
from opt_legacy_stax.errors import JoinPointError, LayoutError


class JoinPoint:
    """Marks the place of a parameter in a tree, and holds its optimizer state.

    It is a leaf to JAX.

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
    return jax.tree.unflatten(opt_state[1], [JoinPoint(state) for state in unpacked(opt_state)])


def pack_optimizer_state(marked_pytree: Any) -> OptimizerState:
    """Inverts `unpack_optimizer_state`.

    Args:
      marked_pytree: a tree whose leaves are join points of this module or of JAX's.

    Raises:
      JoinPointError: a leaf is not a join point; the message lists the first paths.
    """
    keyed, tree_def = jax.tree_util.tree_flatten_with_path(marked_pytree)
    lines = [
        f"{path_str(path)}: expected a JoinPoint, found {type(leaf).__name__}"
        for path, leaf in keyed
        if not _is_join_point(leaf)
    ]
    if lines:
        raise JoinPointError(
            "`marked_pytree` must have a JoinPoint in place of every leaf:\n"
            f"{first_lines(lines)}\nPass a tree returned by `unpack_optimizer_state`."
        )
    return pack(tree_def, [join_point.subtree for _, join_point in keyed])


def convert_old_layout(state: Any, *, is_sm3: bool | None = None) -> OptimizerState:
    """Converts a state created by an older version of JAX to the current layout.

    Two things have changed: jax 0.1 stored leaves in tuples rather than lists, and up to jax 0.2.19
    `sm3` kept `(x, m, vs)` for a parameter, without its shape.

    Args:
      state: an `OptimizerState` of this module or of JAX's; a plain tuple of its three fields; or a
        tree of join points returned by `unpack_optimizer_state` or `load_unpacked_pickle`.
      is_sm3: whether the state belongs to `sm3`. Required for states that look like `(x, m, [v])`,
        since a custom optimizer may have that layout too.

    Raises:
      LayoutError: the state of a parameter is inconsistent, or looks like that of `sm3` and
        `is_sm3` is not given.

    Examples:
      >>> from opt_legacy_stax import JoinPoint, sm3
      >>> old = {'w': JoinPoint((np.ones((2, 3)), np.zeros((2, 3)), [np.zeros(2), np.zeros(3)]))}
      >>> sm3(0.1).params_fn(convert_old_layout(old, is_sm3=True))['w'].shape
      (2, 3)
    """
    if not is_state(state):
        state = pack_optimizer_state(state)
    tree_def, states = state[1], unpacked(state)
    if is_sm3 is not False:
        named = zip(leaf_paths(tree_def), states, strict=True)
        states = [_with_shape(path, kept, is_sm3) for path, kept in named]
    return pack(tree_def, states)


def _is_join_point(leaf: Any) -> bool:
    # Matched by name: the module of JAX's own class depends on the version of JAX.
    return isinstance(leaf, JoinPoint) or (
        type(leaf).__name__ == "JoinPoint" and vars(leaf).keys() == {"subtree"}
    )


def _with_shape(path: str, kept: Any, is_sm3: bool | None) -> Any:
    """Returns what `sm3` keeps for a parameter today; anything else as it is."""
    if not (type(kept) is tuple and len(kept) == 3 and isinstance(kept[2], list)):
        return kept
    if is_sm3 is None:
        raise LayoutError(
            f"the state of `{path}` looks like the `(x, m, vs)` of sm3 up to jax 0.2.19. "
            "Pass `is_sm3=True` if it is, `is_sm3=False` if not."
        )
    x, _, vs = kept
    if np.shape(x) != tuple(np.size(v) for v in vs):
        raise LayoutError(
            f"the state of `{path}` looks like the `(x, m, vs)` of sm3, but `x` has shape "
            f"{np.shape(x)} and `vs` has sizes {tuple(np.size(v) for v in vs)}. Convert it by hand."
        )
    return (*kept, np.shape(x))
