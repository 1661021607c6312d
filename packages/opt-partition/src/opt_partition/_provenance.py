"""Provenance of state dimensions, determined by JAX's sharding-in-types.

Every named dimension of the parameters is tagged with a mesh axis of size 1, one for each name and
size. No device is needed, since the mesh is abstract and `init` is only evaluated for its types. A
state dimension carries the tags of the dimensions whose values it was computed from. This serves
what `_symbols` cannot evaluate, such as `int(n)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from opt_partition._param_axes import Parameter
from opt_partition._specs import mesh_axes_of
from opt_partition._symbols import SMALL, Evaluate, Key, Keys, Origin, Origins


def provenance(
    evaluate: Evaluate, table: Sequence[Parameter], keys: Keys, note: str
) -> list[Origins]:
    """Returns the origin of every dimension of each leaf; `note` is for those without tags.

    Raises any error that `init` raises if it does not work on an Explicit mesh.
    """
    # A dimension of the same key within a parameter needs a mesh axis of its own.
    tags: dict[tuple[Key, int], str] = {}
    specs = []
    for row in keys:
        spec: list[str | None] = []
        for dim, key in enumerate(row):
            repeat = [*row[:dim]].count(key)
            spec.append(None if key is None else tags.setdefault((key, repeat), f"t{len(tags)}"))
        specs.append(PartitionSpec(*spec))
    by_tag = {tag: key for (key, _), tag in tags.items()}
    names = tuple(by_tag) or ("unused",)  # a mesh has at least one axis
    mesh = AbstractMesh((1,) * len(names), names, (AxisType.Explicit,) * len(names))
    structs: dict[Any, jax.ShapeDtypeStruct] = {}
    shapes = []
    for parameter, spec_of in zip(table, specs, strict=True):
        kind = parameter.shape, parameter.dtype, spec_of
        if kind not in structs:
            sharding = NamedSharding(mesh, spec_of)
            structs[kind] = jax.ShapeDtypeStruct(*kind[:2], sharding=sharding)
        shapes.append(structs[kind])
    with jax.sharding.use_abstract_mesh(mesh):
        state = evaluate(shapes)

    def origin(size: int, entry: Any) -> Origin:
        tagged = tuple(by_tag[tag] for tag in mesh_axes_of(entry))
        match tagged:
            case ():
                return SMALL if size < 2 else Origin(note=note, is_known=False)
            case (key,) if key[1] == size:
                return Origin(key, tagged)
            case (_,):
                return Origin(None, tagged, "a part of parameter dimension {}")
        return Origin(None, tagged, "computed from the parameter dimensions {}")

    return [
        tuple(origin(*at) for at in zip(leaf.shape, _entries(leaf), strict=True))
        for leaf in jax.tree.leaves(state)
    ]


def _entries(leaf: Any) -> list[Any]:
    spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else ()
    return [*spec, *[None] * (len(leaf.shape) - len(spec))]
