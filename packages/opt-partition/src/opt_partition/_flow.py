"""Dataflow analysis: what every value of a compiled program depends on.

Each input has a bit, which is carried into fusions, branches and loops; `Deps` has four sets.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from opt_partition._hlo import (
    CALLEES,
    Array,
    Computation,
    Instruction,
    Module,
    Type,
    callees,
    is_collective,
)


@dataclasses.dataclass(slots=True)
class Deps:
    """The dependencies of a value, as bit sets; not frozen, as every instruction makes some."""

    any: int = 0
    # Computed elementwise: by arithmetic, casts, transposes, slices and collectives, but not
    # through a product, reduction or broadcast.
    direct: int = 0
    # Written into a larger array, or selected by index or mask: sums over devices gather them.
    placed: int = 0
    # Reduced along a dimension on the device, and otherwise elementwise or placed.
    reduced: int = 0

    def __or__(self, other: Deps) -> Deps:
        return Deps(
            self.any | other.any,
            self.direct | other.direct,
            self.placed | other.placed,
            self.reduced | other.reduced,
        )


_NOTHING = Deps()

# A single `Deps` may stand for a tuple whose elements are all alike.
Value = Deps | tuple["Value", ...]
Part = tuple[str, int]  # the name of a collective, and the number of one of its operands


class Where(NamedTuple):
    """Where an instruction is in a program."""

    loops: tuple[tuple[str, int], ...] = ()  # the enclosing `while`s and their trip counts
    branches: tuple[tuple[str, int], ...] = ()  # the enclosing `conditional`s and branch numbers
    counted: bool = True  # whether all trip counts are known; an unknown one is 1


def trace(
    module: Module,
    inputs: Sequence[Deps] = (),
    first_tag: int = 0,
    stepped: tuple[int, ...] = (),
) -> Flow:
    """Propagates the dependencies of the entry's parameters, `inputs`, through a program.

    A loop carry that is initialised with a single input counts as that input throughout the loop:
    parameters carried through several steps remain parameters. The results of collectives get a bit
    each, from `first_tag`. An iteration of a loop must update some of each bit set of `stepped`
    (parameters, state) to count as a training step; a loop over layers may update only one of them,
    masked.
    """
    flow = Flow(module, first_tag, stepped)
    entry = module.computations[module.entry]
    result = flow.run(module.entry, inputs, Where())
    flow.outputs = _flatten(result, entry.instructions[entry.root].type)
    return flow


class Flow:
    """The dependencies of the values of a program: interprets it on `Value`s."""

    def __init__(self, module: Module, first_tag: int, stepped: tuple[int, ...]) -> None:
        self.module, self.first_tag, self.stepped = module, first_tag, stepped
        self.outputs: list[Deps] = []  # of each array of the result
        # The collectives in program order, and where they are.
        self.sites: dict[tuple[str, Where], tuple[Computation, Instruction]] = {}
        self.moved: dict[Part, Deps] = {}  # operands of collectives
        self.tags: dict[Part, int] = {}  # of their results
        self.step_loops: set[str] = set()  # `while`s over whole steps

    def run(self, name: str, arguments: Sequence[Value], where: Where) -> Value:
        computation = self.module.computations[name]
        values: dict[str, Value] = {}
        for instruction in computation.instructions.values():
            if instruction.opcode == "parameter":
                number = int(instruction.literal)
                # XLA may pass fewer arguments than a computation declares, e.g. to dead branches.
                value = arguments[number] if number < len(arguments) else Deps()
            else:
                operands = [values[name] for name in instruction.operands]
                value = self.step(computation, instruction, operands, where)
            values[instruction.name] = value
        return values[computation.root]

    def step(
        self,
        computation: Computation,
        instruction: Instruction,
        operands: list[Value],
        where: Where,
    ) -> Value:
        opcode, name = instruction.opcode, instruction.name
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
            self.sites.setdefault((name, where), (computation, instruction))
            return self.collective(instruction, operands)
        called = callees(instruction)
        if called and opcode == "while":
            [condition, body], [start] = called, operands
            if self.carries_steps(body, start):
                self.step_loops.add(name)
            trips = trip_count(self.module, computation, instruction)
            loops = (*where.loops, (name, trips or 1))
            inside = Where(loops, where.branches, where.counted and bool(trips))
            return self.loop(condition, body, start, inside)
        if called and opcode == "conditional":
            results = []
            for n, (branch, value) in enumerate(zip(called, operands[1:], strict=True)):
                inside = where._replace(branches=(*where.branches, (name, n)))
                results.append(self.run(branch, [value], inside))
            return _join(*results)
        if called:
            return _join(*(self.run(callee, operands, where) for callee in called))
        return _otherwise(instruction, [_union([value]) for value in operands])

    def loop(self, condition: str, body: str, start: Value, where: Where) -> Value:
        carry = start
        while True:
            self.run(condition, [carry], where)
            result = _join(carry, self.run(body, [carry], where))
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
                carried |= _union([value]).any
        return all(carried & bits for bits in self.stepped)

    def collective(self, instruction: Instruction, operands: list[Value]) -> Value:
        if instruction.opcode == "all-to-all" and len(operands) > 1:
            operands = [_union(operands)]
        results: list[Deps] = []
        for n, value in enumerate(operands):
            part, deps = (instruction.name, n), _union([value])
            self.moved[part] = self.moved.get(part, _NOTHING) | deps
            tag = self.tags.setdefault(part, self.first_tag + len(self.tags))
            results.append(deps | Deps(1 << tag, 1 << tag))
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
    special = opcode.removesuffix("-start") in _OTHERWISE or opcode in CALLEES
    return "otherwise" if special else "elementwise"


def _otherwise(instruction: Instruction, operands: list[Deps]) -> Deps:
    """Returns the dependencies of an instruction that is not elementwise and calls nothing."""
    opcode = instruction.opcode.removesuffix("-start")
    whole = _union(operands)
    if opcode == "custom-call":
        return whole if _MOVES.search(instruction.attributes) else Deps(whole.any)
    if opcode in _PLACES:
        parts = _PLACES[opcode]
        if opcode == "scatter":  # targets, indices, updates
            count = (len(operands) - 1) // 2
            parts = slice(0, count), slice(count + 1, None)
        kept, put = (_union(operands[part]) for part in parts)
        # What is scattered may be added up, and is then no element.
        direct = kept.direct | (0 if opcode == "scatter" else put.direct)
        placed = kept.placed | put.direct | put.placed
        return Deps(whole.any, direct, placed, kept.reduced | put.reduced)
    if opcode in _PICKS:
        # What is repeated is a statistic, such as a norm: it is no longer a sum of some elements.
        reduced = 0 if opcode == "broadcast" else operands[0].reduced
        return Deps(whole.any, 0, operands[0].direct | operands[0].placed, reduced)
    if opcode in _REDUCES:
        return Deps(whole.any, reduced=whole.direct | whole.placed | whole.reduced)
    if opcode != "dynamic-slice":
        return Deps(whole.any)
    # The other operands are start indices.
    return Deps(whole.any, operands[0].direct, operands[0].placed, operands[0].reduced)


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
    """Returns the dependencies of each array of a value of `type_`, without tokens."""
    if isinstance(type_, Array):
        return [_union([value])] * (type_.dtype != "token")
    elements = value if isinstance(value, tuple) else (value,) * len(type_)
    return [d for v, t in zip(elements, type_, strict=True) for d in _flatten(v, t)]


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Returns the trip count of a `while`: as annotated by XLA, else from counter and limit."""
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


