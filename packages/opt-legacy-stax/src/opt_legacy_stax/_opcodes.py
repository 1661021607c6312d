"""Validation of the opcodes of a pickle, before any of them is executed."""

from __future__ import annotations

import pickletools
from typing import Any

from opt_legacy_stax.errors import UnsafePickleError

# The opcodes needed for plain containers, numbers, strings, bytes and objects.
_NAMES = """
PROTO FRAME STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG
LONG1 LONG4 FLOAT BINFLOAT UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 STRING BINSTRING
SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8 EMPTY_DICT DICT SETITEM SETITEMS
EMPTY_LIST LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 PUT BINPUT LONG_BINPUT
MEMOIZE GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD NEWOBJ
"""
_OPCODES = frozenset(_NAMES.split())
_TUPLES = ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3")
_MAX_DEPTH = 200
_MARK = -1


def check_opcodes(data: bytes) -> None:
    """Raises unless a pickle is safe for an unpickler that restricts `find_class`.

    Every opcode must be in the allowlist and must not declare more data than the file holds. Tuples
    must not be nested too deeply: hashing one, as a dict key, would overflow the C stack.

    Raises:
      UnsafePickleError: the pickle is not safe.
      ValueError: the data is not a pickle.
    """
    machine = _Machine()
    for count, (opcode, argument, position) in enumerate(pickletools.genops(data)):
        if opcode.name not in _OPCODES:
            raise UnsafePickleError(
                f"the pickle has the opcode {opcode.name} at byte {position}, which a pickled "
                "state never uses."
            )
        # CPython's memo is an array: a huge index would make it allocate up to that size.
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(str(argument)) > count:
            raise UnsafePickleError(
                f"the pickle writes past the end of its memo at byte {position}."
            )
        if machine.run(opcode, argument) > _MAX_DEPTH:
            raise UnsafePickleError(
                f"the pickle has tuples nested deeper than {_MAX_DEPTH} at byte {position}."
            )


class _Machine:
    """The pickle virtual machine, tracking the nesting depth of tuples instead of values."""

    def __init__(self) -> None:
        self._stack: list[int] = []
        self._memo: dict[int, int] = {}

    def run(self, opcode: pickletools.OpcodeInfo, argument: Any) -> int:
        """Executes one opcode; returns the depth of the value on top of the stack afterwards."""
        stack, name = self._stack, opcode.name
        match name:
            case "MARK":
                stack.append(_MARK)
            case "POP":
                stack.pop()  # pops marks as well as values
            case "DUP":
                stack.append(stack[-1])
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(self._memo[int(argument)])
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                self._memo[int(argument)] = stack[-1]
            case "MEMOIZE":
                self._memo[len(self._memo)] = stack[-1]
            case _:
                popped = self._popped(opcode)
                if name in _TUPLES:
                    stack.append(1 + max(popped, default=0))
                elif name == "BUILD":  # leaves the object that it updates, of any depth
                    stack.append(popped[0])
                elif opcode.stack_after:
                    stack.append(0)  # not a tuple, so hashing does not recurse
        return stack[-1] if stack else 0

    def _popped(self, opcode: pickletools.OpcodeInfo) -> list[int]:
        """Pops the operands of an opcode, and returns them in stack order."""
        before = opcode.stack_before
        count = len(before)
        if pickletools.markobject in before:
            mark = len(self._stack) - 1 - self._stack[::-1].index(_MARK)
            count = len(self._stack) - mark + before.index(pickletools.markobject)
        if count > len(self._stack):
            raise ValueError("the stack is empty")
        start = len(self._stack) - count
        popped = self._stack[start:]
        del self._stack[start:]
        return popped
