"""Conversion of states from older versions of JAX to the current layout."""

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
    """Converts a state created by an older version of JAX to the current layout.

    Two things have changed: jax 0.1 stored leaves in tuples rather than lists, and up to jax 0.2.19
    `sm3` kept `(x, m, vs)` for a parameter, without its shape. States in the current layout are
    returned unchanged. The different bias correction of adam and adamax up to jax 0.2.6 does not
    affect the layout.

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
    packed, tree_def, subtree_defs = state
    states = [jax.tree.unflatten(d, list(s)) for d, s in zip(subtree_defs, packed, strict=True)]
    if is_sm3 is None:
        for path, kept in zip(leaf_paths(tree_def), states, strict=True):
            if _looks_like_sm3(kept):
                raise LayoutError(
                    f"the state of `{path}` looks like the `(x, m, vs)` of sm3 up to jax 0.2.19. "
                    "Pass `is_sm3=True` if it is, `is_sm3=False` if not."
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
            f"the state of `{path}` looks like the `(x, m, vs)` of sm3, but `x` has shape "
            f"{np.shape(x)} and `vs` has sizes {tuple(np.size(v) for v in vs)}. Convert it by hand."
        )
    return (*kept, np.shape(x))
