"""Where each leaf of a restore goes: decided once, before anything is read.

A leaf goes, in this order,

1. where the target has it, if the target says so;
2. where the optimizer is known to have it: `placement=`, or what an `opt_nnx.Optimizer` keeps;
3. where the checkpoint had it, if those devices are here. If the target or a placement has a mesh,
   a leaf that they say nothing of is sharded as it was over the axes which that mesh has;
4. to JAX's default device, if nothing in the checkpoint was on several devices. A leaf that was,
   and whose devices are not here, is an error: a model that needed a mesh would silently end on
   one device, and fail in the next step or for want of memory.

`with_placement` makes 1 of 2, so that planning and everything after it see one kind of target;
`places` does the rest.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from opt_core._optimizer import OptimizerState
from opt_core._paths import Names, flatten_with_paths
from opt_core._plan.names import named_leaves
from opt_core._plan.placement import Places, committed_sharding, placed
from opt_core._plan.plan import Plan, Row
from opt_core._plan.schema import HasShardings, LeafInfo, leaf_name
from opt_core._plan.view import View
from opt_core.errors import LeafError

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
