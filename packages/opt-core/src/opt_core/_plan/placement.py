"""Where the leaves of a target go: what the caller, the target and the source say of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from opt_core._arrays import committed_sharding, is_abstract, placed
from opt_core._describe import describe_state
from opt_core._optimizer import Optimizer, OptimizerState
from opt_core._paths import Names, flatten_with_paths, path_str
from opt_core._plan.leaves import HasShardings, LeafInfo, View, named_leaves
from opt_core._plan.plan import Plan, Row
from opt_core.errors import LeafError


class Places:
    """The default placement of new leaves.

    They are placed like a leaf of the old state that follows the same dimensions of the same
    parameter, so that moments sharded further by ZeRO stay so; otherwise like the parameter.

    Args:
      params: the path, the shape and the place of each parameter.
      state: the description, the shape and the place of each leaf of the old state.
    """

    def __init__(
        self,
        params: Iterable[tuple[Names, Sequence[int], Any]],
        state: Iterable[tuple[LeafInfo, Sequence[int], Any]] = (),
    ) -> None:
        self._params = {names: (shape, place) for names, shape, place in params}
        self._like: dict[Any, Any] = {}
        for about, shape, place in state:
            if about.parameter is not None and about.dimensions and place is not None:
                self._like.setdefault((about.parameter, about.dimensions, tuple(shape)), place)
        known = [place for _, place in self._params.values() if place is not None]
        meshes = [place.mesh for place in known if isinstance(place, NamedSharding)]
        self.whole = NamedSharding(meshes[0], PartitionSpec()) if meshes else None
        self._alone = known[0] if len(set(known)) == 1 and not meshes else None

    def of(self, about: Any, shape: Sequence[int]) -> Sharding | None:
        """Returns the placement of a new leaf with a description; `None` leaves it to JAX."""
        if self.whole is None:
            return self._alone
        like = self._like.get((about.parameter, about.dimensions, tuple(shape)))
        if isinstance(like, NamedSharding):
            return like
        param_shape, place = self._params.get(about.parameter or (), ((), None))
        if about.parameter is None or not isinstance(place, NamedSharding):
            return self.whole
        dims = about.dimensions or (None,) * len(shape)
        spec = (*place.spec, *(None,) * (len(param_shape) - len(place.spec)))
        kept = [
            None if d is None or size != param_shape[d] else spec[d]
            for d, size in zip(dims, shape, strict=True)
        ]
        return NamedSharding(place.mesh, PartitionSpec(*kept), memory_kind=place.memory_kind)


def placed_like_params(optimizer: Optimizer) -> Optimizer:
    """Returns an abstract optimizer whose state lies like its parameters, as far as it is new."""
    leaves, structure = jax.tree.flatten(optimizer.state.param_states)
    params = named_leaves(optimizer.target)
    like = Places((names, np.shape(x), getattr(x, "sharding", None)) for names, x in params)
    found = [
        placed(leaf, like.of(about, np.shape(leaf))) if is_abstract(leaf) else leaf
        for leaf, about in zip(leaves, describe_state(optimizer).leaves, strict=True)
    ]
    step = placed(optimizer.state.step, like.whole)
    return optimizer.replace(state=OptimizerState(step, jax.tree.unflatten(structure, found)))


_ADVICE = (
    "Pass `placement=`: a memory plan or a `Layout` of opt-partition, or one sharding for all "
    "leaves, such as `jax.sharding.SingleDeviceSharding(jax.devices()[0])`; or give the leaves of "
    "the target shardings"
)


def with_placement(view: View, placement: Any) -> View:
    """Returns a view whose leaves lie where a placement says, if they did not say so themselves."""
    for given in (placement, view.placement):
        if given is not None:
            view = _with(view, given)
    return view


def _with(view: View, given: Any) -> View:
    optimizer, others = view.optimizer, view.others
    target, states = optimizer.target, optimizer.state
    if isinstance(given, Sharding):
        others = {names: _put(leaf, given, "params", names) for names, leaf in others.items()}
        target, states = _placed_by(target, given, "params"), _placed_by(states, given, "state")
    else:
        params, state = _parts(given, states)
        if params is not None:
            target = _placed_by(target, params, "params")
        if state is not None and _covers(state, states.param_states):
            states = OptimizerState(states.step, _placed_by(states.param_states, state, "state"))
        elif state is not None:
            states = _placed_by(states, state, "state")
    optimizer = optimizer.replace(target=target, state=states)
    return dataclasses.replace(view, optimizer=optimizer, others=others)


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


def _placed_by(tree: Any, given: Any, kind: str) -> Any:
    """A tree with its leaves where one sharding says, or those of a tree with the same paths."""
    leaves = named_leaves(tree)
    said = dict.fromkeys((names for names, _ in leaves), given)
    if not isinstance(given, Sharding):
        said = _by_path(given)
    for names, place in said.items():
        if place is not None and not isinstance(place, Sharding):
            where = f" for `{path_str((kind, *names))}`" if names else ""
            raise TypeError(
                "`placement`: expected a plan, a `Layout` or shardings, found "
                f"{type(place).__name__}{where}"
            )
    found = []
    for names, leaf in leaves:
        if names not in said:
            raise LeafError(
                f"`placement` says nothing of `{path_str((kind, *names))}`: it has "
                f"{len(said)} leaves, of another optimizer or other parameters. Make it for the "
                "definition and the parameters of the target"
            )
        found.append(_put(leaf, said[names], kind, names))
    return jax.tree.unflatten(jax.tree.structure(tree), found)


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
            f"`placement`: `{path_str((kind, *names))}` of shape {jnp.shape(leaf)} cannot be "
            f"{getattr(sharding, 'spec', sharding)}. Make it for the shapes of the target"
        ) from error
    return placed(leaf, sharding)


def places(plan: Plan[Any]) -> list[Any]:
    """Returns where each leaf of the target goes, in the order of rows; `None` leaves it to JAX."""
    rows, found = plan.target_rows, _own(plan.view.leaves())
    left = [i for i, place in enumerate(found) if place is None or _is_abstract(place)]
    if not left:
        return found
    known = [x for x in found if x is not None and not _is_abstract(x)]
    asked = next(filter(_is_abstract, found), None)
    saved = _saved(plan.source, [rows[i] for i in left])
    anchor, is_elsewhere = _anchor(known, asked, saved.values())
    for i in left:
        row, place = rows[i], found[i]
        if place is not None:
            found[i] = _on(anchor, place.spec, row.leaf.shape) if anchor else place
        elif row.sources:
            found[i] = _as_saved(row, saved.get(row.sources[0]), anchor, is_elsewhere)
    _check(plan, found, saved)
    _place_new(plan, found)
    return found


def _own(values: Sequence[Any]) -> list[Any]:
    """Where the target says that its leaves lie."""
    if jax.device_count() == 1 and all(isinstance(value, jax.Array) for value in values):
        return [value.sharding for value in values]  # there is nowhere else to be
    return [committed_sharding(value) for value in values]


def _saved(source: Any, rows: Iterable[Row]) -> Mapping[str, Sharding]:
    """Where the checkpoint had the leaves that some rows need, as far as it says so."""
    names = [row.sources[0] for row in rows if row.sources]
    return source.shardings(names) if names and isinstance(source, HasShardings) else {}


def _anchor(known: Sequence[Any], asked: Any, saved: Iterable[Sharding]) -> tuple[Any, bool]:
    """A sharding on the devices that all leaves share, if any, and whether the target says so."""
    # A leaf of the target on one device says nothing of those that the checkpoint had on several.
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
    is_plain = row.how is None and "reshape" not in row.kinds
    stays = was_on == mesh or not (is_elsewhere or _is_abstract(saved))
    # The data of PRNG keys have a dimension more.
    if was_on is not None and is_plain and stays and len(saved.spec) <= len(row.leaf.shape):
        return saved
    return _on(anchor, _spec(row, saved), row.leaf.shape)


def _spec(row: Row, saved: Any) -> list[Any]:
    """How the dimensions of a leaf were sharded, from what it is made of."""
    if not isinstance(saved, NamedSharding) or "reshape" in row.kinds:
        return []
    return [*saved.spec] if row.how is None else row.how.leaf_spec([*saved.spec])


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


def _check(plan: Plan[Any], found: Sequence[Any], saved: Mapping[str, Any]) -> None:
    """Raises a `LeafError` for leaves that were sharded, or are to be, and have no devices."""
    rows = zip(plan.target_rows, found, strict=True)
    lost = [(row, place) for row, place in rows if _is_abstract(place)]
    if not lost:
        return
    (first, place), count = lost[0], len(lost)
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


def _place_new(plan: Plan[Any], found: list[Any]) -> None:
    """Places leaves that are initialised like others of their parameters."""
    rows = plan.target_rows
    missing = [i for i, row in enumerate(rows) if found[i] is None and not row.sources]
    if not missing:
        return
    leaves = [(row.leaf, row.leaf.shape, place) for row, place in zip(rows, found, strict=True)]
    params = [(leaf.path[1:], *at) for leaf, *at in leaves if leaf.kind == "params"]
    states = [row for row in leaves if row[0].transformation]
    new = Places(params, [*states, *_places_of_source(plan, found)])
    for i in missing:
        found[i] = new.of(rows[i].leaf, rows[i].leaf.shape)


def _places_of_source(
    plan: Plan[Any], known: Sequence[Any]
) -> Iterator[tuple[LeafInfo, tuple[int, ...], Any]]:
    """Where the source has leaves that follow parameters, on the meshes of the target."""
    meshes = [place.mesh for place in known if isinstance(place, NamedSharding)]
    if not meshes or not isinstance(plan.source, HasShardings):
        return
    leaves = {x.name: x for x in plan.source.schema.leaves if x.transformation and x.parameter}
    for name, place in plan.source.shardings(leaves).items():
        if isinstance(place, NamedSharding) and place.mesh in meshes:
            yield leaves[name], leaves[name].shape, place


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
