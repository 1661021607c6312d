"""The data of a memory plan."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from opt_partition._display import dtype_name, plain
from opt_partition._explain import Explanation
from opt_partition._layout import Layout, LeafLayout
from opt_partition._plan_views import plan_text, plot_plan
from opt_partition._specs import AnyMesh

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Kind = Literal["params", "grads", "accumulators", "state"]
KINDS: tuple[Kind, ...] = ("params", "grads", "accumulators", "state")
NO_PARAMETER = "(no parameter)"


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """One leaf of a plan.

    Attributes:
      kind: the tree that it belongs to.
      leaf: its layout.
      axes: logical name of each dimension.
      parameter: path of the parameter that it is or belongs to; `None` for counters etc.
      group: group of that parameter.
      field: field of the optimizer state, e.g. `ScaleByAdamState.mu`; otherwise the kind.
      waste: bytes that each device holds beyond an equal share of the leaf.
      reason: why it is replicated; empty if there is no waste.
    """

    kind: Kind
    leaf: LeafLayout
    axes: tuple[Any, ...]
    parameter: str | None
    group: str
    field: str
    waste: int
    reason: str


@dataclasses.dataclass(frozen=True)
class GroupBytes:
    """Bytes per device of one group of parameters.

    Attributes:
      params: bytes of the parameters themselves.
      grads: bytes of their gradients.
      accumulators: bytes of their gradient accumulators.
      state: bytes of their optimizer state.
    """

    params: int = 0
    grads: int = 0
    accumulators: int = 0
    state: int = 0

    @property
    def total(self) -> int:
        """Sum of the four."""
        return self.params + self.grads + self.accumulators + self.state


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """The layout and memory of a training step; prints on one screen.

    `print` shows totals, the largest groups and the three leaves with the most waste; `to_data` and
    the command line's `--all` have everything, and `plot` draws the groups.

    Byte counts are exact integers.

    Attributes:
      mesh: the mesh.
      params: layout of the parameters; pass `plan.params.shardings` to `jax.jit`.
      grads: layout of the gradients.
      accumulators: layout of the gradient accumulators, or `None`.
      state: layout of the optimizer state.
      rows: a row per leaf, in the order parameters, gradients, accumulators, state.
      explanation: how the logical axes of the state were derived.
      zero: mesh axes that the state is sharded over in addition.
      zero_level: 1 if this applies to the state only, 2 for gradients and accumulators too.
      temporary_bytes: what a step of the transformation needs on a device besides, at most, where
        it says so; in no total.
    """

    mesh: AnyMesh
    params: Layout
    grads: Layout
    accumulators: Layout | None
    state: Layout
    rows: tuple[PlanRow, ...]
    explanation: Explanation
    zero: tuple[str, ...] = ()
    zero_level: int = 1
    temporary_bytes: int | None = None

    @property
    def total_bytes(self) -> int:
        """Global bytes of all leaves."""
        return sum(row.leaf.bytes for row in self.rows)

    @property
    def total_bytes_per_device(self) -> int:
        """Bytes of all leaves per device, in all memory kinds."""
        return sum(row.leaf.bytes_per_device for row in self.rows)

    @property
    def bytes_per_device_by_memory(self) -> dict[str, int]:
        """Bytes per device by memory kind; `'device'` is the default memory."""
        return _sums((row.leaf.memory_kind or "device", row) for row in self.rows)

    @property
    def state_fields(self) -> dict[str, int]:
        """Bytes per device of each field of the optimizer state."""
        return _sums((row.field, row) for row in self.rows if row.kind == "state")

    @property
    def groups(self) -> dict[str, GroupBytes]:
        """Bytes per device of each group of parameters; `(no parameter)` is last."""
        sizes: dict[str, Counter[str]] = {}
        for row in self.rows:
            sizes.setdefault(row.group, Counter())[row.kind] += row.leaf.bytes_per_device
        return {name: GroupBytes(**of_kind) for name, of_kind in sizes.items()}

    @functools.cached_property
    def replicated(self) -> tuple[PlanRow, ...]:
        """The leaves of which devices hold more than an equal share, largest waste first."""
        wasteful = (row for row in self.rows if row.waste)
        return tuple(sorted(wasteful, key=lambda row: -row.waste))

    @property
    def notes(self) -> tuple[str, ...]:
        """Every request that could not be satisfied, as `kind path: reason`."""
        return tuple(
            f"{row.kind} {row.leaf.path}: {note}" for row in self.rows for note in row.leaf.notes
        )

    def to_json(self) -> str:
        """Returns the plan as JSON."""
        return json.dumps(self.to_data(), indent=1)

    def to_data(self) -> dict[str, Any]:
        """Returns the plan as dicts, lists, strings and numbers."""
        sizes: dict[str, int] = {}
        for kind in KINDS:
            layout, name = getattr(self, kind), kind.removesuffix("s")
            sizes[f"{name}_bytes"] = layout.bytes if layout else 0
            sizes[f"{name}_bytes_per_device"] = layout.bytes_per_device if layout else 0
        return {
            "mesh": dict(self.mesh.shape),
            "zero": list(self.zero),
            "zero_level": self.zero_level,
            **sizes,
            "total_bytes": self.total_bytes,
            "total_bytes_per_device": self.total_bytes_per_device,
            "bytes_per_device_by_memory": self.bytes_per_device_by_memory,
            "state_fields": self.state_fields,
            "temporary_bytes": self.temporary_bytes,
            "groups": {
                name: {**dataclasses.asdict(group), "total": group.total}
                for name, group in self.groups.items()
            },
            "notes": list(self.notes),
            "rows": [_row_data(row) for row in self.rows],
        }

    def plot(self) -> Figure:
        """Draws a bar for each group: its parameters, gradients, accumulators and state.

        Below each bar, a thin one is the waste among these bytes: what each device holds beyond an
        equal share. Equal groups, such as layers, are one bar. The background is transparent and
        the colours are readable on light and on dark pages.

        Returns:
          The figure; `plan.plot().savefig('plan.png')` writes it.

        Raises:
          ImportError: matplotlib is not installed: `pip install 'opt-partition[plot]'`.
        """
        return plot_plan(self)

    def __str__(self) -> str:
        return plan_text(self)


def _sums(named: Iterable[tuple[str, PlanRow]]) -> dict[str, int]:
    """Returns the sum of bytes per device for each name, in order of first occurrence."""
    sums: Counter[str] = Counter()
    for name, row in named:
        sums[name] += row.leaf.bytes_per_device
    return dict(sums)


def _row_data(row: PlanRow) -> dict[str, Any]:
    leaf = row.leaf
    sizes = {"bytes": leaf.bytes, "bytes_per_device": leaf.bytes_per_device}
    data = {**vars(row), **vars(leaf), **sizes, "dtype": dtype_name(leaf.dtype)}
    return {name: plain(value) for name, value in data.items() if name != "leaf"}
