"""Ways of bringing matrices together, and what each costs a device.

Matrices are handed out over the mesh, or gathered; they stay cut only where the caller asks for
that. The way with the fewest operations on a device is taken, then the one with the fewest
collectives, then the one that moves least. No speeds are needed to choose: handing out moves twice
the matrices that a device computes with, and of what mesh axes replicate a device's own part once
more, so operations are never saved at a price.

  >>> from opt_matrix import newton_schulz
  >>> kind = Kind((4, 8), 1, (('x',), ()), (), (), 'float32')
  >>> best_way(kind, 16, {'x': 8}, ('x',), (), newton_schulz())
  Way(share=('x',), gather=(), split=())
  >>> best_way(kind, 1, {'x': 8}, ('x',), (), newton_schulz())
  Way(share=(), gather=('x',), split=())
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax.numpy as jnp

from opt_matrix._layouts import Axes, Kind, size

Choice = Literal["local", "all_to_all", "gather", "split"]


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


def best_way(
    kind: Kind, count: int, mesh: Mapping[str, int], world: Axes, split: Axes, fn: Any
) -> Way:
    """How `count` matrices on each part of the batch axes come together."""

    def rank(way: Way) -> tuple[Any, ...]:
        each = group_of(kind, way, count, mesh, fn)
        return each.flops_per_device, each.collectives, each.bytes_per_device, len(way.share)

    kept = tuple(axis for axis in kind.matrix_axes if axis in split)
    # While matrices are computed with, these axes all cut the larger side.
    if kind.split or max(kind.fan_in, kind.fan_out) % size(mesh, kept):
        kept = ()
    return min(_ways(kind, mesh, world, kept), key=rank)


def _ways(kind: Kind, mesh: Mapping[str, int], world: Axes, split: Axes) -> Iterator[Way]:
    """Axes that cut matrices are handed out over or gathered, those that replicate may be idle."""
    cut = [axis for axis in kind.matrix_axes if axis not in split]
    used = {*kind.matrix_axes, *kind.batch_axes}
    free = [axis for axis in mesh if mesh[axis] > 1 and axis in world and axis not in used]
    options = [("share", "gather") if axis in world else ("gather",) for axis in cut]
    # Axes that replicate come first: their parts are taken before anything is sent.
    for words in itertools.product(*[("share", "idle")] * len(free), *options):
        named = list(zip((*free, *cut), words, strict=True))
        share, gather = (
            tuple(axis for axis, each in named if each == word) for word in ("share", "gather")
        )
        yield Way(share, gather, split)


def turned_axes(kind: Kind, way: Way) -> Axes:
    """The split axes that cut the smaller side, and have to be moved to the larger one."""
    rows, columns = kind.matrix_spec[: kind.num_rows], kind.matrix_spec[kind.num_rows :]
    small = rows if kind.fan_in <= kind.fan_out else columns
    return tuple(axis for axes in small for axis in axes if axis in way.split)


def group_of(kind: Kind, way: Way, count: int, mesh: Mapping[str, int], fn: Any) -> Group:
    """The group of `count` matrices on each part of the batch axes, and what it costs a device."""
    cut = kind.matrix_axes
    shared_cut = tuple(axis for axis in way.share if axis in cut)
    replicas = size(mesh, tuple(axis for axis in way.share if axis not in cut))
    workers = size(mesh, way.share)
    padded = -(-count // workers) * workers
    here = padded // workers
    itemsize = jnp.dtype(kind.dtype).itemsize
    whole = kind.fan_in * kind.fan_out
    block = whole // size(mesh, cut)  # elements of one matrix on a device at rest
    held = whole // size(mesh, way.split)  # and while it is computed with
    exchanged = padded // replicas * block * itemsize
    moved = collectives = 0
    if shared_cut:
        moved, collectives = 2 * exchanged, 2
    if way.gather:
        moved, collectives = moved + here * held * itemsize, collectives + 1
    copied = 0
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
    small = min(kind.fan_in, kind.fan_out)
    stacks = 2 * max(padded // replicas * block, here * held) * itemsize
    stacks += copied
    # Products are summed in float32. Of a single matrix, XLA's CPU compiler keeps the transpose of
    # every step beside it.
    work = here * ((5 if here == 1 else 1) * held + 3 * small * small) * max(itemsize, 4)
    temp_bytes = stacks + work
    return Group(kind, way, count, padded - count, collectives, moved, flops, ideal, temp_bytes)


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
