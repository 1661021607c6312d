"""Cutting a batch into microbatches without moving rows between devices.

Microbatch `i` of `n` takes the rows `i, i + n, i + 2n, ...`: where rows lie over devices, each has
an equal part of every microbatch. Rows of zeros are added at the end.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opt_accumulate._placement import axes_of, explicit_spec
from opt_accumulate._trees import described, path_str, what_is_wrong
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


def map_rows(function: Callable[[Any], Any], batch: Any) -> Any:
    """Maps over the leaves of a batch that are cut; scalars stay as they are."""
    return jax.tree.map(lambda leaf: function(leaf) if has_rows(leaf) else leaf, batch)


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
    if wrong := described(batch, _no_rows):
        raise BatchError("Leaves of `batch` must be arrays of numbers; found\n" + "\n".join(wrong))
    parents = Counter(path[:-1] for path, leaf in leaves if path and isinstance(path[-1], _Index))
    scalars_in = Counter(path[:-1] for path, leaf in leaves if path and not has_rows(leaf))
    lists = [path for path, count in parents.items() if count == scalars_in[path] == rows > 1]
    if lists:  # every microbatch would have all of them
        raise BatchError(
            f"`batch` has {rows} rows, and a list of {rows} numbers that have none: "
            + ", ".join(map(path_str, lists))
            + ". If these are rows, make an array of them (`np.asarray`); if all microbatches "
            "share them, pass them as a further argument after `batch`."
        )
    return int(rows)


def _no_rows(leaf: Any) -> str:
    if not has_rows(leaf):
        return ""
    return "a ShapeDtypeStruct" if isinstance(leaf, jax.ShapeDtypeStruct) else what_is_wrong(leaf)


class Sizes(NamedTuple):
    """What was asked for: a number of microbatches, or rows of each over all devices."""

    argument: str  # `num_microbatches` or `microbatch_size`
    value: int

    def __str__(self) -> str:
        """For errors."""
        return f"`{self.argument}` is {self.value}"

    def of(self, rows: int, devices: int = 1) -> Split:
        """Returns the sizes for a batch, or for the part of it on each of some devices."""
        is_size = self.argument == "microbatch_size"
        if rows % devices or (is_size and self.value % devices):
            raise BatchError(
                f"`batch` has {rows} rows and {self}: the rows must divide evenly over the "
                f"{devices} devices of `data_axes`. Pad the batch with rows of weight 0, take "
                "other sizes, or `reduce='auto'`."
            )
        local = rows // devices
        if is_size:
            size = min(self.value // devices, local)
            return Split(math.ceil(local / size), size, local, devices)
        return Split(self.value, math.ceil(local / self.value), local, devices)

    def not_divided(self, split: Split) -> BatchError:
        """Returns the error for a batch that would need padding, which would count."""
        each = "" if split.devices == 1 else f" on each of {split.devices} devices"
        step = split.devices if self.argument == "microbatch_size" else 1
        divisors = [d for d in range(1, split.rows + 1) if split.rows % d == 0]
        return BatchError(
            f"`batch` has {split.rows} rows{each}, which do not divide into microbatches: "
            f"{self}. Rows of padding would count, as by `weights` each row does. Take one "
            f"of {', '.join(str(step * d) for d in divisors)}; or let rows of zeros have weight "
            "0: `loss_fn` returns (sum of losses, weight) over a mask in the batch."
        )


def fold(batch: Any, split: Split) -> Any:
    """Returns the batch as (size, num, ...), from which `take` cuts; scalars stay as they are."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _fold(path, leaf, split), batch)


def _fold(path: Any, leaf: Any, split: Split) -> Any:
    if not has_rows(leaf):
        return leaf
    leaf = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    target = None
    if spec := tuple(explicit_spec(leaf) or ()):
        mesh = jax.typeof(leaf).sharding.mesh
        check_devices(split, mesh, axes_of(spec[0]), path_str(path))
        # The rows of each microbatch stay spread as the batch's rows are.
        target = jax.sharding.PartitionSpec(spec[0], None, *spec[1:])
    if split.padding:
        leaf = _pad(leaf, split.padding)
    return jnp.reshape(leaf, (split.size, split.num, *leaf.shape[1:]), out_sharding=target)


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
    return map_rows(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, 1, keepdims=False), folded
    )


def unfold(stacked: jax.Array, split: Split) -> jax.Array:
    """Puts per-row outputs, stacked over the microbatches, in the order of the batch's rows."""
    rows = jnp.swapaxes(stacked, 0, 1)
    spec = explicit_spec(rows)
    target = None if spec is None else jax.sharding.PartitionSpec(spec[0], *tuple(spec)[2:])
    shape = (split.num * split.size, *rows.shape[2:])
    in_order = jnp.reshape(rows, shape, out_sharding=target)
    return in_order[: split.rows] if split.padding else in_order
