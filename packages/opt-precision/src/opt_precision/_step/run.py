"""Tasks of many leaves on one device, or on each device's part of them."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from opt_precision._formats import Format
from opt_precision._step.body import Data, Part, Reduction
from opt_precision._step.placement import (
    Place,
    aligned,
    axis_names,
    local_origin,
    part_shape,
    without,
)
from opt_precision._step.rows import viewed
from opt_precision._step.stream import stream
from opt_precision._step.tasks import Task
from opt_precision._step.work import Operand, Shape, Work

_ACROSS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "reduce_max": lax.pmax,
    "reduce_min": lax.pmin,
    "reduce_sum": lax.psum,
}


class Made(NamedTuple):
    """What tasks made.

    Attributes:
      results: of each task.
      zero: see `opt_precision._step.stream.stream`.
    """

    results: list[list[jax.Array]]
    zero: jax.Array


def run(
    tasks: Sequence[Task], keys: jax.Array | None, place: Place, limit: int, zero: jax.Array
) -> Made:
    """Does tasks, one after the other.

    Args:
      tasks: what to do.
      keys: of their noise.
      place: where the parameters lie.
      limit: the elements of one piece.
      zero: see `opt_precision._step.stream.stream`.
    """
    if place.mesh is not None:
        return _on_mesh(tasks, keys, place, limit, zero)
    works = []
    for task, first in zip(tasks, _first_keys(tasks), strict=True):
        data = Data(task.numbers, zero if task.is_cut else None, keys, first)
        task = task._replace(is_cut=task.is_cut and not place.is_hidden)
        part = Part((0,) * len(task.leaf.shape), task.leaf.shape)
        work = _work(task, task.operands, part, data)
        works.append(work._replace(view=viewed(task) if work.is_looped else None))
    return Made(*stream(works, limit, zero))


def spec_of(place: Place, at: int, shape: Shape, formats: Sequence[Format]) -> PartitionSpec:
    """Where a leaf lies while it is computed: every block of it on one device.

    Args:
      place: where the parameters lie.
      at: the index of the parameter.
      shape: of it.
      formats: of its leaves of the state.
    """
    spec = place.specs[at]
    for form in formats:
        if form.block and not aligned(place.mesh, spec, shape, form.axis, form.block):
            return without(spec, form.axis)
    return spec


def mapped(function: Any, mesh: Any, in_specs: Any, out_specs: Any) -> Any:
    """A function of each device's part of arrays."""
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def resharded(array: jax.Array, spec: PartitionSpec) -> jax.Array:
    """An array in the places that blocks need; for types that say where it is."""
    sharding = jax.typeof(array).sharding
    if sharding.mesh.empty or not sharding.mesh.explicit_axes or sharding.spec == spec:
        return array
    moved: jax.Array = jax.sharding.reshard(array, NamedSharding(sharding.mesh, spec))
    return moved


def _on_mesh(
    tasks: Sequence[Task], keys: jax.Array | None, place: Place, limit: int, zero: jax.Array
) -> Made:
    """The same on each device's part of every leaf; nothing but numbers is sent."""
    mesh, whole = place.mesh, PartitionSpec()
    specs = [spec_of(place, task.leaf.at, task.leaf.shape, task.formats) for task in tasks]

    def parts(arrays: Any, numbers: Any, keys: jax.Array | None, zero: jax.Array) -> Any:
        works = []
        rows = zip(tasks, specs, arrays, numbers, _first_keys(tasks), strict=True)
        for task, spec, values, own, first in rows:
            operands = [
                operand._replace(value=value)
                for operand, value in zip(task.operands, values, strict=True)
            ]
            shape = part_shape(mesh, spec, task.leaf.shape)
            part = Part(local_origin(mesh, spec, shape), shape)
            data = Data(own, zero if task.is_cut else None, keys, first)
            works.append(_work(task, operands, part, data, place=str(spec)))
        made, zero = stream(works, limit, zero)
        return _joined(tasks, specs, made), zero

    own_specs = [
        [whole if operand.is_total else spec for operand in task.operands]
        for task, spec in zip(tasks, specs, strict=True)
    ]
    arrays = [
        [resharded(operand.value, spec) for operand, spec in zip(task.operands, row, strict=True)]
        for task, row in zip(tasks, own_specs, strict=True)
    ]
    out_specs = [
        [spec for operand, spec in zip(task.operands, row, strict=True) if operand.is_result]
        for task, row in zip(tasks, own_specs, strict=True)
    ]
    inputs = arrays, [task.numbers for task in tasks], keys, zero
    in_specs = own_specs, whole, whole, whole
    found, zero = mapped(parts, mesh, in_specs, (out_specs, whole))(*inputs)
    moved = [
        NamedSharding(mesh, place.specs[task.leaf.at])
        if spec != place.specs[task.leaf.at]
        else None
        for task, spec in zip(tasks, specs, strict=True)
    ]
    results = [
        [
            _back(new, old.value, None if old.blocks or old.is_total else lies)
            for new, old in zip(made, [x for x in task.operands if x.is_result], strict=True)
        ]
        for task, made, lies in zip(tasks, found, moved, strict=True)
    ]
    return Made(results, zero)


def _joined(
    tasks: Sequence[Task], specs: Sequence[PartitionSpec], made: list[list[jax.Array]]
) -> list[list[jax.Array]]:
    """Numbers of all devices: those that are alike are sent together."""
    alike: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    for t, (task, spec) in enumerate(zip(tasks, specs, strict=True)):
        axes = tuple(name for entry in spec for name in axis_names(entry))
        if isinstance(task.body, Reduction) and axes:
            for i, name in enumerate(task.body.names):
                alike[name, axes, made[t][i].dtype].append((t, i))
    for (name, axes, _), places in alike.items():
        numbers = _ACROSS[name](jnp.stack([made[t][i] for t, i in places]), axes)
        for (t, i), number in zip(places, numbers, strict=True):
            made[t][i] = number
    return made


def _first_keys(tasks: Sequence[Task]) -> list[np.uint32]:
    """Where the keys of each task begin."""
    ends = itertools.accumulate(len(task.noises) for task in tasks)
    return [np.uint32(first) for first in (0, *ends)][:-1]


def _work(
    task: Task, operands: Sequence[Operand], part: Part, data: Data, *, place: str = ""
) -> Work:
    units = {} if task.unit is None else {task.unit.axis: task.unit.size}
    types = tuple(
        (x.value.shape, x.value.dtype, x.blocks, x.is_result, x.is_total) for x in operands
    )
    key = task.body.key(), part.shape, types, place
    compute = functools.partial(task.body, part)
    return Work(part.shape, operands, compute, units, task.is_cut, data, key)


def _back(new: jax.Array, old: jax.Array, lies: NamedSharding | None) -> jax.Array:
    """A result where its source was: as types say, or else as the layout does.

    Args:
      new: the result.
      old: the source.
      lies: where a layout has the parameter, if the result is like it.
    """
    sharding = jax.typeof(old).sharding
    if sharding.mesh.empty or not sharding.mesh.explicit_axes:
        made: jax.Array = new if lies is None else lax.with_sharding_constraint(new, lies)
        return made
    if jax.typeof(new).sharding == sharding:
        return new
    moved: jax.Array = jax.sharding.reshard(new, sharding)
    return moved
