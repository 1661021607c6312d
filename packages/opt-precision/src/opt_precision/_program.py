"""A traced update as equations: which treat elements one by one, and what each leaf needs.

An inner transformation is traced twice, on whole leaves and on blocks of their rows. Where the
equations correspond, what is one number in the first trace (a norm, a bias correction, a trust
ratio) is computed from the first and becomes an argument of the second, cut down to the equations
of one leaf:

    whole:  s = reduce_sum(g * g);  u = g * rsqrt(s)      g of the whole leaf
    block:  s given;                u = g * rsqrt(s)      g of some rows

Both run by `jax.core.eval_jaxpr`. For each leaf its equations are looked up backwards from what is
wanted: `jax.interpreters.partial_eval.dce_jaxpr` would walk all equations once for each leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

ELEMENTWISE: Final = frozenset(
    {
        *("abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2"),
        *("atanh", "cbrt", "ceil", "clamp", "conj", "convert_element_type", "copy", "copy_p"),
        *("cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2"),
        *("expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "lgamma", "log"),
        *("log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not"),
        *("or", "pow", "reduce_precision", "rem", "round", "rsqrt", "select_n", "sign", "sin"),
        *("sinh", "sqrt", "square", "sub", "tan", "tanh", "xor"),
    }
)
_CALLS: Final = frozenset({"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call"})
# Parameters of elementwise equations and broadcasts that differ between whole leaves and blocks.
_PLACES: Final = frozenset({"shape", "sharding", "out_sharding"})

# How a value depends on the elements of leaves: the index of the leaf whose elements it has, each
# of the same element, or one of these.
NUMBER: Final = -1  # one element
UNIFORM: Final = -2  # one number in all elements
WHOLE: Final = -3  # anything else

Atom: TypeAlias = Var | Literal


def type_of(atom: Atom) -> Any:
    """The type of a value: `shape`, `dtype` and `size`."""
    return atom.aval


class Part(NamedTuple):
    """Some equations of a program, and what they start from."""

    indices: list[int]  # of the equations, in order
    starts: list[Var]  # the values that they are computed from
    outs: list[Atom]  # the values that are wanted


class Program:
    """The equations of a traced function of flat arguments.

    Calls of plain functions are put in place, and conditions with many results become one
    condition for each, with the operands that it needs.

    Attributes:
      arguments: the values that it takes.
      consts: the arrays that it holds, by value.
      equations: in order.
      outs: what it returns.
    """

    def __init__(self, closed: ClosedJaxpr) -> None:
        self.arguments: list[Var] = list(closed.jaxpr.invars)
        self._debug_info = closed.jaxpr.debug_info.with_unknown_names()
        self.consts: dict[Var, Any] = {}
        self.equations: list[JaxprEqn] = []
        self.outs = self._inlined(closed, self.arguments)
        self._makers = {value: i for i, eqn in enumerate(self.equations) for value in eqn.outvars}

    def _inlined(self, closed: ClosedJaxpr, arguments: Sequence[Atom]) -> list[Atom]:
        jaxpr = closed.jaxpr
        known: dict[Any, Atom] = dict(zip(jaxpr.invars, arguments, strict=True))
        for value, const in zip(jaxpr.constvars, closed.consts, strict=True):
            known[value] = new = Var(value.aval)
            self.consts[new] = const
        for eqn in jaxpr.eqns:
            inputs = [x if isinstance(x, Literal) else known[x] for x in eqn.invars]
            if (inner := _plain_call(eqn)) is not None:
                outs = self._inlined(inner, inputs)
            elif eqn.primitive.name == "cond" and not eqn.effects:
                outs = self._conditions(eqn, inputs)
            else:
                made = [Var(value.aval) for value in eqn.outvars]
                self.equations.append(eqn.replace(invars=inputs, outvars=made))
                outs = [*made]
            known.update(zip(eqn.outvars, outs, strict=True))
        return [x if isinstance(x, Literal) else known[x] for x in jaxpr.outvars]

    def _conditions(self, eqn: JaxprEqn, inputs: Sequence[Atom]) -> list[Atom]:
        """One condition for each result of one, with the operands that it needs."""
        index, *operands = inputs
        branches = [Program(branch) for branch in eqn.params["branches"]]
        consts = [(value, const) for branch in branches for value, const in branch.consts.items()]
        held = [Var(value.aval) for value, _ in consts]
        self.consts.update(zip(held, (const for _, const in consts), strict=True))
        results: list[Atom] = []
        for i, value in enumerate(eqn.outvars):
            parts = [branch.part([branch.outs[i]]) for branch in branches]
            needed = {start for part in parts for start in part.starts}
            used = [
                j
                for j in range(len(operands))
                if any(branch.arguments[j] in needed for branch in branches)
            ]
            shared = [k for k, (start, _) in enumerate(consts) if start in needed]
            closed = tuple(
                ClosedJaxpr(
                    branch.jaxpr(
                        part,
                        [
                            *(branch.arguments[j] for j in used),
                            *(
                                consts[k][0] if consts[k][0] in branch.consts else held[k]
                                for k in shared
                            ),
                        ],
                    ),
                    (),
                )
                for branch, part in zip(branches, parts, strict=True)
            )
            results.append(made := Var(value.aval))
            given = [index, *(operands[j] for j in used), *(held[k] for k in shared)]
            params = {**eqn.params, "branches": closed}
            self.equations.append(eqn.replace(invars=given, outvars=[made], params=params))
        return results

    def maker(self, value: Var) -> JaxprEqn | None:
        """The equation that makes a value, if one does."""
        index = self._makers.get(value)
        return None if index is None else self.equations[index]

    def origin(self, atom: Atom, through: frozenset[str]) -> Atom:
        """What a value is made of by nothing but some primitives of one operand."""
        while isinstance(atom, Var):
            eqn = self.maker(atom)
            if eqn is None or eqn.primitive.name not in through:
                break
            atom = eqn.invars[0]
        return atom

    def part(
        self, outs: Iterable[Atom], is_start: Callable[[Var], bool] = lambda value: False
    ) -> Part:
        """The equations that make values."""
        outs = list(outs)
        indices: set[int] = set()
        starts: dict[Var, None] = {}
        stack = [atom for atom in reversed(outs) if not isinstance(atom, Literal)]
        seen: set[Var] = set()
        while stack:
            value = stack.pop()
            if value in seen:
                continue
            seen.add(value)
            index = self._makers.get(value)
            if index is None or is_start(value):
                starts[value] = None
            elif index not in indices:
                indices.add(index)
                stack += [x for x in self.equations[index].invars if not isinstance(x, Literal)]
        return Part(sorted(indices), list(starts), outs)

    def jaxpr(self, part: Part, starts: Sequence[Var] | None = None) -> Jaxpr:
        """Some of the equations as a function of what they start from."""
        equations = [self.equations[i] for i in part.indices]
        starts = part.starts if starts is None else starts
        return Jaxpr((), starts, part.outs, equations, debug_info=self._debug_info)

    def evaluate(self, part: Part, values: Sequence[Any]) -> list[Any]:
        """Computes some of the equations from the values that they start from."""
        made: list[Any] = jax.core.eval_jaxpr(self.jaxpr(part), (), *values)
        return made

    def kinds(self, arguments: Sequence[int], *, is_branch: bool = False) -> dict[Var, int]:
        """How each value depends on the elements of leaves."""
        kinds = {
            value: NUMBER if type_of(value).size == 1 and not is_branch else kind
            for value, kind in zip(self.arguments, arguments, strict=True)
        }
        kinds |= {value: NUMBER if type_of(value).size == 1 else WHOLE for value in self.consts}
        for eqn in self.equations:
            given = [NUMBER if isinstance(x, Literal) else kinds[x] for x in eqn.invars]
            made = _kind(eqn, given)
            for value in eqn.outvars:
                is_number = getattr(value.aval, "size", 0) == 1
                if is_branch:
                    is_number &= set(given) <= {NUMBER} and not eqn.effects
                kinds[value] = NUMBER if is_number else made
        return kinds


def _kind(eqn: JaxprEqn, given: Sequence[int]) -> int:
    """The kind of what an equation makes, if that is not a number."""
    name = eqn.primitive.name
    if eqn.effects:
        return WHOLE
    if name == "broadcast_in_dim":
        return UNIFORM if given[0] == NUMBER else WHOLE
    if name == "cond":
        if given[0] != NUMBER:
            return WHOLE
        branches = [Program(branch) for branch in eqn.params["branches"]]
        found = [
            NUMBER if isinstance(out := branch.outs[0], Literal) else kinds[out]
            for branch in branches
            for kinds in [branch.kinds(given[1:], is_branch=True)]
        ]
        return _joined(found)
    shapes = {type_of(value).shape for value in eqn.outvars}
    return _joined(given) if name in ELEMENTWISE and len(shapes) == 1 else WHOLE


def _joined(kinds: Iterable[int]) -> int:
    """The kind of what is made of several, element by element."""
    found = set(kinds) - {NUMBER, UNIFORM}
    if not found:
        return UNIFORM
    return found.pop() if len(found) == 1 else WHOLE


def _plain_call(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The function that an equation calls, if nothing but its equations matters."""
    if eqn.primitive.name not in _CALLS or eqn.effects:
        return None
    places = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    if any(isinstance(place, jax.sharding.Sharding) for place in places):
        return None
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return inner if isinstance(inner, ClosedJaxpr) else None


