"""Conversion of logical axes to mesh axes by a table of rules.

Tables have the form and semantics of those of T5X and Flax: rules take precedence over dimensions.
In addition, a rule that does not divide a dimension evenly is skipped, and every dimension that
stays unsharded although it has rules gets a note.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec

from opt_partition._mesh.align import align, brief
from opt_partition._mesh.layout import Layout, LeafLayout
from opt_partition._mesh.rule_table import LogicalAxisRules, Placement, RuleTable
from opt_partition._mesh.specs import AnyMesh, shape_and_dtype, spec_str
from opt_partition._trees import leaves_with_paths
from opt_partition.errors import AxesError, IndivisibleError

# `None`, a memory kind, a prefix tree of both, or a function of the path and the leaf.
MemoryKinds = Any


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
      axes: a `PartitionSpec` of logical names per leaf. An entry is a name, `None`, or, for a
        merged dimension, a tuple of names, each of which may contribute mesh axes. Dimensions
        beyond the end of a spec are not sharded; `None` instead of a spec replicates the leaf.
      rules: pairs of a logical name and a mesh axis, several mesh axes, or `None`, which leaves the
        dimension unsharded. Can be a mapping if there is one rule per name.
      mesh: a `Mesh` or `AbstractMesh`; rules with a `Manual` axis do not apply.
      shapes: a tree with the structure of `axes`, of arrays or `jax.ShapeDtypeStruct`s.
      on_indivisible: `'error'` raises an error if a dimension stays unsharded because it is not
        divisible, unless a rule with `None` applies to it.
      on_unknown: `'replicate'` leaves dimensions without any rule for their name unsharded, with a
        note.
      memory_kinds: a memory kind for all leaves, a tree of them with the structure of `shapes` or a
        prefix of it, or a function of the path and the leaf; `None` for the device's default.

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
    _check_choice("on_indivisible", on_indivisible, ("replicate", "error"))
    _check_choice("on_unknown", on_unknown, ("error", "replicate"))
    table = RuleTable(rules, mesh)
    entries = align(axes, shapes, "axes")
    kinds = _memory_kinds(memory_kinds, shapes)

    placements: dict[Any, Placement] = {}
    leaves: list[LeafLayout] = []
    faults = _Faults()
    for (path, leaf), entry, kind in zip(leaves_with_paths(shapes), entries, kinds, strict=True):
        try:
            shape, dtype = shape_and_dtype(leaf)
            dims = _parse_axes(entry, len(shape))
        except (TypeError, ValueError) as error:
            faults.misfits.append(f"{path}: {error}")
            continue
        placement = placements.get((dims, shape))
        if placement is None:
            placement = placements[dims, shape] = table.place(dims, shape)
        faults.add(path, placement)
        leaves.append(
            LeafLayout(
                path=path,
                shape=shape,
                dtype=dtype,
                spec=placement.spec,
                shard_shape=placement.shard_shape,
                memory_kind=kind,
                notes=placement.notes,
            )
        )
    faults.check_fit(with_unknown=on_unknown == "error")
    if on_indivisible == "error":
        faults.check_divisible()
    return Layout(mesh, jax.tree.unflatten(jax.tree.structure(shapes), leaves))


@dataclasses.dataclass
class _Faults:
    """The problems of a tree, collected so that one error can list them all.

    Attributes:
      misfits: leaves whose entry is invalid.
      unknown: names without a rule, and the paths that use them.
      indivisible: dimensions that stay unsharded because they are not divisible.
    """

    misfits: list[str] = dataclasses.field(default_factory=list)
    unknown: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    indivisible: list[str] = dataclasses.field(default_factory=list)

    def add(self, path: str, placement: Placement) -> None:
        """Adds the problems of a leaf."""
        for name in placement.unknown:
            self.unknown.setdefault(name, []).append(path)
        self.indivisible += [f"{path}: {note}" for note in placement.indivisible]

    def check_fit(self, *, with_unknown: bool) -> None:
        lines = list(self.misfits)
        if self.unknown and with_unknown:
            lines += [f"{name!r}, of {', '.join(at)}: no rule" for name, at in self.unknown.items()]
            lines.append("Add `(name, None)` to `rules` or pass `on_unknown='replicate'`")
        if lines:
            raise AxesError("\n  ".join(["`axes` do not match `shapes` and `rules`:", *lines]))

    def check_divisible(self) -> None:
        if self.indivisible:
            head = "dimensions are not divisible by the mesh axes that `rules` assign to them:"
            tail = "Add another rule or `(name, None)`, or pass `on_indivisible='replicate'`"
            raise IndivisibleError("\n  ".join([head, *self.indivisible, tail]))


def _parse_axes(entry: Any, rank: int) -> tuple[tuple[str, ...], ...]:
    """Returns the names of each of `rank` dimensions."""
    if entry is None:
        return ((),) * rank
    if not isinstance(entry, PartitionSpec):
        raise AxesError(f"expected a PartitionSpec of logical names or None, found {brief(entry)}")
    dims: list[tuple[str, ...]] = []
    entries: tuple[Any, ...] = tuple(entry)
    for names in entries:
        several = () if names is None else names if isinstance(names, tuple) else (names,)
        if not all(isinstance(name, str) for name in several):
            raise AxesError(f"expected names, tuples of names or None, found {spec_str(entry)}")
        dims.append(several)
    if len(dims) > rank:
        raise AxesError(
            f"expected at most {rank} entries, one per dimension; found {spec_str(entry)}"
        )
    return (*dims, *[()] * (rank - len(dims)))


def _memory_kinds(memory_kinds: MemoryKinds, shapes: Any) -> list[str | None]:
    """Returns the memory kind of each leaf."""
    if callable(memory_kinds):
        choose: Callable[[str, Any], str | None] = memory_kinds
        kinds: list[Any] = [choose(path, leaf) for path, leaf in leaves_with_paths(shapes)]
    else:
        kinds = align(memory_kinds, shapes, "memory_kinds", prefix=True)
    if not all(kind is None or isinstance(kind, str) for kind in kinds):
        wrong = [
            f"{path}: found {kind!r}"
            for (path, _), kind in zip(leaves_with_paths(shapes), kinds, strict=True)
            if not (kind is None or isinstance(kind, str))
        ]
        raise AxesError("\n  ".join(["`memory_kinds` must be strings or None:", *wrong]))
    return kinds


def _check_choice(argument: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(
            f"`{argument}` must be one of {', '.join(map(repr, choices))}; got {value!r}"
        )
