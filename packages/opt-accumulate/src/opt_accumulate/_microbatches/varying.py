"""Inside `jax.shard_map`: the axes that values vary over, and one sum over them at the end.

There a type says which manual axes a value varies over. The cotangent of parameters that are the
same on all devices is summed over the devices wherever it arises, thus in every microbatch, and
would then be divided by one device's weight. Parameters that vary have a gradient on each device;
it is divided there and summed once: `jax.value_and_grad` of the quotient of sums, exactly. Outside
of `shard_map`, and with `check_vma=False`, nothing varies and nothing is done.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax


def axes_of_types(tree: Any) -> frozenset[str]:
    """Returns the manual mesh axes that any leaf of a tree, abstract or not, varies over."""
    return frozenset().union(*map(_axes_of_type, jax.tree.leaves(tree)))


def _axes_of_type(value: Any) -> frozenset[str]:
    described: Any = value if isinstance(value, jax.ShapeDtypeStruct) else jax.typeof(value)
    try:
        manual = described.manual_axis_type
    except AttributeError:  # before jax 0.10
        return frozenset(described.vma or ())
    return frozenset(manual.varying) if manual is not None else frozenset()


def vary(tree: Any, axes: Collection[str]) -> Any:
    """Returns the same values, of types that vary over `axes` too."""
    return jax.tree.map(lambda leaf: _vary(leaf, axes), tree) if axes else tree


def _vary(leaf: Any, axes: Collection[str]) -> Any:
    missing = tuple(sorted(frozenset(axes) - _axes_of_type(leaf)))
    if not missing:
        return leaf
    lax: Any = jax.lax
    try:
        cast = lax.pcast
    except AttributeError:  # jax 0.8.0
        return lax.pvary(leaf, missing)
    return cast(leaf, missing, to="varying")


def sum_as_like(tree: Any, like: Any) -> Any:
    """Sums each leaf over the axes that it varies over and the same leaf of `like` does not."""

    def sum_leaf(leaf: Any, like: Any) -> Any:
        extra = tuple(sorted(_axes_of_type(leaf) - _axes_of_type(like)))
        return jax.lax.psum(leaf, extra) if extra else leaf

    return jax.tree.map(sum_leaf, tree, like)


def any_over(value: jax.Array, kept: Collection[str]) -> jax.Array:
    """Returns whether a bool is true anywhere on the axes that it varies over but for `kept`."""
    extra = tuple(sorted(_axes_of_type(value) - frozenset(kept)))
    return jax.lax.psum(value.astype("int32"), extra) > 0 if extra else value
