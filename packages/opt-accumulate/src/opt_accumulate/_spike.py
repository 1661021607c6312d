"""Detection of spikes: values far above those accepted before them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from opt_accumulate._trees import check_integer
from opt_accumulate.errors import OptionError


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
