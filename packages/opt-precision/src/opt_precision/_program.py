"""An update as equations: which of them treat each element of a leaf by itself, and which do not.

The inner transformation is traced once. What is computed element by element is later evaluated
piece by piece; sums over leaves and everything else are evaluated whole, first.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

_ELEMENTWISE: Final = frozenset(
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


class Program:
    """The equations of a function of flat arguments.

    Args:
      closed: the traced function.
      kinds: of its arguments.
    """

    def __init__(self, closed: ClosedJaxpr, kinds: Sequence[Kind]) -> None:
        self.jaxpr: Jaxpr = closed.jaxpr
        self.consts = closed.consts
        self.made_by: dict[Var, JaxprEqn] = {}
        self._order = {id(eqn): i for i, eqn in enumerate(self.jaxpr.eqns)}
        self._kinds: dict[Var, Kind] = dict(zip(self.jaxpr.invars, kinds, strict=True))
        self._kinds |= dict.fromkeys(self.jaxpr.constvars, WHOLE)
        for eqn in self.jaxpr.eqns:
            self.made_by.update(dict.fromkeys(eqn.outvars, eqn))
            self._kinds.update(zip(eqn.outvars, _kinds_of(eqn, self.kind), strict=True))

    def kind(self, atom: Any) -> Kind:
        """How a value depends on the elements of a leaf."""
        return WHOLE if isinstance(atom, Literal) else self._kinds[atom]

    def elementwise(self, outs: Iterable[Any]) -> tuple[list[JaxprEqn], list[Any]]:
        """The equations that make values element by element, in order, and what they start from."""
        needed: set[int] = set()
        starts: dict[Any, None] = {}
        stack = [atom for atom in outs if not isinstance(atom, Literal)]
        seen: set[Any] = set()
        while stack:
            var = stack.pop()
            if var in seen:
                continue
            seen.add(var)
            eqn = self.made_by.get(var)
            if eqn is None or self.kind(var) == WHOLE:
                starts[var] = None
                continue
            needed.add(self._order[id(eqn)])
            stack += [atom for atom in eqn.invars if not isinstance(atom, Literal)]
        return [self.jaxpr.eqns[i] for i in sorted(needed)], list(starts)

    def constant(self, atom: Any) -> float | None:
        """The number in all elements of an output, where that does not depend on arguments."""
        if isinstance(atom, Literal):
            return float(atom.val) if jnp.ndim(atom.val) == 0 else None
        equations, starts = self.elementwise([atom])
        if not self.kind(atom).is_uniform or starts:
            return None
        values: dict[Any, Any] = {}
        with jax.ensure_compile_time_eval():
            for eqn in equations:
                found = evaluate(eqn, [_read(values, atom) for atom in eqn.invars], ())
                values.update(zip(eqn.outvars, found, strict=True))
            return float(values[atom])


class Whole:
    """Values of a program that are computed for whole arrays, when they are asked for.

    Args:
      program: the program.
      arguments: functions that make its arguments.
    """

    def __init__(self, program: Program, arguments: Sequence[Callable[[], Any]]) -> None:
        self._program = program
        self._arguments = dict(zip(program.jaxpr.invars, arguments, strict=True))
        self._values: dict[Any, Any] = dict(
            zip(program.jaxpr.constvars, program.consts, strict=True)
        )

    def __call__(self, atom: Any) -> Any:
        """Returns the value of a variable or a literal."""
        if isinstance(atom, Literal):
            return atom.val
        stack = [atom]
        while stack:
            var = stack[-1]
            if var in self._values:
                stack.pop()
                continue
            if (eqn := self._program.made_by.get(var)) is None:
                self._values[var] = self._arguments[var]()
                continue
            missing = [
                x for x in eqn.invars if not isinstance(x, Literal) and x not in self._values
            ]
            if missing:
                stack += missing
                continue
            found = _bind(eqn, [_read(self._values, x) for x in eqn.invars])
            self._values.update(zip(eqn.outvars, found, strict=True))
        return self._values[atom]


def evaluate(eqn: JaxprEqn, values: Sequence[Any], shape: tuple[int, ...] | None) -> list[Any]:
    """Evaluates an equation that treats elements by themselves.

    Args:
      eqn: the equation.
      values: of its arguments.
      shape: of the piece; `None` for whole arrays, whose equations are taken as they are.
    """
    if shape is None:
        return _bind(eqn, values)
    if eqn.primitive.name == "broadcast_in_dim":
        return [jnp.broadcast_to(values[0], shape)]
    if (inner := _called(eqn)) is not None:
        known: dict[Any, Any] = dict(zip(inner.jaxpr.constvars, inner.consts, strict=True))
        known |= zip(inner.jaxpr.invars, values, strict=True)
        for one in inner.jaxpr.eqns:
            is_small = all(var.aval.shape == () for var in one.outvars)
            found = evaluate(one, [_read(known, x) for x in one.invars], () if is_small else shape)
            known.update(zip(one.outvars, found, strict=True))
        return [_read(known, atom) for atom in inner.jaxpr.outvars]
    return _bind(eqn, values, is_whole=False)


def _read(values: Mapping[Any, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, Literal) else values[atom]


def _bind(eqn: JaxprEqn, values: Sequence[Any], *, is_whole: bool = True) -> list[Any]:
    primitive: Any = eqn.primitive
    params = primitive.get_bind_params(eqn.params)
    functions, params = params if isinstance(params, tuple) else ((), params)  # until JAX 0.9
    # A piece is computed on each device by itself, where the mesh that was traced does not hold.
    with eqn.ctx.manager if is_whole else contextlib.nullcontext():
        found = primitive.bind(*functions, *values, **params)
    return list(found) if primitive.multiple_results else [found]


def _called(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The function that an equation calls, if it is a plain call."""
    if eqn.primitive.name not in _CALLS:
        return None
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return inner if isinstance(inner, ClosedJaxpr) else None


