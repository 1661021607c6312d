"""How the matrices of one leaf lie over a mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from opt_matrix._matrices import Dims
from opt_matrix.errors import PlanError

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class LeafLayout:
    """The matrices of one leaf, and the mesh axes that each of its dimensions lies over.

    Attributes:
      path: `/`-joined keys.
      shape: the global shape.
      dtype: its name.
      dims: which dimensions are the matrix, from 0.
      spec: the mesh axes of each dimension.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    dims: Dims
    spec: tuple[Axes, ...]

    @property
    def batch_dims(self) -> tuple[int, ...]:
        """The dimensions that count matrices."""
        matrix = {*self.dims.reduction, *self.dims.output}
        return tuple(d for d in range(len(self.shape)) if d not in matrix)

    @property
    def matrix_dims(self) -> tuple[int, ...]:
        """The dimensions of one matrix, rows first."""
        return self.dims.reduction + self.dims.output

    @property
    def order(self) -> tuple[int, ...]:
        """All dimensions, those that count matrices first."""
        return self.batch_dims + self.matrix_dims

    @property
    def fan_in(self) -> int:
        """Rows of one matrix."""
        return math.prod(self.shape[d] for d in self.dims.reduction)

    @property
    def fan_out(self) -> int:
        """Columns of one matrix."""
        return math.prod(self.shape[d] for d in self.dims.output)

    @property
    def count(self) -> int:
        """Number of matrices."""
        return math.prod(self.shape[d] for d in self.batch_dims)

    @property
    def batch_axes(self) -> Axes:
        """The mesh axes that whole matrices lie over, in the order of the dimensions."""
        return tuple(axis for d in self.batch_dims for axis in self.spec[d])

    @property
    def partition_spec(self) -> PartitionSpec:
        """The layout as a `PartitionSpec`."""
        return PartitionSpec(*(axes or None for axes in self.spec))

    def batch_numbers(self, mesh_shape: Mapping[str, int]) -> np.ndarray:
        """Returns which matrices of the leaf each part of `batch_axes` holds, one row a part."""
        sizes, places = list[int](), list[int]()
        for dim in self.batch_dims:
            parts = math.prod(mesh_shape[axis] for axis in self.spec[dim])
            places.append(len(sizes))
            sizes += [parts, self.shape[dim] // parts]
        numbers = np.arange(self.count).reshape(sizes)
        numbers = numbers.transpose(*places, *(place + 1 for place in places))
        parts = math.prod(mesh_shape[axis] for axis in self.batch_axes)
        return numbers.reshape(parts, self.count // parts)


def leaf_layout(
    path: str, shape: Sequence[int], dtype: Any, dims: Dims, sharding: Any, mesh: Mapping[str, int]
) -> LeafLayout:
    """The layout of a leaf; raises `PlanError` where the sharding does not fit."""
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    if spec is not None and not isinstance(spec, PartitionSpec):
        raise PlanError(
            f"{path}: expected a `NamedSharding`, a `PartitionSpec` or `None` for replicated; got "
            f"{type(sharding).__name__}"
        )
    entries = tuple(spec or ())
    if len(entries) > len(shape):
        raise PlanError(f"{path}: {spec} has more entries than {tuple(shape)} has dimensions")
    axes = [_entry(entry) for entry in entries] + [()] * (len(shape) - len(entries))
    for size, names in zip(shape, axes, strict=True):
        if unknown := [name for name in names if name not in mesh]:
            raise PlanError(f"{path}: {spec} has axes {unknown}, and the mesh has {[*mesh]}")
        parts = math.prod(mesh[name] for name in names)
        if size % parts:
            raise PlanError(
                f"{path}: {spec} cuts {tuple(shape)} in {parts} parts, which does not divide {size}"
            )
    # Axes of size one cut nothing; without them layouts that are alike compare equal.
    cut = tuple(tuple(name for name in names if mesh[name] > 1) for names in axes)
    return LeafLayout(path, tuple(shape), str(np.dtype(dtype)), dims, cut)


def _entry(entry: Any) -> Axes:
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, tuple):
        return entry
    raise PlanError(f"{entry!r} is not an entry of a spec with a meaning here; name mesh axes")


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
