"""Parser for the text of compiled XLA programs (HLO) of jax 0.8 to 0.12 on CPU, GPU and TPU.

JAX offers no public structure of a compiled program.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Array:
    """The type of an array in a compiled program, with its per-device shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes without padding; 0 for tokens and opaque values."""
        return math.ceil(self.size * _bits(self.dtype) / 8)


Type = Array | tuple["Type", ...]
_NO_ARRAY = Array("", (0,))


@dataclasses.dataclass(eq=False, slots=True)
class Instruction:
    """One line of a computation; not frozen, as making ten thousands of those would take longer."""

    name: str  # unique in the program, without `%`
    type: Type
    opcode: str
    operands: tuple[str, ...]  # names of instructions in the same computation
    literal: str  # the text in the parentheses, e.g. of `parameter(0)` or `constant(8)`
    attributes: str  # the rest of the line

    @property
    def array(self) -> Array:
        """Its type; an empty array for a tuple."""
        return self.type if isinstance(self.type, Array) else _NO_ARRAY

    def attribute(self, key: str) -> str | None:
        """Returns the value of an attribute as printed, including brackets, or `None`."""
        text = self.attributes
        if text.startswith(f"{key}="):
            return _value(text, len(key) + 1)
        at = text.find(f", {key}=")
        return None if at < 0 else _value(text, at + len(key) + 3)

    def called(self, key: str) -> tuple[str, ...]:
        """Returns the computations in an attribute such as `calls` or `branch_computations`."""
        return tuple(_NAME.findall(self.attribute(key) or ""))

    @property
    def op_name(self) -> str:
        """The origin in the traced program; for a parameter, the argument."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return re.sub(r"\\(.)", r"\1", found[1]) if found else ""


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """A computation: instructions by name in printed order, operands before their users."""

    name: str
    instructions: dict[str, Instruction]
    root: str  # the instruction that computes the result

    @functools.cached_property
    def async_users(self) -> dict[str, str]:
        """The `-update` or `-done` instruction of an asynchronous operation, by operand."""
        ends = ("-update", "-done")
        found = (i for i in self.instructions.values() if i.opcode.endswith(ends))
        return {name: instruction.name for instruction in found for name in instruction.operands}

    def done(self, start: Instruction) -> Instruction:
        """Returns the `-done` instruction of an asynchronous `start`."""
        found = start
        while not found.opcode.endswith("-done"):
            found = self.instructions[self.async_users[found.name]]
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A compiled program: its first line, computations by name, and the name of the first."""

    header: str
    computations: dict[str, Computation]
    entry: str

    @property
    def aliased_parameters(self) -> frozenset[int]:
        """Numbers of the arguments whose buffers are aliased by an output."""
        found = re.search(r"\binput_output_alias=", self.header)
        table = _value(self.header, found.end()) if found else ""
        return frozenset(int(n) for n in re.findall(r"\((\d+), \{", table))

    @property
    def num_parameters(self) -> int:
        """Number of arguments of the program."""
        body = self.computations[self.entry].instructions.values()
        return sum(instruction.opcode == "parameter" for instruction in body)

    @property
    def num_partitions(self) -> int:
        """Number of devices that run the program."""
        found = re.search(r"\b(?:num_partitions|replica_count)=(\d+)", self.header)
        return int(found[1]) if found else 1


_KINDS = frozenset(
    {
        "all-gather",
        "all-reduce",
        "all-to-all",
        "collective-broadcast",
        "collective-permute",
        "ragged-all-to-all",
        "reduce-scatter",
    }
)


@functools.cache
def is_collective(opcode: str) -> bool:
    """Whether an instruction executes or starts a collective."""
    return opcode.removesuffix("-start") in _KINDS


def callees(instruction: Instruction) -> tuple[str, ...]:
    """Returns the computations that an instruction calls, except those applied to elements."""
    keys = CALLEES.get(instruction.opcode, ())
    return tuple(name for key in keys for name in instruction.called(key))


def parse(text: str) -> Module:
    """Parses the text returned by `compiled.as_text()`."""
    header, computations, entry = "", {}, ""
    name, root, body = "", "", dict[str, Instruction]()
    for line in text.split("\n"):
        if line.startswith(" "):
            head, equals, rest = line.partition(" = ")
            if name and equals:
                *marks, written = head.split()
                instruction = _instruction(written.removeprefix("%"), rest)
                body[instruction.name] = instruction
                root = instruction.name if marks else root
        elif line.startswith("HloModule"):
            header = line
        elif opening := _COMPUTATION.match(line):
            name, root, body = opening["name"], "", {}
            entry = name if opening["entry"] else entry
        elif line.startswith("}") and name:
            computations[name] = Computation(name, body, root)
            name = ""
    if not header or entry not in computations:
        raise ValueError(
            "not the text of a compiled XLA program: it lacks an `HloModule` with an `ENTRY`"
        )
    return Module(header, computations, entry)


def parse_program(text: str) -> Module:
    """Parses a program, and takes all-reduces of concatenated arrays apart.

    XLA for GPUs joins all-reduces: it flattens and concatenates their operands, and slices the
    result. They become all-reduces with several operands, as XLA writes them for CPUs and TPUs:
    each then depends on its own sources alone, and has the size of a gradient.
    """
    module = parse(text)
    for computation in module.computations.values():
        for instruction in tuple(computation.instructions.values()):
            if instruction.opcode in ("all-reduce", "all-reduce-start"):
                computation.instructions.update(_separated(module, computation, instruction))
    return module


def _separated(
    module: Module, computation: Computation, start: Instruction
) -> dict[str, Instruction]:
    """Returns what replaces an all-reduce of a concatenation and the slices of its result."""
    if len(start.operands) != 1:
        return {}
    joined = _inlined(module, computation.instructions[start.operands[0]])
    if joined.opcode != "concatenate" or len(joined.array.shape) > 1:
        return {}
    pieces = [_before_flattening(computation, name) for name in joined.operands]
    end = computation.done(start) if start.opcode == "all-reduce-start" else start
    ends = itertools.accumulate((piece.array.size for piece in pieces), initial=0)
    numbers = {bounds: n for n, bounds in enumerate(itertools.pairwise(ends))}
    users = [user for user in computation.instructions.values() if end.name in user.operands]
    sliced = {user.name: numbers.get(_bounds(module, user), -1) for user in users}
    if len(pieces) < 2 or end.name == computation.root or -1 in sliced.values():
        return {}  # used as a whole, or in other pieces
    types = tuple(piece.type for piece in pieces)
    names = tuple(piece.name for piece in pieces)
    return {
        end.name: dataclasses.replace(end, type=types),
        start.name: dataclasses.replace(start, type=types, operands=names),
        **{
            name: Instruction(name, types[n], "get-tuple-element", (end.name,), "", f"index={n}")
            for name, n in sliced.items()
        },
    }


def _inlined(module: Module, instruction: Instruction) -> Instruction:
    """Returns the only instruction of a fusion, with the fusion's operands; others as they are."""
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
    """Returns the array that a chain of bitcasts of one dtype flattens."""
    flat = computation.instructions[name]
    while flat.opcode == "bitcast":
        source = computation.instructions[flat.operands[0]]
        if source.array.dtype != flat.array.dtype:
            break
        flat = source
    return flat


