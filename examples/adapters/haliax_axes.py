"""Haliax's named arrays as logical axes, for every function that takes `param_axes`.

Copy this file. `named_axes(model)` has the structure of `model`; Levanter's axis mapping, a dict
from names of axes to mesh axes, serves as `rules` unchanged.
"""

from typing import Any

import jax
from haliax import NamedArray


def named_axes(params: Any) -> Any:
    """Returns the names of the dimensions of each `NamedArray`; other arrays have none."""

    def is_named(node: Any) -> bool:
        return isinstance(node, NamedArray)

    def names(node: Any) -> Any:
        spec = jax.P(*(axis.name for axis in node.axes)) if is_named(node) else jax.P()
        return jax.tree.map(lambda _: spec, node)

    return jax.tree.map(names, params, is_leaf=is_named)
