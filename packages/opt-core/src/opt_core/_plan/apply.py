"""Carrying out a plan: read and convert the leaves that are used, make the rest, place all."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from opt_core._description import describe_state
from opt_core._optimizer import Optimizer, OptimizerState
from opt_core._plan.leaves import (
    HeldState,
    LeafInfo,
    Schema,
    View,
    abstract,
    is_wide,
    shown,
)
from opt_core._plan.plan import Plan, Row
from opt_core._plan.rules import Conversion, Padded
from opt_core._plan.stored import PlainOptimizer, PlainSource
from opt_core._plan.values import copies_parameter
from opt_core._trees import (
    Names,
    all_survive,
    committed_sharding,
    convert_held,
    flatten_with_paths,
    has_no_devices,
    is_abstract,
    named_leaves,
    on_devices_of,
    path_str,
    placed,
    strip_weak_type,
    unalias,
)
from opt_core.errors import LeafError


def apply_plan(plan: Plan[Any]) -> tuple[Optimizer, dict[Names, Any]]:
    """Returns the restored optimizer and other leaves; the plan has been checked."""
    view = plan.view
    values, places = view.leaves(), places_of(plan)
    held = plan.source if isinstance(plan.source, HeldState) else None
    if held is not None and held.is_abstract:
        shapes = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values)
        return view.rebuilt([placed(*pair) for pair in zip(shapes, places, strict=True)])
    leaves, growing = _from_source(plan, values, places)
    _initialise(plan, leaves, growing, places)
    optimizer, others = view.rebuilt(leaves)
    if view.stored is not None and isinstance(plan.source, PlainSource):
        optimizer = view.stored.stored_again(optimizer, plan.target_rows, plan.source)
    # Surgery hands leaves over; a restore shares nothing with its target.
    shared = [x for x in values if isinstance(x, jax.Array)] if held is None else []
    result: tuple[Optimizer, dict[Names, Any]] = unalias((optimizer, others), apart_from=shared)
    return result


def _from_source(
    plan: Plan[Any], values: Sequence[Any], places: Sequence[Any]
) -> tuple[list[Any], dict[int, Any]]:
    """Leaves from the source or the target itself, and saved ones that `init` makes longer."""
    # The leaves that `init` makes, or makes longer, are `None`.
    arrays = plan.source.read(_wanted(plan, places))
    uses = Counter(name for row in plan.target_rows for name in row.sources)
    leaves: list[Any] = []
    growing: dict[int, Any] = {}
    checks: list[tuple[Any, Row]] = []
    for i, (row, value) in enumerate(zip(plan.target_rows, values, strict=True)):
        leaves.append(_leaf(row, value, arrays, places[i], checks))
        if _grows(row):
            growing[i] = arrays[row.sources[0]]
        for name in row.sources:
            uses[name] -= 1
            if not uses[name]:
                del arrays[name]
    _raise_misfits(checks)
    return leaves, growing


def _initialise(
    plan: Plan[Any], leaves: list[Any], growing: dict[int, Any], places: Sequence[Any]
) -> None:
    """Puts what `init` makes of the restored parameters in the place of leaves that are `None`."""
    wanted = [i for i, leaf in enumerate(leaves) if leaf is None]
    if not wanted:
        return
    restored, _ = plan.view.rebuilt(leaves)
    optimizer = plan.view.optimizer.replace(target=restored.target)
    params = dict(named_leaves(optimizer.target))
    # What was read is committed to a device; beside it, what is not is compiled for again.
    there = {committed_sharding(leaf) for leaf in leaves if isinstance(leaf, jax.Array)}
    alone = there.pop() if len(there) == 1 else None
    checks: list[tuple[Any, Row]] = []
    for i, leaf in _initial_leaves(optimizer, wanted, places, plan.view.stored).items():
        if i in growing:
            row, saved, place = plan.target_rows[i], growing.pop(i), places[i]
            new = params[row.leaf.parameter or ()] if copies_parameter(row.leaf) else leaf
            if isinstance(place, NamedSharding):  # on explicit meshes, what is joined has one
                new = placed(new, _source_sharding(row, saved.shape, place))
            leaf = _converted(row, [saved, new], place, checks)
        leaves[i] = placed(leaf, alone if places[i] is None else places[i])
    _raise_misfits(checks)


def _wanted(plan: Plan[Any], places: Sequence[Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """What to read, each into the sharding of the first leaf that it is for, where that fits."""
    saved = plan.source.schema.by_name
    wanted: dict[str, jax.ShapeDtypeStruct] = {}
    for row, place in zip(plan.target_rows, places, strict=True):
        for name in row.sources:
            if name not in wanted:
                like = _source_sharding(row, saved[name].shape, place)
                wanted[name] = abstract(saved[name], like)
    return wanted


def _source_sharding(row: Row, shape: tuple[int, ...], sharding: Any) -> Any:
    """Where to read a leaf of the checkpoint for the leaf of the target that it becomes."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    if row.leaf.shape and "reshape" in row.kinds:
        return sharding.update(spec=PartitionSpec())
    spec = [*sharding.spec] if row.how is None else row.how.source_spec([*sharding.spec])
    place = sharding.update(spec=PartitionSpec(*spec))
    try:
        place.shard_shape(shape)
    except ValueError:  # as the result of a function lies, its argument cannot
        place = sharding.update(spec=PartitionSpec())
    return place


