"""Dataflow analysis: what every value of a compiled program depends on."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from opt_partition._verify.collectives import callees, is_collective, may_call
from opt_partition._verify.hlo import Array, Computation, Instruction, Module, Type
from opt_partition._verify.hlo_loops import rewritten_places


@dataclasses.dataclass(slots=True)
class Deps:
    """The dependencies of a value, as bit sets; not frozen, as every instruction makes some.

    Attributes:
      any: all dependencies.
      direct: dependencies from which it is computed elementwise: by arithmetic, casts, transposes,
        slices and collectives, but not through a product, reduction or broadcast.
      placed: dependencies whose elements were written into a larger array, or selected by index or
        mask. Summing such values over devices gathers them.
      reduced: dependencies whose elements were reduced along a dimension on the device, and that
        are elementwise or placed otherwise.
    """

    any: int = 0
    direct: int = 0
    placed: int = 0
    reduced: int = 0

    def __or__(self, other: Deps) -> Deps:
        return Deps(
            self.any | other.any,
            self.direct | other.direct,
            self.placed | other.placed,
            self.reduced | other.reduced,
        )

    @staticmethod
    def of(bit: int) -> Deps:
        """Returns the dependencies of the source with that bit: itself."""
        return Deps(1 << bit, 1 << bit)


_NOTHING = Deps()

# A single `Deps` may stand for a tuple whose elements are all alike.
Value = Deps | tuple["Value", ...]
Part = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class Flow:
    """The dependencies of the values of a program.

    Attributes:
      outputs: dependencies of each array of the result.
      moved: dependencies of each operand of a collective, by instruction and index.
      step_loops: names of the `while` instructions whose iterations are whole training steps, in
        which all parameters and state are updated.
    """

    outputs: tuple[Deps, ...]
    moved: dict[Part, Deps]
    step_loops: frozenset[str] = frozenset()


def trace(
    module: Module,
    inputs: Sequence[Deps],
    tags: Mapping[Part, int],
    stepped: tuple[int, ...] = (),
) -> Flow:
    """Propagates the dependencies on inputs through a program.

    A loop carry that is initialised with a single input counts as that input throughout the loop:
    parameters carried through several steps remain parameters.

    Args:
      module: the program.
      inputs: dependencies of each parameter of the entry computation.
      tags: a bit for each array that a collective communicates, added to its result.
      stepped: bit sets of the inputs that a training step updates, i.e. of the parameters and of
        the state; an iteration must update some of each to count as a step. (A loop over layers may
        update only one of them, masked, in each iteration.)

    Returns:
      The dependencies of the results and of the operands of collectives.

    Examples:
      >>> from opt_partition._verify.hlo import parse
      >>> module = parse('''HloModule jit_f
      ...
      ... ENTRY %main (x: f32[4], y: f32[4]) -> (f32[8], f32[4]) {
      ...   %x = f32[4]{0} parameter(0)
      ...   %y = f32[4]{0} parameter(1)
      ...   %g = f32[8]{0} all-gather(%x), replica_groups={{0,1}}, dimensions={0}
      ...   %sum = f32[4]{0} add(%x, %y)
      ...   ROOT %out = (f32[8]{0}, f32[4]{0}) tuple(%g, %sum)
      ... }''')
      >>> flow = trace(module, [Deps.of(0), Deps.of(1)], {('g', 0): 2})
      >>> [bin(output.any) for output in flow.outputs], flow.moved
      (['0b101', '0b11'], {('g', 0): Deps(any=1, direct=1, placed=0, reduced=0)})
    """
    interpreter = _Interpreter(module, tags, stepped)
    entry = module.computations[module.entry]
    result = interpreter.run(entry, list(inputs))
    outputs = tuple(_flatten(result, entry.instructions[entry.root].type))
    return Flow(outputs, interpreter.moved, frozenset(interpreter.step_loops))


class _Interpreter:
    """Interprets computations on `Value`s, and records the operands of collectives."""

    def __init__(self, module: Module, tags: Mapping[Part, int], stepped: tuple[int, ...]) -> None:
        self.module = module
        self.tags = tags
        self.stepped = stepped
        self.moved: dict[Part, Deps] = {}
        self.step_loops: set[str] = set()

    def run(self, computation: Computation, arguments: Sequence[Value]) -> Value:
        values: dict[str, Value] = {}
        for instruction in computation.instructions.values():
            if instruction.opcode == "parameter":
                number = int(instruction.literal)
                # XLA may pass fewer arguments than a computation declares, e.g. to dead branches.
                value = arguments[number] if number < len(arguments) else Deps()
            else:
                operands = [values[name] for name in instruction.operands]
                value = self.step(computation, instruction, operands)
            values[instruction.name] = value
        return values[computation.root]

    def step(
        self, computation: Computation, instruction: Instruction, operands: list[Value]
    ) -> Value:
        opcode = instruction.opcode
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "get-tuple-element":
            [whole] = operands
            place = int(instruction.attribute("index") or 0)
            return whole[place] if isinstance(whole, tuple) else whole
        how = _how(opcode)
        if how == "unchanged" or (how == "resized" and _is_reshape(computation, instruction)):
            return operands[0]
        if how == "elementwise":
            return _union(operands)
        if how == "collective":
            return self.collective(instruction, operands)
        called = callees(instruction)
        if called and opcode == "while":
            [condition, body], [start] = called, operands
            if self.carries_steps(body, start):
                self.step_loops.add(instruction.name)
            return self.loop(condition, body, start)
        if called and opcode == "conditional":
            return _join(*(self.call(n, [v]) for n, v in zip(called, operands[1:], strict=True)))
        if called:
            return _join(*(self.call(name, operands) for name in called))
        return _otherwise(instruction, [_merge(value) for value in operands])

    def call(self, name: str, arguments: Sequence[Value]) -> Value:
        return self.run(self.module.computations[name], arguments)

    def loop(self, condition: str, body: str, start: Value) -> Value:
        carry = start
        while True:
            self.call(condition, [carry])
            result = _join(carry, self.call(body, [carry]))
            settled = _keep_inputs(start, result)
            if settled == carry:
                return result
            carry = settled

    def carries_steps(self, body: str, start: Value) -> bool:
        """Whether each iteration of a loop updates some of each set of `stepped` inputs."""
        if not self.stepped or not isinstance(start, tuple):
            return False
        carried = 0
        for n in rewritten_places(self.module, body):
            for value in filter(_is_input, start[n : n + 1]):
                carried |= _merge(value).any
        return all(carried & bits for bits in self.stepped)

    def collective(self, instruction: Instruction, operands: list[Value]) -> Value:
        if instruction.opcode == "all-to-all" and len(operands) > 1:
            operands = [_union(operands)]
        results: list[Deps] = []
        for n, value in enumerate(operands):
            part, deps = (instruction.name, n), _merge(value)
            self.moved[part] = self.moved.get(part, Deps()) | deps
            results.append(deps | Deps.of(self.tags[part]) if part in self.tags else deps)
        return results[0] if len(results) == 1 else tuple(results)


@functools.cache
def _how(opcode: str) -> Literal["unchanged", "resized", "elementwise", "collective", "otherwise"]:
    """Returns how the result of an instruction follows from its operands."""
    if opcode in _SAME or opcode.endswith(("-done", "-update")):
        return "unchanged"
    if opcode in ("broadcast", "reduce"):
        return "resized"
    if is_collective(opcode):
        return "collective"
    special = opcode.removesuffix("-start") in _OTHERWISE or may_call(opcode)
    return "otherwise" if special else "elementwise"


def _otherwise(instruction: Instruction, operands: list[Deps]) -> Deps:
    """Returns the dependencies of an instruction that is not elementwise and calls nothing."""
    opcode = instruction.opcode.removesuffix("-start")
    whole = _union(operands)
    if opcode == "custom-call":
        return whole if _MOVES.search(instruction.attributes) else Deps(whole.any)
    if opcode in _PLACES:
        kept, put = (_union(operands[part]) for part in _PLACES[opcode])
        placed = kept.placed | put.direct | put.placed
        return Deps(whole.any, kept.direct | put.direct, placed, kept.reduced | put.reduced)
    if opcode == "scatter":
        # Operands are targets, indices and updates. Updates may be accumulated, so they are not
        # direct.
        count = (len(operands) - 1) // 2
        kept, put = _union(operands[:count]), _union(operands[count + 1 :])
        placed = kept.placed | put.direct | put.placed
        return Deps(whole.any, kept.direct, placed, kept.reduced | put.reduced)
    if opcode in _PICKS:
        # What is repeated is a statistic, such as a norm: it is no longer a sum of some elements.
        reduced = 0 if opcode == "broadcast" else operands[0].reduced
        return Deps(whole.any, 0, operands[0].direct | operands[0].placed, reduced)
    if opcode in _REDUCES:
        return Deps(whole.any, reduced=whole.direct | whole.placed | whole.reduced)
    if opcode in _MIXES:
        return Deps(whole.any)
    carrying = _union(operands[slice(*_CARRYING.get(opcode, (None,)))])
    return Deps(whole.any, carrying.direct, carrying.placed, carrying.reduced)


def _is_reshape(computation: Computation, instruction: Instruction) -> bool:
    """Whether an instruction only adds or removes dimensions of size 1, as TPUs do with sums."""
    source, result = computation.instructions[instruction.operands[0]].type, instruction.type
    return isinstance(source, Array) and isinstance(result, Array) and source.size == result.size


def _join(*values: Value) -> Value:
    """Returns the elementwise union of the dependencies of several values."""
    tuples = [value for value in values if isinstance(value, tuple)]
    if not tuples:
        return _union(values)
    return tuple(
        _join(*(value[n] if isinstance(value, tuple) else value for value in values))
        for n in range(len(tuples[0]))
    )


def _merge(value: Value) -> Deps:
    """Returns the union of the dependencies of all elements of a value."""
    return value if isinstance(value, Deps) else _union(value)


def _union(values: Iterable[Value]) -> Deps:
    """Returns the union of the dependencies of several values: the innermost loop of all."""
    whole = _NOTHING
    for value in values:
        deps = value if isinstance(value, Deps) else _union(value)
        if deps is not whole and deps.any:
            whole = whole | deps if whole.any else deps
    return whole


def _keep_inputs(start: Value, value: Value) -> Value:
    """Returns `value`, with elements that started as a single input reset to it."""
    if isinstance(start, tuple) and isinstance(value, tuple):
        return tuple(map(_keep_inputs, start, value))
    return start if _is_input(start) else value


def _is_input(value: Value) -> bool:
    """Whether a value depends on a single input only, and directly."""
    return isinstance(value, Deps) and value.any == value.direct and value.any.bit_count() == 1


def _flatten(value: Value, type_: Type) -> list[Deps]:
    """Returns the dependencies of each array of a value of `type_`."""
    if not isinstance(type_, tuple):
        return [_merge(value)]
    elements = value if isinstance(value, tuple) else (value,) * len(type_)
    return [d for v, t in zip(elements, type_, strict=True) for d in _flatten(v, t)]


_SAME = frozenset({"bitcast", "copy", "copy-start", "optimization-barrier"})
_MIXES = frozenset(
    {
        "cholesky",
        "convolution",
        "dot",
        "fft",
        "map",
        "ragged-dot",
        "rng",
        "rng-bit-generator",
        "scaled-dot",
        "select-and-scatter",
        "topk",
        "triangular-solve",
    }
)
_REDUCES = frozenset({"reduce", "reduce-window"})
# Their elements are elements of an operand, at other positions or repeated.
_PICKS = frozenset({"broadcast", "gather", "sort"})
# The operands whose elements keep their positions, and those that are written among them.
_PLACES = {
    "dynamic-update-slice": (slice(0, 1), slice(1, 2)),
    "pad": (slice(1, 2), slice(0, 1)),
    "select": (slice(0, 0), slice(1, 3)),
}
# The operands that provide elements of the result; the others are start indices.
_CARRYING = {"dynamic-slice": (0, 1)}
_OTHERWISE = frozenset(
    {"custom-call", "scatter", *_CARRYING, *_MIXES, *_PICKS, *_PLACES, *_REDUCES}
)
# Custom calls on TPUs and GPUs that move values unchanged.
_MOVES = re.compile(
    r'custom_call_target="(ConcatBitcast|AsyncCollectiveStart|AsyncCollectiveDone|MoveTo\w+)"'
)
