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
    repacked,
    strong_param,
    unpacked,
)
from opt_legacy_stax._slots import (
    check_made_by,
    init_split,
    join,
    split,
    update_split,
    whole_step,
)
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
    """A triple as an Optax gradient transformation.

    `update` returns differences; adding them to the parameters may differ from the triple's result
    by one unit in the last place of the larger operand. `apply` returns the triple's result
    exactly; it implements `opt_core.protocols.UpdatesParams`, which `OptaxWrapper` uses.

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
            after, new_state = _apply(triple, params, state, updates)
            return jax.tree.map(operator.sub, after, params), new_state

        self = super().__new__(cls, init, update)
        self.triple = triple
        return self

    def apply(self, params: Any, state: TripleState, grads: Any) -> tuple[Any, TripleState]:
        """Returns the parameters and state after one update, exactly as the triple computes them.

        Args:
          params: the parameters.
          state: the current state.
          grads: gradients with the structure of `params`.
        """
        return _apply(self.triple, params, state, grads)

    def convert_state(self, state: OptimizerState, i: Any) -> tuple[Any, TripleState]:
        """Returns the parameters and Optax state that continue from a state of the triple.

        Args:
          state: a state of the triple.
          i: number of updates already made, i.e. the `i` of the next update.

        Raises:
          LayoutError: `state` does not have the layout that the triple creates.
          StepError: `i` is not a non-negative integer.
        """
        check_made_by(self.triple, state)
        params, slots = split(self.triple, state)
        return params, TripleState(whole_step(i), slots)

    def convert_state_back(self, params: Any, state: TripleState) -> tuple[OptimizerState, Any]:
        """Returns the state of the triple, and the `i` of its next update."""
        return join(params, state.slots), state.count


class OptaxTriple(Optimizer):
    """An Optax transformation as a triple.

    Its packed state has exactly two entries, `opt_state` and `params`, rather than one per
    parameter.
    """

    def convert_state(self, params: Any, opt_state: Any) -> OptimizerState:
        """Returns the triple state that continues from Optax parameters and state."""
        return _pack(params, opt_state)

    def convert_state_back(self, state: OptimizerState) -> tuple[Any, Any]:
        """Returns the parameters and Optax state that continue from a state of the triple."""
        return _unpack(state)


def from_optax(tx: optax.GradientTransformation) -> OptaxTriple:
    """See `opt_legacy_stax.from_optax`."""
    takes_more = isinstance(tx, optax.GradientTransformationExtraArgs)

    def init(params: Any) -> OptimizerState:
        params = jax.tree.map(strong_param, params)
        return _pack(params, tx.init(params))

    def update(i: Any, grads: Any, opt_state: OptimizerState, **extra_args: Any) -> OptimizerState:
        check_step(i)
        params, inner = _unpack(opt_state)
        expected: Any = jax.tree.structure(params)
        found: Any = jax.tree.structure(grads)
        if expected != found:
            raise different_trees(expected, found)
        # like `optax.chain`, drop what `tx` does not accept
        extra = extra_args if takes_more else {}
        updates, inner = tx.update(grads, inner, params, **extra)
        new = _pack(optax.apply_updates(params, updates), inner)
        pairs = zip(opt_state.packed_state, new.packed_state, strict=True)
        return repacked(opt_state, [keep_dtypes(*pair) for pair in pairs])

    def get_params(opt_state: OptimizerState) -> Any:
        return _unpack(opt_state)[0]

    return OptaxTriple(init, update, get_params)


_OUTER: Any = {"opt_state": 0, "params": 0}


def _pack(params: Any, opt_state: Any) -> OptimizerState:
    return pack(jax.tree.structure(_OUTER), [opt_state, params])


def _unpack(state: OptimizerState) -> tuple[Any, Any]:
    check_state(state)
    outer: Any = jax.tree.structure(_OUTER)
    if state[1] != outer:
        raise LayoutError(
            f"`opt_state` must be a state of a `from_optax` triple, with structure {outer}; got "
            f"{state[1]}. Pass a state returned by this triple's functions or by `convert_state`."
        )
    opt_state, params = unpacked(state)
    return params, opt_state


def _apply(
    triple: Optimizer, params: Any, state: TripleState, grads: Any
) -> tuple[Any, TripleState]:
    params, slots = update_split(triple, state.count, grads, params, state.slots)
    return params, TripleState(optax.safe_increment(state.count), slots)
