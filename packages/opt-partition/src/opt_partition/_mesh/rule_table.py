"""A table of rules, and its application to a leaf."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

from opt_partition._mesh.specs import AnyMesh, manual_axes, named_sizes, shard_shape, spec_of
from opt_partition.errors import AxesError

MeshAxes = str | Sequence[str] | None
LogicalAxisRules = Sequence[tuple[str, MeshAxes]] | Mapping[str, MeshAxes]


@dataclasses.dataclass(frozen=True)
class Placement:
    """The result of applying the rules to a shape with logical names.

    Attributes:
      spec: mesh axes of each dimension.
      shard_shape: shape of the shard on one device.
      notes: dimensions that stay unsharded despite a rule, or have no rule.
      indivisible: the notes on indivisible dimensions without an applicable `None` rule.
      unknown: names without a rule.
    """

    spec: PartitionSpec
    shard_shape: tuple[int, ...]
    notes: tuple[str, ...]
    indivisible: tuple[str, ...]
    unknown: tuple[str, ...]


class RuleTable:
    """Rules from logical names to the axes of a mesh.

    Raises:
      AxesError: a rule is malformed, or has a duplicate or unknown mesh axis.
    """

    def __init__(self, rules: LogicalAxisRules, mesh: AnyMesh) -> None:
        self._mesh = mesh
        self._rules = _parse_rules(rules, mesh)
        self._names = {name for name, _ in self._rules}
        self._manual = manual_axes(mesh)

    def place(self, dims: tuple[tuple[str, ...], ...], shape: tuple[int, ...]) -> Placement:
        """Applies the rules to a shape; `dims` contains the names of each dimension."""
        slots = [_Slot(dim, name) for dim, names in enumerate(dims) for name in names]
        present = {slot.name for slot in slots}
        used: dict[str, int] = {}  # mesh axis to dimension, in order of assignment
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
        return Placement(
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
        """Assigns `axes` to the slot, or records why not."""
        manual = [axis for axis in axes if axis in self._manual]
        taken = [axis for axis in axes if axis in used]
        # A merged dimension gets the mesh axes of all its names.
        together = [axis for axis, dim in used.items() if dim == slot.dimension] + list(axes)
        if manual:
            slot.refusals.append(f"cannot use {manual[0]}: it is Manual")
        elif taken:
            slot.refusals.append(f"cannot use {taken[0]}: dimension {used[taken[0]]} uses it")
        elif axes and size % math.prod(self._mesh.shape[axis] for axis in together):
            slot.refusals.append(f"is not divisible by {named_sizes(self._mesh, together)}")
            slot.divides = False
        else:
            slot.axes = axes
            used.update(dict.fromkeys(axes, slot.dimension))


@dataclasses.dataclass
class _Slot:
    """A logical name of a dimension.

    Attributes:
      dimension: the dimension.
      name: the name.
      axes: mesh axes assigned by a rule; `None` before.
      refusals: why earlier rules did not apply.
      divides: `False` if a rule did not apply because the dimension is not divisible.
    """

    dimension: int
    name: str
    axes: tuple[str, ...] | None = None
    refusals: list[str] = dataclasses.field(default_factory=list)
    divides: bool = True


def _note(slot: _Slot, shape: tuple[int, ...]) -> str:
    refusals = " and ".join(slot.refusals)
    return f"dimension {slot.dimension} ({slot.name!r}, {shape[slot.dimension]}) {refusals}"


def _parse_rules(rules: LogicalAxisRules, mesh: AnyMesh) -> list[tuple[str, tuple[str, ...]]]:
    """Returns pairs of a name and mesh axes in `mesh`; `()` for `None`."""
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
                f"`rules` map {name!r} to the mesh axes {', '.join(map(repr, absent))}, which are "
                f"not in `mesh`: it has {named_sizes(mesh, mesh.axis_names)}. Rename the axes, or "
                "omit the rule for this mesh."
            )
        if len(set(axes)) < len(axes):
            raise AxesError(f"`rules` map {name!r} to the same mesh axis twice: {axes!r}")
    return parsed
