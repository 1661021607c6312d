"""What the text of a compiled program says: its kernels, copies and conversions.

    sum(kernel.bytes for kernel in kernels(text))  # that they read and write

`cost_analysis` says nothing of a device that is only described, and counts slices otherwise.
"""

import dataclasses
from collections.abc import Iterator

from opt_partition._verify.hlo import Computation, Instruction, flat_types, parse

# They start nothing on the device: names for memory, and numbers that a kernel is launched with.
_NOT_KERNELS = {
    *("bitcast", "constant", "get-tuple-element", "optimization-barrier", "parameter"),
    *("partition-id", "replica-id", "tuple"),
}
_LOOPS = {"async-start", "conditional", "while"}


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


def kernels(text: str, *, loops: bool = True) -> list[Kernel]:
    """Returns the kernels of a program without loops and branches.

    A kernel that slices an operand, or writes a piece of a result in place, counts with all of it.

    Args:
      text: of the program.
      loops: whether one is an error; else it is left out, and a call is a kernel, as on a CPU.

    Raises:
      ValueError: the program has a loop, a branch or a call, whose kernels run more or less often.
    """
    module = parse(text)
    entry = module.computations[module.entry]
    found = []
    for instruction in entry.instructions.values():
        opcode = instruction.opcode
        if loops and opcode in _LOOPS | {"call"}:
            raise ValueError(f"`{instruction.name}`: the kernels of a `{opcode}` are not counted")
        if opcode not in _NOT_KERNELS | _LOOPS and not opcode.endswith(("-done", "-update")):
            found.append(_kernel(entry, instruction))
    return found


def _kernel(entry: Computation, instruction: Instruction) -> Kernel:
    end = entry.done(instruction) if instruction.opcode.endswith("-start") else instruction
    results = list(flat_types(end.type))
    read = {}
    for name in instruction.operands:
        size = sum(array.bytes for array in flat_types(entry.instructions[name].type))
        while entry.instructions[name].opcode == "bitcast":  # another name of the same array
            [name] = entry.instructions[name].operands
        read[name] = size
    written = sum(array.bytes for array in results)
    largest = max((array.size for array in results), default=0)
    return Kernel(instruction.name, sum(read.values()), written, largest)


def whole_copies(text: str, elements: int) -> list[str]:
    """Returns the names of copies of at least so many elements, within a memory or between two."""
    return [
        instruction.name
        for _, instruction in _instructions(text)
        if instruction.opcode in ("copy", "copy-start")
        and max(array.size for array in flat_types(instruction.type)) >= elements
    ]


def conversions(text: str, source: str, result: str) -> list[str]:
    """Returns the names of conversions from one dtype of HLO to another, in kernels, too."""
    return [
        instruction.name
        for computation, instruction in _instructions(text)
        if instruction.opcode == "convert"
        and _dtype(instruction) == result
        and _dtype(computation.instructions[instruction.operands[0]]) == source
    ]


def _instructions(text: str) -> Iterator[tuple[Computation, Instruction]]:
    for computation in parse(text).computations.values():
        for instruction in computation.instructions.values():
            yield computation, instruction


def _dtype(instruction: Instruction) -> str:
    return next(flat_types(instruction.type)).dtype
