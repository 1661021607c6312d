"""What a way of handing out matrices costs on each device, and which is the cheapest."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from opt_matrix._layouts import Axes
from opt_matrix._newton_schulz import PlannedFunction, SplitFunction


@dataclasses.dataclass(frozen=True)
class Machine:
    """What the choice between plans is computed from; nothing is measured.

    Attributes:
      bandwidth: bytes a second that one device receives in a collective.
      flops: floating-point operations a second of one device, in products of matrices of the size
        at hand; large ones come closer to the peak.
      latency: seconds that each collective takes beyond the three that handing out needs at most:
        what keeps small matrices from being split.
    """

    bandwidth: float = 2e11
    flops: float = 2e13
    latency: float = 1e-5


@dataclasses.dataclass(frozen=True)
class Kind:
    """What the matrices of a group have in common.

    Attributes:
      matrix_shape: the dimensions of one matrix, rows first.
      num_rows: how many of those are rows.
      matrix_spec: the mesh axes of each.
      batch_axes: the mesh axes that whole matrices lie over.
      split: sizes of the matrices side by side in one, or `()`.
      dtype: what they are sent in.
      is_owned: whether devices keep the momentum of whole matrices.
    """

    matrix_shape: tuple[int, ...]
    num_rows: int
    matrix_spec: tuple[Axes, ...]
    batch_axes: Axes
    split: tuple[int, ...]
    dtype: str
    is_owned: bool = False

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

    def side_axes(self, rows: bool) -> Axes:
        """The mesh axes that the rows, or the columns, lie over."""
        part = self.matrix_spec[: self.num_rows] if rows else self.matrix_spec[self.num_rows :]
        return tuple(axis for axes in part for axis in axes)


@dataclasses.dataclass(frozen=True)
class Way:
    """What becomes of each mesh axis while whole matrices are needed.

    Attributes:
      share: whole matrices are handed out over these.
      gather: every device along these computes the same.
      split: matrices stay cut over these.
    """

    share: Axes = ()
    gather: Axes = ()
    split: Axes = ()


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a group costs each device; fields as of `Group`."""

    padding: int
    bytes_per_device: int
    collectives: int
    flops_per_device: float
    temp_bytes: int
    seconds: float


def ways(kind: Kind, mesh: Mapping[str, int], world: Axes, can_split: bool) -> Iterator[Way]:
    """Yields every way to hand out the matrices of one kind.

    An axis that matrices are cut over is handed out over, gathered, or stays; one that replicates
    them is handed out over or left alone.
    """
    cut = kind.matrix_axes
    free = [a for a in mesh if mesh[a] > 1 and a in world and a not in (*cut, *kind.batch_axes)]
    options = [
        [
            *(["share"] if axis in world else []),
            "gather",
            *(["split"] if can_split and not kind.split else []),
        ]
        for axis in cut
    ]
    for chosen in itertools.product(*options, *([["share", "idle"]] * len(free))):
        named = list(zip((*cut, *free), chosen, strict=True))
        # Axes that replicate come first: their parts are taken before anything is sent.
        named.sort(key=lambda pair: pair[0] in cut)
        way = Way(*(_chosen(named, word) for word in ("share", "gather", "split")))
        if _divides(kind, way, mesh):
            yield way


def _chosen(named: Sequence[tuple[str, str]], word: str) -> Axes:
    return tuple(axis for axis, chosen in named if chosen == word)


def _divides(kind: Kind, way: Way, mesh: Mapping[str, int]) -> bool:
    """Whether the larger side can be cut over all axes that a matrix stays cut over."""
    moved = size(mesh, turned_axes(kind, way))
    rows = kind.fan_in > kind.fan_out
    large = kind.fan_in if rows else kind.fan_out
    kept = [axis for axis in kind.side_axes(rows) if axis in way.split]
    return large % (size(mesh, tuple(kept)) * moved) == 0


