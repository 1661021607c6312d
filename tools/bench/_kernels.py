"""What the text of a compiled program says: its kernels, copies and conversions.

    sum(kernel.bytes for kernel in kernels(text))  # that they read and write

`cost_analysis` says nothing of a device that is only described, and counts slices otherwise.
"""

import dataclasses
from collections.abc import Iterator

from opt_partition._flow import trip_count
from opt_partition._hlo import Computation, Instruction, Module, flat_types, parse

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
      read: bytes of its operands, each array once, of a sliced one the slice.
      written: bytes of its results, of an array that it replaces a piece of the piece.
      elements: of the largest of its results.
      times: how often it runs.
    """

    name: str
    read: int
    written: int
    elements: int
    times: int = 1

    @property
    def bytes(self) -> int:
        """Bytes that all runs read and write."""
        return self.times * (self.read + self.written)


def kernels(text: str, *, loops: bool = True) -> list[Kernel]:
    """Returns the kernels of a program, those of a loop as often as it runs.

    Args:
      text: of the program.
      loops: whether those of loops count, and whether a branch is an error; else both are left out,
        and a call is a kernel, as on a CPU.

    Raises:
      ValueError: the program has a branch or a call, or a loop of unknown trips.
    """
    module = parse(text)
    return list(_kernels(module, module.computations[module.entry], loops, 1))


def _kernels(module: Module, inside: Computation, loops: bool, times: int) -> Iterator[Kernel]:
    for instruction in inside.instructions.values():
        opcode = instruction.opcode
        if loops and opcode in _LOOPS | {"call"}:
            trips = trip_count(module, inside, instruction) if opcode == "while" else None
            if trips is None:
                raise ValueError(
                    f"`{instruction.name}`: the kernels of a `{opcode}` are not counted"
                )
            [body] = instruction.called("body")
            yield from _kernels(module, module.computations[body], loops, times * trips)
        elif opcode not in _NOT_KERNELS | _LOOPS and not opcode.endswith(("-done", "-update")):
            yield _kernel(module, inside, instruction, times)


def _kernel(module: Module, inside: Computation, instruction: Instruction, times: int) -> Kernel:
    end = inside.done(instruction) if instruction.opcode.endswith("-start") else instruction
    called = [module.computations[name] for name in instruction.called("calls")]
    read = {}
    for number, name in enumerate(instruction.operands):
        size = sum(array.bytes for array in flat_types(inside.instructions[name].type))
        for fused in called:
            size = min(size, _sliced(fused, number, size))
        while inside.instructions[name].opcode == "bitcast":  # another name of the same array
            [name] = inside.instructions[name].operands
        read[name] = size
    results = list(flat_types(end.type))
    written = sum(array.bytes for array in results)
    for fused in called:
        root = fused.instructions[fused.root]
        names = root.operands if root.opcode == "tuple" else (fused.root,)
        written = sum(_replaced(fused, name) for name in names)
    largest = max((array.size for array in results), default=0)
    return Kernel(instruction.name, sum(read.values()), written, largest, times)


def _sliced(fused: Computation, number: int, size: int) -> int:
    """The bytes that a fusion reads of an operand, of which it may need but a slice."""
    every = fused.instructions.values()
    [name] = [i.name for i in every if i.opcode == "parameter" and i.literal == str(number)]
    slices = [0]
    for user in (i for i in every if name in i.operands):
        is_replaced = user.opcode == "dynamic-update-slice" and user.operands[0] == name
        if user.opcode != "dynamic-slice" and not is_replaced:
            return size
        slices.append(0 if is_replaced else user.array.bytes)
    return max(slices)


def _replaced(fused: Computation, name: str) -> int:
    """The bytes of a result, or of the piece of an array that is replaced."""
    result = fused.instructions[name]
    while result.opcode == "bitcast":
        result = fused.instructions[result.operands[0]]
    if result.opcode == "dynamic-update-slice":
        result = fused.instructions[result.operands[1]]
    return sum(array.bytes for array in flat_types(result.type))


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
