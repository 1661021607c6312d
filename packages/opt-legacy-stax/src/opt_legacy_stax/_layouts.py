"""States of older versions of JAX, in today's layout."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from opt_legacy_stax._joinpoint import pack_optimizer_state
from opt_legacy_stax._optimizers import OptimizerState, pack
from opt_legacy_stax._states import is_state
from opt_legacy_stax._trees import leaf_paths
from opt_legacy_stax.errors import LayoutError


def convert_old_layout(state: Any, *, is_sm3: bool | None = None) -> OptimizerState:
    """Returns a state that an older JAX made, as this module's optimizers expect it.

    What differs: the lists of leaves were tuples in jax 0.1, and up to jax 0.2.19 what `sm3` kept
    for a parameter was `(x, m, vs)`, without its shape. States of today's layout come back as they
    are. The arithmetic of adam and adamax up to jax 0.2.6, with a bias correction of Python
    floats, needs no other layout.

    Args:
      state: an `OptimizerState` of this module's or of JAX's; a plain tuple of its three fields; or
        the tree of join points that `unpack_optimizer_state`, or `load_unpacked_pickle`, returned.
      is_sm3: whether the state is of `sm3`. Another optimizer may keep an `(x, m, [v])` too, so
        this must be said of states that look so.

    Raises:
      LayoutError: what is kept for a parameter does not fit together, or looks like that of `sm3`
        and `is_sm3` is not given.

    Examples:
      >>> from opt_legacy_stax import JoinPoint, sm3
      >>> old = {'w': JoinPoint((np.ones((2, 3)), np.zeros((2, 3)), [np.zeros(2), np.zeros(3)]))}
      >>> sm3(0.1).params_fn(convert_old_layout(old, is_sm3=True))['w'].shape
      (2, 3)
    """
    if not is_state(state):
        state = pack_optimizer_state(state)
    packed, tree_def, subtree_defs = state
    states = [jax.tree.unflatten(d, list(s)) for d, s in zip(subtree_defs, packed, strict=True)]
    if is_sm3 is None:
        for path, kept in zip(leaf_paths(tree_def), states, strict=True):
            if _looks_like_sm3(kept):
                raise LayoutError(
                    f"what is kept for `{path}` looks like `(x, m, vs)` of sm3 up to jax 0.2.19. "
                    "Say whether it is that: `is_sm3=True` or `is_sm3=False`."
                )
    if is_sm3:
        named = zip(leaf_paths(tree_def), states, strict=True)
        states = [_with_shape(path, kept) for path, kept in named]
    return pack(tree_def, states)


def _looks_like_sm3(kept: Any) -> bool:
    return type(kept) is tuple and len(kept) == 3 and isinstance(kept[2], list)


def _with_shape(path: str, kept: Any) -> Any:
    if not _looks_like_sm3(kept):
        return kept
    x, _, vs = kept
    if np.shape(x) != tuple(np.size(v) for v in vs):
        raise LayoutError(
            f"what is kept for `{path}` looks like `(x, m, vs)` of sm3, but `x` has shape "
            f"{np.shape(x)} and `vs` sizes {tuple(np.size(v) for v in vs)}. Convert it by hand."
        )
    return (*kept, np.shape(x))
