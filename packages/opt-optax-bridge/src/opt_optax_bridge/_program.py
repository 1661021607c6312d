"""Functions traced once, of which one can ask what depends on what, and run a part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from opt_core import path_names


@dataclasses.dataclass(frozen=True)
class Program:
    """A function, traced.

    Attributes:
      jaxpr: the traced program; its inputs are the leaves of the operands.
      inputs: for each input, the names along its path in the tuple of operands.
      output: the structure of the result.
    """

    jaxpr: ClosedJaxpr
    inputs: tuple[tuple[str, ...], ...]
    output: Any

    @classmethod
    def trace(cls, function: Callable[..., Any], *operands: Any) -> Program:
        """Traces `function` on operands; a Python number becomes a weakly typed scalar."""
        jaxpr, output = jax.make_jaxpr(function, return_shape=True)(*operands)
        paths = jax.tree_util.tree_leaves_with_path(operands)
        inputs = tuple(path_names(path) for path, _ in paths)
        return cls(jaxpr, inputs, jax.tree.structure(output))

    def reached(self) -> set[tuple[str, ...]]:
        """Returns the paths of the inputs that the output depends on."""
        needed = _needed(self.jaxpr, self.jaxpr.jaxpr.outvars)
        variables = zip(self.inputs, self.jaxpr.jaxpr.invars, strict=True)
        return {names for names, variable in variables if variable in needed}

    def part(self, select: Callable[[Any], Any]) -> Program:
        """Returns the program that computes `select(output)` and nothing else."""
        jaxpr = self.jaxpr.jaxpr
        outvars, structure = jax.tree.flatten(
            select(jax.tree.unflatten(self.output, jaxpr.outvars))
        )
        needed = _needed(self.jaxpr, outvars)
        equations = [eqn for eqn in jaxpr.eqns if any(out in needed for out in eqn.outvars)]
        info = jaxpr.debug_info._replace(result_paths=None)
        jaxpr = jaxpr.replace(eqns=equations, outvars=outvars, debug_info=info)
        return Program(self.jaxpr.replace(jaxpr=jaxpr), self.inputs, structure)

    def run(self, *operands: Any) -> Any:
        """Returns the output for operands; scalars are cast to the dtypes they were traced with."""
        avals = self.jaxpr.in_avals
        leaves = [
            leaf if isinstance(leaf, jax.Array) and leaf.shape else jnp.asarray(leaf, aval.dtype)
            for leaf, aval in zip(jax.tree.leaves(operands), avals, strict=True)
        ]
        return jax.tree.unflatten(self.output, jaxpr_as_fun(self.jaxpr)(*leaves))


def _needed(program: ClosedJaxpr, outputs: Sequence[Any]) -> set[Any]:
    """Returns the variables that `outputs` depend on."""
    needed = {out for out in outputs if not isinstance(out, Literal)}
    for equation in reversed(program.jaxpr.eqns):
        if any(out in needed for out in equation.outvars):
            needed.update(v for v in equation.invars if not isinstance(v, Literal))
    return needed
