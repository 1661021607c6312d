"""Data for the pictures of parameters and their state on the mesh, grouped."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from opt_partition._axes.explain import Explanation
from opt_partition._cli.svg import Side, picture
from opt_partition._display import collapse, dtype_name, entry_text, join_ints
from opt_partition._memory.plan import MemoryPlan
from opt_partition._memory.state_fields import state_fields
from opt_partition._mesh.specs import AnyMesh, manual_axes, mesh_axes_of, named_sizes


@dataclasses.dataclass(frozen=True)
class Item:
    """One leaf to be drawn.

    Attributes:
      path: its path.
      parameter: path of the parameter that it is or belongs to.
      field: its field, e.g. `params`, `grads`, `ScaleByAdamState.mu`.
      shape: its shape.
      dtype: name of its dtype.
      names: logical name of each dimension, as text.
      over: mesh axes that each dimension is sharded over, as text; empty if not sharded.
      ways: number of shards of each dimension.
      copies: mesh axes over which a shard is replicated, as text, and the number of copies.
      remarks: memory kind, notes and actions.
    """

    path: str
    parameter: str | None
    field: str
    shape: tuple[int, ...]
    dtype: str
    names: tuple[str, ...]
    over: tuple[str, ...]
    ways: tuple[int, ...]
    copies: tuple[str, int]
    remarks: tuple[str, ...]

    @property
    def appearance(self) -> Hashable:
        """The key of items with the same picture."""
        return self.shape, self.names, self.over, self.ways, self.copies, self.remarks

    @property
    def dimensions(self) -> list[str]:
        """One line per dimension: its name, size and sharding."""
        lines = []
        for dim, (name, size) in enumerate(zip(self.names, self.shape, strict=True)):
            end = f" / {self.over[dim]} = {size // self.ways[dim]:,}" if self.over[dim] else ""
            lines.append(f"dim {dim}, {name}: {size:,}{end}")
        return lines

    def svg(self) -> str:
        """The picture."""
        sides = [
            Side(dim, size, self.ways[dim], self.over[dim]) for dim, size in enumerate(self.shape)
        ]
        over = [f"dimension {side.dimension} over {side.over}" for side in sides if side.over]
        where = "; ".join(over) or "replicated on every device"
        return picture(sides, self.copies[1], f"{self.field} {join_ints(self.shape)}: {where}")


@dataclasses.dataclass(frozen=True)
class Card:
    """One picture.

    Attributes:
      item: a leaf with this picture.
      fields: fields and dtypes of all leaves with this picture.
    """

    item: Item
    fields: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Family:
    """Parameters that are sharded alike, together with their states.

    Attributes:
      paths: patterns of their paths, or of the paths of leaves without a parameter.
      count: number of parameters.
      cards: pictures of the parameter and its state.
    """

    paths: tuple[str, ...]
    count: int
    cards: tuple[Card, ...]


def plan_items(plan: MemoryPlan) -> list[Item]:
    """Returns the leaves of a plan as items."""
    manual = manual_axes(plan.mesh)
    items = []
    for row in plan.rows:
        leaf = row.leaf
        used = [mesh_axes_of(entry) for entry in leaf.spec]
        taken = manual.union(*used)
        free = [axis for axis, n in plan.mesh.shape.items() if n > 1 and axis not in taken]
        memory = (f"in {leaf.memory_kind}",) if leaf.memory_kind else ()
        items.append(
            Item(
                path=leaf.path,
                parameter=row.parameter,
                field=row.field,
                shape=leaf.shape,
                dtype=dtype_name(leaf.dtype),
                names=tuple(map(entry_text, row.axes)),
                over=tuple(_product(plan.mesh, axes) for axes in used),
                ways=tuple(math.prod(plan.mesh.shape[a] for a in axes) for axes in used),
                copies=(
                    _product(plan.mesh, free),
                    math.prod(plan.mesh.shape[axis] for axis in free),
                ),
                remarks=(*memory, *leaf.actions, *leaf.notes),
            )
        )
    return items


def explanation_items(explanation: Explanation, params: Any) -> list[Item]:
    """Returns the leaves of a state without a mesh as items."""
    fields = state_fields(explanation.state, params)
    return [
        Item(
            path=row.path,
            parameter=row.parameter,
            field=field,
            shape=row.shape,
            dtype=dtype_name(row.dtype),
            names=tuple(map(entry_text, row.axes)),
            over=("",) * len(row.shape),
            ways=(1,) * len(row.shape),
            copies=("", 1),
            remarks=(row.note,) if row.note else (),
        )
        for row, field in zip(explanation.rows, fields, strict=True)
    ]


def families(items: Iterable[Item]) -> list[Family]:
    """Groups leaves by parameter, and equal parameters; leaves without a parameter are last."""
    by_parameter: dict[tuple[str | None, str], list[Item]] = {}
    for item in items:
        # Leaves without a parameter are not grouped.
        alone = item.path if item.parameter is None else ""
        by_parameter.setdefault((item.parameter, alone), []).append(item)
    alike: dict[Hashable, list[tuple[str, list[Item]]]] = {}
    for (parameter, alone), group in sorted(by_parameter.items(), key=lambda i: i[0][0] is None):
        key = tuple((item.field, item.dtype, item.appearance) for item in group)
        alike.setdefault((parameter is None, key), []).append((parameter or alone, group))
    return [_family(members) for members in alike.values()]


def _product(mesh: AnyMesh, axes: Iterable[str]) -> str:
    return named_sizes(mesh, axes).replace(", ", " x ")


def _family(members: Sequence[tuple[str, list[Item]]]) -> Family:
    by_picture: dict[Hashable, list[Item]] = {}
    for item in members[0][1]:
        by_picture.setdefault(item.appearance, []).append(item)
    cards = (
        Card(items[0], tuple(dict.fromkeys(f"{item.field} {item.dtype}" for item in items)))
        for items in by_picture.values()
    )
    patterns = collapse((path for path, _ in members), str, lambda _: None)
    return Family(
        paths=tuple(
            f"{pattern} ({len(group)})" if len(group) > 1 else pattern
            for pattern, group in patterns
        ),
        count=len(members),
        cards=tuple(cards),
    )
