"""The wrapper: what is stored how, in pieces, and around what."""

import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import opt_precision as op
import optax
import optax.contrib
import pytest
from opt_precision.errors import OrderError, PrecisionError, SelectionError, StateError
from precision_testing import (
    CODECS,
    WEIGHTS,
    bits,
    by_field,
    grads,
    master_weights,
    params,
    quantize_state,
    run,
    stochastic_weights,
    structure,
)

contrib: Any = optax.contrib
TXS: dict[str, Any] = {
    "adamw": optax.adamw(1e-3),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "lamb": optax.lamb(1e-3),
    "lion": optax.lion(1e-4),
    "muon": contrib.muon(1e-3),
    "rmsprop": optax.rmsprop(1e-3, initial_scale=0.1, momentum=0.9),
    "masked": optax.masked(optax.adam(1e-3), {"bias": True, "kernel": True, "scale": False}),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", TXS)
def test_eight_bits_stay_close(name: str) -> None:
    start = params()
    raw, _ = run(TXS[name], start)
    ours, state = run(quantize_state(TXS[name], op.dynamic8(), chunk_bytes=20_000), start)
    for one, other, first in zip(*map(jax.tree.leaves, (ours, raw, start)), strict=True):
        moved = np.linalg.norm(np.asarray(other - first))
        assert np.linalg.norm(np.asarray(one - other)) <= 0.2 * moved
    assert any(leaf.dtype == jnp.uint8 for leaf in jax.tree.leaves(state))


def test_no_value_is_rounded_by_a_pair_of_casts() -> None:
    tx = stochastic_weights(quantize_state(optax.adamw(1e-3), op.bfloat16()))
    start = {"w": jnp.ones((64, 256), jnp.bfloat16)}
    for wrapped in (tx, master_weights(optax.adamw(1e-3), storage="kahan")):
        args = (start, wrapped.init(start), grads(0, start))
        text = jax.jit(wrapped.apply).lower(*args).as_text()
        assert not re.search(r"stablehlo\.convert .*f32>\) -> tensor<[^>]*bf16>", text)


def test_decode_gives_the_fields_in_float32() -> None:
    tx = quantize_state(optax.adamw(1e-3), op.float8())
    _, state = run(tx, params())
    _, raw = run(optax.adamw(1e-3), params())
    decoded = op.decode(state)
    assert structure(decoded.inner) == structure(raw)
    for one, other in zip(jax.tree.leaves(decoded.inner), jax.tree.leaves(raw), strict=True):
        assert one.dtype == other.dtype
        assert np.abs(np.asarray(one - other)).max() <= 0.2 * np.abs(np.asarray(other)).max()


class Peak(NamedTuple):
    nu: Any
    peak: Any

    @staticmethod
    def describe_fields() -> dict[str, Any]:
        return {"roles": {"nu": "second_moment", "peak": "other"}}


def scale_by_peak(decay: float | None = None) -> Any:
    """AMSGrad's mechanism under names of its own; with a decay the peak comes down again."""

    def init(params: Any) -> Peak:
        return Peak(optax.tree.zeros_like(params), optax.tree.zeros_like(params))

    def update(updates: Any, state: Peak, params: Any = None) -> Any:
        nu = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state.nu, updates)
        old = state.peak if decay is None else jax.tree.map(lambda p: decay * p, state.peak)
        peak = jax.tree.map(jnp.maximum, old, nu)
        made = jax.tree.map(lambda g, p: g / (jnp.sqrt(p) + 1e-8), updates, peak)
        return made, Peak(nu, peak)

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]