def rewritten_places(module: Module, body: str) -> list[int]:
    """Returns the indices of a loop carry that each iteration replaces as a whole."""
    computation = module.computations[body]
    root = computation.instructions[computation.root]
    if root.opcode != "tuple":
        return []
    origins = (_origin(module, computation, name) for name in root.operands)
    # Inputs of a scan are unchanged, and its stacked outputs are written slice by slice.
    kept = ("get-tuple-element", "parameter", "dynamic-update-slice")
    return [n for n, origin in enumerate(origins) if origin.opcode not in kept]


def _origin(module: Module, computation: Computation, name: str) -> Instruction:
    """Returns the instruction that computes `name`, looking into fusions and calls."""
    while True:
        instruction = _source(computation, name)
        place = 0
        if instruction.opcode == "get-tuple-element":
            place = int(instruction.attribute("index") or 0)
            whole = computation.instructions[instruction.operands[0]]
            if whole.opcode in ("parameter", "while", "conditional"):
                return instruction if whole.opcode == "parameter" else whole
            instruction = _source(computation, whole.name)
        called = instruction.called("calls") or instruction.called("to_apply")
        opcode = instruction.opcode.removesuffix("-start")
        if opcode not in ("async", "call", "fusion") or not called:
            return instruction
        computation = module.computations[called[0]]
        root = computation.instructions[computation.root]
        name = root.operands[place] if root.opcode == "tuple" else root.name


def _element(computation: Computation, tuple_name: str, place: int) -> str:
    """Returns the name of a tuple element if the tuple is constructed here, else of the tuple."""
    instruction = computation.instructions[tuple_name]
    return instruction.operands[place] if instruction.opcode == "tuple" else tuple_name


def _source(computation: Computation, name: str) -> Instruction:
    """Returns the instruction that computes or starts to compute `name`, skipping copies."""
    instruction = computation.instructions[name]
    while instruction.opcode in _COPIES or instruction.opcode.endswith(("-done", "-update")):
        instruction = computation.instructions[instruction.operands[0]]
    return instruction


def _constant(computation: Computation, name: str) -> int | None:
    """Returns the value of `name` if it is an integer constant, else `None`."""
    instruction = _source(computation, name)
    digits = re.fullmatch(r"-?\d+", instruction.literal.strip())
    return int(digits[0]) if digits and instruction.opcode == "constant" else None


def _step(computation: Computation, name: str, place: str) -> int | None:
    """Returns the constant that a loop adds to carry element `place`, or `None` if unknown."""
    add = _source(computation, name)
    if add.opcode != "add":
        return None
    for counter, step in (add.operands, add.operands[::-1]):
        source = _source(computation, counter)
        if source.opcode == "get-tuple-element" and source.attribute("index") == place:
            return _constant(computation, step)
    return None


_COPIES = frozenset({"bitcast", "copy", "copy-start"})
_SAME = _COPIES | {"optimization-barrier"}
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
    "scatter": (slice(0, 1), slice(2, 3)),
    "select": (slice(0, 0), slice(1, 3)),
}
_OTHERWISE = _MIXES | _REDUCES | _PICKS | {"custom-call", "dynamic-slice", *_PLACES}
# Custom calls on TPUs and GPUs that move values unchanged.
_MOVES = re.compile(
    r'custom_call_target="(ConcatBitcast|AsyncCollectiveStart|AsyncCollectiveDone|MoveTo\w+)"'
)
