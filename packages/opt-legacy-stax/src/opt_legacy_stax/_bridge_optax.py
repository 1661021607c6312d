"""Triples as transformations of Optax, and transformations as triples."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax

from opt_legacy_stax._dtypes import keep_dtypes, strong_param
from opt_legacy_stax._identity import triple_of
from opt_legacy_stax._optimizers import Optimizer, OptimizerState, repacked
from opt_legacy_stax._slots import check_made_by, init_split, join, split, update_split
from opt_legacy_stax._states import check_state
from opt_legacy_stax._steps import INT32_MAX, check_step, whole_step
from opt_legacy_stax._trees import different_trees
from opt_legacy_stax.errors import LayoutError


class TripleState(NamedTuple):
    """The state of a triple as a transformation.

    Attributes:
      count: int32 scalar; number of updates made. Stops at 2**31 - 1.
      slots: tree like the parameters, with what the triple keeps for each of them.
    """

    count: Any
    slots: Any


class TripleTransformation(optax.GradientTransformation):
    """A triple as a transformation of Optax.

    `update` returns differences, which rounding may take up to a unit of the last place of the
    larger number away from what the triple computes. `apply` returns what it computes: it is that
    of `opt_core.protocols.UpdatesParams`, which `OptaxWrapper` uses.

    Attributes:
      triple: the optimizer.
    """

    triple: Optimizer

    def __new__(cls, triple: Optimizer) -> Self:
        """Returns the transformation of a triple."""

        def init(params: Any) -> TripleState:
            return TripleState(jnp.zeros((), jnp.int32), init_split(triple, params))

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, TripleState]:
            if params is None:
                raise ValueError(
                    "a triple updates parameters: pass `params` to `update(grads, state, params)`."
                )
            after, new_state = _apply(triple, params, state, updates)
            return jax.tree.map(_difference, after, params), new_state

        self = super().__new__(cls, init, update)
        self.triple = triple
        return self

    def apply(self, params: Any, state: TripleState, grads: Any) -> tuple[Any, TripleState]:
        """Returns the parameters and the state after an update, exactly as the triple's.

        Args:
          params: the parameters.
          state: the state.
          grads: the gradients, like the parameters.
        """
        return _apply(self.triple, params, state, grads)

    def convert_state(self, state: OptimizerState, i: Any) -> tuple[Any, TripleState]:
        """Returns parameters and state of Optax, to go on from a state of the triple.

        Args:
          state: the triple's.
          i: number of updates made, the `i` of the next one.

        Raises:
          LayoutError: the state is not one that the triple makes.
          StepError: `i` is no number of updates.
        """
        check_made_by(self.triple, state)
        params, slots = split(self.triple, state)
        return params, TripleState(whole_step(i), slots)

    def convert_state_back(self, params: Any, state: TripleState) -> tuple[OptimizerState, Any]:
        """Returns the triple's state and the `i` of its next update."""
        return join(params, state.slots), state.count


def to_optax(triple: Optimizer) -> TripleTransformation:
    """See `opt_legacy_stax.to_optax`."""
    return TripleTransformation(Optimizer(*triple_of(triple, "triple")))


class OptaxTriple(Optimizer):
    """A transformation of Optax as a triple.

    Its state has two entries instead of one for each parameter: `opt_state` and `params`.
    """

    def convert_state(self, params: Any, opt_state: Any) -> OptimizerState:
        """Returns the triple's state, to go on from parameters and state of Optax."""
        return _pack(params, opt_state)

    def convert_state_back(self, state: OptimizerState) -> tuple[Any, Any]:
        """Returns parameters and state of Optax, to go on from a state of the triple."""
        return _unpack(state)


def from_optax(tx: optax.GradientTransformation) -> OptaxTriple:
    """See `opt_legacy_stax.from_optax`."""
    if not all(callable(getattr(tx, name, None)) for name in ("init", "update")):
        raise TypeError(
            f"`tx` must be a transformation of Optax, with `init` and `update`; got {tx!r}. Pass "
            "one, e.g. `optax.adam(1e-3)`."
        )
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
        extra = extra_args if takes_more else {}  # as in Optax's own chains
        updates, inner = tx.update(grads, inner, params, **extra)
        new = _pack(optax.apply_updates(params, updates), inner)
        pairs = zip(opt_state.packed_state, new.packed_state, strict=True)
        return repacked(opt_state, [keep_dtypes(*pair) for pair in pairs])

    def get_params(opt_state: OptimizerState) -> Any:
        return _unpack(opt_state)[0]

    return OptaxTriple(init, update, get_params)


_OUTER: Any = {"opt_state": 0, "params": 0}


def _pack(params: Any, opt_state: Any) -> OptimizerState:
    tree_def: Any = jax.tree.structure(_OUTER)
    flat, defs = zip(*(jax.tree.flatten(tree) for tree in (opt_state, params)), strict=True)
    return OptimizerState(tuple(flat), tree_def, tuple(defs))


def _unpack(state: OptimizerState) -> tuple[Any, Any]:
    check_state(state)
    packed, tree_def, subtree_defs = state
    outer: Any = jax.tree.structure(_OUTER)
    if tree_def != outer:
        raise LayoutError(
            f"`opt_state` must be a state of `from_optax`, one of {outer}; found {tree_def}. Pass "
            "what this triple's functions or `convert_state` returned."
        )
    opt_state, params = map(jax.tree.unflatten, subtree_defs, packed)
    return params, opt_state


def _apply(
    triple: Optimizer, params: Any, state: TripleState, grads: Any
) -> tuple[Any, TripleState]:
    params, slots = update_split(triple, state.count, grads, params, state.slots)
    count = jnp.where(state.count < INT32_MAX, state.count + 1, state.count)
    return params, TripleState(count, slots)


def _difference(after: Any, before: Any) -> Any:
    return after - before
