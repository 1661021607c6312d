"""How `MultiSteps` asks a skip function, and what it keeps of the answer."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from opt_accumulate._trees import differences

SKIP = "should_skip"
NEW_SKIP_STATE = (
    "To change the guard of a run, take a new one between two windows: "
    "`state._replace(skip_state=steps.init(params).skip_state)`."
)


@runtime_checkable
class StatefulSkipFunction(Protocol):
    """A skip function that remembers: counters, running statistics.

    Its state lives in `MultiStepsState.skip_state`, and is a dictionary with at least the entry
    `should_skip`, the last decision. Its structure, shapes and dtypes never change.
    """

    def init(self, params: Any) -> Any:
        """Returns the state before the first mini-step."""

    def __call__(
        self, updates: Any, gradient_step: jax.Array, params: Any, skip_state: Any
    ) -> tuple[jax.Array, Any]:
        """Decides on one mini-step.

        Args:
          updates: the gradients of the mini-step.
          gradient_step: steps that have been made.
          params: the parameters, if known.
          skip_state: what `init` or the last call returned.

        Returns:
          Whether to skip the mini-step, a boolean scalar; and the new state.
        """


def check_skip_function(function: Any) -> None:
    """Raises unless `function` may be a skip function, or `None`."""
    if function is not None and not callable(function):
        raise TypeError(
            "`should_skip_update_fn` must be a function of (updates, gradient_step, params) that "
            f"returns (skip, state), found {function!r}. Give e.g. `skip_not_finite`."
        )


def init_skip_state(function: Any, params: Any) -> Any:
    """Returns the state of either kind of skip function before the first mini-step."""
    if isinstance(function, StatefulSkipFunction):
        return _with_decision(function.init(params), jnp.array(False))
    zeros = jax.tree.map(jnp.zeros_like, params)
    skip, state = _answer(function(zeros, jnp.zeros([], jnp.int32), params))
    return _with_decision(state, skip)


def ask(
    function: Any, updates: Any, gradient_step: jax.Array, params: Any, skip_state: Any
) -> tuple[jax.Array, Any]:
    """Calls either kind of skip function.

    Returns:
      The decision, checked; and the state, which has it as `should_skip` in every case.

    Raises:
      ValueError: `skip_state` is not one of this function.
    """
    if not isinstance(function, StatefulSkipFunction):
        skip, state = _answer(function(updates, gradient_step, params))
        return skip, _with_decision(state, skip)
    wrong = differences(
        jax.eval_shape(functools.partial(init_skip_state, function), updates), skip_state
    )
    if wrong:
        raise ValueError(
            "`skip_state` was not made by this `should_skip_update_fn`:\n"
            + "\n".join(wrong)
            + f"\n{NEW_SKIP_STATE}"
        )
    skip, state = _answer(function(updates, gradient_step, params, skip_state))
    return skip, _with_decision(state, skip)


def count_if(skip: jax.Array, number: Any) -> jax.Array:
    """Returns an int32 counter, one more where `skip` is true; it stays at its largest value."""
    return jnp.where(skip, optax.safe_increment(number), number)


def last_decision(skip_state: Any) -> Any:
    """Returns whether the last mini-step was skipped; `None` if the state does not say."""
    return skip_state.get(SKIP) if isinstance(skip_state, Mapping) else None


def _with_decision(state: Any, skip: jax.Array) -> Any:
    if last_decision(state) is not None:
        return state
    return {SKIP: skip, "skip_state": state}


def _answer(returned: Any) -> tuple[jax.Array, Any]:
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(
            "`should_skip_update_fn` must return (skip, state), found "
            f"{type(returned).__name__}. Without a state, return (skip, ())."
        )
    skip, state = returned
    if np.shape(skip) or jnp.result_type(skip) != jnp.bool_:
        raise ValueError(
            "`should_skip_update_fn` must return a boolean scalar first, found an array of dtype "
            f"{jnp.result_type(skip)} and shape {np.shape(skip)}. Reduce it, e.g. with `jnp.any`."
        )
    return jnp.asarray(skip), state
