"""Cutting a batch into microbatches without moving rows between devices.

Microbatch `i` of `n` takes the rows `i, i + n, i + 2n, ...`. A device that holds consecutive rows
of a sharded batch then holds an equal part of every microbatch; consecutive microbatches would
each lie on a few devices only, and had to be spread over all of them first.
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

from opt_accumulate._microbatches.placement import axes_of, explicit_spec
from opt_accumulate._trees import not_numbers, path_str
from opt_accumulate.errors import BatchError

_Index = jax.tree_util.SequenceKey


class Split(NamedTuple):
    """How many rows go where.

    Attributes:
      num: how many microbatches of `size` rows.
      size: rows of each of them.
      last: rows of one smaller microbatch at the end; 0: there is none.
    """

    num: int
    size: int
    last: int

    @property
    def rows(self) -> int:
        """Rows of the whole batch."""
        return self.num * self.size + self.last

    @property
    def total(self) -> int:
        """How many microbatches there are, with the smaller one."""
        return self.num + (self.last > 0)


def has_rows(leaf: Any) -> bool:
    """Whether a leaf of a batch is cut; scalars are what all microbatches share."""
    return np.ndim(leaf) > 0


def batch_rows(batch: Any) -> int:
    """Returns the number of rows that all leaves of a batch have but for scalars.

    Raises:
      BatchError: no leaf with rows, no rows, leaves that differ, that cannot be computed with, or
        rows that are numbers in a list; lists every path.

    Examples:
      >>> batch_rows({'tokens': np.zeros((6, 3)), 'mask': np.ones(6), 'step': 7})
      6
    """
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
    """What was asked for.

    Attributes:
      num_microbatches: how many microbatches; this or `microbatch_size` is `None`.
      microbatch_size: rows of each, over all devices.
      smaller_last: whether the last microbatch may have fewer rows.
    """

    num_microbatches: int | None
    microbatch_size: int | None
    smaller_last: bool = False

    def of(self, rows: int, devices: int = 1) -> Split:
        """Returns the sizes for a batch, or for one device's part of it.

        Args:
          rows: of the batch, over all devices.
          devices: on how many of them the rows lie, each with its own microbatches.

        Raises:
          BatchError: the rows do not divide.

        Examples:
          >>> Sizes(4, None).of(12)
          Split(num=4, size=3, last=0)
          >>> Sizes(None, 4, smaller_last=True).of(28, devices=2)
          Split(num=7, size=2, last=0)
        """
        asked = {name: value for name, value in vars(self).items() if value}
        (name, value), *_ = asked.items()
        each = "" if devices == 1 else f" on each of {devices} devices"
        if rows % devices or (name == "microbatch_size" and value % devices):
            raise BatchError(
                f"`batch` has {rows} rows and `{name}` is {value}: the rows must divide evenly "
                f"over the {devices} devices of `data_axes`. Pad the batch with rows of weight 0, "
                "take other sizes, or `reduce='auto'`."
            )
        local = rows // devices
        if self.num_microbatches is not None:
            size, last = divmod(local, self.num_microbatches)
            split = Split(self.num_microbatches, size, 0)
        else:
            size = min(value // devices, local)
            last = local % size
            split = Split(local // size, size, last)
        if last and not self.smaller_last:
            fewer = "" if value > rows else "; or give `microbatch_size` with `smaller_last=True`"
            numbers = [devices * d if name == "microbatch_size" else d for d in _divisors(local)]
            raise BatchError(
                f"`batch` has {local} rows{each}, which do not divide into microbatches: `{name}` "
                f"is {value}. Take one of {_listed(numbers)}; or pad the batch with rows of weight "
                f"0{fewer}."
            )
        return split


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _listed(numbers: Sequence[int]) -> str:
    shown = numbers if len(numbers) <= 12 else [*numbers[:10], "...", numbers[-1]]
    return ", ".join(map(str, shown))


def fold(batch: Any, split: Split) -> Any:
    """Returns the batch as (size, num, ...), from which `take` cuts; no row changes its device.

    Scalars stay as they are, here and in `take` and `take_last`.

    Raises:
      BatchError: on an Explicit mesh, a microbatch does not divide over the devices of the rows.
    """
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
    leaf = jax.lax.slice_in_dim(leaf, 0, split.num * split.size) if split.last else leaf
    shape = (split.size, split.num, *leaf.shape[1:])
    if not rest:
        return jax.lax.reshape(leaf, shape)
    # The rows of each microbatch stay spread as the batch's rows are.
    target = jax.sharding.PartitionSpec(rest[0], None, *rest[1:])
    folded: jax.Array = jnp.reshape(leaf, shape, out_sharding=target)
    return folded


def check_devices(split: Split, mesh: Any, axes: Sequence[str], where: str) -> None:
    """Raises unless each microbatch has the same number of rows on every device.

    Args:
      split: of the rows over all devices.
      mesh: of the devices.
      axes: the mesh axes that the rows lie over.
      where: what says so.

    Raises:
      BatchError: some devices would have more rows than others.
    """
    devices = math.prod(mesh.shape[axis] for axis in axes)
    if split.size % devices or split.last % devices:
        sizes = f"{split.size}" + (f" and {split.last}" if split.last else "")
        raise BatchError(
            f"Microbatches have {sizes} rows, which do not divide over the {devices} devices that "
            f"the rows of `batch` lie over ({where}: {', '.join(map(repr, axes))}). Take fewer "
            f"microbatches, of a multiple of {devices} rows."
        )


def take(folded: Any, index: Any) -> Any:
    """Returns one microbatch of what `fold` returned.

    Examples:
      >>> folded = fold(jnp.arange(6), Split(num=3, size=2, last=0))
      >>> [take(folded, i).tolist() for i in range(3)]
      [[0, 3], [1, 4], [2, 5]]
    """

    def one(leaf: Any) -> Any:
        if not has_rows(leaf):
            return leaf
        return jax.lax.dynamic_index_in_dim(leaf, index, 1, keepdims=False)

    return jax.tree.map(one, folded)


def take_last(batch: Any, split: Split) -> Any:
    """Returns the smaller microbatch: the last rows of the batch."""
    start = split.num * split.size
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[start:]) if has_rows(leaf) else leaf, batch)


def row_numbers(split: Split, index: Any) -> jax.Array:
    """Returns which rows of the batch microbatch `index` has.

    Examples:
      >>> row_numbers(Split(num=3, size=2, last=1), 1).tolist()
      [1, 4]
    """
    rows: jax.Array = jnp.arange(split.size, dtype=jnp.int32) * split.num + index
    return rows


def unfold(stacked: Any, split: Split) -> jax.Array:
    """Puts per-row outputs, stacked over the microbatches, in the order of the batch's rows.

    Examples:
      >>> unfold(jnp.array([[0, 3], [1, 4], [2, 5]]), Split(num=3, size=2, last=0)).tolist()
      [0, 1, 2, 3, 4, 5]
    """
    rows = jnp.swapaxes(stacked, 0, 1)
    shape = (split.num * split.size, *rows.shape[2:])
    spec = explicit_spec(rows)
    if spec is None:
        return jax.lax.reshape(rows, shape)
    target = jax.sharding.PartitionSpec(spec[0], *tuple(spec)[2:])
    in_order: jax.Array = jnp.reshape(rows, shape, out_sharding=target)
    return in_order
