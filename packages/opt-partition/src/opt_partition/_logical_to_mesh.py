"""Logical axes to mesh axes, by a table of rules.

The tables are those of T5X and Flax, and so is their reading: rules have priority over
dimensions. Beyond it, a rule that would not divide a dimension is passed over, and whatever
stays unsharded against the table's wish carries a note.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec

from opt_partition._align import align, brief
from opt_partition._layout import Layout, LeafLayout, leaves_with_paths
from opt_partition._specs import (
    AnyMesh,
    manual_axes,
    named_sizes,
    shape_and_dtype,
    shard_shape,
    spec_of,
    spec_str,
)
from opt_partition.errors import AxesError, IndivisibleError

MeshAxes = str | Sequence[str] | None
LogicalAxisRules = Sequence[tuple[str, MeshAxes]] | Mapping[str, MeshAxes]
MemoryKinds = Any  # None, a kind, a prefix tree of them, or a function of path and leaf


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
    """Lays leaves with logical axes over a mesh.

    The rules are gone through in order. A rule is used where its name stands at a dimension that
    no earlier rule decided, none of its mesh axes lies over another dimension of the leaf, and
    the dimension divides by all of them together; otherwise a later rule of the same name may
    serve. A rule of several mesh axes is used whole or not at all. A name that a leaf has twice,
    as Shampoo's factors do, is served from the first dimension on.

    Args:
      axes: a `PartitionSpec` of logical names per leaf. An entry is a name, `None`, or a tuple of
        names where a dimension is several of them merged, which may each bring mesh axes. A
        short spec leaves the other dimensions whole; `None` in its place leaves all.
      rules: pairs of a logical name and a mesh axis, several mesh axes, or `None`, which decides
        for leaving the dimension whole. A mapping will do where each name has one rule.
      mesh: a `Mesh` or `AbstractMesh`; rules with a `Manual` axis are not used.
      shapes: arrays or `jax.ShapeDtypeStruct`s in a tree like `axes`.
      on_indivisible: `'error'` raises where a dimension stays whole because it does not divide,
        unless a rule with `None` settled it.
      on_unknown: `'replicate'` leaves dimensions whole whose name no rule has, with a note.
      memory_kinds: the memory of all leaves, a tree like `shapes` or a prefix of it, or a function
        of a leaf's path and the leaf; `None` is the device's default.

    Returns:
      The layout. Leaves' `notes` name every dimension that has rules with mesh axes and yet
      stays whole, and why.

    Raises:
      AxesError: `axes`, `rules`, `mesh` and `shapes` do not fit together.
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
      ("bias: dimension 0 ('mlp', 7) does not divide by model=2",)
    """
    _check_choice("on_indivisible", on_indivisible, ("replicate", "error"))
    _check_choice("on_unknown", on_unknown, ("error", "replicate"))
    table = _Table(mesh, _parse_rules(rules, mesh))
    keyed = list(leaves_with_paths(shapes))
    entries = align(axes, shapes, "axes")
    kinds = _memory_kinds(memory_kinds, shapes, keyed)

    placements: dict[Any, _Placement] = {}
    leaves: list[LeafLayout] = []
    problems: list[str] = []
    indivisible: list[str] = []
    unknown: dict[str, list[str]] = {}
    for (path, leaf), entry, kind in zip(keyed, entries, kinds, strict=True):
        try:
            shape, dtype = shape_and_dtype(leaf)
            dims = _parse_axes(entry, len(shape))
        except (TypeError, AxesError) as error:
            problems.append(f"{path}: {error}")
            continue
        placement = placements.get((dims, shape))
        if placement is None:
            placement = placements[dims, shape] = table.place(dims, shape)
        for name in placement.unknown:
            unknown.setdefault(name, []).append(path)
        indivisible += [f"{path}: {note}" for note in placement.indivisible]
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
    if unknown and on_unknown == "error":
        problems += [f"{name!r}, of {', '.join(paths)}: no rule" for name, paths in unknown.items()]
        problems.append("Add `(name, None)` to `rules` or pass `on_unknown='replicate'`.")
    if problems:
        raise AxesError("\n  ".join(["`axes` does not fit `shapes` and `rules`:", *problems]))
    if indivisible and on_indivisible == "error":
        head = "Dimensions do not divide by the mesh axes that `rules` give them:"
        tail = "Add a rule that divides or `(name, None)`, or pass `on_indivisible='replicate'`."
        raise IndivisibleError("\n  ".join([head, *indivisible, tail]))
    return Layout(mesh, jax.tree.unflatten(jax.tree.structure(shapes), leaves))


@dataclasses.dataclass(frozen=True)
class _Placement:
    """What the rules say about one shape with one tuple of names."""

    spec: PartitionSpec
    shard_shape: tuple[int, ...]
    notes: tuple[str, ...]
    indivisible: tuple[str, ...]
    unknown: tuple[str, ...]


@dataclasses.dataclass
class _Slot:
    """One logical name at one dimension.

    Attributes:
      dimension: the dimension.
      name: the name.
      axes: the mesh axes of the rule that decided; `None` before.
      refusals: why rules before that one were not used.
      divides: whether none of them was refused because the dimension does not divide.
    """

    dimension: int
    name: str
    axes: tuple[str, ...] | None = None
    refusals: list[str] = dataclasses.field(default_factory=list)
    divides: bool = True


class _Table:
    """Rules on a mesh."""

    def __init__(self, mesh: AnyMesh, rules: Sequence[tuple[str, tuple[str, ...]]]) -> None:
        self._mesh = mesh
        self._rules = rules
        self._names = {name for name, _ in rules}
        self._manual = manual_axes(mesh)

    def place(self, dims: tuple[tuple[str, ...], ...], shape: tuple[int, ...]) -> _Placement:
        """Applies the rules to one shape; `dims` holds the names of each dimension."""
        slots = [_Slot(dim, name) for dim, names in enumerate(dims) for name in names]
        present = {slot.name for slot in slots}
        used: dict[str, int] = {}  # mesh axis: dimension; in order of decision
        for name, axes in self._rules:
            if name not in present:
                continue
            for slot in slots:
                if slot.name == name and slot.axes is None:
                    self._try(axes, slot, shape[slot.dimension], used)

        spec = spec_of(
            [axis for slot in slots if slot.dimension == dim for axis in slot.axes or ()]
            for dim in range(len(shape))
        )
        unsharded = [
            (slot, _note(slot, shape)) for slot in slots if not slot.axes and slot.refusals
        ]
        unknown = [slot for slot in slots if slot.name not in self._names]
        return _Placement(
            spec=spec,
            shard_shape=shard_shape(shape, spec, self._mesh),
            notes=(
                *(note for _, note in unsharded),
                *(f"dimension {slot.dimension}: no rule for {slot.name!r}" for slot in unknown),
            ),
            indivisible=tuple(
                note for slot, note in unsharded if slot.axes is None and not slot.divides
            ),
            unknown=tuple(dict.fromkeys(slot.name for slot in unknown)),
        )

    def _try(self, axes: tuple[str, ...], slot: _Slot, size: int, used: dict[str, int]) -> None:
        """Gives `axes` to the slot, or writes down why not."""
        manual = [axis for axis in axes if axis in self._manual]
        taken = [axis for axis in axes if axis in used]
        # A merged dimension has the mesh axes of all its names.
        together = [axis for axis, dim in used.items() if dim == slot.dimension] + list(axes)
        if manual:
            slot.refusals.append(f"cannot use {manual[0]}: it is Manual")
        elif taken:
            slot.refusals.append(f"cannot use {taken[0]}: dimension {used[taken[0]]} has it")
        elif axes and size % math.prod(self._mesh.shape[axis] for axis in together):
            slot.refusals.append(f"does not divide by {named_sizes(self._mesh, together)}")
            slot.divides = False
        else:
            slot.axes = axes
            used.update(dict.fromkeys(axes, slot.dimension))


def _note(slot: _Slot, shape: tuple[int, ...]) -> str:
    refusals = " and ".join(slot.refusals)
    return f"dimension {slot.dimension} ({slot.name!r}, {shape[slot.dimension]}) {refusals}"


def _parse_rules(rules: LogicalAxisRules, mesh: AnyMesh) -> list[tuple[str, tuple[str, ...]]]:
    """Returns pairs of a name and mesh axes that `mesh` has; `()` for `None`."""
    pairs = list(rules.items() if isinstance(rules, Mapping) else rules)
    parsed: list[tuple[str, tuple[str, ...]]] = []
    for pair in pairs:
        match pair:
            case (str(name), None):
                parsed.append((name, ()))
            case (str(name), str(axis)):
                parsed.append((name, (axis,)))
            case (str(name), [*several]) if all(isinstance(axis, str) for axis in several):
                parsed.append((name, tuple(several)))
            case _:
                raise AxesError(
                    "`rules` must be pairs of a logical name and a mesh axis, a tuple of mesh axes "
                    f"or None; found {pair!r}"
                )
    for name, axes in parsed:
        absent = [axis for axis in axes if axis not in mesh.shape]
        if absent:
            raise AxesError(
                f"`rules` give {name!r} the mesh axes {', '.join(map(repr, absent))}, which `mesh` "
                f"has not: it has {named_sizes(mesh, mesh.axis_names)}. Rename the axes, or leave "
                "the rule out on this mesh."
            )
        if len(set(axes)) < len(axes):
            raise AxesError(f"`rules` give {name!r} one mesh axis twice: {axes!r}")
    return parsed


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
            f"expected at most {rank} entries, one a dimension; found {spec_str(entry)}"
        )
    return (*dims, *[()] * (rank - len(dims)))


def _memory_kinds(
    memory_kinds: MemoryKinds, shapes: Any, keyed: Sequence[tuple[str, Any]]
) -> list[str | None]:
    """Returns the memory kind of each leaf."""
    if callable(memory_kinds):
        choose: Callable[[str, Any], str | None] = memory_kinds
        kinds: list[Any] = [choose(path, leaf) for path, leaf in keyed]
    else:
        kinds = align(memory_kinds, shapes, "memory_kinds", prefix=True)
    wrong = [
        f"{path}: found {kind!r}"
        for (path, _), kind in zip(keyed, kinds, strict=True)
        if not (kind is None or isinstance(kind, str))
    ]
    if wrong:
        raise AxesError("\n  ".join(["`memory_kinds` must be strings or None:", *wrong]))
    return kinds


def _check_choice(argument: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"`{argument}` must be one of {', '.join(map(repr, choices))}: {value!r}")
