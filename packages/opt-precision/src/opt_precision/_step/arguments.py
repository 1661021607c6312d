"""What a step is given, flat: parameters, and the leaves of the state that mirror them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opt_precision._formats import is_encoded
from opt_precision._mirrors import KeyPath, find_mirrors, path_str
from opt_precision._step.memory import is_on_host
from opt_precision._step.work import Shape
from opt_precision._weights import Weights
from opt_precision.errors import StateError


class Arguments(NamedTuple):
    """What a step is given.

    Attributes:
      grads: a leaf per parameter.
      state: the inner state as it is stored.
      params: the parameters, or `None`.
      extras: what is kept besides each parameter; `None` where nothing is.
      extra_args: for the inner update.
      steps: how often weights and state were updated.
      is_coded: whether encoded leaves are this step's; those of a wrapper inside are its own.
    """

    grads: Any
    state: Any
    params: Any
    extras: Sequence[Any]
    extra_args: Mapping[str, Any]
    steps: tuple[Any, Any]
    is_coded: bool


class Leaf(NamedTuple):
    """A parameter, with the leaves of the state that mirror it.

    Attributes:
      at: the index of the parameter.
      path: of the parameter.
      shape: of all of them.
      mirrors: the indices of the leaves of the state.
    """

    at: int
    path: str
    shape: Shape
    mirrors: list[int]


class Flat:
    """The arguments of a step as lists of leaves.

    Args:
      given: the arguments.

    Attributes:
      tree: the structure of gradients and parameters.
      grads: the gradients.
      params: the parameters; empty if there are none.
      extras: what is kept besides each parameter; `None` where nothing is.
      state_tree: the structure of the state.
      paths: of the leaves of the state.
      stored: the leaves of the state, encoded or as they are.
      owners: for each of them the index of the parameter that it mirrors, or `None`.
      leaves: the parameters with their mirrors.

    Raises:
      StateError: gradients and parameters differ in structure, or codes belong to none of them.
    """

    def __init__(self, given: Arguments) -> None:
        keyed, self.tree = jax.tree_util.tree_flatten_with_path(given.grads)
        self.grads = [_array(leaf) for _, leaf in keyed]
        self.params = _flat_params(given.params, self.tree)
        self.extras = given.extras
        stored, self.state_tree = jax.tree_util.tree_flatten_with_path(
            given.state, is_leaf=is_encoded if given.is_coded else None
        )
        self.paths: list[KeyPath] = [path for path, _ in stored]
        self.stored = [leaf if is_encoded(leaf) else _array(leaf) for _, leaf in stored]
        shapes = [
            (path, tuple(like.shape)) for (path, _), like in zip(keyed, self.likes, strict=True)
        ]
        state_shapes = [
            (path, tuple(leaf.shape)) for path, leaf in zip(self.paths, self.stored, strict=True)
        ]
        mirrors = find_mirrors(shapes, given.state, state_shapes)
        self.owners = [None if mirror is None else mirror.param for mirror in mirrors]
        for path, leaf, owner in zip(self.paths, self.stored, self.owners, strict=True):
            if is_encoded(leaf) and owner is None:
                raise StateError(
                    f"{path_str(path)} of the state has codes of shape {leaf.shape}, and no "
                    "parameter of that shape has its path: was it made for other parameters?"
                )
        self.leaves = [
            Leaf(i, path_str(path), shape, [j for j, own in enumerate(self.owners) if own == i])
            for i, (path, shape) in enumerate(shapes)
        ]

    @property
    def likes(self) -> list[jax.Array]:
        """The parameters, or the gradients where there are none."""
        return self.params or self.grads

    @property
    def is_traced(self) -> bool:
        """Whether the step is compiled."""
        return any(isinstance(leaf, jax.core.Tracer) for leaf in self.grads)

    def is_any_cut(self, weights: Weights) -> bool:
        """Whether any leaf is computed piece by piece; if none is, steps are as they were traced.

        Args:
          weights: how parameters are rounded.
        """
        return any(self.is_cut(leaf, weights) for leaf in self.leaves)

    def is_cut(self, leaf: Leaf, weights: Weights) -> bool:
        """Whether a leaf is computed piece by piece.

        Args:
          leaf: the leaf.
          weights: how parameters are rounded.
        """
        if not self.is_traced:
            return False
        stored = [self.stored[j] for j in leaf.mirrors]
        # Without codes the compiler needs no temporaries, and eager calls keep theirs anyway.
        is_coded = any(map(is_encoded, stored)) or weights.method != "nearest"
        return is_coded or any(map(is_on_host, jax.tree.leaves(stored)))


def _flat_params(params: Any, tree: Any) -> list[jax.Array]:
    if params is None:
        return []
    leaves, found = jax.tree.flatten(params)
    if found != tree:
        raise StateError(
            f"gradients and parameters must have one structure:\n  parameters {found}\n"
            f"  gradients  {tree}"
        )
    return [_array(leaf) for leaf in leaves]


def _array(leaf: Any) -> Any:
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)


def wide(leaf: Any) -> jax.ShapeDtypeStruct:
    """The type of a leaf as the inner transformation sees it."""
    if is_encoded(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, **_sharding(leaf.codes))
    dtype = leaf.dtype
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        dtype = np.dtype(np.float32)
    return jax.ShapeDtypeStruct(leaf.shape, dtype, **_sharding(leaf), **_weak(leaf, dtype))


def same(leaf: Any) -> jax.ShapeDtypeStruct:
    """The type of a leaf of the state that is not encoded."""
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, **_sharding(leaf), **_weak(leaf, leaf.dtype)
    )


def _sharding(leaf: Any) -> dict[str, Any]:
    sharding = jax.typeof(leaf).sharding
    return {} if sharding.mesh.empty or not sharding.mesh.explicit_axes else {"sharding": sharding}


def _weak(leaf: Any, dtype: Any) -> dict[str, Any]:
    is_weak = dtype == leaf.dtype and getattr(jax.typeof(leaf), "weak_type", False)
    return {"weak_type": True} if is_weak else {}
