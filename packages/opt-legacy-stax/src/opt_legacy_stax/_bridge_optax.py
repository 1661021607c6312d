"""Triples as Optax transformations, and Optax transformations as triples."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax

from opt_legacy_stax._optimizers import (
    Optimizer,
    OptimizerState,
    check_state,
    check_step,
    keep_dtypes,
    pack,
    strong_param,
    unpacked,
)
from opt_legacy_stax._slots import convert, init_split, join, update_split
from opt_legacy_stax._trees import different_trees
from opt_legacy_stax.errors import LayoutError


class TripleState(NamedTuple):
    """The state of a `TripleTransformation`.

    Attributes:
      count: int32 scalar; number of updates made, saturating at 2**31 - 1.
      slots: tree with the structure of the parameters; the triple's state for each of them, with a
        placeholder for the parameter itself.
    """

    count: Any
    slots: Any


class TripleTransformation(optax.GradientTransformation):
    """A triple as an Optax gradient transformation; see `opt_legacy_stax.to_optax`.

    Attributes:
      triple: the wrapped triple.
    """

    triple: Optimizer

    def __new__(cls, triple: Optimizer) -> Self:
        """Creates the transformation for a triple."""

        def init(params: Any) -> TripleState:
            return TripleState(jnp.zeros((), jnp.int32), init_split(triple, params))

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, TripleState]:
            if params is None:
                raise ValueError(
                    "a triple computes new parameters, not updates: pass `params` to "
                    "`update(grads, state, params)`."
                )
            after, new_state = self.apply(params, state, updates)
            return jax.tree.map(operator.sub, after, params), new_state

        self = super().__new__(cls, init, update)
        self.triple = triple
        return self

    def apply(self, params: Any, state: TripleState, grads: Any) -> tuple[Any, TripleState]:
        """Returns the parameters and state after one update, exactly as the triple computes them.

        It implements `opt_core.protocols.UpdatesParams`, which `OptaxWrapper` uses.
        """
        params, slots = update_split(self.triple, state.count, grads, params, state.slots)
        return params, TripleState(optax.safe_increment(state.count), slots)

    def convert_state(self, state: OptimizerState, i: Any) -> tuple[Any, TripleState]:
        """Returns the parameters and Optax state that continue from the triple's before update `i`.

        Raises:
          LayoutError: `state` does not have the layout that the triple creates.
          StepError: `i` is not a non-negative integer.
        """
        params, slots, step = convert(self.triple, state, i)
        return params, TripleState(step, slots)

    def convert_state_back(self, params: Any, state: TripleState) -> tuple[OptimizerState, Any]:
        """Returns the state of the triple, and the `i` of its next update."""
        return join(params, state.slots), state.count


class OptaxTriple(Optimizer):
    """An Optax transformation as a triple; see `opt_legacy_stax.from_optax`.

    Its packed state has exactly two entries, `opt_state` and `params`, rather than one per
    parameter.
    """

    def __new__(cls, tx: optax.GradientTransformation) -> Self:
        """Creates the triple for a transformation."""
        takes_extra_args = isinstance(tx, optax.GradientTransformationExtraArgs)

        def init(params: Any) -> OptimizerState:
            params = jax.tree.map(strong_param, params)
            return self.convert_state(params, tx.init(params))

        def update(i: Any, grads: Any, state: OptimizerState, **extra_args: Any) -> OptimizerState:
            check_step(i)
            params, opt_state = self.convert_state_back(state)
            expected: Any = jax.tree.structure(params)
            found: Any = jax.tree.structure(grads)
            if expected != found:
                raise different_trees(expected, found)
            # like `optax.chain`, drop what `tx` does not accept
            extra = extra_args if takes_extra_args else {}
            updates, opt_state = tx.update(grads, opt_state, params, **extra)
            new = self.convert_state(optax.apply_updates(params, updates), opt_state)
            return keep_dtypes(state, new.packed_state)

        self = super().__new__(cls, init, update, lambda state: self.convert_state_back(state)[0])
        return self

    def convert_state(self, params: Any, opt_state: Any) -> OptimizerState:
        """Returns the triple state that continues from Optax parameters and state."""
        return pack(_OUTER, [opt_state, params])

    def convert_state_back(self, state: OptimizerState) -> tuple[Any, Any]:
        """Returns the parameters and Optax state that continue from a state of the triple."""
        check_state(state)
        if state[1] != _OUTER:
            raise LayoutError(
                f"`opt_state` must be a state of a `from_optax` triple, with structure {_OUTER}; "
                f"got {state[1]}. Pass a state returned by this triple's functions or by "
                "`convert_state`."
            )
        opt_state, params = unpacked(state)
        return params, opt_state


_OUTER: Any = jax.tree.structure({"opt_state": 0, "params": 0})
