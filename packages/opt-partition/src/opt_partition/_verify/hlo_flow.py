"""What every value of a compiled program depends on."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from opt_partition._verify.collectives import callees, collective_kind
from opt_partition._verify.hlo import Array, Computation, Instruction, Module, Type
from opt_partition._verify.hlo_loops import rewritten_places


@dataclasses.dataclass(frozen=True, slots=True)
class Deps:
    """What a value depends on, as bits of three integers.

    Attributes:
      any: everything that it depends on.
      direct: of these, what it is computed from element by element: by arithmetic, casts,
        transposes, slices and collectives, but by no product, reduction or broadcast on the way.
      placed: what has elements in it that were put somewhere in a larger array, or picked by
        index or mask. A sum over devices of such values gathers them.
    """

    any: int = 0
    direct: int = 0
    placed: int = 0

    def __or__(self, other: Deps) -> Deps:
        return Deps(self.any | other.any, self.direct | other.direct, self.placed | other.placed)

    @staticmethod
    def of(bit: int) -> Deps:
        """What the source of a bit depends on: itself."""
        return Deps(1 << bit, 1 << bit)


# One `Deps` stands for a tuple, too, if all its elements are alike.
Value = Deps | tuple["Value", ...]
Part = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class Flow:
    """What the values of a program depend on.

    Attributes:
      outputs: each array of the result.
      moved: each array that a collective moves, before it does; by instruction and place.
      step_loops: names of the `while` instructions that carry inputs through whole training steps:
        each iteration makes parameters and state new.
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
    """Follows the inputs through a program.

    A loop's carry that starts as one of the inputs, and nothing else, stays that input in the eyes
    of the loop's body: parameters carried through several steps remain parameters.

    Args:
      module: the program.
      inputs: what each parameter of its entry stands for.
      tags: a bit for each array that a collective moves, which its result gets besides.
      stepped: bits of the inputs that a training step makes new, some of each: the parameters
        and the state. A loop over layers may make one of them new, masked, in each iteration.

    Returns:
      What the results depend on, and what the collectives move.

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
      (['0b101', '0b11'], {('g', 0): Deps(any=1, direct=1, placed=0)})
    """
    tracer = _Tracer(module, tags, stepped)
    entry = module.computations[module.entry]
    result = tracer.run(entry, list(inputs))
    outputs = tuple(_flatten(result, entry.instructions[entry.root].type))
    return Flow(outputs, tracer.moved, frozenset(tracer.step_loops))


class _Tracer:
    """Runs computations on `Value`s; keeps what collectives move."""

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
                # XLA may pass less to a computation than it declares, e.g. to dead branches.
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
        keeps = opcode in _SAME or opcode.endswith(("-done", "-update"))
        if keeps or _is_reshape(computation, instruction):
            return operands[0]
        if collective_kind(instruction):
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
        return _elementwise(instruction, [_merge(value) for value in operands])

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
        """Whether a loop makes some of all `stepped` inputs new in each iteration."""
        if not self.stepped or not isinstance(start, tuple):
            return False
        carried = 0
        for n in rewritten_places(self.module, body):
            for value in filter(_is_input, start[n : n + 1]):
                carried |= _merge(value).any
        return all(carried & bits for bits in self.stepped)

    def collective(self, instruction: Instruction, operands: list[Value]) -> Value:
        if instruction.opcode == "all-to-all" and len(operands) > 1:
            operands = [_merge(tuple(operands))]
        results: list[Deps] = []
        for n, value in enumerate(operands):
            part, deps = (instruction.name, n), _merge(value)
            self.moved[part] = self.moved.get(part, Deps()) | deps
            results.append(deps | Deps.of(self.tags[part]) if part in self.tags else deps)
        return results[0] if len(results) == 1 else tuple(results)


def _elementwise(instruction: Instruction, operands: list[Deps]) -> Deps:
    """What an instruction without computations of its own makes of its operands."""
    opcode = instruction.opcode.removesuffix("-start")
    whole = _merge(tuple(operands))
    if opcode == "custom-call":
        return whole if _MOVES.search(instruction.attributes) else Deps(whole.any)
    if opcode in _PLACES:
        kept, put = (_merge(tuple(operands[part])) for part in _PLACES[opcode])
        return Deps(whole.any, kept.direct | put.direct, kept.placed | put.direct | put.placed)
    if opcode == "scatter":
        # Of equal numbers: targets, indices, updates. Updates may be added up: not direct.
        count = (len(operands) - 1) // 2
        kept, put = _merge(tuple(operands[:count])), _merge(tuple(operands[count + 1 :]))
        return Deps(whole.any, kept.direct, kept.placed | put.direct | put.placed)
    if opcode in _PICKS:
        return Deps(whole.any, 0, operands[0].direct | operands[0].placed)
    if opcode in _MIXES:
        return Deps(whole.any)
    carrying = _merge(tuple(operands[slice(*_CARRYING.get(opcode, (None,)))]))
    return Deps(whole.any, carrying.direct, carrying.placed)


def _is_reshape(computation: Computation, instruction: Instruction) -> bool:
    """Whether an instruction only adds or takes away dimensions of size 1, as TPUs do by sums."""
    if instruction.opcode not in ("broadcast", "reduce"):
        return False
    source, result = computation.instructions[instruction.operands[0]].type, instruction.type
    return isinstance(source, Array) and isinstance(result, Array) and source.size == result.size


def _join(*values: Value) -> Value:
    """What one of several values depends on."""
    tuples = [value for value in values if isinstance(value, tuple)]
    if not tuples:
        return _merge(tuple(values))
    return tuple(
        _join(*(value[n] if isinstance(value, tuple) else value for value in values))
        for n in range(len(tuples[0]))
    )


def _merge(value: Value) -> Deps:
    """What a value depends on with all its elements."""
    if isinstance(value, Deps):
        return value
    anything = direct = placed = 0  # numbers: the innermost loop of all
    for element in value:
        deps = _merge(element)
        anything, direct = anything | deps.any, direct | deps.direct
        placed |= deps.placed
    return Deps(anything, direct, placed)


def _keep_inputs(start: Value, value: Value) -> Value:
    """`value`, but as at the start where that is one input, element by element."""
    if isinstance(start, tuple) and isinstance(value, tuple):
        return tuple(map(_keep_inputs, start, value))
    return start if _is_input(start) else value


def _is_input(value: Value) -> bool:
    """Whether a value is one input, or made of nothing else."""
    return isinstance(value, Deps) and value.any == value.direct and value.any.bit_count() == 1


def _flatten(value: Value, type_: Type) -> list[Deps]:
    """What each array of a value of `type_` depends on."""
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
        "reduce",
        "reduce-window",
        "rng",
        "rng-bit-generator",
        "scaled-dot",
        "select-and-scatter",
        "topk",
        "triangular-solve",
    }
)
# Their elements are those of an operand, in another place or several times.
_PICKS = frozenset({"broadcast", "gather", "sort"})
# The operands that stay where they are, and those that are put among them.
_PLACES = {
    "dynamic-update-slice": (slice(0, 1), slice(1, 2)),
    "pad": (slice(1, 2), slice(0, 1)),
    "select": (slice(0, 0), slice(1, 3)),
}
# The operands that hold elements of the result; the others say where they start.
_CARRYING = {"dynamic-slice": (0, 1)}
# Calls by which TPUs and GPUs move values as they are.
_MOVES = re.compile(
    r'custom_call_target="(ConcatBitcast|AsyncCollectiveStart|AsyncCollectiveDone|MoveTo\w+)"'
)
