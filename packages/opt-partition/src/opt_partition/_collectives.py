"""The arrays that the collectives of a program move: devices, counts, bytes, sources and ends."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from opt_partition._flow import Flow, Part, Where, trace
from opt_partition._hlo import (
    Array,
    Computation,
    Instruction,
    Module,
    flat_types,
)
from opt_partition._leaves import FIRST_LEAF, LeafReport, Traced

Groups = tuple[tuple[int, ...], ...]


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

    @property
    def array(self) -> str:
        """The dtype and the shapes before and after, e.g. `f32 [32,512] → [256,512]`."""
        shapes = dict.fromkeys((self.operand_shape, self.shape))
        texts = (f"[{','.join(map(str, shape))}]" for shape in shapes)
        return f"{self.dtype} {' → '.join(texts)}"


def collectives(module: Module, mesh_shape: Mapping[str, int]) -> list[Collective]:
    """Returns every array communicated by a collective of a program, in program order.

    The axes of collectives are named after those of `mesh_shape`, a mesh's axes with their sizes.
    """
    return [row for row, _, _ in _rows(module, trace(module), mesh_shape)]


def _rows(
    module: Module, flow: Flow, mesh_shape: Mapping[str, int]
) -> Iterator[tuple[Collective, Part, Where]]:
    seen: set[tuple[str, str]] = set()
    for (name, where), (computation, instruction) in flow.sites.items():
        if not _is_first(instruction, seen):
            continue
        kind, parts = _parts(computation, instruction)
        permutes = instruction.attribute("source_target_pairs") is not None
        groups = None if permutes else parse_groups(instruction.attributes)
        groups = groups or (tuple(range(module.num_partitions)),)
        for n, (operand, result) in enumerate(parts):
            source = computation.instructions[instruction.operands[n]]
            row = Collective(
                name=f"{name}.{n}" if len(parts) > 1 else name,
                kind=kind,
                dtype=result.dtype,
                operand_shape=operand.shape,
                shape=result.shape,
                group_size=len(groups[0]),
                axes=None if kind == "collective-permute" else axes_of(groups, mesh_shape),
                count=math.prod(trips for _, trips in where.loops),
                per_iteration=not where.counted,
                conditional=bool(where.branches),
                bytes=_bytes_sent(kind, operand.bytes, result.bytes, len(groups[0])),
                op_name=instruction.op_name or source.op_name,
            )
            yield row, (name, n), where


def _bytes_sent(kind: str, operand: int, result: int, group_size: int) -> int:
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
    operands = [computation.instructions[name].array for name in instruction.operands]
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
    """Whether an instruction has not been counted yet; TPUs repeat it in fusions that overlap."""
    if "async_collective_fusion_config" not in instruction.attributes:
        return True
    kind = instruction.opcode.removesuffix("-start")
    key = (kind, instruction.attribute("channel_id") or instruction.name)
    new = key not in seen
    seen.add(key)
    return new


@functools.lru_cache(maxsize=1024)
def parse_groups(attributes: str) -> Groups | None:
    """Parses the `replica_groups` of an instruction; `None` if there are none."""
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


# The other collectives bring values to a device unchanged.
_REDUCTIONS = ("all-reduce", "reduce-scatter")


@dataclasses.dataclass(frozen=True, eq=False)
class Moved:
    """An array that a collective communicates, with its sources and destinations."""

    row: Collective
    where: Where
    number: int  # among all such arrays
    count: int  # executions per training step; a program may run several steps in a loop
    step_loops: tuple[str, ...]
    # The sharded state that it depends on; only elementwise dependencies if there are any.
    state: tuple[LeafReport, ...]
    directly: bool  # whether it is computed from `state` elementwise
    placed: bool  # whether a sum over devices gathers elements of `state`
    alone: bool  # whether it depends on state only
    from_inputs: bool  # whether it depends on arguments that are neither parameters nor state
    follows: tuple[int, ...]  # numbers of the arrays that it is computed from elementwise
    reaches: tuple[LeafReport, ...]  # results that are computed from it elementwise
    adds_to: tuple[LeafReport, ...]  # results computed from it elementwise or by a reduction

    @property
    def size(self) -> int:
        """Number of elements on a device afterwards."""
        return math.prod(self.row.shape)

    @property
    def elements(self) -> int:
        """Number of elements that a device receives per training step."""
        return self.size * self.count

    @property
    def operand_elements(self) -> int:
        """Number of elements that a device contributes per training step, without zeros."""
        size = math.prod(self.row.operand_shape) * self.count
        return size if self.is_move else size // self.row.group_size

    @property
    def is_move(self) -> bool:
        """Whether it brings values to a device unchanged, and does not reduce them."""
        return self.row.kind not in _REDUCTIONS

    def __str__(self) -> str:
        over = f" over {'+'.join(self.row.axes)}" if self.row.axes else ""
        times = f", {self.row.count} times per step" if self.row.count > 1 else ""
        times = ", in each iteration of a loop" if self.row.per_iteration else times
        shape = ",".join(map(str, self.row.shape))
        return f"`{self.row.name}` to {self.row.dtype}[{shape}]{over}{times}"


def moved_arrays(
    module: Module, traced: Traced, outputs: Sequence[LeafReport], mesh: Mapping[str, int]
) -> list[Moved]:
    """Returns every array communicated."""
    flow, roles, state = traced
    first_tag = FIRST_LEAF + len(state)
    all_state = (1 << first_tag) - (1 << FIRST_LEAF)
    reaches: defaultdict[int, list[LeafReport]] = defaultdict(list)
    adds_to: defaultdict[int, list[LeafReport]] = defaultdict(list)
    for leaf, deps in zip(outputs, flow.outputs, strict=True):
        for n in _bits(deps.direct >> first_tag):
            reaches[n].append(leaf)
        for n in _bits((deps.direct | deps.reduced) >> first_tag):
            adds_to[n].append(leaf)

    @functools.cache
    def leaves(bits: int) -> tuple[LeafReport, ...]:
        return tuple(state[n] for n in _bits(bits >> FIRST_LEAF))

    moved = []
    for row, part, where in _rows(module, flow, mesh):
        deps, n = flow.moved[part], flow.tags[part] - first_tag
        step_loops = dict(loop for loop in where.loops if loop[0] in flow.step_loops)
        direct, placed = deps.direct & all_state, deps.placed & all_state
        if not direct and row.kind in _REDUCTIONS:
            direct = placed
        depends = leaves(direct or deps.any & all_state)
        sources = [leaf.path for leaf in depends]
        sources += ["params"] * bool(deps.any & roles["params"])
        sources += ["inputs"] * bool(deps.any & roles["other"])
        moved.append(
            Moved(
                row=dataclasses.replace(row, sources=tuple(sources)),
                where=where,
                number=n,
                count=row.count // math.prod(step_loops.values()),
                step_loops=tuple(step_loops),
                state=depends,
                directly=bool(direct),
                placed=bool(placed),
                alone=len(sources) == len(depends),
                from_inputs="inputs" in sources,
                follows=tuple(_bits(deps.direct >> first_tag)) if depends else (),
                reaches=tuple(reaches[n]),
                adds_to=tuple(adds_to[n]),
            )
        )
    return moved


def _bits(number: int) -> Iterator[int]:
    """Yields the positions of the set bits of a number."""
    while number:
        low = number & -number
        yield low.bit_length() - 1
        number ^= low
