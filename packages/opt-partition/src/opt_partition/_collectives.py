"""The collectives of a compiled program: which, over which devices, how often, how many bytes."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping

from opt_partition._hlo import Array, Computation, Instruction, Module, flat_types

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)

Groups = tuple[tuple[int, ...], ...]


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
      branch: the outermost `conditional` that it is in and which of its branches.
    """

    computation: Computation
    instruction: Instruction
    kind: str
    parts: tuple[tuple[Array, Array], ...]
    count: int
    per_iteration: bool
    branch: tuple[str, int] | None

    @property
    def groups(self) -> Groups | None:
        """Partition ids of the devices that take part together; `None` for all."""
        pairs = self.instruction.attribute("source_target_pairs")
        return parse_groups(self.instruction.attributes) if pairs is None else None


def sites(module: Module) -> list[Site]:
    """Every collective that a run of `module` reaches, in program order."""
    found: list[Site] = []
    seen: set[tuple[str, str]] = set()

    def visit(name: str, count: int, per_iteration: bool, branch: tuple[str, int] | None) -> None:
        computation = module.computations[name]
        for instruction in computation.instructions.values():
            kind = collective_kind(instruction)
            if kind is None:
                times: int | None = 1
                if instruction.opcode == "while":
                    times = trip_count(module, computation, instruction)
                for n, callee in enumerate(callees(instruction)):
                    inside = (instruction.name, n) if instruction.opcode == "conditional" else None
                    visit(
                        callee, count * (times or 1), per_iteration or not times, branch or inside
                    )
            elif _first_of_async_fusion(instruction, kind, seen):
                kind, parts = _parts(computation, instruction, kind)
                found.append(
                    Site(computation, instruction, kind, parts, count, per_iteration, branch)
                )

    visit(module.entry, 1, False, None)
    return found


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
            conditional=site.branch is not None,
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
    keys = _CALLEES.get(instruction.opcode, ())
    return tuple(name for key in keys for name in instruction.called(key))


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """How often a `while` runs its body: as XLA noted, else a counter against a constant."""
    noted = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if noted:
        return int(noted[1])
    [body], [condition] = loop.called("body"), loop.called("condition")
    test = module.computations[condition]
    root = test.instructions[test.root]
    if root.opcode != "compare" or root.attribute("direction") != "LT":
        return None
    counter, limit = (test.instructions[name] for name in root.operands)
    place = counter.attribute("index")
    if counter.opcode != "get-tuple-element" or place is None:
        return None
    result = module.computations[body]
    first = _constant(computation, _element(computation, loop.operands[0], int(place)))
    step = _step(result, _element(result, result.root, int(place)), place)
    last = _constant(test, limit.name)
    if first is None or last is None or step is None:
        return None
    return max(0, math.ceil((last - first) / step))