class Pairs:
    """Which values of a trace on blocks are those of the trace on whole leaves."""

    def __init__(self, whole: Program, block: Program) -> None:
        self._whole = whole
        self._block = block
        self._values: dict[Var, Var] = dict(zip(whole.arguments, block.arguments, strict=True))
        self._values |= zip(whole.consts, block.consts, strict=False)
        for one, other in zip(whole.equations, block.equations, strict=False):
            self._values |= zip(one.outvars, other.outvars, strict=False)

    def of(self, part: Part) -> Part | None:
        """The same equations on blocks; `None` where they are others."""
        if len(self._whole.equations) != len(self._block.equations):
            return None
        for i in part.indices:
            if not self._is_same(self._whole.equations[i], self._block.equations[i]):
                return None
        starts = [self._values[x] for x in part.starts]
        outs = [x if isinstance(x, Literal) else self._values[x] for x in part.outs]
        return Part(part.indices, starts, outs)

    def _is_same(self, one: JaxprEqn, other: JaxprEqn) -> bool:
        if one.primitive is not other.primitive or len(one.invars) != len(other.invars):
            return False
        if not all(map(self.are_paired, one.invars, other.invars)):
            return False
        if one.primitive.name == "cond":
            branches = zip(one.params["branches"], other.params["branches"], strict=True)
            return all(_are_alike(*map(Program, both)) for both in branches)
        names = one.params.keys() - _PLACES
        return all(one.params[name] == other.params.get(name) for name in names)

    def are_paired(self, one: Atom, other: Atom) -> bool:
        """Whether two values are the same, but for their shapes."""
        if isinstance(one, Literal) and isinstance(other, Literal):
            return np.array_equal(one.val, other.val)
        return not isinstance(one, Literal) and self._values.get(one) is other


