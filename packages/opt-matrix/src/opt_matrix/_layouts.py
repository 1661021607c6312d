"""How matrices lie over a mesh: those of a leaf, and what makes those of several leaves alike."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from opt_matrix._matrices import Dims
from opt_matrix.errors import PlanError

Axes = tuple[str, ...]


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


def size(mesh: Mapping[str, int], axes: Axes) -> int:
    """Number of parts that some axes make."""
    return math.prod(mesh[axis] for axis in axes)


def leaf_layout(
    path: str, leaf: Any, dims: Dims, sharding: Any, mesh: Mapping[str, int], dtype: Any
) -> LeafLayout:
    """The layout of a leaf whose matrices are sent in a dtype; `None` is its own.

    Raises:
      PlanError: the sharding does not fit.
    """
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
    cut = list[Axes]()
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


def place_like(leaf: jax.Array, like: jax.Array) -> Any:
    """The leaf with the sharding of another, where types have one."""
    return placed(leaf, jax.typeof(like).sharding.spec)


def placed(leaf: Any, spec: PartitionSpec) -> Any:
    """The leaf with a layout, where its type says that it lies otherwise."""
    sharding = jax.typeof(leaf).sharding
    mesh = sharding.mesh
    # Of Auto axes types say nothing, and nothing can be placed over them.
    if mesh.empty or not mesh.explicit_axes or (mesh.auto_axes and any(spec)):
        return leaf
    return leaf if sharding.spec == spec else jax.sharding.reshard(leaf, NamedSharding(mesh, spec))