def _leaf(
    row: Row,
    value: Any,
    arrays: Mapping[str, Any],
    sharding: Any,
    checks: list[tuple[Any, Row]],
) -> Any:
    """The leaf of the target, `None` where `init` makes it or a part of it."""
    if row.by == "keep" or (row.action == "initialised" and row.leaf.kind == "params"):
        array = strip_weak_type(value) if isinstance(value, jax.Array) else jnp.asarray(value)
        return placed(array, sharding)
    if row.action == "initialised":
        return None
    sources = [arrays[name] for name in row.sources]
    has_64_bits = any(map(_is_on_host, sources))
    if has_64_bits and "cast" not in row.kinds:
        raise LeafError(
            f"`{row.leaf.name}`: {row.leaf.dtype} needs `jax_enable_x64`: set it, or give the "
            "target another dtype and admit `'cast'`."
        )
    if _grows(row):
        return None
    if row.how is None and not set(row.kinds) & {"cast", "reshape"}:
        return placed(sources[0], sharding)
    return placed(_converted(row, sources, sharding, checks), sharding)


def _grows(row: Row) -> bool:
    """Whether a leaf of the state gets the further entries of an initial state."""
    return isinstance(row.how, Padded) and row.leaf.kind == "state"


def _is_on_host(array: Any) -> bool:
    """Whether a source has given NumPy's array, as JAX cannot hold 64 bits here."""
    return isinstance(array, np.ndarray) and is_wide(array.dtype)


def _converted(
    row: Row, sources: Sequence[Any], sharding: Any, checks: list[tuple[Any, Row]]
) -> Any:
    """A leaf computed from others; whether all values survive is added to the checks."""
    arrays = [_cast_on_host(row, x) if _is_on_host(x) else x for x in sources]
    out = sharding if isinstance(sharding, NamedSharding) else None
    convert = _compiled_converter(row.how, row.leaf.shape, row.leaf.dtype, out)
    array, fits = _paced(convert(arrays))
    checks.append((fits, row))
    return array


@functools.lru_cache(maxsize=1024)
def _compiled_converter(
    how: Conversion | None, shape: tuple[int, ...], dtype: str, sharding: Any
) -> Any:
    def convert(sources: list[Any]) -> tuple[Any, Any]:
        values = sources[0] if how is None else how.values(sources, shape)
        values = jnp.reshape(values, shape)
        cast = values if dtype.startswith("key<") else values.astype(dtype)
        return cast, all_survive(values, cast)

    return jax.jit(convert, out_shardings=None if sharding is None else (sharding, None))


