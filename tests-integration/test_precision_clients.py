"""opt-precision where transformations go: windows, guards, run-time numbers, NNX."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_nnx
import opt_optax_bridge as opt
import opt_precision as op
import optax
import pytest
from flax import nnx
from opt_accumulate import MultiSteps
from opt_core import MultiOptimizer, Optimizer, describe
from opt_precision.errors import OrderError


def wrapped(learning_rate: Any) -> Any:
    inner: Any = op.quantize_state(optax.adamw(learning_rate), op.dynamic8())
    return op.stochastic_weights(inner)


def params() -> dict[str, Any]:
    return {"kernel": (0.02 * jax.random.normal(jax.random.key(0), (64, 256))).astype(jnp.bfloat16)}


def grads(step: int) -> dict[str, Any]:
    return {"kernel": jax.random.normal(jax.random.key(step), (64, 256))}


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_hyper_parameters_at_run_time() -> None:
    definition = opt.wrap_optax_optimizer(wrapped)
    start: Optimizer = definition(1e-3).create(params())
    step: Any = jax.jit(lambda o, rate: o.apply_gradient(grads(0), learning_rate=rate))
    other: Optimizer = definition(0.1).create(params())
    other = jax.jit(lambda o: o.apply_gradient(grads(0)))(other)
    found = step(start, 0.1)
    structures: Any = jax.tree.structure(found.state), jax.tree.structure(start.state)
    assert structures[0] == structures[1]
    assert bits(found.target) == bits(other.target)
    assert bits(step(start, 1e-3).target) != bits(found.target)
    assert step._cache_size() == 1


PRECISIONS: dict[str, Any] = {
    "body": op.Precision(weights="stochastic", state=op.dynamic8()),
    "head": op.Precision(weights="kahan", state=op.bfloat16()),
    "rest": None,
}


def in_groups(precisions: Any, learning_rate: float = 1e-2) -> MultiOptimizer:
    plain = opt.adamw(learning_rate)
    rows = [
        (name, f"{name}/.*", plain if precision is None else plain.with_precision(precision))
        for name, precision in precisions.items()
    ]
    return MultiOptimizer.from_rules(rows)


def groups_of_params() -> dict[str, Any]:
    return {name: params() for name in PRECISIONS}


def groups_of_grads(step: int) -> dict[str, Any]:
    return {name: grads(step) for name in PRECISIONS}


def test_each_group_has_a_precision() -> None:
    optimizer: Optimizer = in_groups(PRECISIONS).create(groups_of_params())
    by_hand: dict[str, Any] = {
        "body": op.stochastic_weights(op.quantize_state(optax.adamw(0.1), op.dynamic8())),
        "head": op.master_weights(
            op.quantize_state(optax.adamw(0.1), op.bfloat16()), storage="kahan"
        ),
        "rest": optax.adamw(0.1),
    }
    rows = [(name, f"{name}/.*", opt.OptaxWrapper(tx)) for name, tx in by_hand.items()]
    expected: Optimizer = MultiOptimizer.from_rules(rows).create(groups_of_params())
    step: Any = jax.jit(lambda o, g, rate: o.apply_gradient(g, learning_rate=rate))
    plain: Any = jax.jit(lambda o, g: o.apply_gradient(g))
    for number in range(2):
        optimizer = step(optimizer, groups_of_grads(number), 0.1)
        expected = plain(expected, groups_of_grads(number))
    assert step._cache_size() == 1
    assert bits(optimizer.target) == bits(expected.target)
    assert bits(optimizer.state) == bits(expected.state)
    assert [row.precision for row in describe(optimizer).rows] == [
        "stochastic weights, dynamic8 state",
        "kahan weights, bfloat16 state",
        "",
    ]


@pytest.mark.slow
def test_groups_that_are_alike_do_not_share_noise() -> None:
    both = dict.fromkeys(("body", "head"), PRECISIONS["body"])
    optimizer: Optimizer = in_groups(both).create({name: params() for name in both})
    optimizer = optimizer.apply_gradient({name: grads(0) for name in both})
    one, other = (np.asarray(optimizer.target[name]["kernel"], np.float32) for name in both)
    assert 0 < np.count_nonzero(one != other) < one.size
    np.testing.assert_allclose(one, other, rtol=2**-7)


def test_windows_belong_outside() -> None:
    with pytest.raises(OrderError, match="`quantize_state` is around `MultiSteps`"):
        op.quantize_state(MultiSteps(optax.adam(1e-3), 2), op.dynamic8())


@pytest.mark.parametrize("weights", ["stochastic", "remainder8"])
def test_nnx_optimizers(weights: Any) -> None:
    """Flax's makes the same steps as ours."""
    x = jax.random.normal(jax.random.key(1), (8, 64))
    precision = op.Precision(weights=weights, state=op.dynamic8())

    @nnx.jit
    def step(model: Any, optimizer: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    def trained(make: Any) -> tuple[list[float], Any]:
        model = nnx.Linear(64, 256, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        optimizer = make(model, precision(optax.adamw(1e-2)), wrt=nnx.Param)
        losses = [float(step(model, optimizer)) for _ in range(20)]
        assert model.kernel[...].dtype == jnp.bfloat16
        assert "uint8" in {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(optimizer))}
        return losses, nnx.state(model, nnx.Param)

    ours, theirs = trained(opt_nnx.Optimizer), trained(nnx.Optimizer)
    assert ours[0] == theirs[0]
    assert bits(ours[1]) == bits(theirs[1])
    assert ours[0][-1] < 0.5 * ours[0][0]


def test_codes_are_sharded_in_flax_as_the_parameter_is_and_scales_are_not_cut() -> None:
    kernel_init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "x"))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        model = nnx.Linear(64, 256, kernel_init=kernel_init, rngs=nnx.Rngs(0))
        tx = op.quantize_state(optax.adamw(1e-2), op.dynamic8())
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        step = nnx.jit(lambda m, o: o.update(m, nnx.state(m, nnx.Param)))
        for _ in range(2):
            step(model, optimizer)
        mu = optimizer.opt_state.inner[0].mu["kernel"]
        assert isinstance(mu, op.Encoded)
        specs = nnx.get_partition_spec((mu.codes, mu.scale))
    assert [tuple(spec) for spec in jax.tree.leaves(specs)] == [(None, "x"), ()]
    assert mu.codes[...].addressable_shards[0].data.shape == (64, 128)


def test_named_arrays_on_a_mesh_are_refused() -> None:
    named = jax.tree_util.register_dataclass(
        dataclasses.make_dataclass("NamedArray", ["array", "axes"]), ["array"], ["axes"]
    )
    params = {"w": named(jnp.ones((64, 64)), ("embed", "mlp"))}
    tx = op.quantize_state(optax.adam(0.1), op.dynamic8())
    tx.init(params)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh), pytest.raises(op.errors.PrecisionError, match="`for_named_arrays"):
        tx.init(params)
