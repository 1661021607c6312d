"""Codes and rounding on a GPU or TPU: the bits of the CPU where arithmetic is exact, or nearly."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_precision as op
import optax
import pytest
from accelerator import EXACT_ADAMW, assert_equal, make_grads, make_params, on_both

pytestmark = pytest.mark.accelerator

CODECS = {
    "bfloat16": op.bfloat16(),
    "dynamic8": op.dynamic8(),
    "float8": op.float8(),
    "log8": op.log8(),
}
WEIGHTS: dict[str, Any] = {
    "stochastic": op.stochastic_weights,
    "kahan": lambda tx: op.master_weights(tx, storage="kahan"),
    "remainder": lambda tx: op.master_weights(tx, storage="remainder"),
}
RATE = 1e-6
STEPS = 32


def advance(tx: Any, params: Any, state: Any, steps: range) -> tuple[Any, Any]:
    step = jax.jit(tx.apply)
    for number in steps:
        params, state = step(params, state, make_grads(number, params))
    return params, state


def train(tx: Any, steps: int) -> tuple[Any, Any]:
    params = make_params(jnp.bfloat16)
    return advance(tx, params, tx.init(params), range(steps))


@pytest.mark.parametrize(
    "tx",
    [
        *(make(optax.sgd(2.0**-8, momentum=0.5)) for make in WEIGHTS.values()),
        op.quantize_state(optax.sgd(2.0**-8, momentum=0.5), op.bfloat16(m="stochastic")),
    ],
    ids=[*WEIGHTS, "moments"],
)
def test_what_is_exact_has_the_bits_of_the_cpu(tx: Any) -> None:
    found, expected = on_both(lambda _: train(tx, 6))
    assert_equal(found, expected)
    assert (found[0]["w"] != make_params(jnp.bfloat16)["w"]).mean() > 0.5


def ranks(codes: Any) -> Any:
    """Numbers such that neighbouring values are one apart; floats are a sign and a magnitude."""
    codes = np.asarray(codes)
    if codes.dtype == np.uint8:
        return codes.astype(int)
    raw = codes.view(f"uint{8 * codes.itemsize}").astype(int)
    sign = 1 << (8 * codes.itemsize - 1)
    return np.where(raw >= sign, sign - raw, raw)


def assert_neighbours(one: Any, other: Any) -> None:
    distance = np.abs(ranks(one) - ranks(other))
    assert distance.max() <= 1
    assert distance.mean() <= 2e-3


@pytest.mark.parametrize("name", CODECS)
def test_codes_are_those_of_the_cpu(name: str) -> None:
    """After a step from the same codes: what differs once may differ by more later."""
    tx = op.stochastic_weights(op.quantize_state(EXACT_ADAMW, CODECS[name]))
    before, state = jax.device_get(train(tx, 2))
    (params, state), (their_params, theirs) = on_both(
        lambda _: advance(tx, before, state, range(2, 3))
    )
    assert_neighbours(params["w"], their_params["w"])
    moments, their_moments = (s.inner[0] for s in (state, theirs))
    for field in ("mu", "nu"):
        one, other = (getattr(m, field)["w"] for m in (moments, their_moments))
        assert one.codes.dtype.itemsize == (2 if name == "bfloat16" else 1)
        if name == "bfloat16":
            assert_equal(one, other)
            continue
        assert_neighbours(one.codes, other.codes)
        np.testing.assert_allclose(one.scale, other.scale, rtol=1e-5)


def displacement(tx: Any) -> tuple[Any, Any, Any]:
    """How far parameters went in float64, and their master, that all drift alike; the state."""
    start = make_params(jnp.bfloat16)
    params, state, step = start, tx.init(start), jax.jit(tx.apply)
    grads = jax.tree.map(lambda p: -jnp.ones(p.shape), start)
    for _ in range(STEPS):
        params, state = step(params, state, grads)
    before, after, master = (
        np.asarray(tree["w"], np.float64) for tree in (start, params, op.master_of(state, params))
    )
    return after - before, master - before, state


def test_stochastic_weights_move_at_a_rate_that_no_bfloat16_can_take() -> None:
    """All of them stand still if a compiler keeps more digits than there are, and cuts them off."""
    moved, _, _ = displacement(op.stochastic_weights(optax.sgd(RATE)))
    assert (moved == 0).mean() > 0.9
    assert moved.min() == 0
    error = moved.mean() - STEPS * RATE
    assert abs(error) < 4 * moved.std() / np.sqrt(moved.size)
    assert moved.mean() > 0.5 * STEPS * RATE


def test_kahan_keeps_what_rounding_took() -> None:
    """The compensation is 0 if a compiler deletes the rounding that it is the difference to."""
    moved, master, state = displacement(op.master_weights(optax.sgd(RATE), storage="kahan"))
    assert np.asarray(state.kept["w"]).all()
    assert not moved.any()
    np.testing.assert_allclose(master, STEPS * RATE, rtol=0.05)


@pytest.mark.parametrize("name", WEIGHTS)
def test_two_steps_in_one_program_round_twice(name: str) -> None:
    """A compiler that keeps the digits between them makes one rounding of two."""
    tx = WEIGHTS[name](EXACT_ADAMW)
    params, step = make_params(jnp.bfloat16), jax.jit(tx.apply)
    state, grads = tx.init(params), make_grads(0, params)

    @jax.jit
    def both(params: Any, state: Any, grads: Any) -> Any:
        return tx.apply(*tx.apply(params, state, grads), grads)

    assert_equal(both(params, state, grads), step(*step(params, state, grads), grads))


@pytest.mark.parametrize(
    ("weights", "name"),
    [*(("stochastic", name) for name in CODECS), ("kahan", "dynamic8"), ("remainder", "dynamic8")],
)
def test_a_compiled_step_converts_nothing_to_bfloat16(weights: str, name: str) -> None:
    """A conversion and its inverse may be deleted; rounding here is by bits."""
    tx = WEIGHTS[weights](op.quantize_state(EXACT_ADAMW, CODECS[name]))
    params = make_params(jnp.bfloat16)
    lowered = jax.jit(tx.apply, donate_argnums=(0, 1)).lower(params, tx.init(params), make_params())
    assert not re.search(r"stablehlo\.convert .*-> tensor<[^>]*bf16>", lowered.as_text())
    text = lowered.compile().as_text() or ""
    assert not re.search(r" = bf16\[[^=]* convert\(", text)
