"""How matrices lie over a mesh, the ways of bringing them together, and what each costs a device.

The way with the fewest operations on a device is taken, then the one with the fewest collectives,
then the one that moves least: handing out never saves operations at a price.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from opt_matrix._matrices import Dims
from opt_matrix.errors import PlanError

Axes = tuple[str, ...]
Choice = Literal["local", "all_to_all", "gather", "split"]


@dataclasses.dataclass(frozen=True)
class Kind:
    """What the matrices of a group have in common.

    Attributes:
      matrix_shape: the dimensions of one matrix, rows first.
      num_rows: how many of those are rows.
      matrix_spec: the mesh axes of each.
      batch_axes: the mesh axes that the dimensions which count matrices lie over.
      split: sizes of the matrices side by side in one, or `()`.
      dtype: what they are sent in.
    """

    matrix_shape: tuple[int, ...]
    num_rows: int
    matrix_spec: tuple[Axes, ...]
    batch_axes: Axes
    split: tuple[int, ...]
    dtype: str

    @property
    def fan_in(self) -> int:
        """Rows of one matrix."""
        return math.prod(self.matrix_shape[: self.num_rows])

    @property
    def fan_out(self) -> int:
        """Columns of one matrix."""
        return math.prod(self.matrix_shape[self.num_rows :])

    @property
    def matrix_axes(self) -> Axes:
        """The mesh axes that each matrix is cut over."""
        return tuple(axis for axes in self.matrix_spec for axis in axes)

    @property
    def family(self) -> tuple[int, int, tuple[int, ...]]:
        """What the matrices that are numbered together have in common."""
        return self.fan_in, self.fan_out, self.split


@dataclasses.dataclass(frozen=True)
class LeafLayout:
    """The matrices of one leaf, and the mesh axes that each of its dimensions lies over.

    Attributes:
      shape: the global shape.
      dims: which dimensions are the matrix, from 0.
      spec: the mesh axes of each dimension.
      kind: what its matrices share with those of other leaves.
    """

    shape: tuple[int, ...]
    dims: Dims
    spec: tuple[Axes, ...]
    kind: Kind

    @property
    def count(self) -> int:
        """Number of matrices."""
        return math.prod(self.shape) // math.prod(self.kind.matrix_shape)

    @property
    def partition_spec(self) -> PartitionSpec:
        """The layout as a `PartitionSpec`."""
        return PartitionSpec(*(axes or None for axes in self.spec))

    def batch_numbers(self, mesh: Mapping[str, int]) -> np.ndarray:
        """Returns which matrices of the leaf each part of `batch_axes` holds, one row a part."""
        batch = self.dims.order(len(self.shape))[: -len(self.kind.matrix_shape)]
        parts = [size(mesh, self.spec[d]) for d in batch]
        each = [self.shape[d] // n for d, n in zip(batch, parts, strict=True)]
        sizes = [n for pair in zip(parts, each, strict=True) for n in pair]
        places = range(0, len(sizes), 2)
        numbers = np.arange(self.count).reshape(sizes)
        numbers = numbers.transpose(*places, *(place + 1 for place in places))
        return numbers.reshape(math.prod(parts), math.prod(each))


@dataclasses.dataclass(frozen=True)
class Way:
    """What becomes of each mesh axis while matrices are computed with.

    Attributes:
      share: matrices are handed out over these.
      gather: every device along these computes the same.
      split: matrices stay cut over these.
    """

    share: Axes = ()
    gather: Axes = ()
    split: Axes = ()


@dataclasses.dataclass(frozen=True)
class Group:
    """Matrices of one shape that are computed with together, and what that costs each device.

    Attributes:
      kind: what they have in common.
      way: what becomes of each mesh axis.
      count: number of matrices on each part of `kind.batch_axes`.
      padding: number of zero matrices that are added.
      collectives: how many run.
      bytes_per_device: bytes of their results.
      flops_per_device: floating-point operations.
      ideal_flops: what they would be, were all devices busy with nothing done twice.
      temp_bytes: an upper bound of the temporary memory, stacks and buffers included.
      leaves: paths of the leaves that they are in.
      parts: `(start, stop)` of the matrices of each leaf, counted on a device.
    """

    kind: Kind
    way: Way
    count: int
    padding: int
    collectives: int
    bytes_per_device: int
    flops_per_device: float
    ideal_flops: float
    temp_bytes: int
    leaves: tuple[str, ...] = ()
    parts: tuple[tuple[int, int], ...] = ()

    @property
    def choice(self) -> Choice:
        """How the matrices come together, in a word.

        `'local'`: they lie whole where they are computed with, and nothing is sent. `'all_to_all'`:
        they are handed out, each to one device. `'gather'`: every device computes all of them.
        `'split'`: their larger side stays cut, and products are summed over devices.
        """
        if self.way.split:
            return "split"
        if self.way.share:
            return "all_to_all"
        return "gather" if self.way.gather else "local"

    @property
    def axes(self) -> Axes:
        """The mesh axes that `choice` is about."""
        return self.way.split or self.way.share or self.way.gather

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of one matrix."""
        return self.kind.fan_in, self.kind.fan_out

    @property
    def stack_axes(self) -> Axes:
        """The mesh axes that the stack of whole matrices lies over."""
        return self.kind.batch_axes + self.way.share

    def continues(self, before: Group) -> bool:
        """Whether it is the same computation with the next matrices of the same leaf."""
        return len(self.leaves) == 1 and dataclasses.replace(before, parts=self.parts) == self


