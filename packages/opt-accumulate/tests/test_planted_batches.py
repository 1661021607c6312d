"""A corrupted batch, or a NaN, at every position of a run of three windows.

All positions are one program: a run is a scan, and the runs are vmapped. The control is the form in
which others guard: what was rejected is appended to the window all the same.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from opt_accumulate import Spike, eval_params, guard, with_average

WINDOW, SIZE, ROWS = 16, 4, 32
STEPS = 3 * WINDOW
SPIKE = Spike(window=WINDOW, warmup=8, sigma=6.0)
INNER = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
TARGET = jnp.array([1.0, -2.0, 0.5, 3.0])
KEYS = jax.random.split(jax.random.key(0), STEPS)
FEATURES = jax.vmap(lambda key: jax.random.normal(key, (ROWS, SIZE)))(KEYS)
NOISE = jax.vmap(lambda key: 0.1 * jax.random.normal(key, (ROWS,)))(KEYS)


def loss_fn(params: Any, features: Any, labels: Any) -> Any:
    return jnp.mean((features @ params - labels) ** 2)


def runs(tx: Any, spoil: Callable[[Any], Any]) -> tuple[Any, Any, Any]:
    """The last parameters, those to evaluate and the state: one run a position, then a clean one.

    Args:
      tx: the optimizer.
      spoil: what becomes of the labels of the batch at the position.
    """

    def run(position: Any) -> Any:
        def step(carry: Any, inputs: Any) -> Any:
            params, state = carry
            number, features, noise = inputs
            labels = features @ TARGET + noise
            labels = jnp.where(number == position, spoil(labels), labels)
            loss, grads = jax.value_and_grad(loss_fn)(params, features, labels)
            updates, state = tx.update(grads, state, params, loss=loss)
            return (optax.apply_updates(params, updates), state), ()

        first = jnp.zeros(SIZE)
        inputs = jnp.arange(STEPS), FEATURES, NOISE
        (params, state), _ = jax.lax.scan(step, (first, tx.init(first)), inputs)
        return params, eval_params(state, params), state

    found: tuple[Any, Any, Any] = jax.device_get(jax.jit(jax.vmap(run))(jnp.arange(STEPS + 1)))
    return found


SPOILED: dict[str, Callable[[Any], Any]] = {
    "nan": lambda labels: labels.at[3].set(jnp.nan),
    "inf": lambda labels: labels.at[3].set(jnp.inf),
    "corrupted": lambda labels: 1e3 * labels[::-1],
}
# Of the way from where the run begins to where it ends. A step that is not made is 1 of 48; a
# corrupted batch before there is a decision is one clipped step in the wrong direction.
TOLERANCE = 0.01


def distances(ends: Any) -> Any:
    return np.linalg.norm(ends[:-1] - ends[-1], axis=1) / np.linalg.norm(ends[-1])


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", SPOILED)
def test_the_run_ends_where_the_undisturbed_one_does(kind: str) -> None:
    tx = guard(with_average(INNER, 0.8), loss=SPIKE, grad_norm=SPIKE)
    params, averages, state = runs(tx, SPOILED[kind])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((params, averages, state)))
    assert distances(params).max() < TOLERANCE
    assert distances(averages).max() < 2 * TOLERANCE
    judged = STEPS if kind == "nan" else STEPS - SPIKE.warmup
    assert state.skipped[:-1].sum() >= judged
    assert state.skipped.max() == 1
    assert state.skipped[-1] == 0
