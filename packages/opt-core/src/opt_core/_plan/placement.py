"""Placing the new leaves of a state, and creating them without the others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from opt_core._description.describe import describe_state
from opt_core._description.values import LeafDescription
from opt_core._groups.leaf_groups import leaf_groups
from opt_core._optimizer import Optimizer, OptimizerState
from opt_core._paths import Names, flatten_with_paths
from opt_core._plan.leaves import HasShardings, LeafInfo, View, leaf_name, named_leaves
from opt_core._plan.plan import Plan, Row
from opt_core._shardings import committed_sharding, is_abstract, placed
from opt_core.errors import LeafError


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


_ADVICE = (
    "Pass `placement=`: a memory plan or a `Layout` of opt-partition, or one sharding for all "
    "leaves, such as `jax.sharding.SingleDeviceSharding(jax.devices()[0])`; or give the leaves of "
    "the target shardings"
)


def with_placement(view: View, placement: Any) -> View:
    """Returns a view whose leaves lie where a placement says, if they did not say so themselves.

    Args:
      view: of the target.
      placement: see `plan_restore`; comes before that of the view.

    Raises:
      LeafError: the placement was made for other leaves; names one.
      TypeError: it is not a placement.
    """
    for given in (placement, view.placement):
        if given is not None:
            view = _with(view, given)
    return view


def _with(view: View, given: Any) -> View:
    optimizer = view.optimizer
    target, states = optimizer.target, optimizer.state
    if isinstance(given, Sharding):
        others = {names: _put(leaf, given, "params", names) for names, leaf in view.others.items()}
        target, states = _all_by(target, given, "params"), _all_by(states, given, "state")
        placed_optimizer = optimizer.replace(target=target, state=states)
        return dataclasses.replace(view, optimizer=placed_optimizer, others=others)
    params, state = _parts(given, states)
    if params is not None:
        target = _placed_by(target, params, "params")
    if state is not None and _covers(state, states.param_states):
        states = OptimizerState(states.step, _placed_by(states.param_states, state, "state"))
    elif state is not None:
        states = _placed_by(states, state, "state")
    return dataclasses.replace(view, optimizer=optimizer.replace(target=target, state=states))


def _parts(given: Any, states: OptimizerState) -> tuple[Any, Any]:
    """What a placement says of the parameters, and of the state."""
    tree = getattr(given, "shardings", given)
    params = getattr(tree, "params", None)
    state = getattr(tree, "state", getattr(tree, "opt_state", None))
    if params is not None and state is not None:
        return params, state
    has_leaves = bool(named_leaves(states.param_states))
    if has_leaves and (_covers(tree, states.param_states) or _covers(tree, states)):
        return None, tree
    return tree, None


def _covers(given: Any, tree: Any) -> bool:
    """Whether a tree of shardings has all paths of another."""
    return {names for names, _ in named_leaves(tree)} <= _by_path(given).keys()


def _by_path(tree: Any) -> dict[Names, Any]:
    return dict(flatten_with_paths(getattr(tree, "shardings", tree)))


def _all_by(tree: Any, given: Sharding, kind: str) -> Any:
    """A tree with its leaves where one sharding says."""
    leaves = [_put(leaf, given, kind, names) for names, leaf in named_leaves(tree)]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _placed_by(tree: Any, given: Any, kind: str) -> Any:
    """A tree with its leaves where those of another, with the same paths, say."""
    said = _by_path(given)
    for names, place in said.items():
        if place is not None and not isinstance(place, Sharding):
            where = f" for `{leaf_name((kind, *names))}`" if names else ""
            raise TypeError(
                "`placement`: expected a plan, a `Layout` or shardings, found "
                f"{type(place).__name__}{where}"
            )
    leaves = []
    for names, leaf in named_leaves(tree):
        if names not in said:
            raise LeafError(
                f"`placement` says nothing of `{leaf_name((kind, *names))}`: it has "
                f"{len(said)} leaves, of another optimizer or other parameters. Make it for the "
                "definition and the parameters of the target"
            )
        leaves.append(_put(leaf, said[names], kind, names))
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _put(leaf: Any, sharding: Sharding | None, kind: str, names: Names) -> Any:
    """A leaf where a sharding says, unless it says so itself."""
    if committed_sharding(leaf) is not None or sharding is None:
        return leaf
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        mesh = _current_mesh()
        if mesh is not None and _is_same(mesh, sharding.mesh):
            sharding = NamedSharding(mesh, sharding.spec)
        elif not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
    try:
        sharding.shard_shape(jnp.shape(leaf))
    except (IndexError, ValueError) as error:  # of another rank, or not divisible
        raise LeafError(
            f"`placement`: `{leaf_name((kind, *names))}` of shape {jnp.shape(leaf)} cannot be "
            f"{getattr(sharding, 'spec', sharding)}. Make it for the shapes of the target"
        ) from error
    return placed(leaf, sharding)


def places(plan: Plan[Any]) -> dict[str, Sharding | None]:
    """Returns where each leaf of the target goes, by name; `None` leaves it to JAX.

    Args:
      plan: of the restore; its rows and the leaves of its view are in the same order.

    Raises:
      LeafError: a leaf was on several devices that are not here, and nothing else says where it
        goes.
    """
    rows = plan.target_rows
    found: dict[str, Any] = {
        row.leaf.name: place for row, place in zip(rows, _own(leaves_of(plan.view)), strict=True)
    }
    left = [row for row in rows if (x := found[row.leaf.name]) is None or _is_abstract(x)]
    if not left:
        return found
    known = [x for x in found.values() if x is not None and not _is_abstract(x)]
    asked = next(filter(_is_abstract, found.values()), None)
    saved = _saved(plan.source, left)
    anchor, is_elsewhere = _anchor(known, asked, saved.values())
    for row in left:
        name, place = row.leaf.name, found[row.leaf.name]
        if place is not None:
            found[name] = _on(anchor, place.spec, row.leaf.shape) if anchor else place
        elif row.sources:
            found[name] = _as_saved(row, saved.get(row.sources[0]), anchor, is_elsewhere)
    _check(plan, found, saved)
    _place_new(plan, found)
    return found


def leaves_of(view: View) -> list[Any]:
    """Returns the leaves of a view in the order of rows: parameters, others, state."""
    optimizer = view.optimizer
    params, state = jax.tree.leaves(optimizer.target), jax.tree.leaves(optimizer.state)
    return [*params, *view.others.values(), *state]


def _own(values: Sequence[Any]) -> list[Sharding | None]:
    """Where the target says that its leaves lie."""
    if jax.device_count() == 1 and all(isinstance(value, jax.Array) for value in values):
        return [value.sharding for value in values]  # there is nowhere else to be
    return [committed_sharding(value) for value in values]


def _saved(source: Any, rows: Iterable[Row]) -> Mapping[str, Sharding]:
    """Where the checkpoint had the leaves that some rows need, as far as it says so."""
    names = [row.sources[0] for row in rows if row.sources]
    return source.shardings(names) if names and isinstance(source, HasShardings) else {}


def _anchor(known: Sequence[Any], asked: Any, saved: Iterable[Sharding]) -> tuple[Any, bool]:
    """A sharding on the devices that all leaves share, if any, and whether the target says so.

    A leaf of the target on one device says nothing of those that the checkpoint had on several.
    """
    meshed = next((place for place in known if isinstance(place, NamedSharding)), None)
    if meshed is not None:
        return meshed, True
    there = [x for x in saved if isinstance(x, NamedSharding) and not _is_abstract(x)]
    if asked is None:
        widest = max(there, key=lambda place: place.mesh.size, default=None)
        return (widest or next(iter(known), None)), False
    meshes: list[Any] = [_current_mesh(), *(place.mesh for place in there)]
    mesh = next((mesh for mesh in meshes if _is_same(mesh, asked.mesh)), None)
    if mesh is None:
        return None, False
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=asked.mesh.axis_types)
    return NamedSharding(mesh, PartitionSpec()), True


def _as_saved(row: Row, saved: Any, anchor: Any, is_elsewhere: bool) -> Any:
    """Where the checkpoint had a leaf; on the devices of the target, if those are known."""
    was_on = saved.mesh if isinstance(saved, NamedSharding) else None
    mesh = anchor.mesh if isinstance(anchor, NamedSharding) else None
    is_one = mesh is None or mesh.size == 1
    if is_one and not is_elsewhere and was_on is not None and was_on.size > 1:
        return saved  # where it is not here either, that is an error
    if mesh is None:
        return anchor
    is_plain = not row.how and "reshape" not in row.kinds
    stays = was_on == mesh or not (is_elsewhere or _is_abstract(saved))
    # The data of PRNG keys have a dimension more.
    if was_on is not None and is_plain and stays and len(saved.spec) <= len(row.leaf.shape):
        return saved
    return _on(anchor, _spec(row, saved), row.leaf.shape)


def _spec(row: Row, saved: Any) -> list[Any]:
    """How the dimensions of a leaf were sharded, from what it is made of."""
    if not isinstance(saved, NamedSharding) or row.how in ("maxima", "first"):
        return []
    if not row.how and "reshape" not in row.kinds:
        return [*saved.spec]  # no longer: a compiled function takes that for another sharding
    rank = len(row.leaf.shape) + {"stack": -1, "slice": 1}.get(row.how, 0)
    spec = [*saved.spec, *[None] * (rank - len(saved.spec))]
    if len(spec) != rank or "reshape" in row.kinds:
        return []
    if row.how == "stack":
        spec.insert(row.axis, None)
    elif row.how == "slice":
        del spec[row.axis]
    return spec


def _on(anchor: Any, spec: Sequence[Any], shape: Sequence[int]) -> Any:
    """A sharding on the devices of another, by the axes of a spec that it has and that divide."""
    if not isinstance(anchor, NamedSharding):
        return anchor
    entries, sizes = [], anchor.mesh.shape
    for size, entry in zip(shape, spec, strict=False):
        axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        fits = all(axis in sizes for axis in axes)
        fits = fits and size % math.prod(sizes[axis] for axis in axes) == 0
        entries.append(entry if fits else None)
    return NamedSharding(anchor.mesh, PartitionSpec(*entries))


def _check(plan: Plan[Any], found: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raises a `LeafError` for leaves that were sharded, or are to be, and have no devices."""
    lost = [row for row in plan.target_rows if _is_abstract(found[row.leaf.name])]
    if not lost:
        return
    first, count = lost[0], len(lost)
    place: Any = found[first.leaf.name]
    axes = ", ".join(f"{axis}={size}" for axis, size in place.mesh.shape.items())
    more = f" and {count - 1} more" if count > 1 else ""
    was: Any = saved.get(first.sources[0]) if first.sources else None
    if place is was:
        why = (
            f"saved on a mesh of {place.mesh.size} devices ({axes}) that this process does not "
            "have, and nothing says where to place it now"
        )
    else:
        why = f"the target's mesh ({axes}) is an `AbstractMesh`, which has no devices"
    raise LeafError(f"`{first.leaf.name}`{more}: {why}. {_ADVICE}")


