"""The face of T5X's rule table."""

from typing import Any

import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P
from opt_partition import OptaxStatePartitionRules
from opt_partition.errors import AxesError

derive = OptaxStatePartitionRules.derive_optax_logical_axes
derive_params = OptaxStatePartitionRules.derive_params_axes

PARAMS = {"mlp": {"wi": jnp.ones((8, 6)), "wo": jnp.ones((6, 8))}, "scale": jnp.ones(8)}
AXES = {"mlp": {"wi": P("embed", "mlp"), "wo": P("mlp", "embed")}, "scale": P("embed")}


def test_parameters_in_lists() -> None:
    params = [(jnp.ones((8, 6)), jnp.ones(6)), (jnp.ones((6, 4)), jnp.ones(4))]
    axes = [(P("a", "b"), P("b")), (P("b", "c"), P("c"))]
    tx = optax.chain(optax.clip(1.0), optax.chain(optax.adam(0.1), optax.trace(0.9)))
    _, ((adam, _), trace) = derive(tx.init(params), axes)
    assert (adam.count, adam.mu, adam.nu, trace.trace) == (None, axes, axes, axes)
    (sm3, _) = derive(optax.sm3(0.1).init(params), axes)
    assert sm3.mu == [([P("a"), P("b")], [P("b")]), ([P("b"), P("c")], [P("c")])]


def test_what_t5x_fails_on() -> None:
    """zero_nans, SM3, MultiSteps with a skip function, in masked; states not called `...State`."""
    masked = optax.masked(
        optax.MultiSteps(  # type: ignore[arg-type]
            optax.chain(optax.zero_nans(), optax.sm3(0.1), optax.apply_every(2)),
            2,
            should_skip_update_fn=optax.skip_not_finite,
        ),
        {"mlp": True, "scale": False},
    )
    state: Any = derive(masked.init(PARAMS), AXES).inner_state
    below = {"mlp": AXES["mlp"], "scale": optax.MaskedNode()}
    assert state.acc_grads == below
    assert state.skip_state == {"num_not_finite": None, "should_skip": None}
    zero_nans, (sm3, _), apply_every = state.inner_opt_state
    assert zero_nans.found_nan == {"mlp": {"wi": None, "wo": None}, "scale": optax.MaskedNode()}
    assert sm3.mu["mlp"] == {"wi": [P("embed"), P("mlp")], "wo": [P("mlp"), P("embed")]}
    assert apply_every.grad_acc == below


def test_factored_states_need_the_parameters() -> None:
    state = optax.scale_by_factored_rms(min_dim_size_to_factor=2).init(PARAMS)
    with pytest.raises(AxesError, match=r"v_row/mlp/wi \(6,\)(.*\n)*Pass `params`, or use"):
        derive(state, AXES)
    derived = derive(state, AXES, PARAMS)
    assert derived.v_row == {"mlp": {"wi": P("mlp"), "wo": P("mlp")}, "scale": None}
    assert derived.v_col == {"mlp": {"wi": P("embed"), "wo": P("embed")}, "scale": None}
    assert derived.v == {"mlp": {"wi": None, "wo": None}, "scale": P("embed")}


def test_nothing_else_is_guessed() -> None:
    """A vector that no parameter owns is replicated; rows of a square may be its columns."""
    state = optax.scale_by_lbfgs(memory_size=3).init(PARAMS)
    assert derive(state, AXES).weights_memory is None
    square = optax.scale_by_sm3().init({"w": jnp.ones((4, 4))})
    for params in (None, {"w": jnp.ones((4, 4))}):
        with pytest.raises(AxesError, match=r"mu/w/0 \(4,\)") as caught:
            derive(square, {"w": P("a", "b")}, params)
        assert ("Pass `params`" in str(caught.value)) == (params is None)


def test_masked_parameters() -> None:
    masked = {"mlp": optax.MaskedNode(), "scale": 0}
    assert derive_params(masked, AXES) == {"mlp": optax.MaskedNode(), "scale": P("embed")}
    assert derive_params(PARAMS, AXES) == AXES
