"""A traced function as a list of equations: plain calls are taken apart, conditions if wanted."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from opt_precision._bits import Seal, unsealed

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
REDUCTIONS: Final = frozenset({"reduce_max", "reduce_min", "reduce_sum"})
_PRODUCTS: Final = frozenset({"integer_pow", "mul", "square"})
_CALLS: Final = frozenset({"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call"})
# What may stand in a function that is taken apart; others are called as ever.
_PLAIN: Final = ELEMENTWISE | REDUCTIONS | {"broadcast_in_dim", "reshape", "squeeze"}


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """What an equation takes or makes.

    Attributes:
      aval: its type.
    """

    aval: Any

    @property
    def is_number(self) -> bool:
        """Whether it has one element."""
        return bool(self.aval.size == 1)


Atom: TypeAlias = Value | Literal


def type_of(atom: Atom) -> Any:
    """The type of an atom: `shape`, `dtype` and `size`."""
    return atom.aval


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """One result of a `cond`.

    Attributes:
      branches: all of it.
      result: which result.
      used: of the operands of the branches, which.
    """

    branches: Sequence[Equations]
    result: int
    used: Sequence[int]


@dataclasses.dataclass(frozen=True, eq=False)
class Equation:
    """An equation.

    Attributes:
      source: what was traced.
      inputs: its operands.
      outputs: what it makes.
      choice: for one result of a `cond`, whose operands are the index and those that it needs.
    """

    source: JaxprEqn
    inputs: Sequence[Atom]
    outputs: Sequence[Value]
    choice: Choice | None = None

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return self.source.primitive.name


class Equations:
    """The equations of a function of flat arguments.

    Args:
      closed: the traced function.
      is_split: whether conditions are taken apart, too, and functions with derivatives of their
        own; then compilers may round otherwise, and rules of derivatives are lost.

    Attributes:
      arguments: the values that it is given.
      consts: arrays that it holds.
      equations: in order.
      outs: what it returns.
    """

    def __init__(self, closed: ClosedJaxpr, *, is_split: bool = True) -> None:
        self._is_split = is_split
        self.arguments = [Value(var.aval) for var in closed.jaxpr.invars]
        self.consts: dict[Value, Any] = {}
        self.equations: list[Equation] = []
        self.outs = self._take_apart(closed, self.arguments)
        self._made_by = {
            made: i for i, equation in enumerate(self.equations) for made in equation.outputs
        }

    def _take_apart(self, closed: ClosedJaxpr, arguments: Sequence[Atom]) -> list[Atom]:
        jaxpr = closed.jaxpr
        known: dict[Any, Atom] = dict(zip(jaxpr.invars, arguments, strict=True))
        for var, const in zip(jaxpr.constvars, closed.consts, strict=True):
            known[var] = value = Value(var.aval)
            self.consts[value] = const
        for eqn in jaxpr.eqns:
            inputs = [x if isinstance(x, Literal) else known[x] for x in eqn.invars]
            made: Sequence[Atom]
            inner = _plain_call(eqn) if self._is_split or _is_jit(eqn) else None
            if inner is not None:
                made = self._take_apart(inner, inputs)
            elif self._is_split and (branches := _plain_branches(eqn)):
                made = self._choose(eqn, inputs, branches)
            else:
                made = values = [Value(var.aval) for var in eqn.outvars]
                self.equations.append(Equation(eqn, inputs, values))
            known.update(zip(eqn.outvars, made, strict=True))
        return [x if isinstance(x, Literal) else known[x] for x in jaxpr.outvars]

    def _choose(
        self, eqn: JaxprEqn, inputs: Sequence[Atom], branches: Sequence[Equations]
    ) -> list[Value]:
        """The results of a `cond`, each made of what it needs."""
        index, *operands = inputs
        results = []
        for i, var in enumerate(eqn.outvars):
            needed = {value for branch in branches for value in branch.needed([branch.outs[i]])[1]}
            used = [
                j
                for j in range(len(operands))
                if any(branch.arguments[j] in needed for branch in branches)
            ]
            results.append(Value(var.aval))
            choice = Choice(branches, i, used)
            own = [index, *(operands[j] for j in used)]
            self.equations.append(Equation(eqn, own, results[-1:], choice))
        return results

    def made_by(self, value: Value) -> int | None:
        """The index of the equation that makes a value; `None` for what is there before."""
        return self._made_by.get(value)

    def needed(
        self, outs: Iterable[Atom], is_start: Callable[[Value], bool] = lambda value: False
    ) -> tuple[list[int], list[Value]]:
        """The indices of the equations that make values, and what they start from.

        Args:
          outs: the values.
          is_start: whether to take a value as it is, although an equation makes it.
        """
        equations: set[int] = set()
        starts: dict[Value, None] = {}
        stack = [atom for atom in outs if isinstance(atom, Value)]
        seen: set[Value] = set()
        while stack:
            value = stack.pop()
            if value in seen:
                continue
            seen.add(value)
            index = self._made_by.get(value)
            if index is None or is_start(value):
                starts[value] = None
            elif index not in equations:
                equations.add(index)
                stack += [x for x in self.equations[index].inputs if isinstance(x, Value)]
        return sorted(equations), list(starts)


def evaluate(
    equations: Iterable[Equation],
    known: Mapping[Value, Any],
    shape: tuple[int, ...] | None,
    seal: Seal = unsealed,
) -> dict[Value, Any]:
    """Evaluates equations.

    Args:
      equations: in order.
      known: what they start from.
      shape: of the pieces of arrays, for equations that treat elements by themselves; `None` for
        whole arrays.
      seal: what products in pieces go through.

    Returns:
      What they start from, and all that was made.
    """
    values = dict(known)
    for equation in equations:
        operands = [read(values, atom) for atom in equation.inputs]
        made = compute(equation, operands, shape, seal)
        values.update(zip(equation.outputs, made, strict=True))
    return values


def read(values: Mapping[Value, Any], atom: Atom) -> Any:
    """The value of an atom."""
    return atom.val if isinstance(atom, Literal) else values[atom]


def compute(
    equation: Equation,
    operands: Sequence[Any],
    shape: tuple[int, ...] | None,
    seal: Seal = unsealed,
) -> list[Any]:
    """Computes an equation; the arguments are those of `evaluate`."""
    if equation.choice is not None:
        return [_chosen(equation.choice, operands, shape, seal)]
    if shape is not None and equation.name == "broadcast_in_dim":
        number, out = jnp.reshape(operands[0], ()), equation.outputs[0]
        return [jnp.broadcast_to(number, out.aval.shape if out.is_number else shape)]
    if shape is not None and equation.name == "reshard":  # of a number, which is everywhere
        return list(operands)
    eqn, primitive = equation.source, equation.source.primitive
    params: Any = primitive.get_bind_params(eqn.params)
    functions, params = params if isinstance(params, tuple) else ((), params)  # until JAX 0.9
    # Pieces are computed on each device by itself, where the mesh that was traced does not hold.
    with eqn.ctx.manager if shape is None else contextlib.nullcontext():
        found: Any = primitive.bind(*functions, *operands, **params)
    if shape is not None and _is_product(equation):
        found = seal(found)
    return list(found) if primitive.multiple_results else [found]


def _is_product(equation: Equation) -> bool:
    [value, *others] = equation.outputs
    is_float = not others and jnp.issubdtype(value.aval.dtype, jnp.floating)
    return equation.name in _PRODUCTS and is_float and not value.is_number


def _chosen(
    choice: Choice, operands: Sequence[Any], shape: tuple[int, ...] | None, seal: Seal
) -> Any:
    index, *used = operands

    def branch_of(branch: Equations) -> Callable[..., Any]:
        def run(*operands: Any) -> Any:
            out = branch.outs[choice.result]
            given = [branch.arguments[j] for j in choice.used]
            known = branch.consts | dict(zip(given, operands, strict=True))
            equations = [branch.equations[i] for i in branch.needed([out])[0]]
            made = read(evaluate(equations, known, shape, seal), out)
            value = jnp.asarray(made, type_of(out).dtype)
            is_piece = shape is not None and type_of(out).size != 1
            return jnp.broadcast_to(value, shape) if is_piece else value

        return run

    return lax.switch(index, [branch_of(branch) for branch in choice.branches], *used)


def _is_jit(eqn: JaxprEqn) -> bool:
    return not eqn.primitive.name.startswith("custom_")


def _plain_call(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The function that an equation calls, if nothing but its equations matters."""
    if eqn.primitive.name not in _CALLS or eqn.effects:
        return None
    places = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    if any(isinstance(place, jax.sharding.Sharding) for place in places):
        return None
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return inner if isinstance(inner, ClosedJaxpr) and _is_plain(inner) else None


def _plain_branches(eqn: JaxprEqn) -> list[Equations]:
    """The branches of a `cond`, if nothing but their equations matters."""
    if eqn.primitive.name != "cond" or eqn.effects:
        return []
    branches = eqn.params["branches"]
    return [Equations(branch) for branch in branches] if all(map(_is_plain, branches)) else []


def _is_plain(closed: ClosedJaxpr) -> bool:
    return all(
        eqn.primitive.name in _PLAIN
        or _plain_call(eqn) is not None
        or (eqn.primitive.name == "cond" and all(map(_is_plain, eqn.params["branches"])))
        for eqn in closed.jaxpr.eqns
    )
