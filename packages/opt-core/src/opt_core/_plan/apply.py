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

from opt_core._aliasing import unalias
from opt_core._dtypes import all_survive, convert_held, strip_weak_type
from opt_core._optimizer import Optimizer, OptimizerState
from opt_core._paths import Names
from opt_core._plan.leaves import HeldState, Schema, View, is_wide, named_leaves, shown
from opt_core._plan.placement import init_leaves, leaves_of
from opt_core._plan.placement import places as decide_places
from opt_core._plan.plan import Plan, Row
from opt_core._plan.rules import Map, abstract, copies_parameter, function_name
from opt_core._plan.stored import stored_again
from opt_core._shardings import committed_sharding, placed
from opt_core.errors import LeafError


def apply_plan(plan: Plan[Any]) -> tuple[Optimizer, dict[Names, Any]]:
    """Returns the restored optimizer and other leaves; the plan has been checked."""
    target, others = plan.view.optimizer, plan.view.others
    own, params = jax.tree.flatten(target.target)
    states = jax.tree.structure(target.state)
    values, places = leaves_of(plan.view), decide_places(plan)
    rows = list(zip(plan.target_rows, values, strict=True))
    if isinstance(plan.source, HeldState) and plan.source.is_abstract:
        shapes = [placed(_shape(x), places[row.leaf.name]) for row, x in rows]
        whole = jax.tree.unflatten(params, shapes[: len(own)])
        return Optimizer(
            target.optimizer_def, jax.tree.unflatten(states, shapes[len(own) :]), whole
        ), {}
    arrays = plan.source.read(_wanted(plan, places))
    found: list[Any] = []
    checks: dict[str, Any] = {}
    growing: dict[int, Any] = {}
    uses = Counter(name for row in plan.target_rows for name in row.sources)
    for i, (row, value) in enumerate(rows):
        found.append(_leaf(row, value, arrays, places[row.leaf.name], checks, plan.allow))
        if _grows(row):
            growing[i] = arrays[row.sources[0]]
        for name in row.sources:
            uses[name] -= 1
            if not uses[name]:
                del arrays[name]
    _raise_misfits(checks)
    checks.clear()
    n = len(own) + len(others)
    restored = jax.tree.unflatten(params, found[: len(own)])
    kept, shardings = found[n:], [*places.values()][n:]
    if wanted := [i for i, leaf in enumerate(kept) if leaf is None]:
        whole = target.replace(target=restored)
        params_by_path = dict(named_leaves(restored))
        for i, leaf in initial_leaves(whole, wanted, shardings, plan.view.stored).items():
            if n + i in growing:
                row = plan.target_rows[n + i]
                new = (
                    params_by_path[row.leaf.parameter or ()] if copies_parameter(row.leaf) else leaf
                )
                leaf = _grown(row, growing.pop(n + i), new, shardings[i], checks)
            kept[i] = placed(leaf, shardings[i])
        _raise_misfits(checks)
    state: OptimizerState = jax.tree.unflatten(states, kept)
    made = stored_again(plan, target.replace(target=restored, state=state))
    rest = dict(zip(others, found[len(own) : n], strict=True))
    # Surgery hands leaves over; a restore shares nothing with its target.
    is_held = isinstance(plan.source, HeldState)
    others_of_target = [] if is_held else [x for x in values if isinstance(x, jax.Array)]
    result: tuple[Optimizer, dict[Names, Any]] = unalias((made, rest), apart_from=others_of_target)
    return result


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = committed_sharding(leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _wanted(plan: Plan[Any], places: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """What to read, each into the sharding of the first leaf that it is for, where that fits."""
    saved = plan.source.schema.by_name
    wanted: dict[str, jax.ShapeDtypeStruct] = {}
    for row in plan.target_rows:
        for name in row.sources:
            if name not in wanted:
                place = _source_sharding(row, saved[name].shape, places[row.leaf.name])
                wanted[name] = abstract(saved[name], place)
    return wanted


def _source_sharding(row: Row, shape: tuple[int, ...], sharding: Any) -> Any:
    """Where to read a leaf of the checkpoint for the leaf of the target that it becomes."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    if row.how in ("maxima", "first") or (row.leaf.shape and "reshape" in row.kinds):
        return sharding.update(spec=PartitionSpec())
    spec = [*sharding.spec, *[None] * (len(row.leaf.shape) - len(sharding.spec))]
    if row.how == "stack":
        del spec[row.axis]
    elif row.how == "slice":
        spec.insert(row.axis, None)
    elif row.how == "pad":
        spec[row.axis] = None
    elif row.how == "map":  # as its result lies, if an argument of it can
        try:
            sharding.shard_shape(shape)
        except ValueError:
            spec = []
    return sharding.update(spec=PartitionSpec(*spec))


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
    if not row.how and not set(row.kinds) & {"cast", "reshape"}:
        return placed(given[0], sharding)
    if isinstance(row.by, Map) and row.is_opaque:
        made, fits = _called(row, row.by, given, allow)
    else:
        if has_64_bits:  # JAX cannot hold them here, so the source gives NumPy's
            given = [_cast_on_host(row, x) for x in given]
        made, fits = _paced(_converter(row, sharding)(given))
    checks[row.leaf.name] = (fits, row)
    return placed(made, sharding)


def _grows(row: Row) -> bool:
    """Whether a leaf of the state gets new entries, which are those of an initial state."""
    return row.how == "pad" and row.leaf.kind == "state"


def _grown(row: Row, saved: Any, initial: Any, sharding: Any, checks: dict[str, Any]) -> Any:
    """Returns a saved leaf with the further entries of an initial one, or of its parameter."""
    if isinstance(saved, np.ndarray) and is_wide(saved.dtype):
        saved = _cast_on_host(row, saved)
    out = sharding if isinstance(sharding, NamedSharding) else None
    if out is not None:  # on explicit meshes, what is joined has one sharding
        initial = placed(initial, _source_sharding(row, saved.shape, sharding))
    made, fits = _paced(_compiled_growth(row.axis, row.leaf.dtype, out)(saved, initial))
    checks[row.leaf.name] = (fits, row)
    return made


@functools.lru_cache(maxsize=256)
def _compiled_growth(axis: int, dtype: str, sharding: Any) -> Any:
    def grow(saved: Any, initial: Any) -> tuple[Any, Any]:
        cast = saved.astype(dtype)
        new = jax.lax.slice_in_dim(initial, saved.shape[axis], None, axis=axis).astype(dtype)
        return jnp.concatenate([cast, new], axis), all_survive(saved, cast)

    return jax.jit(grow, out_shardings=None if sharding is None else (sharding, None))


def _called(row: Row, by: Map, given: list[Any], allow: frozenset[str]) -> tuple[Any, Any]:
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


def _converter(row: Row, sharding: Any) -> Any:
    out = sharding if isinstance(sharding, NamedSharding) else None
    by: Any = row.by
    detail = {"map": "fn", "pad": "value"}.get(row.how, "")
    given = getattr(by, detail) if detail else row.index
    return _compiled_converter(row.how, row.axis, given, row.leaf.shape, row.leaf.dtype, out)


@functools.lru_cache(maxsize=1024)
def _compiled_converter(
    how: str, axis: int, detail: Any, shape: tuple[int, ...], dtype: str, sharding: Any
) -> Any:
    def convert(given: list[Any]) -> tuple[Any, Any]:
        made = jnp.reshape(_made(how, given, axis, detail, shape), shape)
        cast = made if dtype.startswith("key<") else made.astype(dtype)
        return cast, all_survive(made, cast)

    return jax.jit(convert, out_shardings=None if sharding is None else (sharding, None))


def _made(how: str, given: list[Any], axis: int, detail: Any, shape: tuple[int, ...]) -> Any:
    first = given[0]
    match how:
        case "stack":
            return jnp.stack(given, axis)
        case "slice":
            return jax.lax.index_in_dim(first, detail, axis, keepdims=False)
        case "pad":
            size = shape[axis] - first.shape[axis]
            new = [*first.shape[:axis], size, *first.shape[axis + 1 :]]
            return jnp.concatenate([first, jnp.full(new, detail, first.dtype)], axis)
        case "map":
            return detail(*given)
        case "maximum":
            return functools.reduce(jnp.maximum, given)
        case "maxima":
            return jnp.stack([jnp.max(each) for each in given])
    return first


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
    """Returns the arrays; of several CPU devices, once they are computed.

    XLA's CPU client launches a program for several devices on the threads that also run it. With 32
    in flight on a device, the launch of the next blocks these threads, and parts of a collective
    wait for ever (`max_inflight_computations` in `xla/pjrt/cpu/cpu_client.cc`, seen with jaxlib
    0.10.2). Accelerators have queues of their own.
    """
    for leaf in jax.tree.leaves(arrays):
        devices: Any = leaf.sharding.device_set if isinstance(leaf, jax.Array) else ()
        if len(devices) > 1 and next(iter(devices)).platform == "cpu":
            return jax.block_until_ready(arrays)
    return arrays


def unlike_initial(view: View, schema: Schema) -> Mapping[str, str]:
    """Returns, by name, why `init` does not make leaves of a target's state as they are there.

    Args:
      view: the target.
      schema: of the target.
    """
    state, stored = view.optimizer.state, view.stored
    count = len(jax.tree.leaves(state))
    infos = [leaf for leaf in schema.leaves if leaf.kind == "state"]

    def make(params: Any) -> Any:
        made = view.optimizer.optimizer_def.create(params).state
        if stored is None:
            return made
        return made.replace(param_states=stored.plain_state(made.param_states))

    try:
        made = jax.tree.leaves(jax.eval_shape(make, view.optimizer.target))
    except Exception as error:  # whatever a user's `init` raises
        text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return dict.fromkeys((leaf.name for leaf in infos), f"`init` raises {text}")
    if len(made) != count:
        why = f"`init` makes {len(made)} leaves, the target's state has {count}"
        return dict.fromkeys((leaf.name for leaf in infos), why)
    return {
        leaf.name: f"`init` makes {own} here, expected {leaf}"
        for leaf, own in zip(infos, made, strict=True)
        if (tuple(own.shape), str(own.dtype)) != (leaf.shape, leaf.dtype)
    }


def initial_leaves(
    optimizer: Optimizer, wanted: Sequence[int], places: Sequence[Any], stored: Any
) -> dict[int, Any]:
    """Returns some leaves of a state as `init` makes them from the optimizer's parameters.

    Args:
      optimizer: with the restored parameters.
      wanted: positions among the leaves of the state, the step included.
      places: the shardings of all of them.
      stored: see `View`.
    """
    first = len(jax.tree.leaves(optimizer.state.step))
    found: dict[int, Any] = {i: jnp.zeros((), jnp.int32) for i in wanted if i < first}
    of_params = [i - first for i in wanted if i >= first]
    meshed = {i: x for i in of_params if isinstance(x := places[first + i], NamedSharding)}
    as_kept = {} if stored is None else {"as_kept": stored.plain_state}
    made = init_leaves(optimizer, of_params, meshed, **as_kept)
    return found | {first + i: leaf for i, leaf in made.items()}