def _bounds(module: Module, user: Instruction) -> tuple[int, int]:
    """Returns the part of a flat array that an instruction slices; of anything else, no part."""
    inlined = _inlined(module, user)
    found = re.fullmatch(r"\{\[(\d+):(\d+)\]\}", inlined.attribute("slice") or "")
    return (int(found[1]), int(found[2])) if found and inlined.opcode == "slice" else (-1, -1)


def flat_types(type_: Type) -> Iterator[Array]:
    """Yields the arrays in a type, in order."""
    if isinstance(type_, Array):
        yield type_
    else:
        for part in type_:
            yield from flat_types(part)


@functools.lru_cache(maxsize=4096)  # a program of 10,000 instructions has few types
def parse_type(text: str) -> Type:
    """Parses a type such as `(f32[8,<=2]{1,0:T(8,128)}, bf16[])`."""
    stack: list[list[Type]] = [[]]
    for found in _TYPE_TOKEN.finditer(text):
        if found["dtype"]:
            dims = found["dims"].replace("<=", "").split(",") if found["dims"] else []
            stack[-1].append(Array(found["dtype"], tuple(map(int, dims))))
        elif found[0] == "(":
            stack.append([])
        elif found[0] == ")":
            closed = tuple(stack.pop())
            stack[-1].append(closed)
    [[type_]] = stack
    return type_


def _instruction(name: str, text: str) -> Instruction:
    """Parses the part of a line after `=`: a type, an opcode and its operands, attributes."""
    end = _closing(text, 0) if text[0] == "(" else text.index(" ")
    opcode, _, rest = text[end + 1 :].partition("(")
    literal, _, attributes = rest.partition(")")
    if "(" in literal or '"' in literal or "'" in literal:  # that was not the bracket that closes
        closing = _closing(text, end + 1 + len(opcode))
        literal, attributes = text[end + 2 + len(opcode) : closing - 1], text[closing:]
    operands = () if opcode in ("constant", "parameter") else tuple(_NAME.findall(literal))
    type_ = parse_type(text[:end])
    return Instruction(name, type_, opcode, operands, literal, attributes.removeprefix(", "))


def _value(text: str, start: int) -> str:
    """Returns the text from `start` to the next comma or space outside brackets and quotes."""
    at = start
    while at < len(text) and text[at] not in ", ":
        plain = _PLAIN.match(text, at)
        at = plain.end() if plain else _closing(text, at)
    return text[start:at]


def _closing(text: str, start: int) -> int:
    """Returns the position after the bracket or quote that closes the one at `start`."""
    depth = 0
    for found in _BRACKET_OR_QUOTED.finditer(text, start):
        depth += (found[0] in "([{") - (found[0] in ")]}")
        if depth == 0:
            return found.end()
    raise ValueError(f"unclosed bracket in a line of the compiled program: {text[:200]}")


@functools.cache
def _bits(dtype: str) -> int:
    """Returns the bits per element: the number in the name of the dtype."""
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits[1]) if digits else 8 * (dtype == "pred")


_NAME = re.compile(r"%([\w.\-]+)")
_BRACKET_OR_QUOTED = re.compile(r'[()\[\]{}]|"(?:[^"\\]|\\.)*"' + r"|'(?:[^'\\]|\\.)*'")
_PLAIN = re.compile(r"""[^, (\[{"']+""")
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_TYPE_TOKEN = re.compile(
    r"(?P<dtype>[a-z][a-z0-9]*)\[(?P<dims>[^\]]*)\](?:\{[^}]*\})?|/\*.*?\*/|[()]"
)
_CALLING = {
    "async": ("calls",),
    "call": ("to_apply",),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
    "custom-call": ("calls",),
    "fusion": ("calls",),
    "while": ("condition", "body"),
}
# The attributes with computations that are called, except those applied to elements.
CALLEES = {**_CALLING, **{f"{opcode}-start": keys for opcode, keys in _CALLING.items()}}
