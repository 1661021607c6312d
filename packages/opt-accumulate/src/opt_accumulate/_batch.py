"""Cutting a batch into microbatches without moving rows between devices.

Microbatch `i` of `n` takes the rows `i, i + n, i + 2n, ...`. A device that holds consecutive rows
of a sharded batch then holds an equal part of every microbatch; consecutive microbatches would
each lie on a few devices only, and had to be spread over all of them first. Where rows do not
divide, rows of zeros are added at the end: some microbatches have more of them than others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opt_accumulate._placement import axes_of, explicit_spec
from opt_accumulate._trees import not_numbers, path_str
from opt_accumulate.errors import BatchError

_Index = jax.tree_util.SequenceKey


class Split(NamedTuple):
    """How many rows go where."""

    num: int  # of microbatches
    size: int  # rows of each of them
    rows: int  # of the batch, or of one device's part of it; others are padding
    devices: int  # that have as many rows

    @property
    def padding(self) -> int:
        """How many rows of zeros there are."""
        return self.num * self.size - self.rows


def has_rows(leaf: Any) -> bool:
    """Whether a leaf of a batch is cut; scalars are what all microbatches share."""
    return np.ndim(leaf) > 0


def batch_rows(batch: Any) -> int:
    """Returns the number of rows that all leaves of a batch have but for scalars."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    shapes = {path_str(path): np.shape(leaf) for path, leaf in leaves if has_rows(leaf)}
    if not shapes:
        scalars = ", ".join(path_str(path) for path, _ in leaves)
        found = f"only scalars: {scalars}" if scalars else repr(batch)
        raise BatchError(
            f"`batch` has no rows: expected a tree whose arrays share their first dimension, "
            f"found {found}."
        )
    sizes = {shape[0] for shape in shapes.values()}
    if len(sizes) > 1:
        raise BatchError(
            "Leaves of `batch` must have the same number of rows (first dimension):\n"
            + "".join(
                f"  {path}: {shape[0]} rows of {shape[1:]}\n" for path, shape in shapes.items()
            )
            + "Pass what all microbatches share as further arguments after `batch`."
        )
    (rows,) = sizes
    if not rows:
        raise BatchError("`batch` has 0 rows: " + ", ".join(shapes))
    _check_leaves(leaves, int(rows))
    return int(rows)


def _check_leaves(leaves: Sequence[tuple[Any, Any]], rows: int) -> None:
    """Raises where an array is not of numbers, or a list of scalars looks like rows."""
    arrays = {path_str(path): leaf for path, leaf in leaves if has_rows(leaf)}
    wrong = [line for path, leaf in arrays.items() for line in not_numbers({path: leaf})]
    wrong += [
        f"  {path}: a ShapeDtypeStruct"
        for path, leaf in arrays.items()
        if isinstance(leaf, jax.ShapeDtypeStruct)
    ]
    if wrong:
        raise BatchError("Leaves of `batch` must be arrays of numbers; found\n" + "\n".join(wrong))
    parents = Counter(path[:-1] for path, leaf in leaves if path and isinstance(path[-1], _Index))
    scalars = Counter(path[:-1] for path, leaf in leaves if path and not has_rows(leaf))
    lists = [path for path, count in parents.items() if count == scalars[path] == rows > 1]
    if lists:  # every microbatch would have all of them
        raise BatchError(
            f"`batch` has {rows} rows, and a list of {rows} numbers that have none: "
            + ", ".join(map(path_str, lists))
            + ". If these are rows, make an array of them (`np.asarray`); if all microbatches "
            "share them, pass them as a further argument after `batch`."
        )


