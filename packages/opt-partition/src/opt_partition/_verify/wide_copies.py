"""State that is stored in fewer bits, and that a step computes with as whole arrays of float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from opt_partition._verify.hlo import Computation, Instruction, Module, flat_types
from opt_partition._verify.leaves import Leaf
from opt_partition._verify.report import Finding

LEAST: Final = 1 << 20
"""Copies of at least this many bytes, in float32, are reported."""

_PASSES: Final = frozenset(
    {
        *("bitcast", "call", "conditional", "copy", "get-tuple-element", "optimization-barrier"),
        *("parameter", "tuple", "while"),
    }
)
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
    codes of 8 bits save. An update that is written into a parameter in place is not a copy.
    """
    narrow: dict[tuple[str, int], Leaf] = {}
    for leaf in inputs:
        kind = _NARROW.get(str(leaf.dtype))
        if leaf.role == "state" and kind is not None and 4 * leaf.shard_size >= LEAST:
            narrow.setdefault((kind, leaf.shard_size), leaf)
    if not narrow:
        return
    seen: set[str] = set()
    for computation in _executed(module):
        for instruction in computation.instructions.values():
            found = _decoded(module, computation, instruction, narrow)
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
    narrow: dict[tuple[str, int], Leaf],
) -> Leaf | None:
    """The leaf that an instruction makes a float32 array of."""
    if instruction.opcode in _PASSES or _updates_in_place(module, instruction):
        return None
    made = {a.size for a in flat_types(instruction.type) if a.dtype == _WIDE}
    for name in instruction.operands:
        operand = computation.instructions.get(name)
        for array in flat_types(operand.type) if operand is not None else ():
            found = narrow.get((array.dtype, array.size))
            if found is not None and array.size in made:
                return found
    return None


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
    """The computations whose values are arrays in memory: not those that are fused."""
    stack, seen = [module.entry], {module.entry}
    while stack:
        computation = module.computations[stack.pop()]
        yield computation
        for instruction in computation.instructions.values():
            keys: tuple[str, ...] = ()
            if instruction.opcode == "while":
                keys = ("body",)
            elif instruction.opcode == "conditional":
                keys = ("branch_computations", "true_computation", "false_computation")
            elif instruction.opcode == "call":
                keys = ("to_apply",)
            for name in (name for key in keys for name in instruction.called(key)):
                if name not in seen:
                    seen.add(name)
                    stack.append(name)
