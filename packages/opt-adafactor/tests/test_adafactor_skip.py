"""`skip_nan_updates`: what a step that is not finite leaves as it was."""

from typing import Any

import chex
import numpy as np
import pytest
from adafactor_testing import normal
from opt_adafactor import Adafactor
from opt_core import Optimizer

PARAMS = {"factored": normal(1, (6, 4)), "plain": normal(2, (5,)), "good": normal(3, (3,))}
BAD = [np.nan, np.inf, -np.inf, 1e30]  # the square of the last is not finite


def make(skip: Any, **options: Any) -> Optimizer:
    options = {"beta1": 0.9, "min_dim_size_to_factor": 4, **options}
    optimizer = Adafactor(0.1, skip_nan_updates=skip, **options).create(PARAMS)
    return optimizer.apply_gradient(grads())


def grads(
    bad: float | None = None, names: tuple[str, ...] = ("factored", "plain"), seed: int = 5
) -> Any:
    tree = {name: normal(seed, p.shape) for name, p in PARAMS.items()}
    for name in names if bad is not None else ():
        tree[name] = tree[name].at[(0,) * tree[name].ndim].set(bad)
    return tree


@pytest.mark.sample(1)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("clipping", [None, 1.0])
def test_by_entry(bad: float, clipping: float | None) -> None:
    # T5X keeps the entries that a NaN reaches; an inf stays in `v` there, which freezes it.
    before = make(True, clipping_threshold=clipping)
    after = before.apply_gradient(grads(bad, ("plain",), seed=6))
    chex.assert_tree_all_finite(after)
    old, new = (o.state.param_states["plain"].v for o in (before, after))
    assert new[0] == old[0]
    assert (new[1:] != old[1:]).all()
    moved = after.target["plain"] != before.target["plain"]
    # What is finite but for its square takes part with an update of 0, and momentum goes on; the
    # mean of a clipped tensor that has a NaN in it is NaN for all of it.
    assert moved[0] == np.isfinite(bad)
    assert moved[1:].all() == (clipping is None or np.isfinite(bad))
    # It is alive: the next good gradient moves it.
    assert (after.apply_gradient(grads()).target["plain"] != after.target["plain"]).all()


def test_off_by_default() -> None:
    after = make(False).apply_gradient(grads(np.nan))
    assert np.isnan(after.target["plain"][0])
    assert np.isinf(make(False).apply_gradient(grads(np.inf)).state.param_states["plain"].v[0])
