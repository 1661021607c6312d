"""The state of a guard, and what is read of it: the report, and whether a run is stuck."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from opt_accumulate._trees import path_str, walk
from opt_accumulate.errors import OptionError, StuckError


class Reason(enum.IntFlag):
    """Why a step was skipped; several may hold at once.

    Examples:
      >>> Reason(6)
      <Reason.LOSS|GRAD_NORM: 6>
    """

    NONFINITE = 1
    LOSS = 2
    GRAD_NORM = 4
    UPDATE_NORM = 8


class GuardState(NamedTuple):
    """The state of `guard`.

    Attributes:
      count: int32 scalar; steps, skipped ones included.
      skipped: int32 scalar; steps that were skipped.
      consecutive: int32 scalar; steps skipped in a row up to now.
      was_skipped: bool scalar; whether the last step was skipped.
      stuck: bool scalar; whether `consecutive` has reached `max_consecutive`.
      reason: int32 scalar; the `Reason` of the last skipped step, 0 if there was none.
      last_skipped: int32 scalar; the number of that step, counted from 0, or -1.
      loss: the `Window` of losses, or `None`.
      grad_norm: the `Window` of the gradients' norms, or `None`.
      update_norm: the `Window` of the updates' norms, or `None`.
      inner: the state of the optimizer.
    """

    count: Any
    skipped: Any
    consecutive: Any
    was_skipped: Any
    stuck: Any
    reason: Any
    last_skipped: Any
    loss: Any
    grad_norm: Any
    update_norm: Any
    inner: Any

    @staticmethod
    def describe_fields() -> dict[str, Any]:
        """Returns what the fields mean, as `opt_core.protocols.DescribesFields` asks."""
        counts = ("count", "skipped", "consecutive", "last_skipped")
        flags = ("was_skipped", "stuck", "reason", "loss")
        # Norms are over all parameters: with some of them gone, they are another number.
        norms = ("grad_norm", "update_norm")
        return {
            "roles": {
                **dict.fromkeys(counts, "count"),
                **dict.fromkeys(flags, "other"),
                **dict.fromkeys(norms, "statistic"),
            },
            "passes_on": True,
        }


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GuardReport:
    """What a guard has done, as scalars for logs: the fields of `GuardState` by the same names."""

    skipped: Any
    consecutive: Any
    was_skipped: Any
    stuck: Any
    reason: Any
    last_skipped: Any


def guard_states(state: Any) -> list[tuple[str, GuardState]]:
    """Returns the guards in a state with their paths, the outer ones first."""
    found = ((path_str(path), node) for path, node in walk(state))
    return [(path, node) for path, node in found if isinstance(node, GuardState)]


def report(state: Any) -> GuardReport:
    """Returns what the guard in a state has done; traceable.

    Args:
      state: the state of `guard`, or of an optimizer around it.

    Raises:
      OptionError: `state` does not contain exactly one guard.

    Examples:
      >>> import optax
      >>> from opt_accumulate import guard
      >>> tx = guard(optax.sgd(0.1), loss=None)
      >>> params = jnp.ones(2)
      >>> _, state = jax.jit(tx.apply)(params, tx.init(params), jnp.array([1.0, jnp.nan]))
      >>> found = report(state)
      >>> int(found.skipped), Reason(int(found.reason))
      (1, <Reason.NONFINITE: 1>)
    """
    states = guard_states(state)
    if len(states) != 1:
        paths = ", ".join(f"`{path}`" for path, _ in states)
        raise OptionError(
            f"`state` must hold one guard, found {len(states)}{': ' + paths if paths else ''}. "
            "Pass the state of one of them."
        )
    ((_, found),) = states
    names = (field.name for field in dataclasses.fields(GuardReport))
    return GuardReport(**{name: jnp.asarray(getattr(found, name)) for name in names})


def check_skips(state: Any, max_consecutive: int | None = None) -> None:
    """Raises if too many steps in a row have been skipped.

    Waits for the state: call it where metrics are read anyway, outside of compiled functions.

    Args:
      state: the state of a `guard`, or of an optimizer around it.
      max_consecutive: how many to tolerate; `None` for fewer than the guard's own limit.

    Raises:
      StuckError: there have been more.
      OptionError: `max_consecutive` is negative; `state` has no guard, or is traced.

    Examples:
      >>> import optax
      >>> from opt_accumulate import guard
      >>> tx = guard(optax.sgd(0.1), loss=None)
      >>> params, state = jnp.ones(1), tx.init(jnp.ones(1))
      >>> step = jax.jit(tx.apply)
      >>> for _ in range(3):
      ...     params, state = step(params, state, jnp.array([jnp.nan]))
      >>> check_skips(state, 3)
      >>> check_skips(state, 2)
      Traceback (most recent call last):
      ...
      opt_accumulate.errors.StuckError: 3 steps in a row were skipped, ...
    """
    if max_consecutive is not None and max_consecutive < 0:
        raise OptionError(f"`max_consecutive` must not be negative, found {max_consecutive}.")
    guards = [guard for _, guard in guard_states(state)]
    if not guards:
        raise OptionError(
            "nothing in `state` counts the steps that were skipped in a row. Wrap the optimizer, "
            "or its `MultiSteps`, in `guard`."
        )
    scalars = [(guard.consecutive, guard.stuck) for guard in guards]
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(scalars)):
        raise OptionError(
            "`state` is being traced: `check_skips` reads numbers. Call it outside of `jax.jit`, "
            "on the state that the step returned."
        )
    scalars = jax.device_get(scalars)
    number = max(int(consecutive) for consecutive, _ in scalars)
    is_stuck = any(bool(stuck) for _, stuck in scalars)
    if is_stuck if max_consecutive is None else number > max_consecutive:
        most = "that of the guard" if max_consecutive is None else max_consecutive
        raise StuckError(
            f"{number} steps in a row were skipped, and `max_consecutive` is {most}. Parameters "
            "and optimizer are as before them: go back to a checkpoint, to other data or to a "
            "smaller learning rate."
        )
