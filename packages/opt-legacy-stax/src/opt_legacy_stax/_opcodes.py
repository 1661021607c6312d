"""What the opcodes of a pickle may be, checked before any of them is run."""

from __future__ import annotations

import pickletools
from typing import Any

from opt_legacy_stax.errors import UnsafePickleError

# Opcodes that a pickle of plain containers, numbers, text, bytes and objects has.
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
    """Raises unless a pickle is safe to be interpreted, by an unpickler that limits its names.

    Every opcode is a known one and declares no more than the file holds, and no tuple is nested
    too deep to be hashed: as the key of a dict it would overflow the stack of C.

    Raises:
      UnsafePickleError: it is not.
      ValueError: it is no pickle.
    """
    machine = _Machine()
    for count, (opcode, argument, position) in enumerate(pickletools.genops(data)):
        if opcode.name not in _OPCODES:
            raise UnsafePickleError(
                f"the pickle has the opcode {opcode.name} at byte {position}, which no state needs."
            )
        # The memo is an array: an index far beyond what is in it would be allocated.
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(str(argument)) > count:
            raise UnsafePickleError(f"the pickle stores beyond its memo at byte {position}.")
        if machine.run(opcode, argument) > _MAX_DEPTH:
            raise UnsafePickleError(
                f"the pickle has tuples nested deeper than {_MAX_DEPTH} at byte {position}."
            )


class _Machine:
    """The stack machine of pickles, with the depth of tuples in place of values."""

    def __init__(self) -> None:
        self._stack: list[int] = []
        self._memo: dict[int, int] = {}

    def run(self, opcode: pickletools.OpcodeInfo, argument: Any) -> int:
        """Runs one opcode; returns the depth of what is on top of the stack then."""
        stack, name = self._stack, opcode.name
        match name:
            case "MARK":
                stack.append(_MARK)
            case "POP":
                stack.pop()  # a mark too
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
                elif name == "BUILD":  # leaves what it changes, which may be anything
                    stack.append(popped[0])
                elif opcode.stack_after:
                    stack.append(0)  # hashing it goes no deeper
        return stack[-1] if stack else 0

    def _popped(self, opcode: pickletools.OpcodeInfo) -> list[int]:
        """Removes what the opcode takes, and returns it in its order."""
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
