"""How leaves are stored, as programs that move states see it."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_precision as op
import optax
import pytest

CODECS: Any = (op.bfloat16(), op.dynamic8(), op.float8(), op.log8())


@pytest.mark.parametrize("name", ["f32", "remainder", "remainder8", "kahan"])
def test_a_parameter_is_what_it_was_split_into(name: Any) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 4096, np.uint32)
    # Every upper half with lower halves that round to nothing, either way, and carry.
    lower = np.asarray([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    halves = (np.arange(1 << 16, dtype=np.uint32) << 16)[:, None] | lower
    bits = np.concatenate([bits, halves.ravel()])
    bits = bits[(bits >> 23) & 0xFF < 0xFE]  # finite, also when rounded up
    master = jnp.asarray(bits.view(np.float32))
    state: Any = op.master_weights(optax.sgd(0.1), storage=name).init(jnp.ones(1, jnp.bfloat16))
    _, storage = state.params_storage()
    param, extra = storage.encode(master)
    assert param.dtype == jnp.bfloat16
    again = np.asarray(storage.decode(param, extra))
    if storage.is_exact:
        np.testing.assert_array_equal(again.view(np.uint32), bits)
    else:
        normal = np.abs(master) > 1e-30
        np.testing.assert_allclose(again[normal], np.asarray(master)[normal], rtol=2**-16)


@pytest.mark.parametrize("codec", CODECS, ids=[codec.name for codec in CODECS])
def test_codes_of_values_and_back(codec: Any) -> None:
    params = {"w": jax.random.normal(jax.random.key(0), (16, 300))}
    tx: Any = op.quantize_state(optax.adam(0.1), codec)
    state = tx.init(params)
    for node in (state.inner[0].mu["w"], state.inner[0].nu["w"]):
        storage = node.leaf_storage()
        assert op.read_storage(json.loads(json.dumps(storage.to_data()))) == storage
        values = jnp.abs(params["w"])
        arrays = storage.encode(values)
        again = storage.decode(*arrays)
        stored = jax.tree.unflatten(jax.tree.structure(node), arrays)
        np.testing.assert_array_equal(again, jax.jit(op.decode)(stored))
        np.testing.assert_allclose(again, values, atol=0.08 * float(values.max()))
        assert [len(x) for x in (arrays, storage.fields)] == [len(jax.tree.leaves(node))] * 2


def test_codes_without_their_format_are_refused() -> None:
    tx = op.quantize_state(optax.adam(0.1), op.dynamic8())
    state: Any = tx.init({"w": jnp.ones((16, 256))})
    node = state.inner[0].mu["w"]
    apart = {"mu": {"w": {"codes": node.codes, "scale": node.scale}}}  # as in Flax's optimizer
    with pytest.raises(op.errors.StateError, match=r"mu/w has codes without .* `opt_nnx"):
        op.decode(apart)
    params = {"codes": jnp.ones(3)}
    assert op.decode(params) == params


def test_codes_of_another_release_are_refused() -> None:
    data = {"package": "opt_precision", "of": "params", "name": "remainder", "version": 2}
    with pytest.raises(op.errors.StateError, match="found version 2, this release knows 1"):
        op.read_storage(data)
