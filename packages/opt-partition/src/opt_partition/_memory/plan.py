"""A plan of the memory of a training step, as data."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

from opt_partition._axes.explain import Explanation
from opt_partition._display import dtype_name
from opt_partition._memory.tables import plan_tables
from opt_partition._mesh.copies import OnMesh
from opt_partition._mesh.layout import Layout, LeafLayout
from opt_partition._mesh.specs import AnyMesh

Kind = Literal["params", "grads", "accumulators", "state"]
KINDS: tuple[Kind, ...] = ("params", "grads", "accumulators", "state")
NO_PARAMETER = "(no parameter)"


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """One leaf of a plan.

    Attributes:
      kind: what it is a leaf of.
      leaf: where it lies.
      axes: the logical name of each dimension.
      parameter: path of the parameter that it is, or follows; `None` for counters and the like.
      group: the group of that parameter.
      field: the field of the optimizer state, e.g. `ScaleByAdamState.mu`; otherwise the kind.
      waste: bytes that every device holds beyond an equal share of the leaf.
      reason: why it holds them; empty where there is no waste.
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
      params: of the parameters themselves.
      grads: of their gradients.
      accumulators: of their gradient accumulators.
      state: of the optimizer state that follows them.
    """

    params: int = 0
    grads: int = 0
    accumulators: int = 0
    state: int = 0

    @property
    def total(self) -> int:
        """All four together."""
        return self.params + self.grads + self.accumulators + self.state


@dataclasses.dataclass(frozen=True)
class MemoryPlan(OnMesh):
    """What lies where, and how many bytes it takes; `print` shows it as tables.

    All numbers of bytes are exact and plain integers. Copies share the mesh; a pickle has an
    `AbstractMesh` of the same axes in its place, in the layouts too.

    Attributes:
      mesh: the mesh.
      params: layout of the parameters; `plan.params.shardings` goes into `jax.jit` as it is.
      grads: layout of the gradients.
      accumulators: layout of the gradient accumulators; `None` where there are none.
      state: layout of the optimizer state.
      rows: every leaf, in the order parameters, gradients, accumulators, state.
      explanation: how the logical axes of the state were derived.
      zero: the mesh axes that the state is extended over.
      zero_level: 1 where only the state is, 2 where gradients and accumulators are as well.
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

    @property
    def param_bytes(self) -> int:
        """Bytes of the parameters, each once."""
        return self.params.bytes

    @property
    def param_bytes_per_device(self) -> int:
        """Bytes of the parameters on one device."""
        return self.params.bytes_per_device

    @property
    def grad_bytes(self) -> int:
        """Bytes of the gradients, each once."""
        return self.grads.bytes

    @property
    def grad_bytes_per_device(self) -> int:
        """Bytes of the gradients on one device."""
        return self.grads.bytes_per_device

    @property
    def accumulator_bytes(self) -> int:
        """Bytes of the gradient accumulators, each once."""
        return self.accumulators.bytes if self.accumulators else 0

    @property
    def accumulator_bytes_per_device(self) -> int:
        """Bytes of the gradient accumulators on one device."""
        return self.accumulators.bytes_per_device if self.accumulators else 0

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer state, each leaf once."""
        return self.state.bytes

    @property
    def state_bytes_per_device(self) -> int:
        """Bytes of the optimizer state on one device."""
        return self.state.bytes_per_device

    @property
    def total_bytes(self) -> int:
        """Bytes of everything, each leaf once."""
        return sum(row.leaf.bytes for row in self.rows)

    @property
    def total_bytes_per_device(self) -> int:
        """Bytes of everything on one device, in whatever memory."""
        return sum(row.leaf.bytes_per_device for row in self.rows)

    @property
    def bytes_per_device_by_memory(self) -> dict[str, int]:
        """Bytes on one device by the memory they lie in, `'device'` being its default."""
        return _sums((row.leaf.memory_kind or "device", row) for row in self.rows)

    @property
    def state_fields(self) -> dict[str, int]:
        """Bytes per device of each field of the optimizer state."""
        return _sums((row.field, row) for row in self.rows if row.kind == "state")

    @property
    def groups(self) -> dict[str, GroupBytes]:
        """Bytes per device of each group of parameters; `(no parameter)` is last."""
        names = dict.fromkeys(row.group for row in self.rows)
        by_kind = {
            kind: _sums((row.group, row) for row in self.rows if row.kind == kind) for kind in KINDS
        }
        return {
            name: GroupBytes(**{kind: by_kind[kind].get(name, 0) for kind in KINDS})
            for name in names
        }

    @functools.cached_property
    def replicated(self) -> tuple[PlanRow, ...]:
        """The leaves of which devices hold more than an equal share, the worst first."""
        wasteful = (row for row in self.rows if row.waste)
        return tuple(sorted(wasteful, key=lambda row: -row.waste))

    @property
    def notes(self) -> tuple[str, ...]:
        """Every request that could not be honoured, as `kind path: what and why`."""
        return tuple(
            f"{row.kind} {row.leaf.path}: {note}" for row in self.rows for note in row.leaf.notes
        )

    def to_json(self) -> str:
        """Returns everything as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as dicts, lists, strings and numbers."""
        kinds = {"params": "param", "grads": "grad", "accumulators": "accumulator"}
        prefixes = [*(kinds.get(kind, kind) for kind in KINDS), "total"]
        names = [f"{name}_bytes{end}" for name in prefixes for end in ("", "_per_device")]
        return {
            "mesh": dict(self.mesh.shape),
            "zero": list(self.zero),
            "zero_level": self.zero_level,
            **{name: getattr(self, name) for name in names},
            "bytes_per_device_by_memory": self.bytes_per_device_by_memory,
            "state_fields": self.state_fields,
            "groups": {
                name: {**dataclasses.asdict(group), "total": group.total}
                for name, group in self.groups.items()
            },
            "notes": list(self.notes),
            "rows": [_row_dict(row) for row in self.rows],
        }

    def __str__(self) -> str:
        return "\n\n".join(map(str, plan_tables(self)))


def _sums(named: Iterable[tuple[str, PlanRow]]) -> dict[str, int]:
    """Bytes per device under each name, in the order of the names."""
    sums: Counter[str] = Counter()
    for name, row in named:
        sums[name] += row.leaf.bytes_per_device
    return dict(sums)


def _row_dict(row: PlanRow) -> dict[str, Any]:
    leaf = row.leaf
    return {
        "kind": row.kind,
        "path": leaf.path,
        "shape": list(leaf.shape),
        "dtype": dtype_name(leaf.dtype),
        "axes": [list(entry) if isinstance(entry, tuple) else entry for entry in row.axes],
        "spec": [list(entry) if isinstance(entry, tuple) else entry for entry in leaf.spec],
        "shard_shape": list(leaf.shard_shape),
        "memory_kind": leaf.memory_kind,
        "bytes": leaf.bytes,
        "bytes_per_device": leaf.bytes_per_device,
        "parameter": row.parameter,
        "group": row.group,
        "field": row.field,
        "waste": row.waste,
        "reason": row.reason,
        "notes": list(leaf.notes),
        "actions": list(leaf.actions),
    }
