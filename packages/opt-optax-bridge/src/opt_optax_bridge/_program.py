"""Traced functions whose dependencies can be inspected, and of which parts can be run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jax.extend.core.primitives import convert_element_type_p
from jax.interpreters.partial_eval import DynamicJaxprTracer
from opt_core.extend import strip_weak_type

_PREFIX = "opt_optax_bridge/"
_Values = Callable[[Sequence[Any]], Sequence[Any]]  # of variables, or positions of inputs


def named(name: str, value: Any) -> Any:
    """Returns `value`, marked with a name by which it is found in the traced program."""
    return checkpoint_name(value, _PREFIX + name)


def weakly_typed(number: jax.Array) -> Any:
    """Returns a weakly typed scalar: like a Python number it does not promote others."""
    return convert_element_type_p.bind(
        number, new_dtype=number.dtype, weak_type=True, sharding=None
    )


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced function."""

    function: Callable[..., Any]  # compiled as part of its caller
    jaxpr: ClosedJaxpr  # its inputs are the leaves of the operands
    operands: Any  # the structure of the tuple of operands
    output: Any  # the structure of the result

    @classmethod
    def trace(cls, function: Callable[..., Any], *operands: Any) -> Program:
        """Traces `function` on operands."""
        jitted = jax.jit(function)
        traced = jitted.trace(*operands)
        jaxpr, output = traced.jaxpr, traced.out_info
        structure: Any = jax.tree.structure(operands)
        if len(jaxpr.in_avals) != structure.num_leaves:
            # It captures values of a trace around it, as a loss function does: JAX made inputs of
            # them. Here they are constants.
            jaxpr, output = jax.make_jaxpr(function, return_shape=True)(*operands)
        return cls(jitted, jaxpr, structure, jax.tree.structure(output))

    def reached(self) -> set[str]:
        """Returns the keys of the first operand, a dict, that the output depends on."""
        inputs: dict[str, Any] = jax.tree.unflatten(self.operands, self.jaxpr.jaxpr.invars)[0]
        needed = _needed(self.jaxpr, self.jaxpr.jaxpr.outvars, inputs.values())
        return {name for name, variable in inputs.items() if variable in needed}

    def run(self, *operands: Any) -> Any:
        """Returns the output for operands; scalars are cast to the dtypes they were traced with."""
        # In a caller that is being traced the program becomes one call, which XLA inlines:
        # repeating its equations one by one takes half as long as tracing them. Otherwise it runs
        # operation by operation: each update is a new function, and would be compiled every time.
        if is_staged(operands):
            return self.function(*operands)
        return jax.tree.unflatten(self.output, _run(self.jaxpr, jax.tree.leaves(operands)))

    def values(self, name: str, *operands: Any) -> list[Any]:
        """Returns all values of that name, computing nothing else."""
        # They may be inside branches, compiled functions or loops; of a loop the first pass counts.
        leaves = jax.tree.leaves(operands)
        return list(_find(self.jaxpr, name, lambda places: [leaves[i] for i in places]))


def is_staged(operands: Any) -> bool:
    """Whether a caller that is being traced into a program will compile what is done with these."""
    return any(isinstance(leaf, DynamicJaxprTracer) for leaf in jax.tree.leaves(operands))


def _run(program: ClosedJaxpr, leaves: Sequence[Any]) -> Sequence[Any]:
    cast = [
        leaf if isinstance(leaf, jax.Array) and leaf.shape else jnp.asarray(leaf, aval.dtype)
        for leaf, aval in zip(leaves, program.in_avals, strict=True)
    ]
    return list(jaxpr_as_fun(program)(*cast))


def _find(program: ClosedJaxpr, name: str, inputs: _Values) -> Iterator[Any]:
    """Yields the values of a name, reading only the inputs that they need."""
    jaxpr = program.jaxpr

    def values(outvars: Sequence[Any]) -> Sequence[Any]:
        needed = _needed(program, outvars)
        places = [i for i, v in enumerate(jaxpr.invars) if v in needed]
        part = jaxpr.replace(
            invars=[jaxpr.invars[i] for i in places],
            outvars=list(outvars),
            eqns=[eqn for eqn in jaxpr.eqns if any(out in needed for out in eqn.outvars)],
            debug_info=jaxpr.debug_info._replace(arg_names=None, result_paths=None),
        )
        return _run(ClosedJaxpr(part, program.consts), inputs(places))

    for equation in jaxpr.eqns:
        if equation.params.get("name") == _PREFIX + name:
            yield strip_weak_type(jnp.asarray(values(equation.invars)[0]))
        for body in _bodies(equation):
            yield from _find(body, name, functools.partial(_of_body, body, equation, values))


def _of_body(body: ClosedJaxpr, equation: Any, values: _Values, places: Sequence[int]) -> Any:
    """Inputs of a body, which are the last operands of its equation."""
    operands = equation.invars[len(equation.invars) - len(body.jaxpr.invars) :]
    if any(operands[i].aval.shape != body.in_avals[i].shape for i in places):
        raise LookupError(equation.primitive.name)
    return values([operands[i] for i in places])


def _bodies(equation: Any) -> Iterator[ClosedJaxpr]:
    for value in equation.params.values():
        for body in value if isinstance(value, tuple | list) else (value,):
            if isinstance(body, ClosedJaxpr):
                yield body
            elif isinstance(body, Jaxpr):
                yield ClosedJaxpr(body, ())


def _needed(
    program: ClosedJaxpr, outputs: Sequence[Any], asked: Iterable[Any] | None = None
) -> set[Any]:
    """Returns the variables that `outputs` depend on; if some are asked for, at least of those."""
    needed = {out for out in outputs if not isinstance(out, Literal)}
    # A rate is found after the last few equations of an update, which has a dozen for each leaf.
    left = None if asked is None else set(asked) - needed
    for equation in reversed(program.jaxpr.eqns):
        if left is not None and not left:
            break
        if not needed.isdisjoint(equation.outvars):
            read = [v for v in equation.invars if not isinstance(v, Literal)]
            needed.update(read)
            if left is not None:
                left.difference_update(read)
    return needed
