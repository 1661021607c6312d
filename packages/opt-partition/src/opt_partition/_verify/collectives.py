"""The collectives of a compiled program: which, over which devices, how often, how many bytes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from opt_partition._verify.hlo import Array, Computation, Instruction, Module, flat_types
from opt_partition._verify.hlo_loops import trip_count
from opt_partition._verify.replica_groups import Groups, axes_of, parse_groups

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One array that one collective of a compiled program moves.

    Attributes:
      name: the instruction's; with its place where the instruction moves several arrays.
      kind: one of `KINDS`; asynchronous ones and the fusions that TPUs make go by what they do.
      dtype: HLO's name, e.g. `'bf16'`.
      operand_shape: the shape that one device puts in.
      shape: the shape that one device gets.
      group_size: number of devices that take part together.
      axes: the mesh axes that it runs over; `None` where these are not whole axes of the mesh.
      count: how often it runs in a step, loops multiplied out.
      per_iteration: it is in a loop whose length is not known; `count` is for one iteration.
      conditional: it is in a branch that may not be taken.
      bytes: what one device sends each time, by a ring (an all-reduce's is twice a
        reduce-scatter's); `0` where a group is one device.
      op_name: what JAX noted as its origin.
      sources: what the moved values depend on: state leaves by path, `'params'`, `'inputs'`.
    """

    name: str
    kind: str
    dtype: str
    operand_shape: tuple[int, ...]
    shape: tuple[int, ...]
    group_size: int
    axes: tuple[str, ...] | None
    count: int
    per_iteration: bool
    conditional: bool
    bytes: int
    op_name: str
    sources: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes that one device sends for it in a step."""
        return self.bytes * self.count


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """A place of a program where a collective runs.

    Attributes:
      computation: the one that it is in.
      instruction: the collective itself.
      kind: as of `Collective`.
      parts: operand and result of each array that it moves.
      count: how often the place is reached in a step.
      per_iteration: as of `Collective`.
      loops: the `while`s that it is in, outermost first, and how often each runs.
      branches: the `conditional`s that it is in, outermost first, and which branch of each.
    """

    computation: Computation
    instruction: Instruction
    kind: str
    parts: tuple[tuple[Array, Array], ...]
    count: int
    per_iteration: bool
    loops: tuple[tuple[str, int], ...]
    branches: tuple[tuple[str, int], ...]

    @property
    def groups(self) -> Groups | None:
        """Partition ids of the devices that take part together; `None` for all."""
        pairs = self.instruction.attribute("source_target_pairs")
        return parse_groups(self.instruction.attributes) if pairs is None else None


def sites(module: Module) -> list[Site]:
    """Every collective that a run of `module` reaches, in program order."""
    found: list[Site] = []
    seen: set[tuple[str, str]] = set()

    def visit(name: str, inside: Inside) -> None:
        computation = module.computations[name]
        for instruction in computation.instructions.values():
            kind = collective_kind(instruction)
            if kind is None:
                for n, callee in enumerate(callees(instruction)):
                    visit(callee, inside.entering(module, computation, instruction, n))
            elif _first_of_async_fusion(instruction, kind, seen):
                kind, parts = _parts(computation, instruction, kind)
                found.append(
                    Site(
                        computation,
                        instruction,
                        kind,
                        parts,
                        math.prod(trips for _, trips in inside.loops),
                        inside.per_iteration,
                        inside.loops,
                        inside.branches,
                    )
                )

    visit(module.entry, Inside())
    return found


@dataclasses.dataclass(frozen=True)
class Inside:
    """The loops and branches around a computation; fields as of `Site`."""

    per_iteration: bool = False
    loops: tuple[tuple[str, int], ...] = ()
    branches: tuple[tuple[str, int], ...] = ()

    def entering(
        self, module: Module, computation: Computation, instruction: Instruction, number: int
    ) -> Inside:
        """What is around the computation `number` that an instruction runs."""
        name = instruction.name
        if instruction.opcode == "conditional":
            return dataclasses.replace(self, branches=(*self.branches, (name, number)))
        if instruction.opcode != "while":
            return self
        trips = trip_count(module, computation, instruction)
        return Inside(
            self.per_iteration or not trips, (*self.loops, (name, trips or 1)), self.branches
        )


def collectives(module: Module, mesh_shape: Mapping[str, int] | None = None) -> list[Collective]:
    """Every array that a collective of `module` moves.

    Args:
      module: a compiled program.
      mesh_shape: size of each mesh axis, in the mesh's order; to name the axes.
    """
    return [row for site in sites(module) for row in rows(site, module, mesh_shape)]


def rows(site: Site, module: Module, mesh_shape: Mapping[str, int] | None) -> list[Collective]:
    """The `Collective`s of one place."""
    groups = site.groups or (tuple(range(module.num_partitions)),)
    size = len(groups[0])
    permutes = site.kind == "collective-permute"
    axes = None if permutes else axes_of(groups, mesh_shape or {})
    many = len(site.parts) > 1
    return [
        Collective(
            name=f"{site.instruction.name}.{n}" if many else site.instruction.name,
            kind=site.kind,
            dtype=result.dtype,
            operand_shape=operand.shape,
            shape=result.shape,
            group_size=size,
            axes=axes,
            count=site.count,
            per_iteration=site.per_iteration,
            conditional=bool(site.branches),
            bytes=bytes_sent(site.kind, operand.bytes, result.bytes, size),
            op_name=site.instruction.op_name,
        )
        for n, (operand, result) in enumerate(site.parts)
    ]


def bytes_sent(kind: str, operand: int, result: int, group_size: int) -> int:
    """Bytes that one of `group_size` devices sends, by a ring.

    Examples:
      >>> bytes_sent('all-gather', 10, 80, 8), bytes_sent('reduce-scatter', 80, 10, 8)
      (70, 70)
      >>> bytes_sent('all-reduce', 80, 80, 8), bytes_sent('collective-permute', 80, 80, 8)
      (140, 80)
    """
    if kind in ("collective-permute", "collective-broadcast"):
        return operand
    whole = max(operand, result)
    return (1 + (kind == "all-reduce")) * (whole - whole // group_size)


def collective_kind(instruction: Instruction) -> str | None:
    """The kind of collective that an instruction is or starts; `None` for anything else."""
    opcode = instruction.opcode.removesuffix("-start")
    return opcode if opcode in KINDS else None


def callees(instruction: Instruction) -> tuple[str, ...]:
    """The computations that an instruction runs; not those that it applies to elements."""
    keys = _CALLEES.get(instruction.opcode)
    return tuple(name for key in keys for name in instruction.called(key)) if keys else ()


def _parts(
    computation: Computation, instruction: Instruction, kind: str
) -> tuple[str, tuple[tuple[Array, Array], ...]]:
    """The kind, and operand and result of each array moved."""
    done = _done(computation, instruction) if instruction.opcode != kind else instruction
    results = list(flat_types(done.type))
    operands = [
        array
        for name in instruction.operands
        for array in flat_types(computation.instructions[name].type)
    ]
    root = computation.instructions[computation.root]
    if kind == "all-reduce" and _is_scatter_fusion(computation, instruction):
        return "reduce-scatter", tuple(zip(operands, flat_types(root.type), strict=True))
    if kind == "all-to-all" and len(operands) > 1:
        # One array, cut into a part per device.
        whole = Array(operands[0].dtype, (len(operands), *operands[0].shape))
        return kind, ((whole, whole),)
    if len(operands) < len(results):
        results = results[: len(operands)]
    return kind, tuple(zip(operands, results, strict=False))


def _is_scatter_fusion(computation: Computation, instruction: Instruction) -> bool:
    """Whether a computation is the reduce-scatter of TPUs: an all-reduce and a slice by device."""
    root = computation.instructions[computation.root]
    return (
        computation.name.startswith("all-reduce-scatter")
        and root.opcode == "dynamic-slice"
        and root.operands[0] == instruction.name
    )


def _done(computation: Computation, start: Instruction) -> Instruction:
    """The instruction that waits for the asynchronous `start`."""
    found: Instruction | None = start
    while found is not None and not found.opcode.endswith("-done"):
        found = computation.async_users.get(found.name)
    if found is None:
        raise ValueError(f"`{start.name}` is started and never waited for in the compiled program")
    return found


def _first_of_async_fusion(instruction: Instruction, kind: str, seen: set[tuple[str, str]]) -> bool:
    """Whether an instruction is not yet counted.

    TPUs repeat a collective in each of the fusions that it is spread over; its channel is the same.
    """
    if "async_collective_fusion_config" not in instruction.attributes:
        return True
    key = (kind, instruction.attribute("channel_id") or instruction.name)
    new = key not in seen
    seen.add(key)
    return new


_CALLEES = {
    "async-start": ("calls",),
    "call": ("to_apply",),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
    "custom-call": ("calls",),
    "fusion": ("calls",),
    "while": ("condition", "body"),
}
