"""Means over a window of scalar arguments such as the loss, for optimizers that ask for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from opt_accumulate._multi_steps.accumulator import add
from opt_accumulate._skip.state import NEW_SKIP_STATE, SKIP

_MEANS = "window_means"


def parse_names(names: Sequence[str]) -> tuple[str, ...]:
    """Checks what a user gave as `window_means`."""
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            "`window_means` must be a sequence of names of extra arguments, "
            f"found {names!r}. Give a tuple, e.g. ('value',)."
        )
    return tuple(names)


def attach(skip_state: Any, names: Sequence[str]) -> Any:
    """Returns what `MultiSteps` keeps as `skip_state`: the state of skipping, and the means."""
    if not names:
        return skip_state
    zeros = {name: jnp.zeros([], jnp.float32) for name in names}
    return _join(skip_state, zeros)


def detach(state: Any, names: Sequence[str]) -> tuple[Any, dict[str, jax.Array]]:
    """Returns the state of skipping, and the means."""
    if not names:
        return state, {}
    means = state.get(_MEANS) if isinstance(state, Mapping) else None
    if not isinstance(means, Mapping) or set(means) != set(names):
        found = "none" if means is None else ", ".join(sorted(means))
        raise ValueError(
            f"`skip_state` must hold the `window_means` {', '.join(sorted(names))}; found {found}. "
            f"The state was made with other `window_means`, or by Optax. {NEW_SKIP_STATE}"
        )
    return state["skip_state"], dict(means)


def join(skip_state: Any, means: Mapping[str, jax.Array]) -> Any:
    """The inverse of `detach`."""
    return _join(skip_state, means) if means else skip_state


def take_in(
    extra_args: Mapping[str, Any], means: Mapping[str, jax.Array], count: jax.Array
) -> dict[str, jax.Array]:
    """Returns the means with the values of one more mini-step in them.

    Raises:
      TypeError: a value is missing.
      ValueError: a value is not a real scalar.
    """
    for name in means:
        if name not in extra_args:
            raise TypeError(
                f"`update` needs the argument `{name}`: `window_means` asks for its mean. "
                f"Pass `{name}=...` on every mini-step."
            )
        value = extra_args[name]
        if np.shape(value) or jnp.iscomplexobj(value):
            raise ValueError(
                f"`{name}` must be a real scalar, as `window_means` asks for its mean; found an "
                f"array of shape {np.shape(value)} and dtype {jnp.result_type(value)}."
            )
    return {
        name: add(jnp.asarray(extra_args[name], mean.dtype), mean, count, mean=True)
        for name, mean in means.items()
    }


def _join(skip_state: Any, means: Mapping[str, jax.Array]) -> Any:
    held = {_MEANS: dict(means), "skip_state": skip_state}
    if isinstance(skip_state, Mapping) and SKIP in skip_state:
        held[SKIP] = skip_state[SKIP]
    return held
