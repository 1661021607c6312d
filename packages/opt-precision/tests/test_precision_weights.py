"""Parameters in bfloat16: every way to take updates that are smaller than a step of theirs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_precision as op
import optax
import pytest
from opt_precision import _bits
from opt_precision.errors import StateError
from precision_testing import (
    WEIGHTS,
    bits,
    grads,
    master_weights,
    params,
    quantize_state,
    stochastic_weights,
    structure,
)

LOWER = np.asarray([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
# Every upper half of a float32 with lower halves that round to nothing, either way, and carry.
HALVES = ((np.arange(1 << 16, dtype=np.uint32) << 16)[:, None] | LOWER).ravel()


@pytest.mark.sample(2)
@pytest.mark.parametrize("storage", ["stochastic", "f32", "remainder", "remainder8", "kahan"])
def test_every_nan_stays_one_and_nothing_else_becomes_one(storage: str) -> None:
    updates = jnp.asarray(HALVES).view(jnp.float32)
    is_nan = np.isnan(np.asarray(updates))
    start = {"w": jnp.zeros(HALVES.shape, jnp.bfloat16)}
    tx = WEIGHTS[storage](optax.identity())
    new, state = jax.jit(tx.apply)(start, tx.init(start), {"w": updates})
    known: list[Any] = [new, op.master_of(state, new)]
    for found in known:
        np.testing.assert_array_equal(np.isnan(np.asarray(found["w"], np.float32)), is_nan)
    plain, _ = jax.jit(tx.update)({"w": updates}, tx.init(start), start)
    updated: Any = optax.apply_updates(start, plain)
    assert np.isnan(np.asarray(updated["w"], np.float32))[is_nan].all()


@pytest.mark.internals
def test_stochastic_rounding_of_the_largest_numbers_stays_finite() -> None:
    most = jnp.full(4, 0xFFFF0000, jnp.uint32)
    special = jnp.asarray([3.395e38, -3.395e38, jnp.inf, jnp.nan], jnp.float32)
    kept = np.asarray(_bits.round_stochastic(special, most))
    assert np.isfinite(kept[:2]).all()
    assert np.isposinf(kept[2])
    assert np.isnan(kept[3])


@pytest.mark.internals
def test_noise_differs_by_step_leaf_field_and_seed() -> None:
    index = _bits.global_index((64, 64), (0, 0), (64, 1))
    found = [
        _bits.noise_at(_bits.noise_keys(_bits.step_seed(seed, jnp.int32(step)), [name])[0], index)
        for seed, step, name in [(0, 0, "mu/w"), (0, 1, "mu/w"), (0, 0, "nu/w"), (1, 0, "mu/w")]
    ]
    for a, one in enumerate(found):
        assert abs(np.mean(np.asarray(one) / 2**32) - 0.5) < 0.02
        for other in found[:a]:
            r = np.corrcoef(np.ravel(one).astype(float), np.ravel(other).astype(float))[0, 1]
            assert abs(r) < 0.06


def scanned(tx: Any, start: Any, steps: int, *, plain: bool = False) -> tuple[Any, Any]:
    state = tx.init(start)

    def step(carry: Any, g: Any) -> Any:
        params, state = carry
        g = jax.tree.map(lambda p, g: g + p.astype(jnp.float32), params, g)
        if plain:
            updates, state = tx.update(g, state, params)
            return (optax.apply_updates(params, updates), state), None
        return op.apply(tx, params, state, g), None

    def all_steps(start: Any, state: Any) -> Any:
        rows = [
            jax.random.normal(jax.random.key(i), (steps, *x.shape))
            for i, x in enumerate(jax.tree.leaves(start))
        ]
        gs = jax.tree.unflatten(structure(start), rows)
        return jax.lax.scan(step, (start, state), gs)[0]

    results: tuple[Any, Any] = jax.jit(all_steps)(start, state)
    return results


def test_remainder_is_a_float32_master_bit_by_bit() -> None:
    start = {"w": jax.random.normal(jax.random.key(9), (16, 32)).astype(jnp.bfloat16)}
    tx = optax.adamw(1e-3)
    whole, master = scanned(master_weights(tx, storage="f32"), start, 300)
    visible, rest = scanned(master_weights(tx, storage="remainder"), start, 300)
    assert bits(whole) == bits(visible)
    assert bits(master.kept) == bits(op.master_of(rest, visible))
    assert bits(master.inner) == bits(rest.inner)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", WEIGHTS)
def test_plain_optax_gives_the_same_parameters(name: str) -> None:
    start = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params())
    tx = WEIGHTS[name](quantize_state(optax.adamw(1e-3), op.dynamic8()))
    ours, theirs = (scanned(tx, start, 3, plain=plain) for plain in (False, True))
    assert bits(ours) == bits(theirs)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", WEIGHTS)
def test_states_never_change_their_types(name: str) -> None:
    start = {**params(jnp.bfloat16), "f32": jnp.ones(3)}
    tx = WEIGHTS[name](quantize_state(optax.adamw(optax.linear_schedule(1e-3, 0, 9)), op.log8()))
    state = tx.init(start)
    new_params, new_state = jax.eval_shape(tx.apply, start, state, grads(0, start))
    assert structure(new_state) == structure(state)
    types = [jax.tree.map(jax.typeof, tree) for tree in ((start, state), (new_params, new_state))]
    assert types[0] == types[1]
    updates, _ = jax.eval_shape(tx.update, grads(0, start), state, start)
    assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype("float32")}


def displacement(tx: Any, rate: float, steps: int = 1000) -> tuple[Any, Any]:
    """How far parameters went that all drift, and what they would have gone in float32."""
    start = (0.02 * jax.random.normal(jax.random.key(0), (64, 64))).astype(jnp.bfloat16)
    drift = jnp.sign(jax.random.normal(jax.random.key(1), start.shape))

    def step(carry: Any, key: Any) -> Any:
        p, s, exact = carry
        g = -(0.3 * drift + 0.9 * jax.random.normal(key, start.shape))
        p, s = op.apply(tx, p, s, g)
        return (p, s, exact - rate * g), None

    keys = jax.random.split(jax.random.key(2), steps)
    first = (start, tx.init(start), start.astype(jnp.float32))
    p, _, exact = jax.jit(lambda: jax.lax.scan(step, first, keys)[0])()
    wide = start.astype(jnp.float32)
    return np.asarray(p.astype(jnp.float32) - wide, float), np.asarray(exact - wide, float)


def relative(error: Any, of: Any) -> float:
    return float(np.linalg.norm(error) / np.linalg.norm(of))


@pytest.mark.sample(1)
@pytest.mark.parametrize("storage", ["kahan", "remainder", "remainder8"])
def test_small_rates_move_as_far_as_bfloat16_can_say(storage: Any) -> None:
    made, exact = displacement(master_weights(optax.sgd(1e-6), storage=storage), 1e-6)
    start = (0.02 * jax.random.normal(jax.random.key(0), (64, 64))).astype(jnp.bfloat16)
    wide = np.asarray(start.astype(jnp.float32), np.float32)
    best = np.asarray(_bits.round_nearest(jnp.asarray(wide + exact, jnp.float32)), float) - wide
    most = 1.05 if storage == "remainder8" else 1.02  # its noise is a digit of 24 bits
    assert relative(made - exact, exact) <= most * relative(best - exact, exact)


@pytest.mark.sample(2)
@pytest.mark.parametrize("weight", [1.0, 0.25, 0.02])
@pytest.mark.parametrize("storage", ["kahan", "remainder8"])
def test_weights_of_any_size_move(storage: Any, weight: float) -> None:
    """Rounded to nearest it would be 0.0005 at 1, 0.064 at 0.25; a float32 master moves 0.0507."""
    tx = master_weights(optax.sgd(1e-6), storage=storage)
    start = jnp.full(64, weight, jnp.bfloat16)

    def run() -> Any:
        g = jnp.ones(64)
        return jax.lax.scan(
            lambda c, _: (op.apply(tx, *c, g), None), (start, tx.init(start)), length=50_000
        )[0]

    new, state = jax.jit(run)()
    moved = np.asarray(start, float) - np.asarray(op.master_of(state, new), float)
    # The variance of independent roundings is at most their digit times the way.
    digit = 2.0 ** (np.floor(np.log2(weight)) - 7)
    is_kahan = storage == "kahan"
    assert moved.mean() == pytest.approx(0.05, rel=0.01 if is_kahan else 0.015)
    assert moved.std() <= (0.15 * digit if is_kahan else np.sqrt(0.05 * digit / 256))
    assert np.abs(np.asarray(start, float) - np.asarray(new, float) - moved).max() <= digit / 2


def test_stochastic_weights_are_unbiased_at_small_rates() -> None:
    made, exact = displacement(stochastic_weights(optax.sgd(1e-6)), 1e-6)
    cosine = (made * exact).sum() / np.linalg.norm(made) / np.linalg.norm(exact)
    assert cosine >= 0.7
    error = made - exact
    assert abs(error.mean()) < 3 * error.std() / np.sqrt(error.size)


def test_setting_parameters_resets_what_is_kept_besides_them() -> None:
    start = params(jnp.bfloat16)
    for name in ("f32", "remainder", "remainder8", "kahan"):
        tx = WEIGHTS[name](optax.sgd(1e-3))
        new, state = tx.apply(start, tx.init(start), grads(0, start))
        known = op.master_of(state, new)
        assert bits(known) != bits(op.master_of(state.inner, new))
        reset = op.set_params(state, new)
        assert bits(op.master_of(reset, new)) == bits(op.master_of(state.inner, new))
        assert structure(reset) == structure(state)


def test_each_of_several_states_knows_its_own_parameters() -> None:
    names = ("f32", "remainder", "stochastic")
    ways: dict[Any, Any] = {name: WEIGHTS[name](optax.sgd(1e-3)) for name in names}
    start = {name: {"w": jnp.ones(3, jnp.bfloat16)} for name in ways}
    tx = optax.chain(optax.identity(), optax.partition(ways, {name: name for name in ways}))
    new, state = op.apply(tx, start, tx.init(start), start)
    known = op.master_of(state, new)
    assert known["f32"]["w"].tolist() == known["remainder"]["w"].tolist() == [np.float32(0.999)] * 3
    assert bits(op.master_of(op.set_params(state, new), new)) == bits(op.master_of((), new))
    with pytest.raises(StateError, match="f32/w is float32"):
        op.master_of(state, known)


def test_parameters_in_float16_are_refused() -> None:
    with pytest.raises(StateError, match=r"`stochastic_weights`: \['w'\] is float16"):
        stochastic_weights(optax.sgd(0.1)).init({"w": jnp.ones(2, jnp.float16)})