@pytest.mark.sample(1)
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_moments_that_feed_a_maximum_are_kept(codec: op.Codec) -> None:
    start = params()
    tx: Any = optax.scale_by_amsgrad(b2=0.99)
    ours, raw = quantize_state(tx, codec).init(start), tx.init(start)
    ours_update, update = jax.jit(quantize_state(tx, codec).update), jax.jit(tx.update)
    for step in range(8):
        _, ours = ours_update(grads(step, start), ours, start)
        _, raw = update(grads(step, start), raw, start)
    for one, other in zip(*map(jax.tree.leaves, (ours.inner.nu_max, raw.nu_max)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    report = op.explain_precision(quantize_state(tx, codec), start)
    found = {row.path: row.reason for row in report.rows}
    assert not found["mu/kernel"]
    assert found["nu/kernel"] == "feeds a maximum, which would keep errors of rounding"


def test_moments_of_any_class_that_feed_a_maximum_are_errors() -> None:
    named = by_field({"mu": "moment", "nu": "second_moment"})
    for tx, path, select in (
        (optax.scale_by_amsgrad(), "nu", named),
        (scale_by_peak(), "nu", None),
    ):
        ours = quantize_state(tx, op.dynamic8(), select)
        with pytest.raises(StateError, match=rf"{path}/bias is stored in fewer bits, and the runn"):
            ours.update(params(), ours.init(params()), params())
    # The estimate of D-Adaptation is the largest of sums, in which errors cancel.
    adaptation = optax.contrib.dadapt_adamw()  # type: ignore[attr-defined]
    for tx in (optax.adamax(1e-3), scale_by_peak(0.9), adaptation):
        ours = quantize_state(tx, op.dynamic8())
        ours.update(params(), ours.init(params()), params())


class Mine(NamedTuple):
    momentum: Any
    other: Any


def mine() -> Any:
    def init(params: Any) -> Mine:
        return Mine(optax.tree.zeros_like(params), optax.tree.zeros_like(params))

    def update(updates: Any, state: Mine, params: Any = None) -> tuple[Any, Mine]:
        new = jax.tree.map(lambda m, g: 0.9 * m + g, state.momentum, updates)
        return new, Mine(new, state.other)

    functions: Any = init, update
    return optax.GradientTransformation(*functions)


def test_what_is_in_no_list_is_left_alone() -> None:
    state = quantize_state(mine(), op.dynamic8()).init(params())
    assert not any(leaf.dtype == jnp.uint8 for leaf in jax.tree.leaves(state))
    chosen = quantize_state(mine(), op.dynamic8(), by_field({"momentum": "moment"}))
    state = chosen.init(params())
    assert isinstance(state.inner.momentum["kernel"], op.Encoded)
    assert not isinstance(state.inner.other["kernel"], op.Encoded)


def test_selections_that_match_nothing_are_errors() -> None:
    adam = optax.adam(1e-3)
    for select, words in [
        (by_field({"nv": "second_moment"}), r"\['nv'\]; the fields are \['mu', 'nu'\]"),
        (op.by_path("decoder"), "'decoder' matches none of the moments"),
        (op.moments(keep=["embed.*"]), "'embed.*' matches no parameter"),
    ]:
        with pytest.raises(SelectionError, match=words):
            quantize_state(adam, op.dynamic8(), select).init(params())
    with pytest.raises(SelectionError, match="is not a valid regular expression"):
        op.by_path("(")
    with pytest.raises(SelectionError, match="must be one of"):
        by_field({"mu": "mean"})


def in_window(tx: Any) -> Any:
    return optax.MultiSteps(tx, 2).gradient_transformation()


def if_finite(tx: Any) -> Any:
    return optax.apply_if_finite(tx, 3)


def identity(tx: Any) -> Any:
    return quantize_state(tx, op.identity())


def wrapped(order: Sequence[Any]) -> Any:
    return functools.reduce(lambda tx, wrap: wrap(tx), reversed(order), optax.adamw(1e-2))


def test_wrong_orders_are_errors() -> None:
    with pytest.raises(OrderError, match="twice"):
        quantize_state(quantize_state(optax.adam(1e-3), op.log8()), op.dynamic8())
    with pytest.raises(OrderError, match="`master_weights` is around `stochastic_weights`"):
        op.master_weights(op.stochastic_weights(optax.sgd(0.1)))
    start = {"w": jnp.ones((2, 3), jnp.bfloat16)}
    for window, weights in itertools.product((in_window, if_finite), WEIGHTS.values()):
        for order in ((identity, window, weights), (weights, identity, window)):
            with pytest.raises(OrderError, match=r"`quantize_state` is around `.*Write `"):
                wrapped(order).init(start)
        for other in WEIGHTS.values():
            with pytest.raises(OrderError, match=r"Keep one of them|keep one of them"):
                wrapped((weights, window, other)).init(start)


@pytest.mark.sample(2)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("outside", [True, False])
def test_every_other_order_is_right(weights: str, outside: bool) -> None:
    """As the same windows in the same order in float32: steps that skip or wait change nothing."""
    start = {"w": 0.1 * jax.random.normal(jax.random.key(0), (8, 256))}
    start = jax.tree.map(lambda p: p.astype(jnp.bfloat16), start)

    def steps(tx: Any, params: Any) -> list[Any]:
        state, found = tx.init(params), []
        update = jax.jit(tx.update)
        for step in range(6):
            g = grads(step, params)
            if step == 2:
                g["w"] = g["w"].at[0, 0].set(jnp.nan)
            updates, state = update(g, state, params)
            params = optax.apply_updates(params, updates)
            found.append(np.asarray(op.master_of(state, params)["w"], np.float32))
        return found

    windows = (if_finite, in_window)
    ours = (WEIGHTS[weights], *windows) if outside else (*windows, WEIGHTS[weights], identity)
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), start)
    found, exact = steps(wrapped(ours), start), steps(wrapped(windows), wide)
    # A rate of 0.01; a digit of a bfloat16 parameter is 0.002 at most, a compensation's less, and
    # half a digit of a master of 24 bits 2**-18.
    digits = {"stochastic": 6 * 2.0**-9, "kahan": 1e-4, "remainder8": 6 * 2.0**-18}
    atol = digits.get(weights, 1e-6)
    before = (np.asarray(wide["w"]),) * 2
    for one, other in zip(found, exact, strict=True):
        np.testing.assert_allclose(one, other, atol=atol, rtol=0)
        assert (one == before[0]).all() == (other == before[1]).all()
        before = one, other


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match="`codec` must be a codec"):
        quantize_state(optax.adam(1e-3), "dynamic8")
    with pytest.raises(PrecisionError, match="the roles are"):
        quantize_state(optax.adam(1e-3), {"mu": op.dynamic8()})
    with pytest.raises(TypeError, match="`tx` must be a gradient transformation"):
        quantize_state(optax.adam, op.dynamic8())
    with pytest.raises(PrecisionError, match="`storage` must be one of"):
        master_weights(optax.adam(1e-3), storage="f16")
    with pytest.raises(PrecisionError, match="`codec` is empty; the roles are"):
        quantize_state(optax.adam(1e-3), {})
    with pytest.raises(PrecisionError, match=r"`block` must be an integer .* found 256\.0"):
        op.dynamic8(block=256.0)  # type: ignore[arg-type]
    with pytest.raises(PrecisionError, match="`chunk_bytes` must be at least 4, found 3"):
        quantize_state(optax.adam(1e-3), op.dynamic8(), chunk_bytes=3)
    tx = quantize_state(optax.adam(1e-3), op.dynamic8())
    with pytest.raises(StateError, match="`state` must be a `PrecisionState`, found tuple"):
        tx.update(params(), optax.adam(1e-3).init(params()), params())
    with pytest.raises(StateError, match="must have one structure"):
        tx.update(params(), tx.init(params()), {"kernel": params()["kernel"]})
    state, other = tx.init(params()), {**params(), "kernel": jnp.ones((96, 128))}
    with pytest.raises(StateError, match=r"gradient of kernel has shape \(96, 128\), the param"):
        tx.update(other, state, params())
    with pytest.raises(StateError, match=r"0/mu/kernel of the state has codes of shape \(96, 256"):
        tx.update(other, state, other)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("precision", "text", "tx"),
    [
        (
            op.Precision(weights="stochastic", state=op.dynamic8(), seed=3, chunk_bytes=1 << 16),
            "stochastic weights, dynamic8 state, seed 3",
            stochastic_weights(
                quantize_state(TXS["adamw"], op.dynamic8(), seed=3, chunk_bytes=1 << 16), seed=3
            ),
        ),
        (
            op.Precision(state={"second_moment": op.log8()}, select=op.by_path("nu/kernel")),
            "log8 second_moment",
            quantize_state(TXS["adamw"], {"second_moment": op.log8()}, op.by_path("nu/kernel")),
        ),
    ],
)
def test_a_precision_is_the_wrappers_as_a_value(precision: Any, text: str, tx: Any) -> None:
    assert str(precision) == text
    start = params(jnp.bfloat16)
    assert bits(run(precision(TXS["adamw"]), start)) == bits(run(tx, start))


