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


def test_what_t5x_fails_on() -> None:
    """zero_nans, MultiSteps with a skip function, in masked; states not called `...State`."""
    masked = optax.masked(
        optax.MultiSteps(  # type: ignore[arg-type]
            optax.chain(optax.zero_nans(), optax.apply_every(2)),
            2,
            should_skip_update_fn=optax.skip_not_finite,
        ),
        {"mlp": True, "scale": False},
    )
    state: Any = derive(masked.init(PARAMS), AXES).inner_state
    below = {"mlp": AXES["mlp"], "scale": optax.MaskedNode()}
    assert state.acc_grads == below
    assert state.skip_state == {"num_not_finite": None, "should_skip": None}
    zero_nans, apply_every = state.inner_opt_state
    assert zero_nans.found_nan == {"mlp": {"wi": None, "wo": None}, "scale": optax.MaskedNode()}
    assert apply_every.grad_acc == below


def test_other_shapes_are_not_guessed() -> None:
    """A vector that no parameter owns is replicated; rows of a parameter need its `init`."""
    memory: Any = optax.scale_by_lbfgs(memory_size=3).init(PARAMS)
    with pytest.raises(AxesError, match=r"diff_params_memory/mlp/wi \(3, 8, 6\)"):
        derive(memory, AXES)
    assert derive(memory.weights_memory, AXES) is None
    factored = optax.scale_by_factored_rms(min_dim_size_to_factor=2).init(PARAMS)
    with pytest.raises(AxesError, match=r"v_row/mlp/wi \(6,\)(.*\n)*Use `derive_logical_axes`"):
        derive(factored, AXES)
    ranks = {"mu": {"w": jnp.ones((2, 6))}, "project": {"w": jnp.ones((8, 2))}}
    with pytest.raises(AxesError, match=r"project/w \(8, 2\)"):
        derive(ranks, {"w": P("a", "b")})
    with pytest.raises(AxesError, match=r"w: the name of a dimension must be a string"):
        derive(ranks, {"w": P(1, 2)})


def test_masked_parameters() -> None:
    masked = {"mlp": optax.MaskedNode(), "scale": 0}
    assert derive_params(masked, AXES) == {"mlp": optax.MaskedNode(), "scale": P("embed")}
    assert derive_params(PARAMS, AXES) == AXES
