"""A state keeps structure, shapes, dtypes and weak types, so that a step compiles once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from opt_core.errors import StateChangedError
from opt_core.extend import flatten_with_paths, path_str, strip_weak_type


def stable_leaves(state: Any) -> Any:
    """Returns an initial state whose leaves are what later updates return: strong JAX arrays."""

    def stable(leaf: Any) -> Any:
        if isinstance(leaf, bool | int | float | complex | np.ndarray | np.generic):
            leaf = jnp.array(leaf)  # that of a Python number would be weak
        return strip_weak_type(leaf)

    return jax.tree.map(stable, state)


def keep_avals(old: Any, new: Any) -> Any:
    """Returns the state after an update with the dtypes of the one before it, all strong."""
    check_shapes(old, new)

    def cast(before: Any, after: Any) -> Any:
        if getattr(after, "dtype", None) != before.dtype:
            return jnp.asarray(after, before.dtype)
        return strip_weak_type(after)

    return jax.tree.map(cast, old, new)


def same_shapes(old: Any, new: Any) -> bool:
    """Whether two pytrees have the same structure and their leaves the same shapes."""
    structures: list[Any] = [jax.tree.structure(old), jax.tree.structure(new)]
    shapes = [[np.shape(leaf) for leaf in jax.tree.leaves(tree)] for tree in (old, new)]
    return bool(structures[0] == structures[1]) and shapes[0] == shapes[1]


def check_shapes(old: Any, new: Any) -> None:
    """Raises a `StateChangedError` if structure or a shape differs; leaves may be abstract."""
    if same_shapes(old, new):
        return
    before, after = (
        {path_str(names): str(np.shape(leaf)) for names, leaf in flatten_with_paths(state)}
        for state in (old, new)
    )
    lines = [
        f"  {path}: was {before.get(path, 'absent')}, became {after.get(path, 'absent')}"
        for path in dict.fromkeys([*before, *after])
        if before.get(path) != after.get(path)
    ]
    raise StateChangedError(
        "the transformation changed the structure or the shapes of its state:\n"
        + "\n".join(lines or [f"  {jax.tree.structure(old)} became {jax.tree.structure(new)}"])
        + "\nSuch a step cannot be compiled once, scanned or restored. Use a transformation that "
        "initialises its whole state, and gradients with the shapes of the parameters."
    )