def size(mesh: Mapping[str, int], axes: Axes) -> int:
    """Number of parts that some axes make."""
    return math.prod(mesh[axis] for axis in axes)


def leaf_layout(
    path: str, leaf: Any, dims: Dims, sharding: Any, mesh: Mapping[str, int], dtype: Any
) -> LeafLayout:
    """The layout of a leaf whose matrices are sent in a dtype; `None` is its own."""
    shape = tuple(leaf.shape)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    if spec is not None and not isinstance(spec, PartitionSpec):
        raise PlanError(
            f"{path}: expected a `NamedSharding`, a `PartitionSpec` or `None` for replicated; got "
            f"{type(sharding).__name__}"
        )
    entries = tuple(spec or ())
    if len(entries) > len(shape):
        raise PlanError(f"{path}: {spec} has more entries than {shape} has dimensions")
    cut: list[Axes] = []
    for entry, length in zip(entries + (None,) * (len(shape) - len(entries)), shape, strict=True):
        if not isinstance(entry, str | tuple | None):
            raise PlanError(f"{path}: {entry!r} has no meaning in a spec here; name mesh axes")
        names = (entry,) if isinstance(entry, str) else entry or ()
        if unknown := [name for name in names if name not in mesh]:
            raise PlanError(f"{path}: {spec} has axes {unknown}, and the mesh has {[*mesh]}")
        if length % size(mesh, names):
            raise PlanError(
                f"{path}: {spec} cuts {shape} in {size(mesh, names)} parts, which does not divide "
                f"{length}"
            )
        # Axes of size one cut nothing; without them layouts that are alike compare equal.
        cut.append(tuple(name for name in names if mesh[name] > 1))
    matrix = dims.reduction + dims.output
    batch = dims.order(len(shape))[: -len(matrix)]
    kind = Kind(
        tuple(shape[d] for d in matrix),
        len(dims.reduction),
        tuple(cut[d] for d in matrix),
        tuple(axis for d in batch for axis in cut[d]),
        dims.split,
        str(np.dtype(leaf.dtype if dtype is None else dtype)),
    )
    return LeafLayout(shape, dims, tuple(cut), kind)


