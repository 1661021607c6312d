"""What a step takes, flat: parameters, and the leaves of the state that mirror them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from opt_precision._formats import Encoded, Format, is_encoded
from opt_precision._memory import is_on_host
from opt_precision._mirrors import KeyPath, find_mirrors, path_str
from opt_precision._stream import Shape
from opt_precision._weights import Weights
from opt_precision.errors import StateError


class Arguments(NamedTuple):
    """What a step is given."""

    grads: Any  # a leaf per parameter
    state: Any  # the inner state as it is stored
    params: Any  # the parameters, or `None`
    extras: Sequence[Any]  # what is kept besides each parameter; `None` where nothing is
    extra_args: Mapping[str, Any]  # for the inner update
    steps: tuple[Any, Any]  # how often weights and state were updated
    is_coded: bool  # whether encoded leaves are this step's; those of a wrapper inside are its own


class Leaf(NamedTuple):
    """A parameter, with the leaves of the state that mirror it."""

    at: int  # the index of the parameter
    path: str  # of the parameter
    shape: Shape  # of all of them
    mirrors: list[int]  # the indices of the leaves of the state


class Flat:
    """The arguments of a step as lists of leaves.

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

    def is_cut(self, leaf: Leaf, weights: Weights) -> bool:
        """Whether a leaf is computed in a loop: one that is rounded, or lies on the host.

        Without codes the compiler needs no temporaries, and eager calls keep theirs anyway.
        """
        stored = [self.stored[j] for j in leaf.mirrors]
        is_rounded = any(map(is_encoded, stored)) or weights.is_met_by(self.likes[leaf.at].dtype)
        return self.is_traced and (is_rounded or any(map(is_on_host, jax.tree.leaves(stored))))

    def formats(self, leaf: Leaf) -> list[Format]:
        """How the leaves of the state are encoded that mirror a parameter."""
        stored = [self.stored[j] for j in leaf.mirrors]
        return [one.format for one in stored if isinstance(one, Encoded)]


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
    """The type of a leaf of floats as the inner transformation sees it."""
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


class Update:
    """The inner update as a function of flat arguments: gradients, state, parameters, and more.

    Attributes:
      arrays: the arrays among the extra arguments, which are its last ones.
    """

    def __init__(self, tx: Any, given: Arguments, flat: Flat) -> None:
        self._tx = tx
        self._given = given
        self._flat = flat
        self._put_back, self.arrays = _split_args(given.extra_args)

    @property
    def owners(self) -> list[int | None]:
        """For each argument the index of the parameter whose shape it has."""
        flat = self._flat
        each = range(len(flat.leaves))
        return [
            *(i if g.shape == flat.leaves[i].shape else None for i, g in enumerate(flat.grads)),
            *flat.owners,
            *(each if flat.params else ()),
            *(None for _ in self.arrays),
        ]

    def trace(self) -> ClosedJaxpr:
        """Returns it traced on whole leaves."""

        def checked(*leaves: Any) -> list[Any]:
            updates, new = self._called(leaves)
            return [*_checked_updates(updates, self._flat), *_checked_state(new, self._flat)]

        try:
            return jax.make_jaxpr(checked)(*self._avals)
        except (TypeError, ValueError) as error:
            if wrong := _other_shapes(self._flat):
                raise StateError(wrong) from error
            raise

    def trace_blocks(self, pieces: Sequence[Shape]) -> ClosedJaxpr:
        """Returns it traced on blocks."""
        avals = [
            jax.ShapeDtypeStruct(
                aval.shape if owner is None else pieces[owner],
                aval.dtype,
                **({"weak_type": True} if getattr(aval, "weak_type", False) else {}),
            )
            for aval, owner in zip(self._avals, self.owners, strict=True)
        ]
        return jax.make_jaxpr(lambda *leaves: jax.tree.leaves(self._called(leaves)))(*avals)

    def _called(self, leaves: Sequence[Any]) -> Any:
        flat, given = self._flat, self._given
        number, state_number = len(flat.grads), len(flat.stored)
        grads = jax.tree.unflatten(flat.tree, leaves[:number])
        state = jax.tree.unflatten(flat.state_tree, leaves[number : number + state_number])
        rest = leaves[number + state_number :]
        params = given.params  # `None`, or a tree without leaves
        if flat.params:
            params = jax.tree.unflatten(flat.tree, rest[: len(flat.params)])
        return self._tx.update(grads, state, params, **self._put_back(rest[len(flat.params) :]))

    @property
    def _avals(self) -> list[jax.ShapeDtypeStruct]:
        flat = self._flat
        return [
            *map(wide, flat.grads),
            *(wide(leaf) if is_encoded(leaf) else same(leaf) for leaf in flat.stored),
            *map(wide, flat.params),
            *(same(jnp.asarray(array)) for array in self.arrays),
        ]


def _other_shapes(flat: Flat) -> str:
    """Which gradients do not have the shape of their parameter."""
    return "; ".join(
        f"the gradient of {leaf.path} has shape {tuple(grad.shape)}, the parameter {leaf.shape}"
        for leaf, grad in zip(flat.leaves, flat.grads, strict=True)
        if tuple(grad.shape) != leaf.shape
    )


def _checked_updates(updates: Any, flat: Flat) -> list[Any]:
    leaves = jax.tree.leaves(updates)
    if len(leaves) != len(flat.leaves):
        raise StateError(
            f"the inner transformation made updates for {len(leaves)} leaves of "
            f"{len(flat.leaves)}; a transformation that changes the tree cannot be wrapped"
        )
    for leaf, update in zip(flat.leaves, leaves, strict=True):
        if tuple(update.shape) != leaf.shape:
            raise StateError(
                f"the inner transformation made an update of shape {tuple(update.shape)} for "
                f"{leaf.path} of shape {leaf.shape}"
            )
    return leaves


def _checked_state(new: Any, flat: Flat) -> list[Any]:
    leaves, tree = jax.tree.flatten(new)
    found: Any = tree
    if found != flat.state_tree or any(
        jnp.shape(leaf) != tuple(old.shape) for leaf, old in zip(leaves, flat.stored, strict=True)
    ):
        raise StateError(
            "the inner transformation returned another state than it took; a state must "
            f"keep its structure and shapes from `init` on:\n  took     {flat.state_tree}\n"
            f"  returned {found}"
        )
    return leaves


def _split_args(extra_args: Mapping[str, Any]) -> tuple[Callable[[Sequence[Any]], Any], list[Any]]:
    """The arrays among the extra arguments, and the way to put them back."""
    leaves, tree = jax.tree.flatten(dict(extra_args))
    is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]

    def put_back(arrays: Sequence[Any]) -> Any:
        given = iter(arrays)
        return jax.tree.unflatten(
            tree, [next(given) if own else leaf for leaf, own in zip(leaves, is_array, strict=True)]
        )

    return put_back, [leaf for leaf, own in zip(leaves, is_array, strict=True) if own]