def turned_axes(kind: Kind, way: Way) -> Axes:
    """The split axes that cut the smaller side, and have to be moved to the larger one."""
    small_is_rows = kind.fan_in <= kind.fan_out
    return tuple(axis for axis in kind.side_axes(small_is_rows) if axis in way.split)


def size(mesh: Mapping[str, int], axes: Axes) -> int:
    """Number of parts that some axes make."""
    return math.prod(mesh[axis] for axis in axes)


def cost(
    kind: Kind, way: Way, count: int, mesh: Mapping[str, int], fn: Any, machine: Machine
) -> Cost:
    """Returns what `count` matrices on each part of the batch axes cost a device.

    Args:
      kind: what they have in common.
      way: how they are handed out.
      count: how many there are.
      mesh: size of each axis of the mesh.
      fn: what is computed.
      machine: how fast it is.
    """
    cut = kind.matrix_axes
    shared_cut = tuple(axis for axis in way.share if axis in cut)
    replicas = size(mesh, tuple(axis for axis in way.share if axis not in cut))
    workers = size(mesh, way.share)
    padded = -(-count // workers) * workers
    here = padded // workers
    itemsize = _itemsize(kind.dtype)
    whole = kind.fan_in * kind.fan_out
    block = whole // size(mesh, cut)  # elements of one matrix on a device at rest
    held = whole // size(mesh, way.split)  # and while it is computed with
    exchanged = padded // replicas * block * itemsize
    moved = collectives = 0
    if shared_cut:
        moved, collectives = 2 * exchanged, 2
    if way.gather:
        moved, collectives = moved + here * held * itemsize, collectives + 1
    if replicas > 1:
        moved, collectives = moved + padded * block * itemsize, collectives + 1
    if turned_axes(kind, way):
        moved, collectives = moved + 2 * here * held * itemsize, collectives + 2
    if way.split:
        reduces, each = fn.split_bytes(kind.fan_in, kind.fan_out)
        moved, collectives = moved + here * each, collectives + reduces
    flops = here * flops_of(fn, kind, size(mesh, way.split))
    small = min(kind.fan_in, kind.fan_out)
    stacks = 2 * max(padded // replicas * block, here * held) * itemsize
    stacks += padded * block * itemsize * (replicas > 1)
    # Products are summed in float32. Of a single matrix, XLA's CPU compiler keeps the transpose of
    # every step beside it.
    work = here * ((5 if here == 1 else 1) * held + 3 * small * small) * max(itemsize, 4)
    seconds = moved / machine.bandwidth + flops / machine.flops
    seconds += max(0, collectives - 3) * machine.latency
    return Cost(padded - count, moved, collectives, flops, stacks + work, seconds)


def flops_of(fn: Any, kind: Kind, parts: int = 1) -> float:
    """Floating-point operations for one matrix of a kind, with those side by side in it."""
    columns = kind.split or (kind.fan_out,)
    if isinstance(fn, PlannedFunction):
        return sum(fn.flops(kind.fan_in, width, parts) for width in columns)
    # Of an unknown function, that it costs as much as a few products.
    return sum(10.0 * kind.fan_in * width * min(kind.fan_in, width) for width in columns)


def cheapest(
    kind: Kind,
    count: int,
    mesh: Mapping[str, int],
    world: Axes,
    fn: Any,
    machine: Machine,
    max_bytes: int,
) -> Way:
    """Returns the way that takes least time, of those that fit if any does."""

    def rank(way: Way) -> tuple[Any, ...]:
        found = cost(kind, way, count, mesh, fn, machine)
        least = cost(kind, way, min(count, size(mesh, way.share)), mesh, fn, machine)
        return least.temp_bytes > max_bytes, found.seconds, found.collectives, len(way.share)

    return min(ways(kind, mesh, world, isinstance(fn, SplitFunction)), key=rank)


def _itemsize(dtype: str) -> int:
    return int(jnp.dtype(dtype).itemsize)
