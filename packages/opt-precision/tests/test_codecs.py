"""What codes mean: the ratchet, the hazard, and the way there and back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_precision as op
import optax
import pytest
from opt_precision import _bits, _maps
from opt_precision._codecs import Role
from opt_precision._formats import decode, encode
from precision_testing import CODECS, EIGHT_BITS, quantize_state

QUIET = {0.95: 1000, 0.99: 2000, 0.999: 6000}


def second(codec: op.Codec, b2: float) -> float:
    """Mean of `v` after gradients of 0.5 for 2,000 steps and of 0.005 for a quiet phase."""
    form = codec.form("second_moment", (16, 256), jnp.float32)
    index = _bits.global_index((2, 256), (0, 0), (256, 1))
    assert isinstance(form, op.Format)

    def body(step: Any, stored: Any) -> Any:
        v = decode(form, *stored)
        g = jnp.where(step < 2000, 0.5, 0.005)
        g = jnp.where(index % 256 == 0, 10.0, g)  # the block's largest element
        (key,) = _bits.noise_keys(_bits.step_seed(0, step), ["v"])
        noise = _bits.noise_at(key, index) if form.stochastic else None
        return encode(form, b2 * v + (1 - b2) * g * g, noise)

    def run() -> Any:
        first = encode(form, jnp.zeros((2, 256)), None)
        return decode(form, *jax.lax.fori_loop(0, 2000 + QUIET[b2], body, first))

    return float(jax.jit(run)()[:, 1:].mean())


def exact(b2: float) -> float:
    quiet = QUIET[b2]
    high = 0.25 * (1 - b2**2000)
    return high * b2**quiet + 0.005**2 * (1 - b2**quiet)


@pytest.mark.sample(2)
@pytest.mark.parametrize("b2", [0.95, 0.99, 0.999])
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_second_moments_come_down_again(codec: op.Codec, b2: float) -> None:
    assert second(codec, b2) == pytest.approx(exact(b2), rel=0.05)


@pytest.mark.sample(1)
@pytest.mark.parametrize("codec", [op.bfloat16(v="nearest"), op.dynamic8(v="nearest")])
def test_rounded_to_nearest_they_do_not(codec: op.Codec) -> None:
    assert second(codec, 0.999) > 100 * exact(0.999)


@pytest.mark.sample(1)
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_first_moments_come_down_to_nothing(codec: op.Codec) -> None:
    """Those whose gradients end, beside others whose gradients go on."""
    tx = quantize_state(optax.ema(0.9, debias=False), codec)
    g = jnp.asarray(np.random.default_rng(0).normal(size=(16, 256)), jnp.float32)
    is_dead = jnp.arange(256) % 3 == 0

    def step(state: Any, i: Any) -> Any:
        own = jnp.where(is_dead & (i >= 20), 0.0, g)
        return tx.update({"w": own}, state)[1], None

    def run() -> Any:
        return jax.lax.scan(step, tx.init({"w": g}), jnp.arange(220))[0]

    moment = np.asarray(op.decode(jax.jit(run)()).inner.ema["w"])
    largest = np.abs(g).max()
    assert np.abs(moment[:, is_dead]).max() < 1e-3 * largest
    np.testing.assert_allclose(moment[:, ~is_dead], g[:, ~is_dead], atol=0.1 * largest)


def test_a_slow_first_moment_in_bfloat16_does_not_stand_still() -> None:
    """Rounded to nearest, 0.999 of a number is that number."""
    tx, g = quantize_state(optax.ema(0.999, debias=False), op.bfloat16()), jnp.ones((16, 256))

    def run() -> Any:
        state = tx.update({"w": g}, tx.init({"w": g}))[1]
        return jax.lax.scan(lambda s, _: (tx.update({"w": 0 * g}, s)[1], None), state, length=2000)

    moment = op.decode(jax.jit(run)()[0]).inner.ema["w"]
    assert float(moment.mean()) == pytest.approx(1e-3 * 0.999**2000, rel=0.02)


def largest_ratios(
    codec: Any, decades: float, b1: float = 0.9, steps: int = 200
) -> tuple[float, float, float]:
    """Largest update over the exact largest, ratio of rms and cosine, after steps of Adam."""
    rng = np.random.default_rng(0)
    sizes = jnp.asarray(10.0 ** (-decades * rng.uniform(size=(32, 256))), jnp.float32)
    keys = jax.random.split(jax.random.key(1), steps)

    def last(tx: optax.GradientTransformation) -> np.ndarray:
        def step(carry: Any, key: Any) -> Any:
            g = sizes * jax.random.normal(key, sizes.shape)
            updates, state = tx.update(g, carry[1], sizes)
            return (updates, state), None

        first = (jnp.zeros_like(sizes), tx.init(sizes))
        made = jax.jit(lambda: jax.lax.scan(step, first, keys)[0][0])()
        return np.asarray(made, np.float64).ravel()

    adam = optax.adam(1.0, b1, eps=1e-30)
    raw, ours = last(adam), last(quantize_state(adam, codec))
    cosine = raw @ ours / np.sqrt((raw @ raw) * (ours @ ours))
    rms = np.sqrt(np.mean(ours**2) / np.mean(raw**2))
    return np.abs(ours).max() / np.abs(raw).max(), rms, cosine


@pytest.mark.sample(1)
@pytest.mark.parametrize("codec", EIGHT_BITS.values(), ids=EIGHT_BITS)
def test_updates_do_not_explode_over_seven_decades(codec: op.Codec) -> None:
    assert largest_ratios(codec, 7)[0] <= 2.5


@pytest.mark.slow
def test_first_moments_of_long_memory_keep_their_direction_in_sixteen_bits() -> None:
    mixed = {"moment": op.bfloat16(), "second_moment": op.dynamic8()}
    codecs = (op.dynamic8(m="stochastic"), op.dynamic8(), mixed)
    random, nearest, best = (largest_ratios(codec, 4, 0.99, 1000)[2] for codec in codecs)
    assert 0.7 <= random < nearest < 0.9  # 0.74 and 0.86
    assert best >= 0.97


def test_updates_are_right_over_four_decades() -> None:
    largest, rms, cosine = largest_ratios(op.dynamic8(), 4)
    assert largest <= 2
    assert 0.95 <= rms <= 1.06
    assert cosine >= 0.97


@pytest.mark.parametrize("codec", EIGHT_BITS.values(), ids=EIGHT_BITS)
def test_second_moments_have_no_zero(codec: op.Codec) -> None:
    """One would make the largest updates of all, divided by `eps`."""
    form = codec.form("second_moment", (16, 256), jnp.float32)
    assert isinstance(form, op.Format)
    v = jnp.zeros((16, 256)).at[:, 0].set(1.0)
    for noise in (None, jnp.zeros(v.shape, jnp.uint32)):
        assert decode(form, *encode(form, v, noise)).min() > 0


ROLES: tuple[Role, ...] = ("moment", "slow_moment", "second_moment")


@pytest.mark.internals
@pytest.mark.sample(5)
@pytest.mark.parametrize("codec", EIGHT_BITS.values(), ids=EIGHT_BITS)
@pytest.mark.parametrize("role", ROLES)
def test_nearest_codes_are_those_of_a_search(role: Role, codec: op.Codec) -> None:
    form = codec.form(role, (64, 256), jnp.float32)
    assert isinstance(form, op.Format)
    x = np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32) ** 5
    x = np.abs(x) if form.squared else x
    encoded = op.Encoded(*encode(form, jnp.asarray(x), None), form)
    every = jnp.tile(jnp.arange(256, dtype=jnp.uint8), (64, 1)).view(encoded.codes.dtype)
    values = np.asarray(decode(form, every, encoded.scale), np.float64)
    found = np.asarray(decode(form, encoded.codes, encoded.scale), np.float64)
    best = np.abs(values[:, :, None] - x[:, None, :]).min(1)
    np.testing.assert_allclose(np.abs(found - x), best, rtol=1e-5, atol=1e-6 * np.abs(x).max())


@pytest.mark.internals
def test_the_maps_are_those_of_bitsandbytes() -> None:
    assert len(_maps.dynamic_roots()) == 256
    assert _maps.dynamic_roots()[1] == pytest.approx(3.25e-7)
    assert len(_maps.dynamic_magnitudes()) == 128
    assert _maps.dynamic_magnitudes()[1] == pytest.approx(5.5e-7)
