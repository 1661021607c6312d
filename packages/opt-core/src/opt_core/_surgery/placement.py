"""Placing the new leaves of a state, and creating them without the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from opt_core._description.describe import describe_state
from opt_core._description.values import LeafDescription
from opt_core._groups.leaf_groups import leaf_groups
from opt_core._optimizer import Optimizer, OptimizerState
from opt_core._paths import Names, children, flatten_with_paths, path_str
from opt_core.errors import GroupError


def is_tracer(leaf: Any) -> bool:
    """Whether a leaf has no value yet."""
    return isinstance(leaf, jax.core.Tracer)


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
    if any(map(is_tracer, params)):
        return [placed(leaf, x) for leaf, x in zip(make(part.target), places, strict=True)]
    made: list[Any] = jax.jit(make, out_shardings=list(places))(part.target)
    return made


def placed(leaf: Any, sharding: Sharding | None) -> Any:
    """Returns a leaf with the right placement: itself if it has it."""
    if sharding is None or not hasattr(leaf, "dtype"):
        return leaf
    if is_abstract(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    if is_tracer(leaf):
        return jax.lax.with_sharding_constraint(leaf, sharding)
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
    # The compiler chooses that of a tracer.
    found = None if is_tracer(leaf) else getattr(leaf, "sharding", None)
    return found if isinstance(found, Sharding) else None


def mesh_sharding(leaf: Any) -> NamedSharding | None:
    """Returns the sharding of a leaf on a mesh, if it is on one."""
    found = _sharding(leaf)
    return found if isinstance(found, NamedSharding) else None


def flat_shardings(
    shardings: Any, structure: Any, shapes: Mapping[str, Sequence[int]]
) -> list[Sharding | None]:
    """Returns a sharding, or `None`, for every leaf of a state.

    Args:
      shardings: an `Optimizer` of shardings, or a tree like its `param_states`; `None` for a leaf
        that is placed by its parameter.
      structure: of `param_states`.
      shapes: of its leaves by path, in their order.

    Raises:
      GroupError: they have another structure, or one does not fit its leaf; names the leaf.
    """
    if shardings is None:
        return [None] * structure.num_leaves
    tree = shardings.state.param_states if isinstance(shardings, Optimizer) else shardings
    if problem := _other_structure(structure.unflatten(list(shapes)), tree, ()):
        raise GroupError(
            "`shardings`: expected a tree like the new `param_states`, or an `Optimizer` of "
            f"shardings; {problem}"
        )
    found = list(structure.flatten_up_to(tree))
    problems = [
        f"`shardings`: of `{path}`, {problem}"
        for (path, shape), place in zip(shapes.items(), found, strict=True)
        if (problem := _misplaced(place, shape))
    ]
    if problems:
        raise GroupError("\n".join(problems))
    return found


def _other_structure(expected: Any, found: Any, names: Names) -> str:
    """Returns where a tree first has other containers; empty if it has the same or deeper ones."""
    opened = children(expected)
    if opened is None:
        is_other = expected is None and found is not None
        return f"at `{path_str(names)}` expected `None`, found {found!r}" if is_other else ""
    given = children(found)
    wanted = [name for name, _ in opened.children]
    keys = [] if given is None else [name for name, _ in given.children]
    if type(expected) is not type(found) or wanted != keys:
        where = f"at `{path_str(names)}`" if names else "at the top"
        had = type(found).__name__ + (f" of {keys}" if given is not None else "")
        return f"{where} expected {type(expected).__name__} of {wanted}, found {had}"
    inner = zip(opened.children, () if given is None else given.children, strict=True)
    problems = (_other_structure(one, other, (*names, name)) for (name, one), (_, other) in inner)
    return next(filter(None, problems), "")


def _misplaced(place: Any, shape: Sequence[int]) -> str:
    """Returns why something cannot place a leaf; empty if it can."""
    if place is None:
        return ""
    if isinstance(place, PartitionSpec):
        return f"expected a sharding or `None`, found {place!r}: give `NamedSharding(mesh, spec)`"
    if not isinstance(place, Sharding):
        return f"expected a sharding or `None`, found {place!r}"
    fits = not isinstance(place, NamedSharding) or len(place.spec) <= len(shape)
    try:
        if fits:
            place.shard_shape(tuple(shape))
    except ValueError:
        fits = False
    if not fits:
        return f"expected a sharding that divides the shape {list(shape)}, found {place}"
    return ""


def value_of(leaf: Any, what: str) -> Any:
    """Returns the value of a small leaf as a NumPy array; `None` for an abstract one.

    Args:
      leaf: an array, replicated if it is on several processes.
      what: what needs the value, for the error.

    Raises:
      GroupError: it is traced.
    """
    if is_abstract(leaf):
        return None
    if is_tracer(leaf):
        raise GroupError(
            f"{what}, which cannot be done while tracing: call it outside of compiled functions"
        )
    if jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        leaf = leaf.addressable_data(0)
    return np.asarray(leaf)


def all_equal(leaves: Iterable[Any]) -> bool:
    """Whether leaves have the same value bit for bit; true for leaves without values.

    Raises:
      GroupError: there are several, and one is traced.
    """
    found = list(leaves)
    if len(found) < 2:
        return True
    what = "states of several groups have to be compared"
    values = [value for leaf in found if (value := value_of(leaf, what)) is not None]
    return all(value.tobytes() == values[0].tobytes() for value in values[1:])
