"""State that is stored in fewer bits, and that a step computes with as whole arrays of float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from opt_partition._verify.collectives import callees, is_collective, may_call
from opt_partition._verify.hlo import Computation, Instruction, Module, flat_types
from opt_partition._verify.hlo_flow import Deps, trace
from opt_partition._verify.leaves import Leaf
from opt_partition._verify.report import Finding

LEAST: Final = 1 << 20
"""Copies of at least this many bytes, in float32, are reported."""

_SAME: Final = frozenset({"bitcast", "copy", "copy-start", "optimization-barrier"})
_PASSES: Final = _SAME | {
    *("call", "conditional", "get-tuple-element", "parameter", "tuple", "while"),
}
_WIDE: Final = "f32"
_NARROW: Final = {
    "bfloat16": "bf16",
    "float8_e4m3fn": "f8e4m3fn",
    "float8_e5m2": "f8e5m2",
    "int16": "s16",
    "int4": "s4",
    "int8": "s8",
    "uint4": "u4",
    "uint8": "u8",
}


def wide_copies(module: Module, inputs: Sequence[Leaf]) -> Iterator[Finding]:
    """Yields a warning for each leaf of the state that is decoded as a whole.

    A piece at a time is how a step should do it: a float32 copy takes four times the memory that
    codes of 8 bits save. An update that is written into a parameter in place is not a copy, nor is
    a new parameter that one kernel computes from the codes, nor what is sent to other devices.
    """
    narrow: dict[tuple[str, int], Leaf] = {}
    for leaf in inputs:
        kind = _NARROW.get(str(leaf.dtype))
        if leaf.role == "state" and kind is not None and 4 * leaf.shard_size >= LEAST:
            narrow.setdefault((kind, leaf.shard_size), leaf)
    if not narrow:
        return
    executed = list(_executed(module))
    kept = _Kept(module, executed).arrays
    seen: set[str] = set()
    for computation in executed:
        for instruction in computation.instructions.values():
            found = _decoded(module, computation, instruction, narrow, kept)
            if found is not None and found.path not in seen:
                seen.add(found.path)
                yield Finding(
                    "float32 copy",
                    "warning",
                    found.path,
                    f"{found}: `{instruction.name}` computes {4 * found.shard_size:,} bytes of "
                    "float32 from state of this size: compute it piece by piece",
                )


def _decoded(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    narrow: Mapping[tuple[str, int], Leaf],
    kept: frozenset[tuple[str, int]],
) -> Leaf | None:
    """Returns the leaf that an instruction makes a temporary float32 array of."""
    opcode = instruction.opcode
    passes = opcode in _PASSES or is_collective(opcode) or opcode.endswith(("-done", "-update"))
    if passes or _updates_in_place(module, instruction):
        return None
    end = computation.done(instruction) if opcode.endswith("-start") else instruction
    made = [
        (n, array.size)
        for n, array in enumerate(flat_types(end.type))
        if array.dtype == _WIDE and (instruction.name, n) not in kept
    ]
    for number, name in enumerate(instruction.operands):
        for array in flat_types(computation.instructions[name].type):
            found = narrow.get((array.dtype, array.size))
            places = [n for n, size in made if size == array.size]
            if found is not None and places and _depends(module, instruction, number, places):
                return found
    return None


def _depends(module: Module, instruction: Instruction, number: int, places: Sequence[int]) -> bool:
    """Whether one of the results of an instruction is computed from an operand."""
    called = callees(instruction)
    if not called:
        return True
    inside = dataclasses.replace(module, entry=called[0])
    inputs = [Deps.of(n) for n in range(len(instruction.operands))]
    outputs = trace(inside, inputs, {}).outputs
    return any(outputs[place].any >> number & 1 for place in places)


class _Kept:
    """The arrays that are not temporary: results of the program, and what is sent.

    Attributes:
      arrays: names of the instructions that compute them, with the index of the result.
    """

    def __init__(self, module: Module, executed: Sequence[Computation]) -> None:
        self._module = module
        self._found: set[tuple[str, int]] = set()
        entry = module.computations[module.entry]
        for place, _ in enumerate(flat_types(entry.instructions[entry.root].type)):
            self._add(entry, entry.root, place)
        for computation in executed:
            for instruction in computation.instructions.values():
                if is_collective(instruction.opcode):
                    for name in instruction.operands:
                        self._add(computation, name, 0)
        self.arrays = frozenset(self._found)

    def _add(self, computation: Computation, name: str, place: int) -> None:
        """Adds what computes an array, looking through what passes it on."""
        instruction = computation.instructions[name]
        opcode, operands = instruction.opcode, instruction.operands
        if opcode == "tuple":
            self._add(computation, operands[place], 0)
        elif opcode == "get-tuple-element":
            self._add(computation, operands[0], int(instruction.attribute("index") or 0))
        elif opcode in _SAME or opcode.endswith(("-done", "-update")):
            self._add(computation, operands[0], place)
        elif opcode in ("call", "conditional", "while"):
            # The last of the computations that a loop calls is its body.
            for called in callees(instruction)[opcode == "while" :]:
                inside = self._module.computations[called]
                self._add(inside, inside.root, place)
            if opcode == "while":
                self._add(computation, operands[0], place)
        else:
            self._found.add((name, place))


def _updates_in_place(module: Module, instruction: Instruction) -> bool:
    """Whether an instruction writes a piece into an array."""
    if instruction.opcode == "dynamic-update-slice":
        return True
    for called in instruction.called("calls"):
        fused = module.computations[called]
        root = fused.instructions[fused.root]
        ends = [fused.instructions[n] for n in root.operands] if root.opcode == "tuple" else [root]
        while any(end.opcode == "bitcast" for end in ends):
            ends = [
                fused.instructions[end.operands[0]] if end.opcode == "bitcast" else end
                for end in ends
            ]
        if any(end.opcode == "dynamic-update-slice" for end in ends):
            return True
    return False


def _executed(module: Module) -> Iterator[Computation]:
    """Yields the computations whose values are arrays in memory: not those that are fused."""
    stack, seen = [module.entry], {module.entry}
    while stack:
        computation = module.computations[stack.pop()]
        yield computation
        for instruction in computation.instructions.values():
            opcode = instruction.opcode.removesuffix("-start")
            if may_call(opcode) and opcode not in ("custom-call", "fusion"):
                for name in callees(instruction)[opcode == "while" :]:
                    if name not in seen:
                        seen.add(name)
                        stack.append(name)
