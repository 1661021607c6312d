"""Stopping a run in which one mini-step after another is skipped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from opt_accumulate.errors import OptionError, StuckError

_IN_A_ROW = "num_consecutive"


def check_skips(state: Any, max_consecutive: int) -> None:
    """Raises if too many mini-steps in a row have been skipped; nothing else has changed in them.

    Waits for the state: call it where metrics are read anyway, not in a compiled step.

    Args:
      state: the state of a `MultiSteps` whose skip function is `any_of`, `all_of` or
        `skip_outliers`, which count them; or that of an optimizer around it.
      max_consecutive: how many to bear.

    Raises:
      StuckError: there have been more.
      OptionError: `max_consecutive` is negative, nothing in the state counts, or it is traced.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from opt_accumulate import MultiSteps, any_of, skip_not_finite
      >>> steps = MultiSteps(optax.sgd(0.1), 1, should_skip_update_fn=any_of(skip_not_finite))
      >>> params, state = jnp.ones(1), steps.init(jnp.ones(1))
      >>> for _ in range(3):
      ...     params, state = steps.apply(params, state, jnp.array([jnp.nan]))
      >>> check_skips(state, 3)
      >>> check_skips(state, 2)
      Traceback (most recent call last):
      ...
      opt_accumulate.errors.StuckError: 3 mini-steps in a row were skipped, ...
    """
    if max_consecutive < 0:
        raise OptionError(f"`max_consecutive` must not be negative, found {max_consecutive}.")
    counters = list(_counters(state))
    if not counters:
        raise OptionError(
            "nothing in `state` counts the mini-steps that were skipped in a row. Give "
            "`MultiSteps` a `should_skip_update_fn` that does, e.g. `any_of(skip_not_finite)`."
        )
    if any(isinstance(counter, jax.core.Tracer) for counter in counters):
        raise OptionError(
            "`state` is being traced: `check_skips` reads numbers. Call it outside of `jax.jit`, "
            "on the state that the step returned."
        )
    number = max(map(int, jax.device_get(counters)))
    if number > max_consecutive:
        raise StuckError(
            f"{number} mini-steps in a row were skipped, more than `max_consecutive` = "
            f"{max_consecutive}. Parameters and optimizer are as before them: go back to a "
            "checkpoint, to other data or to a smaller learning rate."
        )


def _counters(node: Any) -> Iterator[Any]:
    """Yields the outermost counters: those of a combination, not those of what it combines."""
    for found in jax.tree.leaves(node, is_leaf=_counts):
        if _counts(found):
            yield found[_IN_A_ROW]


def _counts(node: Any) -> bool:
    return isinstance(node, Mapping) and _IN_A_ROW in node
