"""An update as equations: which of them treat each element of a leaf by itself, and which do not.

The inner transformation is traced once. What is computed element by element is later evaluated
piece by piece, and so are sums of it; everything else is evaluated whole, first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from opt_precision._step.equations import (
    ELEMENTWISE,
    Atom,
    Choice,
    Equation,
    Equations,
    Value,
    evaluate,
    type_of,
)


class Kind(NamedTuple):
    """How a value depends on the elements of a leaf.

    Attributes:
      leaf: the index of the parameter whose elements it has, each made of the same element of
        arrays like it; -1 where it is one number in all of its elements; `None` otherwise.
    """

    leaf: int | None

    @property
    def is_uniform(self) -> bool:
        """Whether all elements are one number."""
        return self.leaf == -1


WHOLE: Final = Kind(None)
UNIFORM: Final = Kind(-1)
_NUMBERS: Final = ELEMENTWISE | {"broadcast_in_dim", "reshape", "reshard", "squeeze"}
KindOf: TypeAlias = Callable[[Atom], Kind]


class Program(Equations):
    """The equations of a function of flat arguments, and the kinds of what they make.

    Args:
      closed: the traced function.
      kinds: of its arguments.
      is_split: see `Equations`.
    """

    def __init__(self, closed: ClosedJaxpr, kinds: Sequence[Kind], *, is_split: bool) -> None:
        super().__init__(closed, is_split=is_split)
        self.kind = _with_kinds(self.equations, dict(zip(self.arguments, kinds, strict=True)))

    def elementwise(self, outs: Iterable[Atom]) -> tuple[list[Equation], list[Value]]:
        """The equations that make values element by element, in order, and what they start from."""
        found, starts = self.needed(outs, lambda value: self.kind(value) == WHOLE)
        return [self.equations[i] for i in found], starts

    def constant(self, atom: Atom) -> Any:
        """The number in all elements of an output; `None` if it depends on arguments."""
        if isinstance(atom, Literal):
            return atom.val if jnp.ndim(atom.val) == 0 else None
        if jnp.issubdtype(atom.aval.dtype, jax.dtypes.extended):
            return None
        if atom.is_number:
            found, starts = self.needed([atom])
            equations = [self.equations[i] for i in found]
        elif self.kind(atom).is_uniform:
            equations, starts = self.elementwise([atom])
        else:
            return None
        if starts or not all(_makes_numbers(one) or not atom.is_number for one in equations):
            return None
        with jax.ensure_compile_time_eval():
            return np.asarray(evaluate(equations, {}, ())[atom]).reshape(())[()]


def _with_kinds(equations: Iterable[Equation], found: dict[Value, Kind]) -> KindOf:
    """Adds the kinds of what equations make, and returns how to look them up."""

    def kind(atom: Atom) -> Kind:
        return WHOLE if isinstance(atom, Literal) else found.get(atom, WHOLE)

    for equation in equations:
        made = _kind_of(equation, kind)
        for value in equation.outputs:
            found[value] = WHOLE if made == UNIFORM and value.is_number else made
    return kind


def _kind_of(equation: Equation, kind: KindOf) -> Kind:
    """The kind of what an equation makes."""
    if equation.source.effects:
        return WHOLE
    if equation.choice is not None:
        return _kind_of_choice(equation, equation.choice, kind)
    if equation.name == "broadcast_in_dim":
        return UNIFORM if _is_number(equation.inputs[0], kind) else WHOLE
    return _kind_of_elements(equation, kind) if equation.name in ELEMENTWISE else WHOLE


def _makes_numbers(equation: Equation) -> bool:
    is_plain = equation.choice is None and equation.name in _NUMBERS
    return is_plain and all(value.is_number for value in equation.outputs)


def _is_number(atom: Atom, kind: KindOf) -> bool:
    return bool(kind(atom) == WHOLE and type_of(atom).size == 1)


def _kind_of_elements(equation: Equation, kind: KindOf) -> Kind:
    shapes = {value.aval.shape for value in equation.outputs}
    leaves = {kind(atom).leaf for atom in equation.inputs if kind(atom) != WHOLE}
    others = {type_of(atom).shape for atom in equation.inputs if kind(atom) == WHOLE}
    of_leaves = leaves - {-1}
    if len(shapes) > 1 or len(of_leaves) > 1 or not leaves:
        return WHOLE
    # Whole arrays may take part in what is made of a leaf, but not in what is one number.
    if not others <= ({(), *shapes} if of_leaves else {()}):
        return WHOLE
    return Kind(of_leaves.pop()) if of_leaves else UNIFORM


def _kind_of_choice(equation: Equation, choice: Choice, kind: KindOf) -> Kind:
    index, *used = equation.inputs
    shape = equation.outputs[0].aval.shape
    if not _is_number(index, kind) or any(type_of(x).shape not in ((), shape) for x in used):
        return WHOLE
    found: Kind | None = None
    for branch in choice.branches:
        out = branch.outs[choice.result]
        given = [branch.arguments[j] for j in choice.used]
        equations = [branch.equations[i] for i in branch.needed([out])[0]]
        inner = _with_kinds(equations, dict(zip(given, map(kind, used), strict=True)))
        if not all(_is_of_elements(one, inner) for one in equations):
            return WHOLE
        found = inner(out) if found is None else _either(found, inner(out))
    return found or WHOLE


def _is_of_elements(equation: Equation, kind: KindOf) -> bool:
    """Whether a piece is all that it takes: it makes elements of pieces, or numbers of numbers."""
    if all(kind(value) != WHOLE for value in equation.outputs):
        return True
    return all(type_of(atom).size == 1 for atom in (*equation.inputs, *equation.outputs))


def _either(one: Kind, other: Kind) -> Kind:
    """The kind of what is made in one of two ways."""
    if one == other:
        return one
    leaves = {one.leaf, other.leaf} - {-1}
    return Kind(leaves.pop()) if len(leaves) == 1 else WHOLE
