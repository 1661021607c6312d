"""Placing the new leaves of a state, and creating them without the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from opt_core._description.describe import describe_state
from opt_core._description.values import LeafDescription
from opt_core._groups.leaf_groups import leaf_groups
from opt_core._optimizer import Optimizer, OptimizerState
from opt_core._paths import flatten_with_paths


def is_abstract(leaf: Any) -> bool:
    """Whether a leaf has no value at all."""
    return isinstance(leaf, jax.ShapeDtypeStruct)


def init_leaves(
    optimizer: Optimizer,
    wanted: Sequence[int],
    shardings: Mapping[int, Sharding | None],
    as_kept: Callable[[Any], Any] = lambda states: states,
) -> dict[int, Any]:
    """Returns some leaves of an optimizer's initial state.

    They are created group by group in a compiled function that creates nothing else, so that no
    device ever holds more than its share of them.

    Args:
      optimizer: its parameters are passed to `init_state`; only the structure of its state is read.
      wanted: positions among the leaves of `param_states`.
      shardings: their placement, by position; `None` leaves it to JAX.
      as_kept: makes `param_states` of that structure of initial ones, where it is another.
    """
    structure: Any = jax.tree.structure(optimizer.state.param_states)
    positions = structure.unflatten(range(structure.num_leaves))
    whole = optimizer.replace(state=OptimizerState(optimizer.state.step, positions))
    found: dict[int, Any] = {}
    left = frozenset(wanted)
    for _, part in leaf_groups(whole):
        own = jax.tree.leaves(part.state.param_states)
        chosen = [k for k, i in enumerate(own) if i in left]
        if not chosen:
            continue
        made = _made(part, chosen, [shardings.get(own[k]) for k in chosen], as_kept)
        found |= {own[k]: leaf for k, leaf in zip(chosen, made, strict=True)}
    return found


def _made(
    part: Optimizer,
    chosen: Sequence[int],
    places: Sequence[Sharding | None],
    as_kept: Callable[[Any], Any],
) -> list[Any]:
    def make(params: Any) -> list[Any]:
        leaves = jax.tree.leaves(as_kept(part.optimizer_def.create(params).state.param_states))
        return [leaves[k] for k in chosen]

    params = jax.tree.leaves(part.target)
    if any(map(is_abstract, params)):
        shapes = jax.eval_shape(make, part.target)
        return [placed(leaf, place) for leaf, place in zip(shapes, places, strict=True)]
    made: list[Any] = jax.jit(make, out_shardings=list(places))(part.target)
    return made


def placed(leaf: Any, sharding: Sharding | None) -> Any:
    """Returns a leaf with the right placement: itself if it has it."""
    if sharding is None or not hasattr(leaf, "dtype"):
        return leaf
    if is_abstract(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return leaf if getattr(leaf, "sharding", None) == sharding else jax.device_put(leaf, sharding)


def committed_sharding(leaf: Any) -> Sharding | None:
    """Returns where a leaf is committed to, if anywhere; where an abstract leaf is wanted."""
    if is_abstract(leaf):
        found: Sharding | None = leaf.sharding
        return found
    return leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None


class Places:
    """The default placement of new leaves.

    They are placed like an old leaf that follows the same dimensions of the same parameter, so that
    moments sharded further by ZeRO stay so; otherwise like the parameter.

    Args:
      params: the parameters.
      leaves: of the old state.
      descriptions: their descriptions.
    """

    def __init__(
        self, params: Any, leaves: Sequence[Any], descriptions: Sequence[LeafDescription]
    ) -> None:
        named = [(names, x) for names, x in flatten_with_paths(params) if x is not None]
        self._params = {names: (np.shape(x), _sharding(x)) for names, x in named}
        self._like: dict[Any, Sharding] = {}
        for leaf, description in zip(leaves, descriptions, strict=True):
            place = _sharding(leaf)
            if description.parameter is not None and description.dimensions and place is not None:
                key = description.parameter, description.dimensions, np.shape(leaf)
                self._like.setdefault(key, place)
        known = [place for _, place in self._params.values() if place is not None]
        meshes = [place.mesh for place in known if isinstance(place, NamedSharding)]
        self._mesh = meshes[0] if meshes else None
        self.whole = NamedSharding(meshes[0], PartitionSpec()) if meshes else None
        self._alone = known[0] if len(set(known)) == 1 and not meshes else None

    def of(self, description: LeafDescription, shape: Sequence[int]) -> Sharding | None:
        """Returns the placement of a new leaf; `None` leaves it to JAX."""
        if self._mesh is None:
            return self._alone
        like = self._like.get((description.parameter, description.dimensions, tuple(shape)))
        if isinstance(like, NamedSharding):
            return like
        param_shape, place = self._params.get(description.parameter or (), ((), None))
        if description.parameter is None or not isinstance(place, NamedSharding):
            return self.whole
        dims = description.dimensions or (None,) * len(shape)
        spec = (*place.spec, *(None,) * (len(param_shape) - len(place.spec)))
        kept = [
            None if d is None or size != param_shape[d] else spec[d]
            for d, size in zip(dims, shape, strict=True)
        ]
        return NamedSharding(place.mesh, PartitionSpec(*kept), memory_kind=place.memory_kind)


def placed_like_params(optimizer: Optimizer) -> Optimizer:
    """Returns an abstract optimizer whose state lies like its parameters, as far as it is new."""
    leaves, structure = jax.tree.flatten(optimizer.state.param_states)
    places = Places(optimizer.target, (), ())
    descriptions = describe_state(optimizer).leaves
    found = [
        placed(leaf, places.of(about, np.shape(leaf))) if is_abstract(leaf) else leaf
        for leaf, about in zip(leaves, descriptions, strict=True)
    ]
    step = placed(optimizer.state.step, places.whole)
    return optimizer.replace(state=OptimizerState(step, jax.tree.unflatten(structure, found)))


def _sharding(leaf: Any) -> Sharding | None:
    found = getattr(leaf, "sharding", None)
    return found if isinstance(found, Sharding) else None