def _place_new(plan: Plan[Any], found: dict[str, Any]) -> None:
    """Places leaves that are initialised like others of their parameters."""
    missing = [row for row in plan.target_rows if found[row.leaf.name] is None and not row.sources]
    if not missing:
        return
    params: Any = jax.tree.structure(plan.view.optimizer.target)
    leaves = [(row.leaf, found[row.leaf.name]) for row in plan.target_rows]
    states = [(leaf, place) for leaf, place in leaves if leaf.transformation]
    states += _places_of_source(plan, [place for _, place in leaves])
    new = Places(
        params.unflatten([_placed(*pair) for pair in leaves[: params.num_leaves]]),
        [_placed(*pair) for pair in states],
        [leaf.description for leaf, _ in states],
    )
    for row in missing:
        found[row.leaf.name] = new.of(row.leaf.description, row.leaf.shape)


def _places_of_source(plan: Plan[Any], known: Sequence[Any]) -> list[tuple[LeafInfo, Any]]:
    """Where the source has leaves that follow parameters, on the meshes of the target."""
    if not isinstance(plan.source, HasShardings):
        return []
    meshes = [place.mesh for place in known if isinstance(place, NamedSharding)]
    leaves = {x.name: x for x in plan.source.schema.leaves if x.transformation and x.parameter}
    places = plan.source.shardings(leaves) if meshes else {}
    return [
        (leaves[name], place)
        for name, place in places.items()
        if isinstance(place, NamedSharding) and place.mesh in meshes
    ]


def _placed(leaf: LeafInfo, place: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, jnp.int8, sharding=place)


def _is_abstract(place: Any) -> bool:
    return isinstance(place, NamedSharding) and isinstance(place.mesh, AbstractMesh)


def _is_same(mesh: Any, other: Any) -> bool:
    """Whether a mesh has devices for the axes of another."""
    return isinstance(mesh, Mesh) and [*mesh.shape.items()] == [*other.shape.items()]


def _current_mesh() -> Mesh | None:
    """The mesh that `jax.set_mesh` was given, if any."""
    current = jax.sharding.get_abstract_mesh()
    if current.empty:
        return None
    place = jax.jit(lambda: jnp.zeros(()), out_shardings=PartitionSpec())().sharding
    mesh = place.mesh if isinstance(place, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) else None
