"""Carrying out a plan: read the leaves that are used, convert them, initialise the rest."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from opt_core._arrays import (
    all_survive,
    convert_held,
    is_abstract,
    placed,
    strip_weak_type,
    unalias,
)
from opt_core._groups.multi_optimizer import leaf_groups
from opt_core._optimizer import Optimizer, OptimizerState
from opt_core._paths import Names
from opt_core._plan.conversions import Conversion, Mapped, Padded
from opt_core._plan.leaves import HeldState, Schema, View, is_wide, named_leaves, shown
from opt_core._plan.placement import places as decide_places
from opt_core._plan.plan import Plan, Row
from opt_core._plan.rules import abstract, function_name
from opt_core._plan.stored import stored_again
from opt_core._plan.values import copies_parameter
from opt_core._storage import PlainOptimizer
from opt_core.errors import LeafError


def apply_plan(plan: Plan[Any]) -> tuple[Optimizer, dict[Names, Any]]:
    """Returns the restored optimizer and other leaves; the plan has been checked."""
    view = plan.view
    values, places = view.leaves(), decide_places(plan)
    held = plan.source if isinstance(plan.source, HeldState) else None
    if held is not None and held.is_abstract:
        shapes = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values)
        return view.rebuilt([placed(*pair) for pair in zip(shapes, places, strict=True)])
    leaves, growing = _from_source(plan, values, places)
    _initialise(plan, leaves, growing, places)
    optimizer, others = view.rebuilt(leaves)
    if view.stored is not None:
        optimizer = stored_again(plan, optimizer)
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
    checks: dict[str, Any] = {}
    for i, (row, value) in enumerate(zip(plan.target_rows, values, strict=True)):
        leaves.append(_leaf(row, value, arrays, places[i], checks, plan.allow))
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
    checks: dict[str, Any] = {}
    for i, leaf in _initial_leaves(optimizer, wanted, places, plan.view.stored).items():
        if i in growing:
            row = plan.target_rows[i]
            new = params[row.leaf.parameter or ()] if copies_parameter(row.leaf) else leaf
            leaf = _grown(row, growing.pop(i), new, places[i], checks)
        leaves[i] = placed(leaf, places[i])
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
    checks: dict[str, Any],
    allow: frozenset[str],
) -> Any:
    """The leaf of the target, `None` where `init` makes it or a part of it."""
    if row.by == "keep" or (row.action == "initialised" and row.leaf.kind == "params"):
        array = strip_weak_type(value) if isinstance(value, jax.Array) else jnp.asarray(value)
        return placed(array, sharding)
    if row.action == "initialised":
        return None
    given = [arrays[name] for name in row.sources]
    has_64_bits = any(isinstance(x, np.ndarray) and is_wide(x.dtype) for x in given)
    if has_64_bits and "cast" not in row.kinds:
        raise LeafError(
            f"`{row.leaf.name}`: {row.leaf.dtype} needs `jax_enable_x64`: set it, or give the "
            "target another dtype and admit `'cast'`."
        )
    if _grows(row):
        return None
    if row.how is None and not set(row.kinds) & {"cast", "reshape"}:
        return placed(given[0], sharding)
    if isinstance(row.how, Mapped) and row.how.is_opaque:
        made, fits = _called(row, row.how, given, allow)
    else:
        if has_64_bits:  # JAX cannot hold them here, so the source gives NumPy's
            given = [_cast_on_host(row, x) for x in given]
        out = sharding if isinstance(sharding, NamedSharding) else None
        convert = _compiled_converter(row.how, row.leaf.shape, row.leaf.dtype, out)
        made, fits = _paced(convert(given))
    checks[row.leaf.name] = (fits, row)
    return placed(made, sharding)


def _grows(row: Row) -> bool:
    """Whether a leaf of the state gets the further entries of an initial state."""
    return isinstance(row.how, Padded) and row.leaf.kind == "state"


def _grown(row: Row, saved: Any, initial: Any, sharding: Any, checks: dict[str, Any]) -> Any:
    """Returns a saved leaf with the further entries of an initial one, or of its parameter."""
    axis = row.how.axis if isinstance(row.how, Padded) else 0
    if isinstance(saved, np.ndarray) and is_wide(saved.dtype):
        saved = _cast_on_host(row, saved)
    out = sharding if isinstance(sharding, NamedSharding) else None
    if out is not None:  # on explicit meshes, what is joined has one sharding
        initial = placed(initial, _source_sharding(row, saved.shape, sharding))
    made, fits = _paced(_compiled_growth(axis, row.leaf.dtype, out)(saved, initial))
    checks[row.leaf.name] = (fits, row)
    return made


@functools.lru_cache(maxsize=256)
def _compiled_growth(axis: int, dtype: str, sharding: Any) -> Any:
    def grow(saved: Any, initial: Any) -> tuple[Any, Any]:
        cast = saved.astype(dtype)
        new = jax.lax.slice_in_dim(initial, saved.shape[axis], None, axis=axis).astype(dtype)
        return jnp.concatenate([cast, new], axis), all_survive(saved, cast)

    return jax.jit(grow, out_shardings=None if sharding is None else (sharding, None))


def _called(row: Row, by: Mapped, given: list[Any], allow: frozenset[str]) -> tuple[Any, Any]:
    """What a function makes that needs values: nothing of it was known before."""
    leaf, name = row.leaf, function_name(by.fn)
    try:
        found = by.fn(*given)
    except Exception as error:
        raise LeafError(
            f"`{leaf.name}`: `{name}` raises {type(error).__name__}: {error}"
        ) from error
    is_array = isinstance(found, jax.Array | np.ndarray | np.generic)
    result = shown(found) if is_array else type(found).__name__
    may_cast = "cast" in allow and not leaf.is_key
    is_right = is_array and found.shape == leaf.shape
    if not is_right or (str(found.dtype) != leaf.dtype and not may_cast):
        expected = f"one array {leaf}"
        raise LeafError(f"`{leaf.name}`: `{name}` returns {result}, expected {expected}")
    if leaf.is_key:
        return found, True
    with np.errstate(all="ignore"):
        made = found.astype(jnp.dtype(leaf.dtype))
        return jnp.asarray(made), all_survive(found, made)


@functools.lru_cache(maxsize=1024)
def _compiled_converter(
    how: Conversion | None, shape: tuple[int, ...], dtype: str, sharding: Any
) -> Any:
    def convert(given: list[Any]) -> tuple[Any, Any]:
        values = given[0] if how is None else how.values(given, shape)
        values = jnp.reshape(values, shape)
        cast = values if dtype.startswith("key<") else values.astype(dtype)
        return cast, all_survive(values, cast)

    return jax.jit(convert, out_shardings=None if sharding is None else (sharding, None))


def _cast_on_host(row: Row, array: Any) -> np.ndarray[Any, Any]:
    made, lost = convert_held(np.asarray(array), jnp.dtype(row.leaf.dtype))
    if lost is not None:
        raise _misfit(row)
    return made


def _raise_misfits(checks: Mapping[str, Any]) -> None:
    verdicts = jax.device_get([found for found, _ in checks.values()])
    for good, (_, row) in zip(verdicts, checks.values(), strict=True):
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
        leaf.name: f"`init` makes {shape} here, expected {leaf}"
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
    for _, part in leaf_groups(numbered):
        of_part = jax.tree.leaves(part.state.param_states)
        chosen = [k for k, i in enumerate(of_part) if i in left]
        if chosen:
            meshed = [
                x if isinstance(x := places[of_part[k]], NamedSharding) else None for k in chosen
            ]
            made = _made(part, chosen, meshed, stored)
            initial |= {of_part[k]: leaf for k, leaf in zip(chosen, made, strict=True)}
    return initial


def _made(part: Optimizer, chosen: Sequence[int], places: Sequence[Any], stored: Any) -> list[Any]:
    def make(params: Any) -> list[Any]:
        leaves = _plain_leaves(part.optimizer_def.create(params).state.param_states, stored)
        return [leaves[k] for k in chosen]

    if any(map(is_abstract, jax.tree.leaves(part.target))):
        shapes = jax.eval_shape(make, part.target)
        return [placed(leaf, place) for leaf, place in zip(shapes, places, strict=True)]
    leaves: list[Any] = jax.jit(make, out_shardings=list(places))(part.target)
    return leaves
