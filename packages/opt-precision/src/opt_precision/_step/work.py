"""What is to be computed for one leaf."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import jax

Origin: TypeAlias = tuple[Any, ...]
Shape: TypeAlias = tuple[int, ...]

# XLA on CPUs compiles a loop over less than a kilobyte as one function, which rounds otherwise.
_TINY: Final = 256


class Blocks(NamedTuple):
    """What an array has one element for: blocks along an axis of the leaf.

    Attributes:
      axis: of the leaf.
      size: of a block.
    """

    axis: int
    size: int


class Operand(NamedTuple):
    """An array that goes with a leaf.

    Attributes:
      value: the array; of the leaf's shape, or with an element per block.
      blocks: `None` for one of the leaf's shape.
      is_result: whether the piece that was computed takes the place of the one that was read.
      is_total: whether it is one number for the whole leaf, which each piece changes.
    """

    value: jax.Array
    blocks: Blocks | None = None
    is_result: bool = False
    is_total: bool = False


Compute: TypeAlias = Callable[[Any, Shape | None, Origin, Sequence[jax.Array]], Sequence[jax.Array]]


class View(NamedTuple):
    """A leaf as rows of one width, so that leaves of many shapes can be put together.

    Attributes:
      body: of the computation, an `opt_precision._step.body.Update` on rows.
      operands: its arrays, with as many rows.
      width: of the rows.
      unit: how many columns may not be cut apart.
      key: equal for leaves whose computations differ in nothing but their noise.
    """

    body: Any
    operands: Sequence[Operand]
    width: int
    unit: int
    key: Hashable


class Work(NamedTuple):
    """What is to be computed for one leaf.

    Attributes:
      shape: of the leaf, as far as this device has it.
      operands: its arrays; those that are results are replaced.
      compute: from `data`, the shape of a piece (`None` for the whole leaf), where it begins and
        the pieces of all operands to those of the results, in order.
      units: per axis what may not be cut apart; 1 for the others.
      is_cut: whether it may be cut into pieces.
      data: numbers that the computation needs, a tree of arrays; those of NumPy are unsigned.
      key: equal for leaves of one shape whose computations differ in nothing but `data`.
      view: the same as rows of one width, for leaves of any shape to be put together.
    """

    shape: Shape
    operands: Sequence[Operand]
    compute: Compute
    units: Mapping[int, int]
    is_cut: bool
    data: Any
    key: Hashable
    view: View | None = None

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def is_looped(self) -> bool:
        """Whether it is computed in a loop, by itself or with others."""
        return self.is_cut and self.size >= _TINY

    @property
    def results(self) -> list[jax.Array]:
        """What the results replace."""
        return [operand.value for operand in self.operands if operand.is_result]