def test_precisions_are_compared_by_value() -> None:
    make: Any = op.Precision
    assert make(weights="f32", state=op.log8()) == make(weights="f32", state=op.log8())
    assert make(weights="f32", state=op.log8()) != make(weights="f32", state=op.dynamic8())
    roles = {"moment": op.bfloat16(), "second_moment": op.dynamic8(block=128)}
    again = make(state=dict(reversed(roles.items())))
    assert {make(state=roles): 1} == {again: 1}
    assert (
        str(again) == str(make(state=roles)) == "bfloat16 moment, dynamic8(block=128) second_moment"
    )
    with pytest.raises(PrecisionError, match=r"`weights` must be one of .*, found 'bfloat16'"):
        make(weights="bfloat16")
    with pytest.raises(PrecisionError, match="without them nothing changes"):
        make()
    with pytest.raises(TypeError, match=r"`codec` must be a codec .* found 'dynamic8'"):
        make(state="dynamic8")
    with pytest.raises(PrecisionError, match="about moments; give `state`"):
        make(weights="kahan", select=op.moments())


def test_init_is_abstract_where_parameters_are() -> None:
    shapes = {"w": jax.ShapeDtypeStruct((1 << 14, 1 << 14), jnp.bfloat16)}
    tx = quantize_state(optax.rmsprop(1e-3, initial_scale=0.5), op.dynamic8())
    state: Any = jax.eval_shape(tx.init, shapes)
    assert [leaf.dtype for leaf in jax.tree.leaves(state)][-2:] == [jnp.uint8, jnp.float32]
    small = tx.init({"w": jnp.zeros((64, 256))})
    nu = op.decode(small).inner[0].nu["w"]
    np.testing.assert_allclose(np.asarray(nu), 0.5, rtol=1e-6)


LIMITS = {  # bytes of parameters and state, a parameter; float32 with AdamW has 12
    ("stochastic", "bfloat16"): 6.001,
    ("stochastic", "dynamic8"): 4.04,
    ("stochastic", "log8"): 4.04,
    ("stochastic", "float8"): 4.04,
    ("kahan", "dynamic8"): 6.04,
    ("remainder", "dynamic8"): 6.04,
    ("remainder8", "dynamic8"): 5.04,
}


@pytest.mark.parametrize(("weights", "codec"), LIMITS)
def test_bytes_of_parameters_and_state(weights: Any, codec: str) -> None:
    start = {"w": jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16)}
    tx = op.Precision(weights=weights, state=CODECS[codec])(optax.adamw(1e-3))
    leaves = jax.tree.leaves((start, jax.eval_shape(tx.init, start)))
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / start["w"].size
    assert 4 < held <= LIMITS[weights, codec]
