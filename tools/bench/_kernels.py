"""What the text of a program that was compiled for a GPU says: its kernels, copies and conversions.

    found = kernels(text)
    sum(kernel.bytes for kernel in found)        # that they read and write

`cost_analysis` says nothing of a device that is only described, and counts slices otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from opt_partition._verify.hlo import Computation, Instruction, Module, flat_types, parse

# They start nothing on the device: names for memory, and numbers that a kernel is launched with.
_NOT_KERNELS = frozenset(
    {
        *("bitcast", "constant", "get-tuple-element", "optimization-barrier", "parameter"),
        *("partition-id", "replica-id", "tuple"),
    }
)
_CALLS = frozenset({"async-start", "call", "conditional", "while"})


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An instruction that the device executes.

    Attributes:
      name: in the program.
      read: bytes of its operands, each array once.
      written: bytes of its results.
      elements: of the largest of its results.
    """

    name: str
    read: int
    written: int
    elements: int

    @property
    def bytes(self) -> int:
        """Bytes that it reads and writes."""
        return self.read + self.written


def kernels(text: str) -> list[Kernel]:
    """Returns the kernels of a program without loops and branches.

    A kernel that slices an operand, or writes a piece of a result in place, counts with all of it.

    Raises:
      ValueError: the program has a loop, a branch or a call, whose kernels run more or less often.
    """
    module = parse(text)
    entry = module.computations[module.entry]
    found = []
    for instruction in entry.instructions.values():
        opcode = instruction.opcode
        if opcode in _CALLS:
            raise ValueError(f"`{instruction.name}`: the kernels of a `{opcode}` are not counted")
        if opcode not in _NOT_KERNELS and not opcode.endswith(("-done", "-update")):
            found.append(_kernel(entry, instruction))
    return found


def _kernel(entry: Computation, instruction: Instruction) -> Kernel:
    is_async = instruction.opcode.endswith("-start")
    end = entry.done(instruction) if is_async else instruction
    results = list(flat_types(end.type))
    read = {_buffer(entry, name): _bytes(entry, name) for name in instruction.operands}
    return Kernel(
        instruction.name,
        sum(read.values()),
        sum(array.bytes for array in results),
        max((array.size for array in results), default=0),
    )


def _buffer(entry: Computation, name: str) -> str:
    """Returns the array that a name stands for, which may have several."""
    while entry.instructions[name].opcode == "bitcast":
        [name] = entry.instructions[name].operands
    return name


def _bytes(entry: Computation, name: str) -> int:
    return sum(array.bytes for array in flat_types(entry.instructions[name].type))


def whole_copies(text: str, elements: int) -> list[str]:
    """Returns the names of copies of at least so many elements, within a memory or between two."""
    return [
        instruction.name
        for _, instruction in _instructions(parse(text))
        if instruction.opcode in ("copy", "copy-start")
        and max(array.size for array in flat_types(instruction.type)) >= elements
    ]


def conversions(text: str, source: str, result: str) -> list[str]:
    """Returns the names of conversions from one dtype of HLO to another, in kernels, too."""
    return [
        instruction.name
        for computation, instruction in _instructions(parse(text))
        if instruction.opcode == "convert"
        and _dtype(instruction) == result
        and _dtype(computation.instructions[instruction.operands[0]]) == source
    ]


def _instructions(module: Module) -> Iterator[tuple[Computation, Instruction]]:
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            yield computation, instruction


def _dtype(instruction: Instruction) -> str:
    return next(flat_types(instruction.type)).dtype