@functools.lru_cache(maxsize=1024)
def parse_groups(attributes: str) -> Groups | None:
    """The groups in an instruction's `replica_groups`; `None` where it gives none.

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
    if found := _MESH_GROUPS.search(attributes):
        return _mesh_groups(found["sizes"], found["ids"] or "", found["axes"])
    if found := _IOTA_GROUPS.search(attributes):
        count, size = _ints(found["shape"])
        dims = _ints(found["dims"])
        ids = _iota(dims, _ints(found["order"] or "") or tuple(range(len(dims))))
        return tuple(tuple(ids[n * size : (n + 1) * size]) for n in range(count))
    if found := _LISTED_GROUPS.search(attributes):
        return tuple(_ints(group) for group in re.findall(r"\{([^{}]*)\}", found["groups"]))
    return None


def axes_of(groups: Groups, mesh_shape: Mapping[str, int]) -> tuple[str, ...] | None:
    """The mesh axes along which a group's devices differ; `None` if that is no whole axes.

    Examples:
      >>> axes_of(((0, 2, 4, 6), (1, 3, 5, 7)), {'data': 4, 'model': 2})
      ('data',)
      >>> axes_of(((0, 4), (1, 5)), {'data': 4, 'model': 2}) is None
      True
    """
    sizes = tuple(mesh_shape.values())
    if not sizes or sum(map(len, groups)) != math.prod(sizes):
        return None
    places = [_unravel(device, sizes) for device in groups[0]]
    differ = [len({place[n] for place in places}) > 1 for n in range(len(sizes))]
    spanned = math.prod(size for size, varies in zip(sizes, differ, strict=True) if varies)
    if spanned != len(places):
        return None
    return tuple(axis for axis, varies in zip(mesh_shape, differ, strict=True) if varies)


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
    name = start.name
    for instruction in computation.instructions.values():
        if name in instruction.operands and instruction.opcode.endswith(("-update", "-done")):
            if instruction.opcode.endswith("-done"):
                return instruction
            name = instruction.name
    raise ValueError(f"`{start.name}` is started and never waited for in the compiled program")


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


def _element(computation: Computation, tuple_name: str, place: int) -> str:
    """Name of an element of a tuple, if the tuple is made in sight; else of the tuple."""
    instruction = computation.instructions[tuple_name]
    return instruction.operands[place] if instruction.opcode == "tuple" else tuple_name


def _source(computation: Computation, name: str) -> Instruction:
    """The instruction whose value `name` has, behind copies."""
    instruction = computation.instructions[name]
    while instruction.opcode in ("copy", "bitcast", "copy-start", "copy-done"):
        instruction = computation.instructions[instruction.operands[0]]
    return instruction


def _constant(computation: Computation, name: str) -> int | None:
    """The integer that `name` is; `None` if it is none."""
    instruction = _source(computation, name)
    digits = re.fullmatch(r"-?\d+", instruction.literal.strip())
    return int(digits[0]) if digits and instruction.opcode == "constant" else None


def _step(computation: Computation, name: str, place: str) -> int | None:
    """What a loop adds to element `place` of its carry each time; `None` if not plain to see."""
    add = _source(computation, name)
    if add.opcode != "add":
        return None
    for counter, step in (add.operands, add.operands[::-1]):
        source = _source(computation, counter)
        if source.opcode == "get-tuple-element" and source.attribute("index") == place:
            return _constant(computation, step)
    return None


def _mesh_groups(sizes: str, ids: str, axes: str) -> Groups:
    """Groups of a mesh of named axes, over some of them."""
    shape = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", sizes)}
    total = math.prod(shape.values())
    over = [list(shape).index(name) for name in re.findall(r"'([^']+)'", axes)]
    rest = [n for n in range(len(shape)) if n not in over]
    order = _iota(tuple(shape.values()), (*rest, *over))
    if found := re.search(r"\[([\d,]*)\]T\(([\d,]*)\)", ids):
        devices: tuple[int, ...] = _iota(_ints(found[1]), _ints(found[2]))
    else:
        listed = _ints(ids)
        devices = listed if len(listed) == total else tuple(range(total))
    size = math.prod(tuple(shape.values())[n] for n in over)
    return tuple(
        tuple(devices[n] for n in order[start : start + size]) for start in range(0, total, size)
    )


def _iota(dims: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """`0, 1, ...` as an array of `dims`, transposed by `order`, in a row."""
    strides = [math.prod(dims[n + 1 :]) for n in range(len(dims))]
    ids = [0]
    for n in order:
        ids = [i + k * strides[n] for i in ids for k in range(dims[n])]
    return tuple(ids)


def _unravel(index: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The place of element `index` of an array of `sizes`."""
    place = []
    for size in reversed(sizes):
        index, at = divmod(index, size)
        place.append(at)
    return tuple(reversed(place))


def _ints(text: str) -> tuple[int, ...]:
    """The integers in a text."""
    return tuple(map(int, re.findall(r"\d+", text)))


_CALLEES = {
    "async-start": ("calls",),
    "call": ("to_apply",),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
    "custom-call": ("calls",),
    "fusion": ("calls",),
    "while": ("condition", "body"),
}
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[(?P<sizes>[^\]]*)\](?:, device_ids=(?P<ids>[^{]*))? \{(?P<axes>[^}]*)\}"
)
_IOTA_GROUPS = re.compile(
    r"replica_groups=\[(?P<shape>[\d,]*)\]<=\[(?P<dims>[\d,]*)\](?:T\((?P<order>[\d,]*)\))?"
)
_LISTED_GROUPS = re.compile(r"replica_groups=\{(?P<groups>\{[\d,{} ]*\})\}")