def _kinds_of(eqn: JaxprEqn, kind: Callable[[Any], Kind]) -> list[Kind]:
    """The kinds of what an equation makes."""
    whole = [WHOLE] * len(eqn.outvars)
    if eqn.effects:
        return whole
    if (inner := _called(eqn)) is not None:
        return _kinds_of_call(eqn, inner, kind) or whole
    if eqn.primitive.name == "broadcast_in_dim":
        operand = eqn.invars[0]
        is_number = operand.aval.shape == () and kind(operand) == WHOLE  # type: ignore[attr-defined]
        return [UNIFORM if is_number else WHOLE]
    if eqn.primitive.name not in _ELEMENTWISE:
        return whole
    shapes = {var.aval.shape for var in eqn.outvars}  # type: ignore[attr-defined]
    leaves = {kind(atom).leaf for atom in eqn.invars if kind(atom) != WHOLE}
    others = {
        atom.aval.shape  # type: ignore[attr-defined]
        for atom in eqn.invars
        if kind(atom) == WHOLE
    }
    of_leaves = leaves - {-1}
    if len(shapes) > 1 or len(of_leaves) > 1 or not leaves:
        return whole
    # Whole arrays may take part in what is made of a leaf, but not in what is one number.
    if not others <= ({(), *shapes} if of_leaves else {()}):
        return whole
    found = Kind(of_leaves.pop()) if of_leaves else UNIFORM
    return [found] * len(eqn.outvars)


def _kinds_of_call(
    eqn: JaxprEqn, inner: ClosedJaxpr, kind: Callable[[Any], Kind]
) -> list[Kind] | None:
    """The kinds of what a call makes; `None` where something in it needs whole arrays."""
    jaxpr = inner.jaxpr
    kinds: dict[Any, Kind] = dict(zip(jaxpr.invars, map(kind, eqn.invars), strict=True))
    kinds |= dict.fromkeys(jaxpr.constvars, WHOLE)
    look: Callable[[Any], Kind] = functools.partial(_look, kinds)
    for one in jaxpr.eqns:
        found = _kinds_of(one, look)
        # Numbers may be computed once for every piece, arrays may not.
        if WHOLE in found and any(x.aval.shape for x in (*one.invars, *one.outvars)):
            return None
        kinds.update(zip(one.outvars, found, strict=True))
    return [look(atom) for atom in jaxpr.outvars]


def _look(kinds: Mapping[Any, Kind], atom: Any) -> Kind:
    return WHOLE if isinstance(atom, Literal) else kinds[atom]
