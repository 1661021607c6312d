"""Stopping a run in which one step after another is skipped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from opt_accumulate._guard.state import GuardState
from opt_accumulate.errors import OptionError, StuckError

_IN_A_ROW = "num_consecutive"


def check_skips(state: Any, max_consecutive: int | None = None) -> None:
    """Raises if too many steps in a row have been skipped.

    Waits for the state: call it where metrics are read anyway, outside of compiled functions.

    Args:
      state: the state of a `guard`, or of a `MultiSteps` whose skip function is `any_of`, `all_of`
        or `skip_outliers`, which count them; or that of an optimizer around it.
      max_consecutive: how many to tolerate; `None` for fewer than the guard's own limit.

    Raises:
      StuckError: there have been more.
      OptionError: `max_consecutive` is negative, or missing where no guard has one; nothing in the
        state counts; or the state is traced.

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
    if max_consecutive is not None and max_consecutive < 0:
        raise OptionError(f"`max_consecutive` must not be negative, found {max_consecutive}.")
    counters = list(_counters(state))
    if not counters:
        raise OptionError(
            "nothing in `state` counts the steps that were skipped in a row. Use `guard`, or give "
            "`MultiSteps` a `should_skip_update_fn` that does, e.g. `any_of(skip_not_finite)`."
        )
    guards = [counter for counter in counters if isinstance(counter, GuardState)]
    if max_consecutive is None and not guards:
        raise OptionError(
            "`max_consecutive` is missing: only a `guard` has a limit of its own. Give a number."
        )
    numbers = [_number(counter) for counter in (guards if max_consecutive is None else counters)]
    read = numbers, [guard.stuck for guard in guards]
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(read)):
        raise OptionError(
            "`state` is being traced: `check_skips` reads numbers. Call it outside of `jax.jit`, "
            "on the state that the step returned."
        )
    numbers, stuck = jax.device_get(read)
    number = max(map(int, numbers))
    if any(map(bool, stuck)) if max_consecutive is None else number > max_consecutive:
        most = "that of the guard" if max_consecutive is None else max_consecutive
        what = "steps" if guards else "mini-steps"
        raise StuckError(
            f"{number} {what} in a row were skipped, and `max_consecutive` is {most}. Parameters "
            "and optimizer are as before them: go back to a checkpoint, to other data or to a "
            "smaller learning rate."
        )


def _counters(node: Any) -> Iterator[Any]:
    """Yields the outermost counters: those of a combination, not those of what it combines."""
    for found in jax.tree.leaves(node, is_leaf=_counts):
        if _counts(found):
            yield found


def _counts(node: Any) -> bool:
    return isinstance(node, GuardState) or (isinstance(node, Mapping) and _IN_A_ROW in node)


def _number(counter: Any) -> Any:
    return counter.consecutive if isinstance(counter, GuardState) else counter[_IN_A_ROW]
