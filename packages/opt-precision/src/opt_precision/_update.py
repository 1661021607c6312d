"""What a step takes, leaf by leaf, and the inner update as equations of flat arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from opt_precision import _bits
from opt_precision._formats import Format, is_encoded
from opt_precision._place import explicit_sharding, fetched, is_on_host
from opt_precision._select import KeyPath, Moments, Shape, find_mirrors, path_str
from opt_precision._weights import Weights
from opt_precision.errors import StateError

# The arrays of a parameter; the leaves of the state that mirror it are numbered from 0 on.
GRADIENT: Final = -1
PARAMETER: Final = -2
EXTRA: Final = -3  # what is kept besides it


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What a step takes, and how it is to be computed."""

    grads: Any  # a leaf per parameter
    params: Any  # the parameters, or `None`
    extra_args: Mapping[str, Any]  # for the inner update
    is_in_place: bool  # whether new parameters are wanted, or updates
    tx: Any  # the inner transformation
    state: Any  # the inner state as it is stored
    # Whether encoded leaves are this step's; those of a wrapper inside are its own.
    is_coded: bool
    moments: Moments  # how large blocks are, and where parameters lie
    weights: Weights  # how parameters are rounded
    extras: Sequence[Any]  # what is kept besides each parameter, or `None`; empty for none
    step: jax.Array  # how often the state was updated


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
    def formats(self) -> list[Format]:
        """How the leaves of the state are encoded that are."""
        return [array.format for array in self.arrays.values() if is_encoded(array)]

    @property
    def is_hosted(self) -> bool:
        """Whether a part of its state lies on the host."""
        state = [self.arrays[number] for number in range(len(self.names))]
        return any(map(is_on_host, jax.tree.leaves(state)))


class Update:
    """The inner update, traced on whole leaves.

    Attributes:
      tree: the structure of parameters.
      leaves: the parameters.
      stored: the leaves of the state, whose structure is `state_tree`.
      paths: theirs.
      places: for each of them the parameter that it mirrors, and its number there.
      closed: the trace.
      origin: for its arguments that are arrays of parameters the parameter, and which array.
      others: its other arguments.
    """

    def __init__(self, args: Arguments) -> None:
        keyed, self.tree = jax.tree_util.tree_flatten_with_path(args.grads)
        grads = [as_array(leaf) for _, leaf in keyed]
        params = _flat_params(args.params, self.tree)
        stored, self.state_tree = jax.tree_util.tree_flatten_with_path(
            args.state, is_leaf=is_encoded if args.is_coded else None
        )
        self.paths: list[KeyPath] = [path for path, _ in stored]
        self.stored = [leaf if is_encoded(leaf) else as_array(leaf) for _, leaf in stored]
        self.leaves: list[Leaf] = []
        for i, ((path, _), grad, like) in enumerate(
            zip(keyed, grads, params or grads, strict=True)
        ):
            own = {GRADIENT: grad, **({PARAMETER: like} if params else {})}
            if args.extras and args.extras[i] is not None:
                own[EXTRA] = args.extras[i]
            self.leaves.append(Leaf(i, path_str(path), tuple(like.shape), [], own))
        self.places = self._find_places([path for path, _ in keyed], args.state)

        extra_args, extra_tree = jax.tree.flatten(dict(args.extra_args))
        is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in extra_args]
        arrays = [as_array(x) for x, is_one in zip(extra_args, is_array, strict=True) if is_one]

        def update(grads: Any, stored: Any, params: Any, arrays: Any) -> list[Any]:
            left = iter(arrays)
            rows = zip(extra_args, is_array, strict=True)
            updates, new = args.tx.update(
                jax.tree.unflatten(self.tree, grads),
                jax.tree.unflatten(self.state_tree, stored),
                # `None`, or a tree without leaves
                jax.tree.unflatten(self.tree, params) if params else args.params,
                **jax.tree.unflatten(extra_tree, [next(left) if own else x for x, own in rows]),
            )
            return self._checked(updates, new)

        types = (map(wide, grads), map(_seen, self.stored), map(wide, params), map(_seen, arrays))
        try:
            self.closed: ClosedJaxpr = jax.make_jaxpr(update)(*map(list, types))
        except (TypeError, ValueError) as error:
            wrong = [leaf for leaf in self.leaves if leaf.arrays[GRADIENT].shape != leaf.shape]
            if not wrong:
                raise
            raise StateError(
                "; ".join(
                    f"the gradient of {leaf.path} has shape {leaf.arrays[GRADIENT].shape}, the "
                    f"parameter {leaf.shape}"
                    for leaf in wrong
                )
            ) from error
        fit = [x.shape == leaf.shape for x, leaf in zip(grads, self.leaves, strict=True)]
        places: list[tuple[int, int] | None] = [
            *((i, GRADIENT) if is_like else None for i, is_like in enumerate(fit)),
            *self.places,
            *((i, PARAMETER) for i, _ in enumerate(params)),
            *(None for _ in arrays),
        ]
        other = [x if is_like else _bits.widen(x) for x, is_like in zip(grads, fit, strict=True)]
        values = [*other, *self.stored, *params, *arrays]
        rows = list(zip(self.closed.jaxpr.invars, places, values, strict=True))
        self.origin = {var: place for var, place, _ in rows if place is not None}
        self.others = {var: fetched(x) for var, place, x in rows if place is None}

    def _find_places(self, paths: Sequence[KeyPath], state: Any) -> list[tuple[int, int] | None]:
        """For each leaf of the state the parameter that it mirrors, and its number there."""
        params = [(path, leaf.shape) for path, leaf in zip(paths, self.leaves, strict=True)]
        rows = list(zip(self.paths, self.stored, strict=True))
        mirrors = find_mirrors(params, state, [(path, tuple(x.shape)) for path, x in rows])
        places: list[tuple[int, int] | None] = []
        for (path, array), mirror in zip(rows, mirrors, strict=True):
            if mirror is None:
                if is_encoded(array):
                    raise StateError(
                        f"{path_str(path)} of the state has codes of shape {array.shape}, and no "
                        "parameter of that shape has its path: was it made for other parameters?"
                    )
                places.append(None)
                continue
            leaf = self.leaves[mirror.param]
            places.append((leaf.at, len(leaf.names)))
            leaf.arrays[len(leaf.names)] = array
            leaf.names.append(mirror.path)
        return places

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


def as_array(leaf: Any) -> Any:
    """A leaf as an array."""
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)


def wide(leaf: Any) -> jax.ShapeDtypeStruct:
    """The type of a gradient or parameter as the inner transformation sees it: in float32."""
    is_short = jnp.issubdtype(leaf.dtype, jnp.floating) and jnp.finfo(leaf.dtype).bits < 32
    return _type(leaf, np.dtype(np.float32) if is_short else leaf.dtype)


def _seen(leaf: Any) -> jax.ShapeDtypeStruct:
    """The type of a leaf of the state as the inner transformation sees it."""
    return _type(leaf, leaf.dtype)


def _type(leaf: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    array = leaf.codes if is_encoded(leaf) else leaf
    is_weak = dtype == array.dtype and getattr(jax.typeof(array), "weak_type", False)
    sharding = explicit_sharding(array)
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding, weak_type=bool(is_weak))