def _cast_on_host(row: Row, array: Any) -> np.ndarray[Any, Any]:
    cast, lost = convert_held(np.asarray(array), jnp.dtype(row.leaf.dtype))
    if lost is not None:
        raise _misfit(row)
    return cast


def _raise_misfits(checks: Sequence[tuple[Any, Row]]) -> None:
    for good, (_, row) in zip(jax.device_get([fits for fits, _ in checks]), checks, strict=True):
        if not good:
            raise _misfit(row)


def _misfit(row: Row) -> LeafError:
    return LeafError(
        f"`{row.leaf.name}`: a value does not fit {row.leaf.dtype} ({row.note}). "
        "Restore it in its own dtype, or initialise it by a rule."
    )


def _paced(arrays: Any) -> Any:
    """Returns the arrays; of several CPU devices, once they are computed."""
    # XLA's CPU client launches a program for several devices on the threads that also run it. With
    # 32 in flight on a device, the launch of the next blocks these threads, and parts of a
    # collective wait for ever (`max_inflight_computations` in `xla/pjrt/cpu/cpu_client.cc`, seen
    # with jaxlib 0.10.2). Accelerators have queues of their own.
    for leaf in jax.tree.leaves(arrays):
        devices: Any = leaf.sharding.device_set if isinstance(leaf, jax.Array) else ()
        if len(devices) > 1 and next(iter(devices)).platform == "cpu":
            return jax.block_until_ready(arrays)
    return arrays


def unlike_initial(view: View, schema: Schema) -> Mapping[str, str]:
    """Returns, by name, why `init` does not make leaves of a target's state as they are there."""
    infos = [leaf for leaf in schema.leaves if leaf.kind == "state"]

    def make(params: Any) -> list[Any]:
        state = view.optimizer.optimizer_def.create(params).state
        return [*jax.tree.leaves(state.step), *_plain_leaves(state.param_states, view.stored)]

    try:
        initial = jax.eval_shape(make, view.optimizer.target)
    except Exception as error:  # whatever a user's `init` raises
        text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return dict.fromkeys((leaf.name for leaf in infos), f"`init` raises {text}")
    if len(initial) != len(infos):
        why = f"`init` makes {len(initial)} leaves, the target's state has {len(infos)}"
        return dict.fromkeys((leaf.name for leaf in infos), why)
    return {
        leaf.name: f"`init` makes {shown(shape)} here, expected {shown(leaf)}"
        for leaf, shape in zip(infos, initial, strict=True)
        if (tuple(shape.shape), str(shape.dtype)) != (leaf.shape, leaf.dtype)
    }


def _plain_leaves(states: Any, stored: PlainOptimizer | None) -> list[Any]:
    """The leaves of initial `param_states`, as they are in a plan."""
    return jax.tree.leaves(states if stored is None else stored.plain_state(states))


def _initial_leaves(
    optimizer: Optimizer, wanted: Sequence[int], places: Sequence[Any], stored: Any
) -> dict[int, Any]:
    """Some leaves of a state as `init` makes them from the optimizer's parameters."""
    # They are created group by group in a compiled function that creates nothing else, so that no
    # device ever holds more than its share of them. Positions are those of the leaves of a view.
    structure: Any = jax.tree.structure(optimizer.state.param_states)
    left = frozenset(wanted)
    first = len(places) - structure.num_leaves
    initial: dict[int, Any] = {i: jnp.zeros((), jnp.int32) for i in wanted if i < first}
    positions = structure.unflatten(range(first, len(places)))
    numbered = optimizer.replace(state=OptimizerState(optimizer.state.step, positions))
    for _, part in numbered.optimizer_def.leaf_groups(numbered):
        of_part = jax.tree.leaves(part.state.param_states)
        chosen = [k for k, i in enumerate(of_part) if i in left]
        if chosen:
            meshed = [
                x if isinstance(x := places[of_part[k]], NamedSharding) else None for k in chosen
            ]
            leaves = _created(part, chosen, meshed, stored)
            initial |= {of_part[k]: leaf for k, leaf in zip(chosen, leaves, strict=True)}
    return initial