@dataclass(frozen=True)
class Sizes:
    """What was asked for: a number of microbatches, or rows of each over all devices."""

    num_microbatches: int | None
    microbatch_size: int | None

    def of(self, rows: int, devices: int = 1) -> Split:
        """Returns the sizes for a batch, or for the part of it on each of some devices."""
        if rows % devices or (self.microbatch_size or 0) % devices:
            raise BatchError(
                f"`batch` has {rows} rows and {self._asked}: the rows must divide evenly over the "
                f"{devices} devices of `data_axes`. Pad the batch with rows of weight 0, take "
                "other sizes, or `reduce='auto'`."
            )
        local = rows // devices
        if self.num_microbatches is not None:
            num = self.num_microbatches
            size = math.ceil(local / num)
        else:
            size = min((self.microbatch_size or 0) // devices, local)
            num = math.ceil(local / size)
        return Split(num, size, local, devices)

    def not_divided(self, split: Split) -> BatchError:
        """Returns the error for a batch that would need padding, which would count."""
        each = "" if split.devices == 1 else f" on each of {split.devices} devices"
        step = 1 if self.microbatch_size is None else split.devices
        numbers = ", ".join(str(step * number) for number in _divisors(split.rows))
        return BatchError(
            f"`batch` has {split.rows} rows{each}, which do not divide into microbatches: "
            f"{self._asked}. Rows of padding would count, as by `weights` each row does. Take one "
            f"of {numbers}; or let rows of zeros have weight 0: `loss_fn` returns (sum of "
            "losses, weight) over a mask in the batch."
        )

    @property
    def _asked(self) -> str:
        (asked,) = (f"`{name}` is {value}" for name, value in vars(self).items() if value)
        return asked


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def fold(batch: Any, split: Split) -> Any:
    """Returns the batch as (size, num, ...), from which `take` cuts; scalars stay as they are."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _fold(path, leaf, split), batch)


def _fold(path: Any, leaf: Any, split: Split) -> Any:
    if not has_rows(leaf):
        return leaf
    leaf = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    spec = explicit_spec(leaf)
    rest = () if spec is None else tuple(spec)
    if rest:
        mesh = jax.typeof(leaf).sharding.mesh
        check_devices(split, mesh, axes_of(rest[0]), path_str(path))
    if split.padding:
        leaf = _pad(leaf, split.padding)
    shape = (split.size, split.num, *leaf.shape[1:])
    if not rest:
        return jax.lax.reshape(leaf, shape)
    # The rows of each microbatch stay spread as the batch's rows are.
    target = jax.sharding.PartitionSpec(rest[0], None, *rest[1:])
    folded: jax.Array = jnp.reshape(leaf, shape, out_sharding=target)
    return folded


def _pad(leaf: jax.Array, rows: int) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = _pad(jax.random.key_data(leaf), rows)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return jnp.pad(leaf, [(0, rows)] + [(0, 0)] * (leaf.ndim - 1))


def zero_rows(leaf: jax.Array) -> jax.Array:
    """Returns as many rows of padding."""
    return _pad(leaf[:0], leaf.shape[0])


def check_devices(split: Split, mesh: Any, axes: Sequence[str], where: str) -> None:
    """Raises unless each microbatch has the same number of rows on every device along `axes`."""
    devices = math.prod(mesh.shape[axis] for axis in axes)
    if split.size % devices:
        raise BatchError(
            f"Microbatches have {split.size} rows, which do not divide over the {devices} devices "
            f"that the rows of `batch` lie over ({where}: {', '.join(map(repr, axes))}). Take "
            f"fewer microbatches, of a multiple of {devices} rows."
        )


def take(folded: Any, index: Any) -> Any:
    """Returns one microbatch of what `fold` returned."""

    def cut(leaf: Any) -> Any:
        if not has_rows(leaf):
            return leaf
        return jax.lax.dynamic_index_in_dim(leaf, index, 1, keepdims=False)

    return jax.tree.map(cut, folded)


def row_numbers(split: Split, index: Any) -> jax.Array:
    """Returns which rows of the batch microbatch `index` has."""
    rows: jax.Array = jnp.arange(split.size, dtype=jnp.int32) * split.num + index
    return rows


def unfold(stacked: Any, split: Split) -> jax.Array:
    """Puts per-row outputs, stacked over the microbatches, in the order of the batch's rows."""
    rows = jnp.swapaxes(stacked, 0, 1)
    shape = (split.num * split.size, *rows.shape[2:])
    spec = explicit_spec(rows)
    if spec is None:
        in_order: jax.Array = jax.lax.reshape(rows, shape)
    else:
        target = jax.sharding.PartitionSpec(spec[0], *tuple(spec)[2:])
        in_order = jnp.reshape(rows, shape, out_sharding=target)
    return jax.lax.slice_in_dim(in_order, 0, split.rows) if split.padding else in_order
