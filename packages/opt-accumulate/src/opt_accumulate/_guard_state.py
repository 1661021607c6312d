"""What a guard keeps: windows of values, in which spikes stand out, and counts of skipped steps."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from opt_accumulate._trees import check_integer, path_str, walk
from opt_accumulate.errors import OptionError, StuckError


@dataclasses.dataclass(frozen=True)
class Spike:
    """The definition of a spike: a value many standard deviations above the mean of a window.

    The window holds the latest finite values of steps that were made. Rejected values never enter
    it, so they do not affect later decisions. Values below the mean are never spikes.

    Attributes:
      window: the size of the window.
      sigma: how many standard deviations above the mean make a spike.
      min_deviation: a lower bound of the standard deviation, relative to the mean: a window of
        nearly equal values says little about the next one.
      warmup: values to accept before the first decision; at most `window`.
      patience: after this many consecutive finite spikes the level is taken to have changed: the
        window is emptied and restarts with the next step.
      argument: of a guard's `loss`, the keyword by which the loop passes it to `update`, such as
        `value` (NumPyro, `optax.contrib.reduce_on_plateau`).

    Raises:
      OptionError: a number is out of range, or `argument` is not a keyword.
    """

    window: int = 128
    sigma: float = 6.0
    min_deviation: float = 0.01
    warmup: int = 32
    patience: int = 16
    argument: str = "loss"

    def __post_init__(self) -> None:
        """Checks the values."""
        for name, least in (("window", 2), ("warmup", 2), ("patience", 1)):
            check_integer(name, getattr(self, name), least)
        if self.warmup > self.window:
            raise OptionError(
                f"`warmup` must be at most `window`, {self.window}, found {self.warmup}: no "
                "step would ever be judged."
            )
        if not self.sigma > 0:
            raise OptionError(f"`sigma` must be positive, found {self.sigma!r}.")
        if not self.min_deviation >= 0:
            raise OptionError(
                f"`min_deviation` must not be negative, found {self.min_deviation!r}."
            )
        if type(self.argument) is not str or not self.argument.isidentifier():
            raise OptionError(f"`argument` must be the name of a keyword, found {self.argument!r}.")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Window:
    """The values that the next value is compared with.

    Attributes:
      values: float32 `[window]`; a ring buffer, of which the first `count` entries are filled.
      count: int32 scalar; values accepted since the window was last empty.
      rejected: int32 scalar; consecutive finite spikes.
    """

    values: Any
    count: Any
    rejected: Any

    @classmethod
    def empty(cls, spike: Spike) -> Window:
        """Returns the window before the first step."""
        zeros = jnp.zeros([spike.window], jnp.float32)
        return cls(zeros, jnp.zeros([], jnp.int32), jnp.zeros([], jnp.int32))

    def threshold(self, spike: Spike) -> jax.Array:
        """Returns the value above which values are spikes; infinity before the warmup is over."""
        filled = jnp.minimum(self.count, spike.window)
        is_filled = jnp.arange(spike.window) < filled
        # Scaled: squares of values above 1e19 overflow float32.
        unit = jnp.maximum(jnp.max(jnp.abs(self.values), where=is_filled, initial=0), 1e-30)
        scaled = jnp.where(is_filled, self.values / unit, 0)
        mean = scaled.sum() / jnp.maximum(filled, 1)
        squares = jnp.where(is_filled, jnp.square(scaled - mean), 0)
        deviation = jnp.sqrt(squares.sum() / jnp.maximum(filled - 1, 1))
        deviation = jnp.maximum(deviation, spike.min_deviation * jnp.abs(mean))
        limit = unit * (mean + spike.sigma * deviation)
        return jnp.where(self.count < spike.warmup, jnp.inf, limit)

    def judged(self, spike: Spike, value: jax.Array, accepted: jax.Array) -> Window:
        """Returns the window after a step."""
        is_finite = jnp.isfinite(value)
        enters = accepted & is_finite
        is_next = jnp.arange(spike.window) == self.count % spike.window
        values = jnp.where(enters & is_next, value, self.values)
        count = jnp.where(enters, optax.safe_increment(self.count), self.count)
        in_a_row = jnp.where(value > self.threshold(spike), self.rejected + 1, 0)
        rejected = jnp.where(is_finite, in_a_row, self.rejected)
        is_new_level = rejected >= spike.patience
        return Window(
            values, jnp.where(is_new_level, 0, count), jnp.where(is_new_level, 0, rejected)
        )


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
