"""Provenance of state dimensions, determined by JAX's sharding-in-types.

Every dimension of every parameter is tagged with its own mesh axis of size 1. No device is needed,
since the mesh is abstract and `init` is only evaluated for its types. Each output carries the tags
of the dimensions it was computed from, which is exact even for square matrices.

A tag consists of a *colour* and a dimension. There are few colours, so that equal parameters of
repeated layers have few distinct types and JAX's caches remain effective. The colours of one
evaluation are the last digit of each parameter's number, those of the next evaluation the digit
before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from opt_partition._axes.param_axes import Parameter
from opt_partition._specs import mesh_axes_of

COLOURS = 32


class Tag(NamedTuple):
    """The origin of a dimension: dimension `dim` of a parameter with that colour."""

    colour: int
    dim: int


# The tags of each dimension of a leaf; several if dimensions were merged.
Tags = tuple[tuple[Tag, ...], ...]


def trace_provenance(
    init: Callable[[Any], Any], treedef: Any, table: Sequence[Parameter], colours: Sequence[int]
) -> tuple[Any, list[Tags]]:
    """Evaluates `init` for its types, with every parameter dimension tagged.

    Args:
      init: creates a state for parameters.
      treedef: tree structure of the parameters.
      table: the parameters.
      colours: one per parameter, less than `COLOURS`.

    Returns:
      The state, as `jax.ShapeDtypeStruct`s, and the tags of each of its leaves.

    Raises:
      Exception: any error that `init` raises if it does not work on an Explicit mesh.
    """
    rank = max((len(parameter.shape) for parameter in table), default=0)
    names = [_axis_name(Tag(c, d)) for c in sorted({*colours}) for d in range(rank)]
    # A mesh has at least one axis.
    names = names or ["unused"]
    mesh = AbstractMesh((1,) * len(names), tuple(names), (AxisType.Explicit,) * len(names))
    made: dict[Any, jax.ShapeDtypeStruct] = {}
    tagged = []
    for parameter, colour in zip(table, colours, strict=True):
        key = parameter.shape, parameter.dtype, colour
        if key not in made:
            axes = (_axis_name(Tag(colour, dim)) for dim in range(len(parameter.shape)))
            sharding = NamedSharding(mesh, PartitionSpec(*axes))
            made[key] = jax.ShapeDtypeStruct(parameter.shape, parameter.dtype, sharding=sharding)
        tagged.append(made[key])
    with jax.sharding.use_abstract_mesh(mesh):
        state = jax.eval_shape(init, jax.tree.unflatten(treedef, tagged))
    tags = [_tags(leaf) for leaf in jax.tree.leaves(state)]
    plain = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    return plain, tags


def _tags(leaf: Any) -> Tags:
    spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else ()
    entries = [*spec, *[None] * (len(leaf.shape) - len(spec))]
    return tuple(tuple(map(_tag, mesh_axes_of(entry))) for entry in entries)


def _axis_name(tag: Tag) -> str:
    return f"{tag.colour}.{tag.dim}"


def _tag(axis_name: str) -> Tag:
    colour, _, dim = axis_name.partition(".")
    return Tag(int(colour), int(dim))
