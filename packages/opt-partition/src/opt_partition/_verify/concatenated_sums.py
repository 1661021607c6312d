"""All-reduces of concatenated arrays, as XLA for GPUs writes them, taken apart.

It joins the all-reduces of a program, flattens and concatenates their operands, and slices the
result. Read as one array, everything in it would seem to depend on everything else in it, and none
of it would have the size of a gradient.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence

from opt_partition._verify.hlo import Array, Computation, Instruction, Module, parse


def parse_program(text: str) -> Module:
    """Parses the text of a compiled program, and takes all-reduces of concatenated arrays apart.

    They become all-reduces with several operands, as XLA writes them for CPUs and TPUs.

    Examples:
      >>> module = parse_program('''HloModule jit_f
      ...
      ... ENTRY %main (x: f32[2,2], y: f32[3]) -> f32[3] {
      ...   %x = f32[2,2]{1,0} parameter(0)
      ...   %y = f32[3]{0} parameter(1)
      ...   %flat = f32[4]{0} bitcast(%x)
      ...   %both = f32[7]{0} concatenate(%flat, %y), dimensions={0}
      ...   %sum = f32[7]{0} all-reduce(%both), replica_groups={}, to_apply=%add
      ...   %first = f32[4]{0} slice(%sum), slice={[0:4]}
      ...   ROOT %second = f32[3]{0} slice(%sum), slice={[4:7]}
      ... }''')
      >>> entry = module.computations['main'].instructions
      >>> entry['sum'].operands, [str(array) for array in entry['sum'].type]
      (('x', 'y'), ['f32[2,2]', 'f32[3]'])
      >>> entry['second'].opcode, entry['second'].attributes
      ('get-tuple-element', 'index=1')
    """
    module = parse(text)
    return dataclasses.replace(
        module,
        computations={
            name: _taken_apart(module, computation)
            for name, computation in module.computations.items()
        },
    )


def _taken_apart(module: Module, computation: Computation) -> Computation:
    """Returns the computation with all-reduces that have an operand for each array."""
    replaced: dict[str, Instruction] = {}
    for instruction in computation.instructions.values():
        if instruction.opcode in ("all-reduce", "all-reduce-start"):
            replaced |= _separated(module, computation, instruction)
    if not replaced:
        return computation
    return dataclasses.replace(computation, instructions=computation.instructions | replaced)


def _separated(
    module: Module, computation: Computation, start: Instruction
) -> dict[str, Instruction]:
    """Returns what replaces an all-reduce and the slices of its result.

    Nothing, if its operand is not a concatenation or the result is used in other ways.
    """
    pieces = _pieces(module, computation, start)
    if len(pieces) < 2:
        return {}
    end = computation.done(start) if start.opcode == "all-reduce-start" else start
    slices = _slices(module, computation, end, [_size(piece) for piece in pieces])
    if slices is None:
        return {}
    types = tuple(piece.type for piece in pieces)
    names = tuple(piece.name for piece in pieces)
    return {
        end.name: dataclasses.replace(end, type=types),
        start.name: dataclasses.replace(start, type=types, operands=names),
        **{
            name: Instruction(name, types[n], "get-tuple-element", (end.name,), "", f"index={n}")
            for name, n in slices.items()
        },
    }


def _slices(
    module: Module, computation: Computation, flat: Instruction, sizes: Sequence[int]
) -> dict[str, int] | None:
    """Returns the users of a flat array with the number of the piece that each of them slices.

    `None`, if one of them does anything else.
    """
    bounds = itertools.pairwise(itertools.accumulate(sizes, initial=0))
    numbers: dict[tuple[int, int] | None, int] = {piece: n for n, piece in enumerate(bounds)}
    users = [user for user in computation.instructions.values() if flat.name in user.operands]
    found = {user.name: numbers.get(_bounds(module, user), -1) for user in users}
    used_as_it_is = flat.name == computation.root or -1 in found.values()
    return None if used_as_it_is else found


def _pieces(module: Module, computation: Computation, start: Instruction) -> list[Instruction]:
    """Returns the arrays that an all-reduce sums, before they were flattened and concatenated."""
    if len(start.operands) != 1:
        return []
    whole = _inlined(module, computation.instructions[start.operands[0]])
    if whole.opcode != "concatenate" or not isinstance(whole.type, Array) or whole.type.shape[1:]:
        return []
    return [_before_flattening(computation, name) for name in whole.operands]


def _inlined(module: Module, instruction: Instruction) -> Instruction:
    """Returns the instruction that a fusion consists of, with the operands of the fusion.

    Anything but a fusion of a single instruction is returned as it is.
    """
    if instruction.opcode != "fusion":
        return instruction
    fused = module.computations[instruction.called("calls")[0]]
    root = fused.instructions[fused.root]
    inside = [fused.instructions[name] for name in root.operands]
    if any(operand.opcode != "parameter" for operand in inside):
        return instruction
    operands = tuple(instruction.operands[int(operand.literal)] for operand in inside)
    return dataclasses.replace(root, operands=operands)


def _before_flattening(computation: Computation, name: str) -> Instruction:
    found = computation.instructions[name]
    while found.opcode == "bitcast":
        source = computation.instructions[found.operands[0]]
        if not isinstance(source.type, Array) or source.type.dtype != _dtype(found):
            break
        found = source
    return found


def _bounds(module: Module, user: Instruction) -> tuple[int, int] | None:
    """Returns the part of a flat array that an instruction slices, if that is all it does."""
    inlined = _inlined(module, user)
    if inlined.opcode != "slice":
        return None
    found = re.fullmatch(r"\{\[(\d+):(\d+)\]\}", inlined.attribute("slice") or "")
    return (int(found[1]), int(found[2])) if found else None


def _dtype(instruction: Instruction) -> str:
    return instruction.type.dtype if isinstance(instruction.type, Array) else ""


def _size(instruction: Instruction) -> int:
    return instruction.type.size if isinstance(instruction.type, Array) else 0
