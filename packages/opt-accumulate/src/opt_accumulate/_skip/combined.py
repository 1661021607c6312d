"""Several skip functions as one, with counts of what each would have skipped."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from opt_accumulate._skip.state import StatefulSkipFunction, ask, count_if, init_skip_state


def any_of(*functions: Callable[..., Any]) -> CombinedSkip:
    """Skips a mini-step that any of the functions would skip.

    `any_of(f)` is `f` with a counter.

    Args:
      *functions: skip functions, of either kind; combined ones too.

    Returns:
      A skip function for `MultiSteps`. Its state has the entries `should_skip`; `num_skipped`, an
      int32; `num_consecutive`, how many of these were the latest in a row, for `check_skips`;
      `num_by_function`, how often each would have skipped; and `skip_states`, the state of each.
      A stateful function keeps its old state on a mini-step that was decided against it.

    Examples:
      >>> from opt_accumulate import skip_not_finite
      >>> counted = any_of(skip_not_finite)
      >>> state = counted.init(jnp.zeros(1))
      >>> for value in (1.0, jnp.nan, jnp.inf):
      ...     skip, state = counted(jnp.array([value]), 0, None, state)
      >>> bool(skip), int(state['num_skipped'])
      (True, 2)
    """
    return _combined("any_of", functions, operator.or_)


def all_of(*functions: Callable[..., Any]) -> CombinedSkip:
    """Skips a mini-step that all of the functions would skip; otherwise as `any_of`.

    Examples:
      >>> def late(updates, gradient_step, params):
      ...     return gradient_step > 2, ()
      >>> def negative(updates, gradient_step, params):
      ...     return updates[0] < 0, ()
      >>> both = all_of(late, negative)
      >>> state = both.init(jnp.zeros(1))
      >>> bool(both(jnp.array([-1.0]), jnp.int32(2), None, state)[0])
      False
    """
    return _combined("all_of", functions, operator.and_)


@dataclasses.dataclass(frozen=True)
class CombinedSkip:
    """What `any_of` and `all_of` return: a `StatefulSkipFunction`."""

    functions: tuple[Callable[..., Any], ...]
    operator: Callable[[Any, Any], Any]

    def init(self, params: Any) -> dict[str, Any]:
        """Returns the state before the first mini-step."""
        zero = jnp.zeros([], jnp.int32)
        return {
            "should_skip": jnp.array(False),
            "num_skipped": zero,
            "num_consecutive": jnp.copy(zero),
            "num_by_function": tuple(jnp.copy(zero) for _ in self.functions),
            "skip_states": tuple(init_skip_state(f, params) for f in self.functions),
        }

    def __call__(
        self, updates: Any, gradient_step: Any, params: Any, skip_state: Any
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Asks all functions."""
        olds = skip_state["skip_states"]
        answers = [
            ask(function, updates, gradient_step, params, old)
            for function, old in zip(self.functions, olds, strict=True)
        ]
        skip = functools.reduce(self.operator, [vote for vote, _ in answers])
        kept = [
            _settle(function, vote == skip, new, old)
            for function, (vote, new), old in zip(self.functions, answers, olds, strict=True)
        ]
        counts = zip(skip_state["num_by_function"], answers, strict=True)
        return skip, {
            "should_skip": skip,
            "num_skipped": count_if(skip, skip_state["num_skipped"]),
            "num_consecutive": jnp.where(skip, count_if(skip, skip_state["num_consecutive"]), 0),
            "num_by_function": tuple(count_if(vote, count) for count, (vote, _) in counts),
            "skip_states": tuple(kept),
        }


def _settle(function: Any, agreed: jax.Array, new: Any, old: Any) -> Any:
    """What a function keeps; one that does not remember only reports, and always may."""
    if not isinstance(function, StatefulSkipFunction):
        return new
    return jax.tree.map(lambda new, old: jnp.where(agreed, new, old), new, old)


def _combined(
    name: str, functions: tuple[Callable[..., Any], ...], operator: Callable[[Any, Any], Any]
) -> CombinedSkip:
    if not functions:
        raise TypeError(f"`{name}` needs at least one skip function, found none.")
    for function in functions:
        if not callable(function):
            raise TypeError(f"`{name}` takes skip functions, found {function!r}.")
    return CombinedSkip(functions, operator)
