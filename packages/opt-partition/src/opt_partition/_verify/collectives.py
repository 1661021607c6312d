"""The collectives of a compiled program, with their devices, counts and bytes."""

from __future__ import annotations

import dataclasses
import functools
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
    """One array communicated by a collective of a compiled program.

    Attributes:
      name: name of the instruction, with an index if it communicates several arrays.
      kind: one of `KINDS`, also for asynchronous collectives and TPU fusions.
      dtype: HLO name of the dtype, e.g. `'bf16'`.
      operand_shape: shape of the operand on one device.
      shape: shape of the result on one device.
      group_size: number of participating devices per group.
      axes: mesh axes that it runs over; `None` if the groups do not correspond to mesh axes.
      count: number of executions per step, including loops.
      per_iteration: whether it is in a loop of unknown length; `count` is then per iteration.
      conditional: whether it is in a conditional branch.
      bytes: bytes sent by one device per execution, assuming a ring algorithm (for an all-reduce
        twice those of a reduce-scatter); `0` for groups of one device.
      op_name: its origin in the JAX program, from the HLO metadata; of a combined collective, which
        has none on GPUs, that of its operand.
      sources: what the values depend on: paths of state leaves, `'params'`, `'inputs'`.
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
        """Bytes sent by one device per step."""
        return self.bytes * self.count


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """An occurrence of a collective in a program.

    Attributes:
      computation: the computation that contains it.
      instruction: the collective.
      kind: see `Collective`.
      parts: operand and result of each array that it communicates.
      count: number of executions per step.
      per_iteration: see `Collective`.
      loops: the enclosing `while` loops, outermost first, with their trip counts.
      branches: the enclosing `conditional`s, outermost first, with the index of the branch.
    """

    computation: Computation
    instruction: Instruction
    kind: str
    parts: tuple[tuple[Array, Array], ...]
    count: int
    per_iteration: bool
    loops: tuple[tuple[str, int], ...]
    branches: tuple[tuple[str, int], ...]

    def operand(self, number: int) -> Instruction:
        """Returns the instruction that computes an array that is communicated."""
        return self.computation.instructions[self.instruction.operands[number]]

    @property
    def groups(self) -> Groups | None:
        """Partition ids of the devices in each group; `None` for a single group of all devices."""
        pairs = self.instruction.attribute("source_target_pairs")
        return parse_groups(self.instruction.attributes) if pairs is None else None


def sites(module: Module) -> list[Site]:
    """Returns every collective reachable from the entry of `module`, in program order."""
    found: list[Site] = []
    seen: set[tuple[str, str]] = set()

    def visit(name: str, inside: Inside) -> None:
        computation = module.computations[name]
        for instruction in computation.instructions.values():
            opcode = instruction.opcode
            if may_call(opcode):
                for n, callee in enumerate(callees(instruction)):
                    visit(callee, inside.entering(module, computation, instruction, n))
            elif is_collective(opcode) and _first_of_async_fusion(instruction, seen):
                kind = opcode.removesuffix("-start")
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
    """The loops and branches that enclose a computation; see `Site` for the fields."""

    per_iteration: bool = False
    loops: tuple[tuple[str, int], ...] = ()
    branches: tuple[tuple[str, int], ...] = ()

    def entering(
        self, module: Module, computation: Computation, instruction: Instruction, number: int
    ) -> Inside:
        """Returns the context of the computation `number` called by an instruction."""
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
    """Returns every array communicated by a collective of `module`.

    Args:
      module: a compiled program.
      mesh_shape: sizes of the mesh axes, in order; used to name the axes of collectives.
    """
    return [row for site in sites(module) for row in rows(site, module, mesh_shape)]


def rows(site: Site, module: Module, mesh_shape: Mapping[str, int] | None) -> list[Collective]:
    """Returns the `Collective`s of one site."""
    groups = site.groups or (tuple(range(module.num_partitions)),)
    size = len(groups[0])
    permutes = site.kind == "collective-permute"
    axes = None if permutes else axes_of(groups, mesh_shape or {})
    many = len(site.parts) > 1
    op_name = site.instruction.op_name
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
            op_name=op_name or site.operand(n).op_name,
        )
        for n, (operand, result) in enumerate(site.parts)
    ]


def bytes_sent(kind: str, operand: int, result: int, group_size: int) -> int:
    """Returns the bytes that one of `group_size` devices sends in a ring algorithm.

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


@functools.cache
def is_collective(opcode: str) -> bool:
    """Whether an instruction executes or starts a collective."""
    return opcode.removesuffix("-start") in KINDS


def may_call(opcode: str) -> bool:
    """Whether an instruction calls computations, except those applied to elements."""
    return opcode in _CALLEES


def callees(instruction: Instruction) -> tuple[str, ...]:
    """Returns the computations that an instruction calls, except those applied to elements."""
    keys = _CALLEES.get(instruction.opcode)
    return tuple(name for key in keys for name in instruction.called(key)) if keys else ()


def _parts(
    computation: Computation, instruction: Instruction, kind: str
) -> tuple[str, tuple[tuple[Array, Array], ...]]:
    """Returns the kind, and the operand and result of each array communicated."""
    done = computation.done(instruction) if instruction.opcode != kind else instruction
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
        # A single array, split into a part per device.
        whole = Array(operands[0].dtype, (len(operands), *operands[0].shape))
        return kind, ((whole, whole),)
    if len(operands) < len(results):
        results = results[: len(operands)]
    return kind, tuple(zip(operands, results, strict=False))


def _is_scatter_fusion(computation: Computation, instruction: Instruction) -> bool:
    """Whether a computation is a TPU reduce-scatter: an all-reduce followed by a slice."""
    root = computation.instructions[computation.root]
    return (
        computation.name.startswith("all-reduce-scatter")
        and root.opcode == "dynamic-slice"
        and root.operands[0] == instruction.name
    )


def _first_of_async_fusion(instruction: Instruction, seen: set[tuple[str, str]]) -> bool:
    """Whether an instruction has not been counted yet.

    On TPUs, a collective is repeated with the same channel in each fusion it is overlapped with.
    """
    if "async_collective_fusion_config" not in instruction.attributes:
        return True
    kind = instruction.opcode.removesuffix("-start")
    key = (kind, instruction.attribute("channel_id") or instruction.name)
    new = key not in seen
    seen.add(key)
    return new


_CALLING = {
    "async": ("calls",),
    "call": ("to_apply",),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
    "custom-call": ("calls",),
    "fusion": ("calls",),
    "while": ("condition", "body"),
}
_CALLEES = {**_CALLING, **{f"{opcode}-start": keys for opcode, keys in _CALLING.items()}}
