"""How `MultiSteps` asks a skip function, and what it keeps of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

SKIP = "should_skip"


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


def init_skip_state(function: Any, params: Any) -> Any:
    """Returns the state of either kind of skip function before the first mini-step."""
    if isinstance(function, StatefulSkipFunction):
        return _with_decision(function.init(params), jnp.array(False))
    zeros = jax.tree.map(jnp.zeros_like, params)
    skip, state = function(zeros, jnp.zeros([], jnp.int32), params)
    return _with_decision(state, _checked(skip))


def ask(
    function: Any, updates: Any, gradient_step: jax.Array, params: Any, skip_state: Any
) -> tuple[jax.Array, Any]:
    """Calls either kind of skip function.

    Returns:
      The decision, checked; and the state, which has it as `should_skip` in every case.
    """
    if isinstance(function, StatefulSkipFunction):
        skip, state = function(updates, gradient_step, params, skip_state)
    else:
        skip, state = function(updates, gradient_step, params)
    skip = _checked(skip)
    return skip, _with_decision(state, skip)


def last_decision(skip_state: Any) -> Any:
    """Returns whether the last mini-step was skipped; `None` if the state does not say."""
    return skip_state.get(SKIP) if isinstance(skip_state, Mapping) else None


def _with_decision(state: Any, skip: jax.Array) -> Any:
    if last_decision(state) is not None:
        return state
    return {SKIP: skip, "skip_state": state}


def _checked(skip: Any) -> jax.Array:
    if np.shape(skip) or jnp.result_type(skip) != jnp.bool_:
        raise ValueError(
            "`should_skip_update_fn` must return a boolean scalar first, found an array of dtype "
            f"{jnp.result_type(skip)} and shape {np.shape(skip)}. Reduce it, e.g. with `jnp.any`."
        )
    return jnp.asarray(skip)