def _created(
    part: Optimizer, chosen: Sequence[int], places: Sequence[Any], stored: Any
) -> list[Any]:
    def make(params: Any) -> list[Any]:
        leaves = _plain_leaves(part.optimizer_def.create(params).state.param_states, stored)
        return [leaves[k] for k in chosen]

    if any(map(is_abstract, jax.tree.leaves(part.target))):
        shapes = jax.eval_shape(make, part.target)
        return [placed(leaf, place) for leaf, place in zip(shapes, places, strict=True)]
    leaves: list[Any] = jax.jit(make, out_shardings=list(places))(part.target)
    return leaves


# Where leaves go: what the caller, the target and the source say of it.


class Places:
    """The default placement of new leaves.

    They are placed like a leaf of the old state that follows the same dimensions of the same
    parameter, so that moments sharded further by ZeRO stay so; otherwise like the parameter.
    """

    def __init__(
        self,
        params: Iterable[tuple[Names, Sequence[int], Any]],  # path, shape and place
        state: Iterable[tuple[LeafInfo, Any]] = (),  # of the old state, with their places
    ) -> None:
        self._params = {names: (shape, place) for names, shape, place in params}
        self._like: dict[Any, Any] = {}
        for about, place in state:
            if about.parameter is not None and about.dimensions and place is not None:
                self._like.setdefault((about.parameter, about.dimensions, about.shape), place)
        known = [place for _, place in self._params.values() if place is not None]
        meshes = [place.mesh for place in known if isinstance(place, NamedSharding)]
        self.replicated = NamedSharding(meshes[0], PartitionSpec()) if meshes else None
        self._alone = known[0] if len(set(known)) == 1 and not meshes else None

    def of(self, about: Any, shape: Sequence[int]) -> Sharding | None:
        """Returns the placement of a new leaf with a description; `None` leaves it to JAX."""
        if self.replicated is None:
            return self._alone
        like = self._like.get((about.parameter, about.dimensions, tuple(shape)))
        if isinstance(like, NamedSharding):
            return like
        param_shape, place = self._params.get(about.parameter or (), ((), None))
        if about.parameter is None or not isinstance(place, NamedSharding):
            return self.replicated
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
    placed_leaves = [
        placed(leaf, like.of(about, np.shape(leaf))) if is_abstract(leaf) else leaf
        for leaf, about in zip(leaves, describe_state(optimizer).leaves, strict=True)
    ]
    step = placed(optimizer.state.step, like.replicated)
    state = OptimizerState(step, jax.tree.unflatten(structure, placed_leaves))
    return optimizer.replace(state=state)


_ADVICE = (
    "Pass `placement=`: a memory plan or a `Layout` of opt-partition, or one sharding for all "
    "leaves, such as `jax.sharding.SingleDeviceSharding(jax.devices()[0])`; or give the leaves of "
    "the target shardings, of a Flax NNX pair by `mesh=` of `opt_nnx.Optimizer`"
)


def with_placement(view: View, placement: Any) -> View:
    """Returns a view whose leaves lie where a placement says, if they did not say so themselves."""
    for said in (placement, view.placement):
        if said is not None:
            view = _with(view, said)
    return view


def _with(view: View, placement: Any) -> View:
    optimizer, others = view.optimizer, view.others
    target, states = optimizer.target, optimizer.state
    if isinstance(placement, Sharding):
        others = {names: _put(leaf, placement, "params", names) for names, leaf in others.items()}
        target = _placed_by(target, placement, "params")
        states = _placed_by(states, placement, "state")
    else:
        params, state = _parts(placement, states)
        if params is not None:
            target = _placed_by(target, params, "params")
        if state is not None and _covers(state, states.param_states):
            states = OptimizerState(states.step, _placed_by(states.param_states, state, "state"))
        elif state is not None:
            states = _placed_by(states, state, "state")
    optimizer = optimizer.replace(target=target, state=states)
    return dataclasses.replace(view, optimizer=optimizer, others=others)


