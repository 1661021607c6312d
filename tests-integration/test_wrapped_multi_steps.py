"""`OptaxWrapper` around `opt_accumulate.MultiSteps`: the parameters are handed to it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import optax
import pytest
from opt_accumulate import MultiSteps
from opt_core import Optimizer, describe_state
from opt_core.protocols import UpdatesParams

PARAMS = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3)}


def gradients(step: int) -> Any:
    return jax.tree.map(lambda p: jnp.cos(p + step), PARAMS)


def run(tx: Any, steps: int = 7) -> Optimizer:
    optimizer = opt.OptaxWrapper(tx).create(jax.tree.map(jnp.copy, PARAMS))
    step = jax.jit(lambda optimizer, grads: optimizer.apply_gradient(grads), donate_argnums=0)
    for i in range(steps):
        optimizer = step(optimizer, gradients(i))
    return optimizer


def rising(step: Any) -> Any:
    return step + 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("every_k", [3, np.int64(3), rising])
@pytest.mark.parametrize("mean", [True, False])
def test_it_is_described_as_optax_describes_its_own(every_k: Any, mean: bool) -> None:
    ours, theirs = (
        describe_state(opt.OptaxWrapper(steps(optax.adamw(0.1), every_k, mean)).create(PARAMS))
        for steps in (MultiSteps, optax.MultiSteps)
    )
    assert ours.leaves == theirs.leaves
    (steps, *inner), (optax_steps, *optax_inner) = ours.transformations, theirs.transformations
    assert inner == optax_inner
    assert (steps.name, steps.bearing) == (optax_steps.name, optax_steps.bearing)
    for name in steps.bearing:
        assert steps.settings[name] == optax_steps.settings[name]


def test_state_dicts_go_between_the_two() -> None:
    theirs = run(optax.MultiSteps(optax.adamw(0.1), 3), steps=4)
    ours = opt.OptaxWrapper(MultiSteps(optax.adamw(0.1), 3)).create(PARAMS)
    restored = ours.restore_state(theirs.state_dict())
    step = restored.apply_gradient(gradients(4)).apply_gradient(gradients(5))
    for a, b in zip(
        jax.tree.leaves(step),
        jax.tree.leaves(run(optax.MultiSteps(optax.adamw(0.1), 3), 6)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_apply_is_what_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    tx = MultiSteps(optax.sgd(0.1), 2)
    assert isinstance(tx, UpdatesParams)
    assert not isinstance(optax.sgd(0.1), UpdatesParams)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the parameters need not be added to")

    monkeypatch.setattr(MultiSteps, "update", refuse)
    optimizer = opt.OptaxWrapper(tx).create(PARAMS)
    stepped = optimizer.apply_gradient(gradients(0))
    for a, b in zip(jax.tree.leaves(stepped.target), jax.tree.leaves(PARAMS), strict=True):
        np.testing.assert_array_equal(a, b)
