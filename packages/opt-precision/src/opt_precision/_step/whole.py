"""Values of a program that are computed for whole arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

from opt_precision._step.equations import Atom, Equations, Value, compute, read

Thunk = Callable[[], Any]


class Whole:
    """Computes values for whole arrays when they are asked for, each once.

    Args:
      program: the program.
      arguments: functions that make its arguments.
      outer: where the values are that are not computed here; `None` if all are.
      own: the indices of the equations that are computed here, where `outer` is given.
      passed: what values of `outer` go through.
    """

    def __init__(
        self,
        program: Equations,
        arguments: Mapping[Value, Thunk],
        outer: Whole | None = None,
        own: Set[int] = frozenset(),
        passed: Callable[[Any], Any] = lambda value: value,
    ) -> None:
        self._program = program
        self._arguments = arguments
        self._outer = outer
        self._own = own
        self._passed = passed
        self._values: dict[Value, Any] = dict(program.consts)

    def set(self, value: Value, result: Any) -> None:
        """Says what a value is, which is then not computed."""
        self._values[value] = result

    def __call__(self, atom: Atom) -> Any:
        """Returns a value, or that of a literal."""
        stack = [atom] if isinstance(atom, Value) else []
        while stack:
            value = stack[-1]
            if value in self._values or self._is_taken(value):
                stack.pop()
                continue
            index = self._program.made_by(value)
            assert index is not None
            equation = self._program.equations[index]
            operands = [x for x in equation.inputs if isinstance(x, Value)]
            if missing := [x for x in operands if x not in self._values]:
                stack += missing
                continue
            found = compute(equation, [read(self._values, x) for x in equation.inputs], None)
            for made, result in zip(equation.outputs, found, strict=True):
                self._values.setdefault(made, result)
        return read(self._values, atom)

    def _is_taken(self, value: Value) -> bool:
        """Takes a value that no equation here makes; returns whether there was one."""
        index = self._program.made_by(value)
        if index is None and value in self._arguments:
            self._values[value] = self._arguments[value]()
        elif self._outer is not None and index not in self._own:
            self._values[value] = self._passed(self._outer(value))
        return value in self._values