def _parts(placement: Any, states: OptimizerState) -> tuple[Any, Any]:
    """What a placement says of the parameters, and of the state."""
    tree = getattr(placement, "shardings", placement)
    params = getattr(tree, "params", None)
    state = getattr(tree, "state", getattr(tree, "opt_state", None))
    if params is not None and state is not None:
        return params, state
    has_leaves = bool(named_leaves(states.param_states))
    if has_leaves and (_covers(tree, states.param_states) or _covers(tree, states)):
        return None, tree
    return tree, None


def _covers(placement: Any, tree: Any) -> bool:
    """Whether a tree of shardings has all paths of another."""
    return {_unboxed(names) for names, _ in named_leaves(tree)} <= _by_path(placement).keys()


def _by_path(tree: Any) -> dict[Names, Any]:
    leaves = flatten_with_paths(getattr(tree, "shardings", tree))
    return {_unboxed(names): leaf for names, leaf in leaves}


def _unboxed(names: Names) -> Names:
    """A path without the attribute of a Flax box or variable: a plan may be of either tree."""
    # A leaf of the shorter path would be in the place of the box, so no two paths become one.
    return names[:-1] if names[-1:] == ("value",) else names


def _placed_by(tree: Any, placement: Any, kind: str) -> Any:
    """A tree with its leaves where one sharding says, or those of a tree with the same paths."""
    leaves = named_leaves(tree)
    said = dict.fromkeys((_unboxed(names) for names, _ in leaves), placement)
    if not isinstance(placement, Sharding):
        said = _by_path(placement)
    for names, place in said.items():
        if place is not None and not isinstance(place, Sharding):
            where = f" for `{path_str((kind, *names))}`" if names else ""
            raise TypeError(
                "`placement`: expected a plan, a `Layout` or shardings, found "
                f"{type(place).__name__}{where}"
            )
    result = []
    for names, leaf in leaves:
        if _unboxed(names) not in said:
            raise LeafError(
                f"`placement` says nothing of `{path_str((kind, *names))}`: it has "
                f"{len(said)} leaves, of another optimizer or other parameters. Make it for the "
                "definition and the parameters of the target"
            )
        result.append(_put(leaf, said[_unboxed(names)], kind, names))
    return jax.tree.unflatten(jax.tree.structure(tree), result)


def _put(leaf: Any, sharding: Sharding | None, kind: str, names: Names) -> Any:
    """A leaf where a sharding says, unless it names devices itself."""
    own = committed_sharding(leaf)
    if sharding is None or (own is not None and not has_no_devices(own)):
        return leaf
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        mesh = _current_mesh()
        if mesh is not None and _is_same(mesh, sharding.mesh):
            sharding = NamedSharding(mesh, sharding.spec)
        elif not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
    _check_shape(f"`placement`: `{path_str((kind, *names))}`", jnp.shape(leaf), sharding)
    return placed(leaf, sharding)


def _check_shape(what: str, shape: tuple[int, ...], sharding: Sharding) -> None:
    """Raises a `LeafError` for a sharding of another rank, or one that does not divide a shape."""
    try:
        sharding.shard_shape(shape)
    except (IndexError, ValueError) as error:
        raise LeafError(
            f"{what} of shape {shape} cannot be {getattr(sharding, 'spec', sharding)}. Give it a "
            "sharding whose axes divide its dimensions"
        ) from error


