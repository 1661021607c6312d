"""The collectives of a compiled program, with their devices, counts and bytes."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from opt_partition._verify.flow import trip_count
from opt_partition._verify.hlo import (
    Array,
    Computation,
    Instruction,
    Module,
    callees,
    flat_types,
    is_collective,
    may_call,
)

Groups = tuple[tuple[int, ...], ...]
Enclosing = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One array communicated by a collective of a compiled program.

    Attributes:
      name: name of the instruction, with an index if it communicates several arrays.
      kind: `'all-gather'`, `'all-reduce'`, `'all-to-all'`, `'collective-broadcast'`,
        `'collective-permute'`, `'ragged-all-to-all'` or `'reduce-scatter'`, also for asynchronous
        collectives and TPU fusions.
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
    """An array that a collective communicates, and where this is."""

    row: Collective
    part: tuple[str, int]  # the name of its instruction, and the index of the array in it
    loops: Enclosing  # the enclosing `while`s, outermost first, with their trip counts
    branches: Enclosing  # the enclosing `conditional`s, with the index of the branch


def sites(module: Module, mesh_shape: Mapping[str, int] | None = None) -> list[Site]:
    """Returns every array communicated by a collective of a program, in program order.

    The axes of collectives are named after those of `mesh_shape`, a mesh's axes with their sizes.
    """
    every: list[Site] = []
    seen: set[tuple[str, str]] = set()

    def visit(name: str, loops: Enclosing, branches: Enclosing, counted: bool) -> None:
        computation = module.computations[name]
        for instruction in computation.instructions.values():
            opcode = instruction.opcode
            if opcode == "while":
                trips = trip_count(module, computation, instruction)
                inside = (*loops, (instruction.name, trips or 1))
                for callee in callees(instruction):
                    visit(callee, inside, branches, counted and bool(trips))
            elif opcode == "conditional":
                for n, callee in enumerate(callees(instruction)):
                    visit(callee, loops, (*branches, (instruction.name, n)), counted)
            elif may_call(opcode):
                for callee in callees(instruction):
                    visit(callee, loops, branches, counted)
            elif is_collective(opcode) and _is_first(instruction, seen):
                rows = _rows(module, computation, instruction, mesh_shape, loops, branches, counted)
                for n, row in enumerate(rows):
                    every.append(Site(row, (instruction.name, n), loops, branches))

    visit(module.entry, (), (), True)
    return every


def collectives(module: Module, mesh_shape: Mapping[str, int] | None = None) -> list[Collective]:
    """Returns the `Collective`s of `sites`."""
    return [site.row for site in sites(module, mesh_shape)]


def _rows(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    mesh_shape: Mapping[str, int] | None,
    loops: Enclosing,
    branches: Enclosing,
    counted: bool,
) -> list[Collective]:
    """Returns a row for each array that a collective communicates."""
    kind, parts = _parts(computation, instruction)
    permutes = instruction.attribute("source_target_pairs") is not None
    groups = None if permutes else parse_groups(instruction.attributes)
    groups = groups or (tuple(range(module.num_partitions)),)
    operands = [computation.instructions[name] for name in instruction.operands]
    return [
        Collective(
            name=f"{instruction.name}.{n}" if len(parts) > 1 else instruction.name,
            kind=kind,
            dtype=result.dtype,
            operand_shape=operand.shape,
            shape=result.shape,
            group_size=len(groups[0]),
            axes=None if kind == "collective-permute" else axes_of(groups, mesh_shape or {}),
            count=math.prod(trips for _, trips in loops),
            per_iteration=not counted,
            conditional=bool(branches),
            bytes=bytes_sent(kind, operand.bytes, result.bytes, len(groups[0])),
            op_name=instruction.op_name or operands[n].op_name,
        )
        for n, (operand, result) in enumerate(parts)
    ]


def bytes_sent(kind: str, operand: int, result: int, group_size: int) -> int:
    """Returns the bytes sent by one device of a group, assuming a ring algorithm."""
    if kind in ("collective-permute", "collective-broadcast"):
        return operand
    whole = max(operand, result)
    return (1 + (kind == "all-reduce")) * (whole - whole // group_size)


def _parts(
    computation: Computation, instruction: Instruction
) -> tuple[str, tuple[tuple[Array, Array], ...]]:
    """Returns the kind, and the operand and result of each array communicated."""
    kind = instruction.opcode.removesuffix("-start")
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
    return kind, tuple(zip(operands, results, strict=False))


def _is_scatter_fusion(computation: Computation, instruction: Instruction) -> bool:
    """Whether a computation is a TPU reduce-scatter: an all-reduce followed by a slice."""
    root = computation.instructions[computation.root]
    return (
        computation.name.startswith("all-reduce-scatter")
        and root.opcode == "dynamic-slice"
        and root.operands[0] == instruction.name
    )


def _is_first(instruction: Instruction, seen: set[tuple[str, str]]) -> bool:
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


@functools.lru_cache(maxsize=1024)
def parse_groups(attributes: str) -> Groups | None:
    """Parses the `replica_groups` of an instruction; `None` if there are none.

    Examples:
      >>> parse_groups('replica_groups={{0,1},{2,3}}')
      ((0, 1), (2, 3))
      >>> parse_groups('replica_groups=[2,2]<=[2,2]T(1,0)')
      ((0, 2), (1, 3))
      >>> parse_groups("replica_groups=mesh['a'=2,'b'=2] {'a'}, dimensions={0}")
      ((0, 2), (1, 3))
      >>> parse_groups("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}")
      ((0, 1), (2, 3))
      >>> parse_groups('replica_groups={}') is None
      True
    """
    if mesh := _MESH_GROUPS.search(attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh["sizes"])}
        over = [list(sizes).index(name) for name in re.findall(r"'([^']+)'", mesh["axes"])]
        rest = [n for n in range(len(sizes)) if n not in over]
        ids = np.arange(math.prod(sizes.values()))
        if order := re.search(r"\[([\d,]*)\]T\(([\d,]*)\)", mesh["ids"] or ""):
            ids = _iota(order[1], order[2])
        elif len(listed := _ints(mesh["ids"] or "")) == len(ids):
            ids = np.array(listed)
        grid = ids.reshape(tuple(sizes.values())).transpose(*rest, *over)
        return _tuples(grid.reshape(-1, math.prod(grid.shape[len(rest) :])))
    if iota := _IOTA_GROUPS.search(attributes):
        return _tuples(_iota(iota["dims"], iota["order"]).reshape(_ints(iota["shape"])))
    if groups := _LISTED_GROUPS.search(attributes):
        return tuple(_ints(group) for group in re.findall(r"\{([^{}]*)\}", groups["groups"]))
    return None


def axes_of(groups: Groups, mesh_shape: Mapping[str, int]) -> tuple[str, ...] | None:
    """Returns the mesh axes along which a group extends; `None` if it does not span whole axes."""
    sizes = tuple(mesh_shape.values())
    if not sizes or sum(map(len, groups)) != math.prod(sizes):
        return None
    places = np.unravel_index(np.array(groups[0]), sizes)
    varying = [axis for axis, at in zip(mesh_shape, places, strict=True) if np.ptp(at)]
    whole = math.prod(mesh_shape[axis] for axis in varying) == len(groups[0])
    return tuple(varying) if whole else None


def _iota(dims: str, order: str | None) -> NDArray[np.int_]:
    """Returns `arange` reshaped to `dims` and transposed by `order`."""
    shape = _ints(dims)
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids.transpose(_ints(order)) if order else ids


def _tuples(grid: NDArray[np.int_]) -> Groups:
    return tuple(map(tuple, grid.tolist()))


def _ints(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[(?P<sizes>[^\]]*)\](?:, device_ids=(?P<ids>[^{]*))? \{(?P<axes>[^}]*)\}"
)
_IOTA_GROUPS = re.compile(
    r"replica_groups=\[(?P<shape>[\d,]*)\]<=\[(?P<dims>[\d,]*)\](?:T\((?P<order>[\d,]*)\))?"
)
_LISTED_GROUPS = re.compile(r"replica_groups=\{(?P<groups>\{[\d,{} ]*\})\}")
