"""Every transformation of Optax under `quantize_state`: nothing changes, and what is a moment."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import opt_precision as op
import pytest
from opt_precision.errors import OrderError
from optax_table import TABLE
from partition_oracles import EQUAL, QUICK, random_data, step_of, strongly_typed, structs


def quantized(tx: Any, codec: Any) -> Any:
    return op.quantize_state(tx, codec)


def trained(name: str, tx: Any, data: list[Any]) -> tuple[Any, Any]:
    start, *targets = data
    state = jax.tree.map(strongly_typed, tx.init(start))
    step = jax.jit(step_of(TABLE[name], tx), compiler_options=QUICK)
    for target in targets:
        start, state = step(start, state, target)
    return start, state


def is_refused(name: str, tx: Any, params: Any) -> bool:
    """Whether a wrapper belongs outside, or the state grows, which no wrapper can keep."""
    # Parameters that are pairs; an update of a shape that is not the parameter's.
    if TABLE[name].grows or name in ("lookahead", "scale_by_distance_over_gradients"):
        return True
    try:
        jax.eval_shape(tx.init, params)
    except OrderError:
        return True
    return False


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", TABLE)
def test_the_identity_changes_no_bit_and_eight_bits_no_type(name: str) -> None:
    case = TABLE[name]
    shapes = structs(EQUAL, case)
    tx = case.build(shapes)
    ours = quantized(tx, op.identity())
    if is_refused(name, ours, shapes):
        pytest.skip("belongs around `quantize_state`, or grows")
    data = random_data(shapes, 3)
    one, other = trained(name, tx, data), trained(name, ours, data)
    for a, b in zip(*map(jax.tree.leaves, (one[0], other[0])), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(*map(jax.tree.leaves, (one[1], other[1].inner)), strict=True):
        if not jax.numpy.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(a, b)
    eight = quantized(tx, op.dynamic8(min_size=1))
    state = jax.eval_shape(eight.init, shapes)
    step = step_of(case, eight)
    new = jax.eval_shape(step, data[0], state, data[1])[1]
    structures: Any = jax.tree.structure(new), jax.tree.structure(state)
    assert structures[0] == structures[1]
    assert jax.tree.map(str, jax.tree.map(_type, new)) == jax.tree.map(
        str, jax.tree.map(_type, state)
    )


def _type(leaf: Any) -> tuple[Any, Any]:
    return leaf.shape, leaf.dtype
