"""A traced update as equations: which treat elements one by one, and what each leaf needs.

What is one number (a norm, a bias correction) is computed from whole leaves. The elementwise
equations of one leaf take it as an argument, and are the same for blocks, but for broadcasts:

    whole:  s = reduce_sum(g * g);  u = g * rsqrt(s)      g of the whole leaf
    block:  s known;                u = g * rsqrt(s)      g of some rows
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from opt_precision._select import Shape

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
# Parameters that are of whole leaves.
_PLACES: Final = frozenset({"sharding", "out_sharding"})

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
    outs: Sequence[Atom]  # the values that are wanted


class Program:
    """The equations of a traced function, with those of the functions that it calls."""

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
            elif (branches := _elementwise_branches(eqn)) is not None:
                outs = self._chosen(eqn, branches, inputs)
            else:
                results = [Var(value.aval) for value in eqn.outvars]
                self.equations.append(eqn.replace(invars=inputs, outvars=results))
                outs = [*results]
            known.update(zip(eqn.outvars, outs, strict=True))
        return [x if isinstance(x, Literal) else known[x] for x in jaxpr.outvars]

    def _chosen(
        self, eqn: JaxprEqn, branches: Sequence[ClosedJaxpr], inputs: Sequence[Atom]
    ) -> list[Atom]:
        """All branches of a condition, and for each of its results the choice among theirs."""
        index, *operands = inputs
        results: list[Atom] = []
        for value, *cases in zip(
            eqn.outvars, *(self._inlined(branch, operands) for branch in branches), strict=True
        ):
            results.append(out := Var(value.aval))
            self.equations.append(
                eqn.replace(
                    primitive=lax.select_n_p, invars=[index, *cases], outvars=[out], params={}
                )
            )
        return results

    def origin(self, atom: Atom, through: frozenset[str]) -> Atom:
        """What a value is made of by nothing but some primitives of one operand."""
        while isinstance(atom, Var) and (index := self._makers.get(atom)) is not None:
            eqn = self.equations[index]
            if eqn.primitive.name not in through:
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

    def jaxpr(self, part: Part) -> Jaxpr:
        """Some of the equations as a function of what they start from."""
        equations = [self.equations[i] for i in part.indices]
        return Jaxpr((), part.starts, part.outs, equations, debug_info=self._debug_info)

    def evaluate(self, part: Part, values: Callable[[Var], Any]) -> dict[Var, Any]:
        """Computes all that some of the equations make, from the values that they start from."""
        made = [value for i in part.indices for value in self.equations[i].outvars]
        jaxpr = self.jaxpr(part._replace(outs=made))
        outs = jax.core.eval_jaxpr(jaxpr, (), *map(values, part.starts))
        return dict(zip(made, outs, strict=True))

    def kinds(self, owners: Mapping[Var, int]) -> dict[Var, int]:
        """How each value depends on the elements of leaves, which some arguments are."""

        def kind(value: Var, of_whole: int) -> int:
            return NUMBER if getattr(value.aval, "size", 0) == 1 else of_whole

        given = [*self.arguments, *self.consts]
        kinds = {value: kind(value, owners.get(value, WHOLE)) for value in given}
        for eqn in self.equations:
            of = _kind(eqn, [NUMBER if isinstance(x, Literal) else kinds[x] for x in eqn.invars])
            kinds |= {value: kind(value, of) for value in eqn.outvars}
        return kinds


def _kind(eqn: JaxprEqn, operands: Sequence[int]) -> int:
    """The kind of what an equation makes, if that is not a number."""
    name = eqn.primitive.name
    if name == "broadcast_in_dim":
        return UNIFORM if operands[0] == NUMBER else WHOLE
    shapes = {type_of(value).shape for value in eqn.outvars}
    is_elementwise = name in ELEMENTWISE and not eqn.effects and len(shapes) == 1
    return _joined(operands) if is_elementwise else WHOLE


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


def _elementwise_branches(eqn: JaxprEqn) -> Sequence[ClosedJaxpr] | None:
    """The branches of a condition that costs little if all are computed; `None` for others."""
    if eqn.primitive.name != "cond" or eqn.effects:
        return None
    branches: Sequence[ClosedJaxpr] = eqn.params["branches"]
    names = {inner.primitive.name for each in branches for inner in Program(each).equations}
    return branches if names <= ELEMENTWISE | {"broadcast_in_dim"} else None


def run_on_block(jaxpr: Jaxpr, values: Sequence[Any], whole: Shape, piece: Shape) -> list[Any]:
    """Elementwise equations of a leaf on a block of it, in the context of the caller."""
    known: dict[Any, Any] = dict(zip(jaxpr.invars, values, strict=True))

    def value(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else known[atom]

    for eqn in jaxpr.eqns:
        params = {**eqn.params, **dict.fromkeys(_PLACES & eqn.params.keys())}
        if eqn.primitive.name == "broadcast_in_dim" and type_of(eqn.outvars[0]).shape == whole:
            params["shape"] = piece
        out = eqn.primitive.bind(*map(value, eqn.invars), **params)
        known |= zip(eqn.outvars, [out], strict=True)
    return list(map(value, jaxpr.outvars))


_SAME: Final = frozenset({"convert_element_type", "copy", "copy_p"})


def feeding_extremes(program: Program, first: int, number: int) -> dict[int, int]:
    """Which leaves of the state a running maximum or minimum is made of, and where that is kept.

    That is a leaf whose new value is the larger of its old one and of something else, as `nu_max`
    of AMSGrad. One whose old value decays, as Adamax's, comes down again and is not meant, nor is
    one number, as it is made of sums.
    """
    place: dict[Var, int] = {
        value: j for j, value in enumerate(program.arguments[first : first + number])
    }
    feeding: dict[int, int] = {}
    for i, eqn in enumerate(program.equations):
        if eqn.primitive.name not in ("max", "min") or not type_of(eqn.outvars[0]).shape:
            continue
        olds = [program.origin(atom, _SAME) for atom in eqn.invars]
        for j in {place[value] for value in olds if isinstance(value, Var) and value in place}:
            if i in program.part([program.outs[first + j]]).indices:
                starts = program.part(eqn.invars).starts
                feeding |= {place[value]: j for value in starts if value in place}
    return feeding


def levels(program: Program, is_total: Callable[[JaxprEqn], bool]) -> Iterator[list[JaxprEqn]]:
    """Equations that are needed, each with those that need no others but those before them."""
    depth: dict[Var, int] = {}
    levels: dict[int, list[JaxprEqn]] = {}
    for i in program.part(program.outs).indices:
        eqn = program.equations[i]
        level = max((depth.get(x, 0) for x in eqn.invars if isinstance(x, Var)), default=0)
        if is_total(eqn):
            levels.setdefault(level, []).append(eqn)
            level += 1
        depth.update(dict.fromkeys(eqn.outvars, level))
    for level in sorted(levels):
        yield levels[level]