def _are_alike(one: Program, other: Program) -> bool:
    """Whether two programs have the same equations, but for their shapes."""
    if len(one.arguments) != len(other.arguments) or one.consts or other.consts:
        return False
    pairs = Pairs(one, other)
    is_same = pairs.of(one.part(one.outs)) is not None
    return is_same and all(map(pairs.are_paired, one.outs, other.outs))


_SAME: Final = frozenset({"convert_element_type", "copy", "copy_p"})


def feeding_extremes(program: Program, first: int, number: int) -> dict[int, int]:
    """Which leaves of the state a running maximum or minimum is made of, and where that is kept.

    That is a leaf whose new value is the larger of its old one and of something else, as `nu_max`
    of AMSGrad. One whose old value decays, as Adamax's, comes down again and is not meant.
    """
    place: dict[Var, int] = {
        value: j for j, value in enumerate(program.arguments[first : first + number])
    }
    feeding: dict[int, int] = {}
    for i, eqn in enumerate(program.equations):
        if eqn.primitive.name not in ("max", "min"):
            continue
        olds = [program.origin(atom, _SAME) for atom in eqn.invars]
        for j in {place[value] for value in olds if isinstance(value, Var) and value in place}:
            if i in program.part([program.outs[first + j]]).indices:
                starts = program.part(eqn.invars).starts
                feeding |= {place[value]: j for value in starts if value in place}
    return feeding