def places_of(plan: Plan[Any]) -> list[Any]:
    """Returns where each leaf of the target goes, in the order of rows; `None` leaves it to JAX."""
    rows, places = plan.target_rows, _target_places(plan.view.leaves())
    for row, place in zip(rows, places, strict=True):
        if place is not None:
            _check_shape(f"`{row.leaf.name}`", row.leaf.shape, place)
    left = [i for i, place in enumerate(places) if place is None or has_no_devices(place)]
    if not left:
        return places
    known = [x for x in places if x is not None and not has_no_devices(x)]
    asked = next(filter(has_no_devices, places), None)
    names = [rows[i].sources[0] for i in left if rows[i].sources]
    saved = plan.source.shardings(names) if names else {}
    anchor, is_elsewhere = _anchor(known, asked, saved.values())
    for i in left:
        row, place = rows[i], places[i]
        if place is not None:
            places[i] = on_devices_of(anchor, place.spec, row.leaf.shape) if anchor else place
        elif row.sources:
            places[i] = _as_saved(row, saved.get(row.sources[0]), anchor, is_elsewhere)
    _check(plan, places, saved)
    _place_new(plan, places)
    return places


def _target_places(values: Sequence[Any]) -> list[Any]:
    """The shardings that the target states for its leaves."""
    if jax.device_count() == 1 and all(isinstance(value, jax.Array) for value in values):
        return [value.sharding for value in values]  # there is nowhere else to be
    return [committed_sharding(value) for value in values]


def _anchor(known: Sequence[Any], asked: Any, saved: Iterable[Sharding]) -> tuple[Any, bool]:
    """A sharding on the devices that all leaves share, if any, and whether the target says so."""
    # A leaf of the target on one device says nothing of those that the checkpoint had on several.
    meshed = next((place for place in known if isinstance(place, NamedSharding)), None)
    if meshed is not None:
        return meshed, True
    there = [x for x in saved if isinstance(x, NamedSharding) and not has_no_devices(x)]
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
    stays = was_on == mesh or not (is_elsewhere or has_no_devices(saved))
    # The data of PRNG keys have a dimension more.
    if was_on is not None and is_plain and stays and len(saved.spec) <= len(row.leaf.shape):
        return saved
    return on_devices_of(anchor, _spec(row, saved), row.leaf.shape)


def _spec(row: Row, saved: Any) -> list[Any]:
    """How the dimensions of a leaf were sharded, from what it is made of."""
    if not isinstance(saved, NamedSharding) or "reshape" in row.kinds:
        return []
    return [*saved.spec] if row.how is None else row.how.leaf_spec([*saved.spec])


def _check(plan: Plan[Any], places: Sequence[Any], saved: Mapping[str, Any]) -> None:
    """Raises a `LeafError` for leaves that were sharded, or are to be, and have no devices."""
    rows = zip(plan.target_rows, places, strict=True)
    lost = [(row, place) for row, place in rows if has_no_devices(place)]
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


def _place_new(plan: Plan[Any], places: list[Any]) -> None:
    """Places leaves that are initialised like others of their parameters."""
    rows = plan.target_rows
    missing = [i for i, row in enumerate(rows) if places[i] is None and not row.sources]
    if not missing:
        return
    leaves = [(row.leaf, place) for row, place in zip(rows, places, strict=True)]
    params = [(x.path[1:], x.shape, place) for x, place in leaves if x.kind == "params"]
    states = [(leaf, place) for leaf, place in leaves if leaf.transformation]
    new = Places(params, [*states, *_places_of_source(plan, places)])
    for i in missing:
        places[i] = new.of(rows[i].leaf, rows[i].leaf.shape)


def _places_of_source(plan: Plan[Any], known: Sequence[Any]) -> Iterator[tuple[LeafInfo, Any]]:
    """Where the source has leaves that follow parameters, on the meshes of the target."""
    meshes = [place.mesh for place in known if isinstance(place, NamedSharding)]
    if not meshes:
        return
    leaves = {x.name: x for x in plan.source.schema.leaves if x.transformation and x.parameter}
    for name, place in plan.source.shardings(leaves).items():
        if isinstance(place, NamedSharding) and place.mesh in meshes:
            yield leaves[name], place


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
