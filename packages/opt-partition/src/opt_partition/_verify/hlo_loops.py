"""Trip counts of the loops of a compiled program."""

from __future__ import annotations

import math
import re

from opt_partition._verify.hlo import Computation, Instruction, Module


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
    """Returns the indices of a loop carry that each iteration replaces as a whole.

    Excludes those that are unchanged, like the inputs of a scan, and those that are written slice
    by slice, like the stacked outputs of a scan.
    """
    computation = module.computations[body]
    root = computation.instructions[computation.root]
    if root.opcode != "tuple":
        return []
    origins = (_origin(module, computation, name) for name in root.operands)
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
    while instruction.opcode in _SAME or instruction.opcode.endswith(("-done", "-update")):
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


_SAME = frozenset({"bitcast", "copy", "copy-start"})
