"""Bytes that parameters and state take, a parameter."""

import jax
import jax.numpy as jnp
import opt_precision as op
import optax
import pytest

PARAMS = {"w": jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16)}
LIMITS = {  # float32 with AdamW has 12
    ("stochastic", "bfloat16"): 6.001,
    ("stochastic", "dynamic8"): 4.04,
    ("stochastic", "log8"): 4.04,
    ("stochastic", "float8"): 4.04,
    ("kahan", "dynamic8"): 6.04,
    ("remainder", "dynamic8"): 6.04,
    ("remainder8", "dynamic8"): 5.04,
}


@pytest.mark.parametrize(("weights", "codec"), LIMITS)
def test_bytes_of_parameters_and_state(weights: str, codec: str) -> None:
    inner = op.quantize_state(optax.adamw(1e-3), getattr(op, codec)())
    if weights == "stochastic":
        tx = op.stochastic_weights(inner)
    else:
        tx = op.master_weights(inner, storage=weights)  # type: ignore[arg-type]
    leaves = jax.tree.leaves((PARAMS, jax.eval_shape(tx.init, PARAMS)))
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / PARAMS["w"].size
    assert 4 < held <= LIMITS[weights, codec]
