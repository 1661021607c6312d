"""Programs of many kinds: nested wrappers, odd shapes, 64 bits, functions of the user's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_precision as op
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from opt_precision.errors import StateError
from precision_testing import (
    CODECS,
    WEIGHTS,
    bits,
    grads,
    master_weights,
    params,
    quantize_state,
    run,
    stochastic_weights,
    structure,
)


@pytest.mark.sample(1)
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("codec", [op.bfloat16(), op.dynamic8()], ids=["bfloat16", "dynamic8"])
def test_codes_of_a_wrapper_inside_of_a_chain_are_its_own(codec: op.Codec, weights: Any) -> None:
    start = params(jnp.bfloat16)
    inner = quantize_state(optax.scale_by_adam(), codec)
    tx = weights(optax.chain(inner, optax.scale(-1e-3)))
    _, state = run(tx, start)
    state = state.inner[0]
    alone = inner.init(start)
    update = jax.jit(inner.update)
    for step in range(3):  # its state depends on gradients alone
        _, alone = update(grads(step, start), alone)
    assert structure(state) == structure(alone)
    assert bits(state) == bits(alone)
    assert any(isinstance(x, op.Encoded) for x in jax.tree.leaves(state, is_leaf=is_encoded))


def is_encoded(node: Any) -> bool:
    return isinstance(node, op.Encoded)


@pytest.mark.sample(1)
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_leaves_that_are_masked_are_never_touched(weights: Any) -> None:
    start = {**params(jnp.bfloat16), "frozen": optax.MaskedNode()}
    made, state = run(weights(quantize_state(optax.adamw(1e-3), op.dynamic8())), start)
    assert structure(made) == structure(start)
    assert len(jax.tree.leaves(op.master_of(state, made))) == len(params())
    given = params(jnp.bfloat16)
    masked = optax.masked(weights(optax.sgd(0.1)), {"bias": False, "kernel": True, "scale": False})
    updates, _ = masked.update(grads(0, params()), masked.init(given), given)
    assert structure(updates) == structure(params())


def test_other_dtypes_than_the_state_was_made_for_are_errors() -> None:
    tx = master_weights(optax.sgd(0.1))
    state = tx.init(params(jnp.bfloat16))
    with pytest.raises(
        StateError, match=r"\['bias'\] is float32, and the state of `master_weights`"
    ):
        tx.apply(params(), state, params())
    with pytest.raises(StateError, match="made for other parameters than these 1"):
        tx.apply({"w": jnp.ones(3)}, state, {"w": jnp.ones(3)})


def test_reports_name_what_is_made_whole_or_say_that_they_do_not_know() -> None:
    shapes = {"w": jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)}
    tx = quantize_state(optax.adamw(1e-3), op.dynamic8())
    assert op.explain_precision(tx, shapes).whole == ()

    def update(updates: Any, state: Any, params: Any = None, *, value: Any) -> Any:
        return jax.tree.map(lambda u: u * value, updates), state

    given = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)  # type: ignore[arg-type]
    tx = quantize_state(optax.chain(optax.scale_by_adam(), given), op.dynamic8())
    assert op.explain_precision(tx, shapes).whole is None
    assert "not known without `extra_args`" in str(op.explain_precision(tx, shapes))
    assert op.explain_precision(tx, shapes, value=1.0).whole == ()
    with pytest.raises(TypeError, match="unexpected"):
        op.explain_precision(tx, shapes, value=1.0, other=2.0)


def test_blocks_that_lie_on_several_devices_are_named_with_one_that_fits() -> None:
    mesh = AbstractMesh((64,), ("data",), axis_types=(AxisType.Auto,))
    layout: Any = {name: NamedSharding(mesh, P(None, "data")) for name in ("wide", "wider")}
    shapes = {
        "wide": jax.ShapeDtypeStruct((64, 4096), jnp.bfloat16),
        "wider": jax.ShapeDtypeStruct((64, 256 * 64), jnp.bfloat16),
    }
    words = r"wide: blocks of 256 along dimension 1, which has 64 elements on each of 64 devices: "
    with pytest.warns(UserWarning, match=words + "give the codec `block=64`") as found:
        op.explain_precision(quantize_state(optax.adam(1e-3), op.dynamic8(), layout=layout), shapes)
    assert "wider" not in str(found[0].message)
    fitting = quantize_state(optax.adam(1e-3), op.dynamic8(block=64), layout=layout)
    op.explain_precision(fitting, shapes)  # warnings are errors


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_with_numbers_of_64_bits_and_leaves_of_every_size(codec: op.Codec) -> None:
    enable_x64: Any = jax.enable_x64
    with enable_x64(True):
        start = {
            "w": jnp.ones((64, 512), jnp.bfloat16),
            "d": jnp.ones((64, 512), jnp.float64),
            "none": jnp.ones((0, 256), jnp.bfloat16),
            "one": jnp.ones((1,), jnp.bfloat16),
        }
        tx = stochastic_weights(quantize_state(optax.adamw(1e-3), codec, chunk_bytes=1 << 13))
        made, state = run(tx, start)
        assert jax.tree.map(jnp.result_type, made) == jax.tree.map(jnp.result_type, start)
        assert structure(state) == structure(tx.init(start))
        assert all(np.isfinite(np.asarray(x, np.float64)).all() for x in jax.tree.leaves(made))
        assert (np.asarray(made["d"]) != 1).all()
