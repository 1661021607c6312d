"""Hyperball against NumPy, one matrix at a time."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from opt_matrix import Dims, Matrices, hyperball, newton_schulz, scale_by_muon
from opt_matrix.errors import OptionError, UndecidedError

RNG = np.random.default_rng(2)
F32 = newton_schulz(dtype=None)


def array(*shape: int) -> Any:
    return RNG.normal(size=shape).astype(np.float32)


def turned(w: Any, u: Any, rate: float) -> Any:
    """A step of the paper for one matrix, in float64."""
    w, u = np.float64(w), np.float64(u)
    radius = np.linalg.norm(w)
    moved = w - rate * radius * u / np.linalg.norm(u)
    return radius * moved / np.linalg.norm(moved)


def one(dims: Any, w: Any, u: Any, rate: float) -> Any:
    tx = hyperball(optax.identity(), Matrices.by_path({"w": dims}), rate)
    updates: Any = jax.jit(tx.update)({"w": u}, tx.init({"w": w}), {"w": w})[0]
    return w + updates["w"]


@pytest.mark.parametrize("rate", [1e-3, 0.5])
def test_stacks_heads_and_fused_matrices_are_matrices_of_their_own(rate: float) -> None:
    w, u = array(2, 3, 6, 8), array(2, 3, 6, 8)
    each = [[turned(w[i, j], u[i, j], rate) for j in range(3)] for i in range(2)]
    np.testing.assert_allclose(one((-2, -1), w, u, rate), each, atol=1e-5)

    w, u = array(6, 2, 4), 1e6 * array(6, 2, 4)  # embed, heads, features
    np.testing.assert_allclose(one((0, (1, 2)), w, u, rate), turned(w, u, rate), atol=1e-5)
    per_head = np.stack([turned(w[:, h], u[:, h], rate) for h in range(2)], axis=1)
    np.testing.assert_allclose(one((0, 2), w, u, rate), per_head, atol=1e-5)

    w, u = array(2, 16, 6), 1e-6 * array(2, 16, 6)  # joined, embed
    parts = [
        np.concatenate([turned(x, y, rate) for x, y in zip(*both, strict=True)])
        for both in zip(*([np.split(m, [8, 12]) for m in x] for x in (w, u)), strict=True)
    ]
    fused = one(Dims((2,), (1,), split=(8, 4, 4)), w, u, rate)
    np.testing.assert_allclose(fused, parts, atol=1e-5)


def test_ten_steps_of_muon_hold_all_norms_and_another_optimizer_has_the_rest() -> None:
    params = {"b": array(4), "w": array(3, 6, 8)}
    matrices = Matrices.by_path({"b": None, "w": (-2, -1)})
    rate: Any = optax.linear_schedule(0.1, 0.0, 20)
    direction = scale_by_muon(
        matrices=Matrices.by_path({"w": (-2, -1)}), momentum=0.0, nesterov=False, orthogonalize=F32
    )
    tx = hyperball(direction, matrices, rate, rest=optax.sgd(0.5))
    state, update = tx.init(params), jax.jit(chex.assert_max_traces(tx.update, 1))
    found: Any = params
    w, b = params["w"], params["b"]
    for step in range(10):
        grads = {"b": array(4), "w": array(3, 6, 8)}
        updates, state = update(grads, state, found)
        found = optax.apply_updates(found, updates)
        orthogonal = F32(jnp.asarray(grads["w"]))
        w = np.stack([turned(*both, rate(step)) for both in zip(w, orthogonal, strict=True)])
        b = b - 0.5 * grads["b"]
    np.testing.assert_allclose(found["w"], w, atol=1e-4)
    np.testing.assert_allclose(found["b"], b, atol=1e-5)
    norms, before = (np.linalg.norm(x, axis=(1, 2)) for x in (found["w"], params["w"]))
    np.testing.assert_allclose(norms, before, rtol=1e-6)


def test_a_matrix_without_direction_stays_and_one_of_zeros_says_so() -> None:
    w = array(3, 4, 5)
    w[2] = 0
    u = array(3, 4, 5)
    u[1] = 0
    found = np.asarray(one((-2, -1), w, u, 0.1))
    np.testing.assert_array_equal(found[1], w[1])
    assert np.isfinite(found[:2]).all()
    assert np.isnan(found[2]).all()


def test_updates_keep_the_dtype_of_gradients() -> None:
    w = jnp.asarray(array(4, 5), jnp.bfloat16)
    tx = hyperball(optax.identity(), Matrices.by_rank2(), 0.1)
    updates: Any = tx.update([w], tx.init([w]), [w])[0]
    assert updates[0].dtype == jnp.bfloat16


def test_bad_arguments() -> None:
    params: Any = {"b": array(3), "w": array(2, 3)}
    with pytest.raises(OptionError, match="`matrices` must say"):
        hyperball(optax.identity(), "w", 0.1)  # type: ignore[arg-type]
    tx = hyperball(optax.identity(), Matrices.by_rank2(), 0.1)
    with pytest.raises(UndecidedError, match=r"`hyperball` .* these hold none.*\n  b"):
        tx.init(params)
    params.pop("b")
    with pytest.raises(OptionError, match="call `update` with `params`"):
        tx.update(params, tx.init(params))
