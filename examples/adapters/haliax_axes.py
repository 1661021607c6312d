"""Haliax's named arrays as logical axes, and encoded state beside them on a mesh.

Copy this file. `named_axes(model)` has the structure of `model`, for every function that takes
`param_axes`; Levanter's axis mapping, a dict from names of axes to mesh axes, serves as `rules`
unchanged. `for_named_arrays(quantize_state(...))` is for `named_jit`, which lays out a `NamedArray`
by the names of its axes: codes get those of the parameter, scales none.
"""

import dataclasses
from typing import Any

import jax
import optax
from haliax import NamedArray
from opt_precision import Encoded


def is_named(node: Any) -> bool:
    """Whether a node is a `NamedArray`."""
    return isinstance(node, NamedArray)


def named_axes(params: Any) -> Any:
    """Returns the names of the dimensions of each `NamedArray`; other arrays have none."""

    def names(node: Any) -> Any:
        spec = jax.P(*(axis.name for axis in node.axes)) if is_named(node) else jax.P()
        return jax.tree.map(lambda _: spec, node)

    return jax.tree.map(names, params, is_leaf=is_named)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Held:
    """What is in the place of a `NamedArray` while the transformation computes."""

    array: Any
    names: Any = dataclasses.field(metadata={"static": True})


def for_named_arrays(tx: Any) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation whose encoded leaves lie where the parameters do."""

    def inwards(tree: Any) -> Any:
        def held(node: Any) -> Any:
            if is_named(node):
                return Held(node.array, node.axes)
            if isinstance(node, Encoded) and is_named(node.codes):
                codes: Any = node.codes
                return Held(dataclasses.replace(node, codes=codes.array), codes.axes)
            return node

        return jax.tree.map(held, tree, is_leaf=lambda x: is_named(x) or isinstance(x, Encoded))

    def outwards(tree: Any) -> Any:
        def named(node: Any) -> Any:
            if not isinstance(node, Held):
                return node
            if isinstance(node.array, Encoded):
                codes: Any = NamedArray(node.array.codes, node.names)
                return dataclasses.replace(node.array, codes=codes)
            return NamedArray(node.array, node.names)

        return jax.tree.map(named, tree, is_leaf=lambda x: isinstance(x, Held))

    def init(params: Any) -> Any:
        return outwards(tx.init(inwards(params)))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        trees = (inwards(tree) for tree in (updates, state, params))
        return outwards(tx.update(*trees, **extra_args))

    return optax.GradientTransformationExtraArgs(init, update)
