"""Which parameter dimension a state dimension came from, as JAX's sharding-in-types tells it.

Every dimension of every parameter is tagged with a mesh axis of size 1 that nothing else carries.
No device is needed: the mesh is abstract, and `init` is only evaluated for its types. What comes
out carries the tags of what it was made from. That is exact for square matrices, too.

A tag holds a *colour* and a dimension. There are few colours, so that the equal parameters of
repeated layers have few different types and JAX's caches stay warm; the colours of one evaluation
are the last digit of each parameter's number, those of the next one the digit before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from opt_partition._axes.param_axes import Parameter
from opt_partition._mesh.specs import mesh_axes_of

COLOURS = 32


class Tag(NamedTuple):
    """Where a dimension came from: dimension `dim` of a parameter of that colour."""

    colour: int
    dim: int


# The tags of each dimension of a leaf; several where dimensions were merged.
Tags = tuple[tuple[Tag, ...], ...]


def trace_provenance(
    init: Callable[[Any], Any], treedef: Any, table: Sequence[Parameter], colours: Sequence[int]
) -> tuple[Any, list[Tags]]:
    """Evaluates `init` for its types, with every parameter dimension tagged.

    Args:
      init: makes a state of parameters.
      treedef: the tree of the parameters.
      table: the parameters.
      colours: one per parameter, less than `COLOURS`.

    Returns:
      The state, as `jax.ShapeDtypeStruct`s, and the tags of every leaf of it.

    Raises:
      Exception: whatever `init` raises where it cannot work on such a mesh.
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
