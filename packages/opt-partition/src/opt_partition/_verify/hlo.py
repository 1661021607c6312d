"""Parser for the text of compiled XLA programs (HLO).

Reads only what the analysis of collectives needs: names, shapes, operands, called computations and
a few attributes. Written for the output of jax 0.8 to 0.12 for CPU, GPU and TPU.
"""

from __future__ import annotations

import dataclasses
import functools
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

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


Type = Array | tuple["Type", ...]


@dataclasses.dataclass(eq=False, slots=True)
class Instruction:
    """One line of a computation; not frozen, as making ten thousands of those would take longer.

    Attributes:
      name: unique name in the program, without `%`.
      type: an `Array`, or a tuple of types.
      opcode: e.g. `'all-gather-start'`.
      operands: names of instructions in the same computation.
      literal: text in the parentheses, e.g. of `parameter(0)` or `constant(8)`.
      attributes: the rest of the line.
    """

    name: str
    type: Type
    opcode: str
    operands: tuple[str, ...]
    literal: str
    attributes: str

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
    """A computation: instructions in printed order, operands before their users.

    Attributes:
      name: unique name in the program, without `%`.
      instructions: instructions by name.
      root: name of the instruction that computes the result.
    """

    name: str
    instructions: dict[str, Instruction]
    root: str

    @functools.cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        """The parameters in order of their numbers."""
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return tuple(sorted(found, key=lambda i: int(i.literal)))

    @functools.cached_property
    def async_users(self) -> dict[str, Instruction]:
        """The `-update` and `-done` instructions of asynchronous operations, by operand."""
        ends = ("-update", "-done")
        found = (i for i in self.instructions.values() if i.opcode.endswith(ends))
        return {name: instruction for instruction in found for name in instruction.operands}

    def done(self, start: Instruction) -> Instruction:
        """Returns the `-done` instruction of an asynchronous `start`."""
        found: Instruction | None = start
        while found is not None and not found.opcode.endswith("-done"):
            found = self.async_users.get(found.name)
        if found is None:
            raise ValueError(
                f"`{start.name}` has no matching `-done` instruction in the compiled program"
            )
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A compiled program.

    Attributes:
      header: its first line.
      computations: computations by name.
      entry: name of the entry computation.
    """

    header: str
    computations: dict[str, Computation]
    entry: str

    @property
    def aliased_parameters(self) -> frozenset[int]:
        """Numbers of the entry parameters whose buffers are aliased by an output."""
        found = re.search(r"\binput_output_alias=", self.header)
        table = _value(self.header, found.end()) if found else ""
        return frozenset(int(n) for n in re.findall(r"\((\d+), \{", table))

    @property
    def num_partitions(self) -> int:
        """Number of devices that run the program."""
        found = re.search(r"\b(?:num_partitions|replica_count)=(\d+)", self.header)
        return int(found[1]) if found else 1


def parse(text: str) -> Module:
    """Parses the text returned by `compiled.as_text()`.

    Raises:
      ValueError: the text is not HLO, or cannot be parsed.

    Examples:
      >>> module = parse('''HloModule jit_f
      ...
      ... ENTRY %main (x: f32[4]) -> f32[8] {
      ...   %x = f32[4]{0} parameter(0), metadata={op_name="x"}
      ...   ROOT %g = f32[8]{0} all-gather(%x), replica_groups={{0,1}}, dimensions={0}
      ... }''')
      >>> gather = module.computations['main'].instructions['g']
      >>> gather.opcode, gather.operands, str(gather.type), gather.attribute('replica_groups')
      ('all-gather', ('x',), 'f32[8]', '{{0,1}}')
    """
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


def flat_types(type_: Type) -> Iterator[Array]:
    """Yields the arrays in a type, in order.

    Examples:
      >>> [str(array) for array in flat_types((Array('f32', ()), (Array('s8', (2, 3)),)))]
      ['f32[]', 's8[2,3]']
    """
    if isinstance(type_, Array):
        yield type_
    else:
        for part in type_:
            yield from flat_types(part)


@functools.lru_cache(maxsize=4096)  # a program of 10,000 instructions has few types
def parse_type(text: str) -> Type:
    """Parses a type.

    Examples:
      >>> parse_type('(f32[8,<=2]{1,0:T(8,128)}, (bf16[], token[]))')
      (Array(dtype='f32', shape=(8, 2)), (Array(dtype='bf16', shape=()), Array(dtype='token', ...)))
    """
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
    """Returns the bits per element: the number in the name of the dtype.

    Examples:
      >>> [_bits(dtype) for dtype in ('pred', 'bf16', 'f8e4m3fn', 's4', 'c64', 'token')]
      [8, 16, 8, 4, 64, 0]
    """
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits[1]) if digits else 8 * (dtype == "pred")


_NAME = re.compile(r"%([\w.\-]+)")
_BRACKET_OR_QUOTED = re.compile(r'[()\[\]{}]|"(?:[^"\\]|\\.)*"' + r"|'(?:[^'\\]|\\.)*'")
_PLAIN = re.compile(r"""[^, (\[{"']+""")
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_TYPE_TOKEN = re.compile(
    r"(?P<dtype>[a-z][a-z0-9]*)\[(?P<dims>[^\]]*)\](?:\{[^}]*\})?|/\*.*?\*/|[()]"
)
