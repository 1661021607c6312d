"""Conversion of logical axes to mesh axes by a table of rules, as in T5X and Flax."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import tree_leaves_with_path

from opt_partition._layout import (
    AnyMesh,
    Layout,
    LeafLayout,
    check_choice,
    distinct_axes,
    mesh_axes_of,
    named_sizes,
    shard_shape,
    spec_of,
)
from opt_partition._param_axes import Axis, named_leaf
from opt_partition._trees import align, leaves_with_paths, map_leaves
from opt_partition.errors import AxesError, IndivisibleError

MeshAxes = str | Sequence[str] | None
LogicalAxisRules = Sequence[tuple[str, MeshAxes]] | Mapping[str, MeshAxes]
MemoryKinds = str | Callable[[str, Any], str | None] | None


def logical_to_mesh(
    axes: Any,
    rules: LogicalAxisRules,
    mesh: AnyMesh,
    shapes: Any,
    *,
    on_indivisible: Literal["replicate", "error"] = "replicate",
    on_unknown: Literal["error", "replicate"] = "error",
    memory_kinds: MemoryKinds = None,
) -> Layout:
    """Lays out leaves with logical axes on a mesh.

    Rules are applied in order. A rule applies to a dimension with its name if no earlier rule has
    decided the dimension, none of its mesh axes is used by another dimension of the leaf, and the
    product of their sizes divides the dimension; otherwise a later rule for the same name may
    apply. A rule with several mesh axes applies as a whole or not at all. If a name occurs twice in
    a leaf, as in the factors of Shampoo, the first dimension takes precedence.

    Args:
      axes: a `PartitionSpec` or tuple of logical names per leaf. An entry is a name, `None`, or,
        for a merged dimension, a tuple of names, each of which may contribute mesh axes. Dimensions
        beyond the end of a spec are not sharded; `None` instead of a spec replicates the leaf.
      rules: pairs of a logical name and a mesh axis, several mesh axes, or `None`, which leaves the
        dimension unsharded. Can be a mapping if there is one rule per name.
      mesh: a `Mesh` or `AbstractMesh`.
      shapes: a tree with the structure of `axes`, of arrays or `jax.ShapeDtypeStruct`s.
      on_indivisible: `'error'` raises an error if a dimension stays unsharded because it is not
        divisible, unless a rule with `None` applies to it.
      on_unknown: `'replicate'` leaves dimensions without any rule for their name unsharded, with a
        note.
      memory_kinds: a memory kind for all leaves, or a function of the path and the leaf; `None` for
        the device's default.

    Returns:
      The layout. The `notes` of a leaf list every dimension that stays unsharded although it has
      rules with mesh axes, and why.

    Raises:
      AxesError: `axes`, `rules`, `mesh` and `shapes` do not match.
      IndivisibleError: see `on_indivisible`.

    Examples:
      >>> from jax.sharding import AbstractMesh, PartitionSpec as P
      >>> layout = logical_to_mesh(
      ...     {'wi': P('embed', 'mlp'), 'bias': P('mlp')},
      ...     [('mlp', 'model'), ('embed', 'data')],
      ...     AbstractMesh((4, 2), ('data', 'model')),
      ...     {'wi': jax.ShapeDtypeStruct((8, 6), 'float32'),
      ...      'bias': jax.ShapeDtypeStruct((7,), 'float32')},
      ... )
      >>> [(leaf.path, tuple(leaf.spec), leaf.shard_shape) for leaf in layout.rows]
      [('bias', (None,), (7,)), ('wi', ('data', 'model'), (2, 3))]
      >>> layout.notes
      ("bias: dimension 0 ('mlp', 7) is not divisible by model=2",)
    """
    check_choice("on_indivisible", on_indivisible, ("replicate", "error"))
    check_choice("on_unknown", on_unknown, ("error", "replicate"))
    pairs = _parse_rules(rules, mesh)
    entries = align(axes, shapes, "axes")
    head = "`axes` do not match `shapes` and `rules`:"
    parsed = map_leaves(named_leaf, tree_leaves_with_path(shapes), entries, head)
    place = functools.cache(functools.partial(_place, rules=pairs, mesh=mesh))
    leaves = []
    unknown: dict[str, list[str]] = {}
    indivisible: list[str] = []
    for (path, leaf), (shape, dtype, names) in zip(leaves_with_paths(shapes), parsed, strict=True):
        spec, notes, without_rule, not_divisible = place(names, shape)
        for name in without_rule:
            unknown.setdefault(name, []).append(path)
        indivisible += [f"{path}: {note}" for note in not_divisible]
        kind = memory_kinds(path, leaf) if callable(memory_kinds) else memory_kinds
        shard = shard_shape(shape, spec, mesh)
        leaves.append(LeafLayout(path, shape, dtype, spec, shard, kind, notes))
    if unknown and on_unknown == "error":
        missing = [f"{name!r}, of {', '.join(at)}: no rule" for name, at in unknown.items()]
        tail = "Add `(name, None)` to `rules` or pass `on_unknown='replicate'`"
        raise AxesError("\n  ".join([head, *missing, tail]))
    if indivisible and on_indivisible == "error":
        head = "dimensions are not divisible by the mesh axes that `rules` assign to them:"
        tail = "Add another rule or `(name, None)`, or pass `on_indivisible='replicate'`"
        raise IndivisibleError("\n  ".join([head, *indivisible, tail]))
    return Layout(mesh, jax.tree.unflatten(jax.tree.structure(shapes), leaves))


@dataclasses.dataclass
class _Slot:
    """A logical name of a dimension, the mesh axes that it got, and why earlier rules failed."""

    dimension: int
    name: str
    axes: tuple[str, ...] | None = None
    refusals: list[str] = dataclasses.field(default_factory=list)
    divides: bool = True


_Rules = Sequence[tuple[str, tuple[str, ...]]]


def _place(
    names: tuple[Axis, ...], shape: tuple[int, ...], rules: _Rules, mesh: AnyMesh
) -> tuple[PartitionSpec, tuple[str, ...], dict[str, None], list[str]]:
    """Returns a spec, its notes, names without a rule, and the notes on divisibility alone."""
    slots = [_Slot(dim, name) for dim, axis in enumerate(names) for name in mesh_axes_of(axis)]
    used: dict[str, int] = {}  # mesh axis to dimension, in order of assignment
    for name, axes in rules:
        for slot in slots:
            if slot.name == name and slot.axes is None:
                _try(axes, slot, shape[slot.dimension], used, mesh)
    spec = spec_of(
        [axis for slot in slots if slot.dimension == dim for axis in slot.axes or ()]
        for dim in range(len(shape))
    )
    notes, indivisible, missing = [], [], []
    with_rule = {name for name, _ in rules}
    for slot in slots:
        if slot.name not in with_rule:
            missing.append(slot)
        elif not slot.axes and slot.refusals:
            size, why = shape[slot.dimension], " and ".join(slot.refusals)
            notes.append(f"dimension {slot.dimension} ({slot.name!r}, {size}) {why}")
            indivisible += notes[-1:] * (slot.axes is None and not slot.divides)
    notes += [f"dimension {slot.dimension}: no rule for {slot.name!r}" for slot in missing]
    return spec, tuple(notes), dict.fromkeys(slot.name for slot in missing), indivisible


def _try(
    axes: tuple[str, ...], slot: _Slot, size: int, used: dict[str, int], mesh: AnyMesh
) -> None:
    """Assigns `axes` to a slot, or records why not."""
    taken = [axis for axis in axes if axis in used]
    # A merged dimension gets the mesh axes of all its names.
    together = [axis for axis, dim in used.items() if dim == slot.dimension] + list(axes)
    if taken:
        slot.refusals.append(f"cannot use {taken[0]}: dimension {used[taken[0]]} uses it")
    elif axes and size % math.prod(mesh.shape[axis] for axis in together):
        slot.refusals.append(f"is not divisible by {named_sizes(mesh, together)}")
        slot.divides = False
    else:
        slot.axes = axes
        used.update(dict.fromkeys(axes, slot.dimension))


def rule_pairs(rules: LogicalAxisRules) -> list[Any]:
    """Returns rules, pairs or a mapping, as a list."""
    return list(rules.items() if isinstance(rules, Mapping) else rules)


def _parse_rules(rules: LogicalAxisRules, mesh: AnyMesh) -> _Rules:
    """Returns pairs of a name and mesh axes in `mesh`; `()` for `None`."""
    parsed: list[tuple[str, tuple[str, ...]]] = []
    for pair in rule_pairs(rules):
        match pair:
            case (str(name), None | str() | [*_]):
                if axes := mesh_axes_of(pair[1]):
                    distinct_axes(f"what `rules` map {name!r} to", axes, mesh)
                parsed.append((name, axes))
            case _:
                raise AxesError(
                    "`rules` must be pairs of a logical name and a mesh axis, a tuple of mesh axes "
                    f"or None; found {pair!r}"
                )
    return parsed
