"""What a step takes, leaf by leaf, and the inner update as a function of flat arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from opt_precision._formats import Format, is_encoded
from opt_precision._place import explicit_sharding, is_on_host
from opt_precision._select import KeyPath, Shape, find_mirrors, path_str
from opt_precision._weights import NEAREST, Weights
from opt_precision.errors import StateError

# What an argument of the update, or a value that equations start from, is of a leaf: an index is
# that of a leaf of the state that mirrors the parameter.
GRADIENT: Final = -1
PARAMETER: Final = -2
COMPUTED: Final = -3  # an array of the leaf's shape that was computed before
NUMBER: Final = -4  # nothing of it: a number, or an array that is not cut
EXTRA: Final = -5  # what is kept besides the parameter


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What a step takes, and how it is to be computed."""

    grads: Any  # a leaf per parameter
    params: Any  # the parameters, or `None`
    extra_args: Mapping[str, Any]  # for the inner update
    is_in_place: bool  # whether new parameters are wanted, or updates
    tx: Any = None  # the inner transformation
    state: Any = None  # the inner state as it is stored
    # Whether encoded leaves are this step's; those of a wrapper inside are its own.
    is_coded: bool = False
    weights: Weights = NEAREST  # how parameters are rounded
    extras: Sequence[Any] | None = None  # what is kept besides each parameter, or `None`
    seed: int = 0  # of the noise of the state
    steps: tuple[Any, Any] = (0, 0)  # how often weights and state were updated
    chunk_bytes: int = 64 << 20  # the float32 bytes of one block
    layout: Any = None  # where parameters lie; `None` if their types say so

    @property
    def limit(self) -> int:
        """How many elements make one block."""
        return max(1, self.chunk_bytes // 4)


class Leaf(NamedTuple):
    """A parameter, and what belongs to it."""

    at: int  # the index of the parameter
    path: str  # of the parameter
    shape: Shape  # of all of it
    names: list[str]  # the paths of the leaves of the state
    arrays: dict[int, Any]  # its gradient, the parameter, what is kept besides it, and its state

    @property
    def like(self) -> Any:
        """The parameter, or the gradient if there are gradients alone."""
        return self.arrays.get(PARAMETER, self.arrays[GRADIENT])

    @property
    def state(self) -> list[Any]:
        """The leaves of the state that mirror it."""
        return [self.arrays[place] for place in range(len(self.names))]

    @property
    def formats(self) -> list[Format]:
        """How the leaves of the state are encoded that are."""
        return [leaf.format for leaf in self.state if is_encoded(leaf)]

    @property
    def is_hosted(self) -> bool:
        """Whether a part of its state lies on the host."""
        return any(map(is_on_host, jax.tree.leaves(self.state)))


class Update:
    """The inner update as a function of flat arguments: gradients, state, parameters, and more."""

    def __init__(self, args: Arguments) -> None:
        self._args = args
        keyed, self.tree = jax.tree_util.tree_flatten_with_path(args.grads)
        grads = [as_array(leaf) for _, leaf in keyed]
        params = _flat_params(args.params, self.tree)
        stored, self.state_tree = jax.tree_util.tree_flatten_with_path(
            args.state, is_leaf=is_encoded if args.is_coded else None
        )
        self.paths: list[KeyPath] = [path for path, _ in stored]
        self.stored = [leaf if is_encoded(leaf) else as_array(leaf) for _, leaf in stored]
        self._put_back, arrays = _split_args(args.extra_args)
        self._counts = [len(grads), len(self.stored), len(params)]
        self.arguments = [*grads, *self.stored, *params, *arrays]
        shapes = [
            (path, tuple(like.shape))
            for (path, _), like in zip(keyed, params or grads, strict=True)
        ]
        owned: list[list[int]] = [[] for _ in shapes]
        places: list[tuple[int | None, int]] = []
        for j, owner in enumerate(self._mirrors(shapes)):
            places.append((None, NUMBER) if owner is None else (owner, len(owned[owner])))
            if owner is not None:
                owned[owner].append(j)
        self.leaves = []
        for i, ((path, shape), own) in enumerate(zip(shapes, owned, strict=True)):
            own_arrays = {GRADIENT: grads[i], **{k: self.stored[j] for k, j in enumerate(own)}}
            if params:
                own_arrays[PARAMETER] = params[i]
            if args.extras and args.extras[i] is not None:
                own_arrays[EXTRA] = args.extras[i]
            names = [path_str(self.paths[j]) for j in own]
            self.leaves.append(Leaf(i, path_str(path), shape, names, own_arrays))
        rows = zip(self.leaves, grads, strict=True)
        self.places = [
            *((leaf.at if leaf.shape == grad.shape else None, GRADIENT) for leaf, grad in rows),
            *places,
            *((i, PARAMETER) for i, _ in enumerate(params)),
            *((None, NUMBER) for _ in arrays),
        ]

    def _mirrors(self, shapes: Sequence[tuple[KeyPath, Shape]]) -> list[int | None]:
        """For each leaf of the state the parameter that it mirrors."""
        stored = zip(self.paths, self.stored, strict=True)
        state = [(path, tuple(leaf.shape)) for path, leaf in stored]
        mirrors = find_mirrors(shapes, self._args.state, state)
        for path, leaf, mirror in zip(self.paths, self.stored, mirrors, strict=True):
            if is_encoded(leaf) and mirror is None:
                raise StateError(
                    f"{path_str(path)} of the state has codes of shape {leaf.shape}, and no "
                    "parameter of that shape has its path: was it made for other parameters?"
                )
        return [None if mirror is None else mirror.param for mirror in mirrors]

    def trace(self) -> ClosedJaxpr:
        """Returns it traced on whole leaves."""
        rows = zip(self.arguments, self.places, strict=True)
        types = [wide(x) if of in (GRADIENT, PARAMETER) else seen(x) for x, (_, of) in rows]
        try:
            return jax.make_jaxpr(self._called)(*types)
        except (TypeError, ValueError) as error:
            wrong = "; ".join(
                f"the gradient of {leaf.path} has shape {tuple(leaf.arrays[GRADIENT].shape)}, the "
                f"parameter {leaf.shape}"
                for leaf in self.leaves
                if tuple(leaf.arrays[GRADIENT].shape) != leaf.shape
            )
            if wrong:
                raise StateError(wrong) from error
            raise

    def _called(self, *leaves: Any) -> list[Any]:
        left = iter(leaves)
        grads, stored, params = ([next(left) for _ in range(n)] for n in self._counts)
        updates, new = self._args.tx.update(
            jax.tree.unflatten(self.tree, grads),
            jax.tree.unflatten(self.state_tree, stored),
            # `None`, or a tree without leaves
            jax.tree.unflatten(self.tree, params) if params else self._args.params,
            **self._put_back(left),
        )
        return self._checked(updates, new)

    def _checked(self, updates: Any, new: Any) -> list[Any]:
        """Updates and the new state, flat."""
        leaves = jax.tree.leaves(updates)
        if len(leaves) != len(self.leaves):
            raise StateError(
                f"the inner transformation made updates for {len(leaves)} leaves of "
                f"{len(self.leaves)}; a transformation that changes the tree cannot be wrapped"
            )
        for leaf, update in zip(self.leaves, leaves, strict=True):
            if tuple(update.shape) != leaf.shape:
                raise StateError(
                    f"the inner transformation made an update of shape {tuple(update.shape)} for "
                    f"{leaf.path} of shape {leaf.shape}"
                )
        state, tree = jax.tree.flatten(new)
        found: Any = tree
        shapes = [[jnp.shape(leaf) for leaf in own] for own in (state, self.stored)]
        if found != self.state_tree or shapes[0] != shapes[1]:
            raise StateError(
                "the inner transformation returned another state than it took; a state must "
                f"keep its structure and shapes from `init` on:\n  took     {self.state_tree}\n"
                f"  returned {tree}"
            )
        return [*leaves, *state]


def _flat_params(params: Any, tree: Any) -> list[jax.Array]:
    if params is None:
        return []
    leaves, found = jax.tree.flatten(params)
    if found != tree:
        raise StateError(
            f"gradients and parameters must have one structure:\n  parameters {found}\n"
            f"  gradients  {tree}"
        )
    return [as_array(leaf) for leaf in leaves]


def _split_args(extra_args: Mapping[str, Any]) -> tuple[Callable[[Iterator[Any]], Any], list[Any]]:
    """The arrays among the extra arguments, and the way to put them back."""
    leaves, tree = jax.tree.flatten(dict(extra_args))
    is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
    rows = list(zip(leaves, is_array, strict=True))

    def put_back(arrays: Iterator[Any]) -> Any:
        return jax.tree.unflatten(tree, [next(arrays) if own else leaf for leaf, own in rows])

    return put_back, [as_array(leaf) for leaf, own in rows if own]


def as_array(leaf: Any) -> Any:
    """A leaf as an array."""
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)


def seen(leaf: Any) -> jax.ShapeDtypeStruct:
    """The type of a leaf of the state as the inner transformation sees it."""
    return _type(leaf, leaf.dtype)


def wide(leaf: Any) -> jax.ShapeDtypeStruct:
    """The type of a gradient or parameter as the inner transformation sees it: in float32."""
    is_short = jnp.issubdtype(leaf.dtype, jnp.floating) and jnp.finfo(leaf.dtype).bits < 32
    return _type(leaf, np.dtype(np.float32) if is_short else leaf.dtype)


def _type(leaf: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    array = leaf.codes if is_encoded(leaf) else leaf
    is_weak = dtype == array.dtype and getattr(jax.typeof(array), "weak_type", False)
    sharding = explicit_sharding(array)
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding, weak_type=bool(is_weak))
