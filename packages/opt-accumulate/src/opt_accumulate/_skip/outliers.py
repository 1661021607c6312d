"""A guard against gradients far larger than those before them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from opt_accumulate._skip.functions import global_norm
from opt_accumulate._skip.state import count_if


def skip_outliers(
    factor: float,
    *,
    decay: float = 0.99,
    warmup: int = 20,
    max_consecutive: int | None = None,
) -> SkipOutliers:
    """Skips mini-steps whose gradient norm exceeds `factor` times its running mean.

    The mean is over accepted mini-steps only: arithmetic while there are fewer than
    `1 / (1 - decay)` of them, exponential afterwards. A norm that is not finite is always
    skipped. A norm of 0 is never skipped, and counts neither in the mean nor in the warmup.

    Args:
      factor: the multiple of the running mean above which a norm is an outlier; more than 1.
      decay: of the running mean; 1 for the arithmetic mean of all accepted norms.
      warmup: finite mini-steps to accept before judging any; those of norm 0 do not count.
      max_consecutive: accept a finite gradient after this many skips in a row, so that a run whose
        gradients have grown for good continues; `None` for never.

    Returns:
      A skip function for `MultiSteps`. Its state has the entries `should_skip`, `norm` (the last
      one), `mean_norm`, `num_accepted`, `num_skipped` and `num_consecutive`.

    Raises:
      TypeError: an argument is not a number.
      ValueError: an argument is out of its range.

    Examples:
      >>> guard = skip_outliers(3.0, warmup=2)
      >>> state = guard.init(None)
      >>> for norm in (1.0, 1.0, 2.0, 50.0, 1.0):
      ...     skip, state = guard(jnp.array([norm]), 0, None, state)
      ...     print(bool(skip), end=' ')
      False False False True False
      >>> int(state['num_skipped'])
      1
    """
    for name, value in {"factor": factor, "decay": decay, "warmup": warmup}.items():
        if not isinstance(value, int | float | np.generic | jax.Array):
            raise TypeError(f"`{name}` must be a number, found {value!r}.")
    _require(factor > 1, "factor", "more than 1", factor)
    _require(0 < decay <= 1, "decay", "more than 0 and at most 1", decay)
    _require(warmup >= 1, "warmup", "at least 1", warmup)
    is_natural = max_consecutive is None or max_consecutive >= 1
    _require(is_natural, "max_consecutive", "at least 1, or None", max_consecutive)
    return SkipOutliers(factor, decay, warmup, max_consecutive)


@dataclasses.dataclass(frozen=True)
class SkipOutliers:
    """What `skip_outliers` returns: a `StatefulSkipFunction`."""

    factor: float
    decay: float
    warmup: int
    max_consecutive: int | None

    def init(self, params: Any) -> dict[str, jax.Array]:
        """Returns the statistics of no mini-step."""
        del params
        counters = ("num_accepted", "num_skipped", "num_consecutive")
        return {
            "should_skip": jnp.array(False),
            "norm": jnp.zeros([], jnp.float32),
            "mean_norm": jnp.zeros([], jnp.float32),
            **{name: jnp.zeros([], jnp.int32) for name in counters},
        }

    def __call__(
        self, updates: Any, gradient_step: Any, params: Any, skip_state: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Judges one mini-step by the statistics of those accepted before it."""
        del gradient_step, params
        norm = global_norm(updates)
        names = ("mean_norm", "num_accepted", "num_consecutive")
        mean, accepted, in_a_row = (jnp.asarray(skip_state[name]) for name in names)

        tolerated = accepted < self.warmup
        if self.max_consecutive is not None:
            tolerated |= in_a_row >= self.max_consecutive
        is_zero = norm == 0
        skip = ~(jnp.isfinite(norm) & (tolerated | is_zero | (norm <= self.factor * mean)))
        unheard = skip | is_zero

        weight = jnp.maximum(1 / (accepted + 1.0), 1 - self.decay)
        return skip, {
            "should_skip": skip,
            "norm": norm,
            "mean_norm": jnp.where(unheard, mean, mean + (norm - mean) * weight),
            "num_accepted": count_if(~unheard, accepted),
            "num_skipped": count_if(skip, skip_state["num_skipped"]),
            "num_consecutive": jnp.where(skip, optax.safe_increment(in_a_row), 0),
        }


def _require(holds: bool, name: str, rule: str, found: Any) -> None:
    if not holds:
        raise ValueError(f"`{name}` must be {rule}, found {found!r}.")
