"""Specs of mesh axes, shapes and dtypes of single leaves."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from opt_partition.errors import AxesError

AnyMesh = Mesh | AbstractMesh


@functools.cache
def itemsize(dtype: Any) -> int:
    """Returns the bytes of one element; for a typed PRNG key, of its data."""
    if jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        return int(math.prod(data.shape) * data.dtype.itemsize)
    return int(jax.numpy.dtype(dtype).itemsize)


def shape_and_dtype(leaf: Any) -> tuple[tuple[int, ...], Any]:
    """Returns the shape and dtype of an array, a `jax.ShapeDtypeStruct` or a Python number."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        try:
            leaf = jax.typeof(leaf)
        except TypeError:
            raise TypeError(
                f"expected an array or a jax.ShapeDtypeStruct, found {type(leaf).__name__} (for an "
                "Equinox module, pass only its arrays: `eqx.filter(model, eqx.is_array)`)"
            ) from None
    return tuple(leaf.shape), leaf.dtype


def mesh_axes_of(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes in one entry of a `PartitionSpec`."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def padded(spec: PartitionSpec, rank: int) -> list[Any]:
    """Returns an entry of a spec for each of `rank` dimensions."""
    return [*spec, *[None] * (rank - len(spec))]


def shard_shape(shape: Sequence[int], spec: PartitionSpec, mesh: AnyMesh) -> tuple[int, ...]:
    """Returns the shape of the shard on one device; every dimension must be divisible."""
    return tuple(
        size // math.prod([mesh.shape[axis] for axis in mesh_axes_of(entry)]) if entry else size
        for size, entry in zip(shape, padded(spec, len(shape)), strict=True)
    )


def named_sizes(mesh: AnyMesh, axes: Iterable[str]) -> str:
    """Formats mesh axes with their sizes."""
    return ", ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)


def spec_of(axes: Iterable[Sequence[str]]) -> PartitionSpec:
    """Returns the `PartitionSpec` with the given mesh axes for each dimension."""
    return PartitionSpec(
        *((names[0] if len(names) == 1 else tuple(names)) if names else None for names in axes)
    )


def spec_str(spec: PartitionSpec) -> str:
    """Formats a spec independently of the JAX version."""
    return f"P({', '.join(map(repr, spec))})"


def check_choice(argument: str, value: str, choices: Sequence[str]) -> None:
    """Raises `ValueError` if the value of an argument is not one of `choices`."""
    if value not in choices:
        raise ValueError(
            f"`{argument}` must be one of {', '.join(map(repr, choices))}; got {value!r}"
        )


def checked_spec(spec: PartitionSpec, shape: tuple[int, ...], mesh: AnyMesh) -> PartitionSpec:
    """Pads `spec` to the length of `shape`; raises `AxesError` if it is not valid on `mesh`."""
    if getattr(spec, "unreduced", None):
        raise AxesError(f"{spec} is unreduced: reduce first")
    if len(spec) > len(shape):
        raise AxesError(f"{spec_str(spec)} has more entries than {shape} has dimensions")
    if PartitionSpec.UNCONSTRAINED in tuple(spec):
        raise AxesError(f"{spec_str(spec)} has unconstrained dimensions; specify their mesh axes")
    names = list(map(mesh_axes_of, padded(spec, len(shape))))
    flat = [axis for axes in names for axis in axes]
    absent = [axis for axis in flat if axis not in mesh.shape]
    if absent:
        raise AxesError(
            f"{spec_str(spec)} uses {', '.join(map(repr, absent))}, but `mesh` only has "
            f"{named_sizes(mesh, mesh.axis_names)}"
        )
    if len(set(flat)) < len(flat):
        raise AxesError(f"{spec_str(spec)} uses a mesh axis twice")
    for dim, (size, axes) in enumerate(zip(shape, names, strict=True)):
        if size % math.prod(mesh.shape[axis] for axis in axes):
            raise AxesError(
                f"dimension {dim} of {shape} is not divisible by {named_sizes(mesh, axes)}"
            )
    return spec_of(names)