def best_way(
    kind: Kind, count: int, mesh: Mapping[str, int], world: Axes, split: Collection[str], fn: Any
) -> Way:
    """How `count` matrices on each part of the batch axes come together."""
    kept = tuple(axis for axis in kind.matrix_axes if axis in split)
    # While matrices are computed with, these axes all cut the larger side.
    if kind.split or max(kind.fan_in, kind.fan_out) % size(mesh, kept):
        kept = ()
    used = {*kind.matrix_axes, *kind.batch_axes}
    # Axes that replicate come first: their parts are taken before anything is sent.
    free = [axis for axis in mesh if mesh[axis] > 1 and axis in world and axis not in used]
    options: dict[str, tuple[str, ...]] = dict.fromkeys(free, ("share", "idle"))
    for axis in kind.matrix_axes:
        if axis not in kept:
            options[axis] = ("share", "gather") if axis in world else ("gather",)

    def way_of(words: tuple[str, ...]) -> Way:
        named = list(zip(options, words, strict=True))
        share, gather = (
            tuple(axis for axis, each in named if each == word) for word in ("share", "gather")
        )
        return Way(share, gather, kept)

    def rank(way: Way) -> tuple[Any, ...]:
        each = group_of(kind, way, count, mesh, fn)
        return each.flops_per_device, each.collectives, each.bytes_per_device, len(way.share)

    return min(map(way_of, itertools.product(*options.values())), key=rank)


def turned_axes(kind: Kind, way: Way) -> Axes:
    """The split axes that cut the smaller side, and have to be moved to the larger one."""
    rows, columns = kind.matrix_spec[: kind.num_rows], kind.matrix_spec[kind.num_rows :]
    small = rows if kind.fan_in <= kind.fan_out else columns
    return tuple(axis for axes in small for axis in axes if axis in way.split)


def group_of(kind: Kind, way: Way, count: int, mesh: Mapping[str, int], fn: Any) -> Group:
    """The group of `count` matrices on each part of the batch axes, and what it costs a device."""
    replicas = size(mesh, tuple(axis for axis in way.share if axis not in kind.matrix_axes))
    workers = size(mesh, way.share)
    padded = -(-count // workers) * workers
    here = padded // workers
    itemsize = jnp.dtype(kind.dtype).itemsize
    whole = kind.fan_in * kind.fan_out
    block = whole // size(mesh, kind.matrix_axes)  # elements of one matrix on a device at rest
    held = whole // size(mesh, way.split)  # and while it is computed with
    moved = collectives = copied = 0
    if workers > replicas:
        moved, collectives = 2 * (padded // replicas * block * itemsize), 2
    if way.gather:
        moved, collectives = moved + here * held * itemsize, collectives + 1
    if replicas > 1:
        summed = is_summed(count, padded - count)
        copied = count * block * max(itemsize, 4) if summed else padded * block * itemsize
        moved, collectives = moved + copied, collectives + 1
    if turned_axes(kind, way):
        moved, collectives = moved + 2 * here * held * itemsize, collectives + 2
    if way.split:
        reduces, each = fn.split_bytes(kind.fan_in, kind.fan_out)
        moved, collectives = moved + here * each, collectives + reduces
    flops = here * _flops(fn, kind, size(mesh, way.split))
    ideal = count * size(mesh, kind.batch_axes) * _flops(fn, kind) / size(mesh, tuple(mesh))
    stacks = 2 * max(padded // replicas * block, here * held) * itemsize + copied
    # Products are summed in float32. Of a single matrix, XLA's CPU compiler keeps the transpose of
    # every step beside it.
    small = min(kind.fan_in, kind.fan_out)
    work = here * ((5 if here == 1 else 1) * held + 3 * small * small) * max(itemsize, 4)
    padding, temp_bytes = padded - count, stacks + work
    return Group(kind, way, count, padding, collectives, moved, flops, ideal, temp_bytes)


def is_summed(count: int, padding: int) -> bool:
    """Whether what replicating axes had shared out comes back by a sum: a gather has padding."""
    return padding > count


def _flops(fn: Any, kind: Kind, parts: int = 1) -> float:
    """Floating-point operations for one matrix of a kind, with those side by side in it."""
    if parts > 1:  # by a function with `split`
        return float(fn.flops(kind.fan_in, kind.fan_out, parts))
    # An unknown function is taken to cost as much as a few products.
    flops = getattr(fn, "flops", lambda rows, columns: 10.0 * rows * columns * min(rows, columns))
    return float(sum(flops(kind.fan_in, width) for width in kind.split or (kind.fan_out,)))
