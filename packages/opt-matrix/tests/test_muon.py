"""On one device Muon is Optax's: updates, state, and dimensions of every kind."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import PartitionSpec as P
from opt_matrix import (
    Dims,
    Matrices,
    muon,
    newton_schulz,
    plan_matrices,
    scale_by_muon,
    scale_by_normuon,
    scale_by_soap,
)
from opt_matrix.errors import OptionError, PlanError, UndecidedError

contrib: Any = optax.contrib
RNG = np.random.default_rng(1)
F32 = newton_schulz(dtype=None)


def array(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


PARAMS = {"b": array(6), "wi": array(8, 6), "wo": array(6, 8), "sq": array(7, 7)}
GRADS = [jax.tree.map(lambda x: array(*x.shape), PARAMS) for _ in range(10)]


def run(tx: Any, params: Any, grads: Any, state: Any = None) -> tuple[Any, Any]:
    state = tx.init(params) if state is None else state
    update = jax.jit(tx.update)
    for own in grads:
        updates, state = update(own, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"scale": "rms"}, {"consistent_rms": 0.2}),
        ({"nesterov": False, "momentum": 0.8}, {"nesterov": False, "beta": 0.8}),
        ({"orthogonalize": newton_schulz(5, "dion", None)}, {"ns_coeffs": "dion"}),
        (
            {"weight_decay": 0.1, "mu_dtype": "bfloat16"},
            {"weight_decay": 0.1, "mu_dtype": "bfloat16"},
        ),
    ],
)
def test_ten_steps_equal_optax(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    mine = muon(0.1, matrices=Matrices.by_rank2(), **{"orthogonalize": F32} | ours)
    found, state = run(mine, PARAMS, GRADS)
    expected, their_state = run(contrib.muon(0.1, **theirs), PARAMS, GRADS)
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, their_state)
    chex.assert_trees_all_close(state, their_state, rtol=1e-5, atol=1e-5)


def test_states_go_over_to_optax_and_back_in_the_middle() -> None:
    mine = muon(0.1, matrices=Matrices.by_rank2(), orthogonalize=F32)
    theirs = contrib.muon(0.1)
    expected, _ = run(theirs, PARAMS, GRADS[:6])
    params, state = run(mine, PARAMS, GRADS[:2])
    params, state = run(theirs, params, GRADS[2:4], state)
    params, state = run(mine, params, GRADS[4:6], state)
    chex.assert_trees_all_close(params, expected, rtol=1e-5, atol=1e-5)


def test_a_stack_of_no_layers_stays_as_it_is() -> None:
    params = {"w": array(0, 4, 6)}
    found, _ = run(muon(0.1, matrices=Matrices.by_path({"w": (1, 2)})), params, [params])
    chex.assert_trees_all_equal(found, params)


def one(dims: Any, x: jax.Array, **options: Any) -> jax.Array:
    options = {"orthogonalize": F32, "matrices": Matrices.by_path({"w": dims}), **options}
    tx = scale_by_muon(**options)
    updates: Any = jax.jit(tx.update)({"w": x}, tx.init({"w": x}))[0]
    found: jax.Array = updates["w"]
    return found


def of_matrix(x: jax.Array, scale: Any = "width") -> jax.Array:
    return one((0, 1), x, scale=scale)


@pytest.mark.sample(1)
@pytest.mark.parametrize("scale", ["width", "rms", "spectral"])
def test_stacks_heads_and_fused_matrices_equal_their_parts(scale: Any) -> None:
    stack = array(1, 2, 6, 8)
    each = [[of_matrix(matrix, scale) for matrix in stack[0]]]
    np.testing.assert_allclose(one((-2, -1), stack, scale=scale), each, atol=2e-5)

    heads = array(6, 2, 4)  # embed, heads, features
    joined = of_matrix(heads.reshape(6, 8), scale).reshape(6, 2, 4)
    np.testing.assert_allclose(one((0, (1, 2)), heads, scale=scale), joined, atol=2e-5)
    per_head = jnp.stack([of_matrix(heads[:, h], scale) for h in range(2)], axis=1)
    np.testing.assert_allclose(one((0, 2), heads, scale=scale), per_head, atol=2e-5)

    qkv = array(1, 6, 16)
    blocks = [
        jnp.concatenate([of_matrix(p, scale) for p in jnp.split(q, [8, 12], axis=1)], axis=1)
        for q in qkv
    ]
    fused = one(Dims((1,), (2,), split=(8, 4, 4)), qkv, scale=scale)
    np.testing.assert_allclose(fused, blocks, atol=2e-5)


def test_any_function_of_matrices() -> None:
    tx: Any = muon(
        1.0, matrices=Matrices.by_rank2(), orthogonalize=jnp.sign, momentum=0.0, nesterov=False
    )
    updates, state = jax.jit(tx.update)(PARAMS, tx.init(PARAMS), PARAMS)
    np.testing.assert_allclose(updates["sq"], -jnp.sign(PARAMS["sq"]))
    assert state.inner_states["muon"].inner_state[0].ns_coeffs.shape == (0, 3)


@pytest.mark.sample(1)
@pytest.mark.parametrize("is_planned", [False, True])
def test_momentum_at_run_time(is_planned: bool) -> None:
    params = {"w": PARAMS["wi"]}
    mesh = jax.make_mesh((1,), ("x",))
    plan = plan_matrices(params, P(), mesh, Matrices.by_rank2(), fn=F32) if is_planned else None
    options: Any = {"matrices": Matrices.by_rank2(), "orthogonalize": F32, "plan": plan}
    injected = optax.inject_hyperparams(muon, static_args=("orthogonalize", "nesterov", "plan"))
    tx = injected(learning_rate=0.1, **options)
    first, second = ({"w": own["wi"]} for own in GRADS[:2])
    update: Any = jax.jit(tx.update)
    _, state = update(first, tx.init(params), params)
    alone = jax.jit(muon(0.1, momentum=0.5, **options).update)
    expected, _ = alone(second, state.inner_state, params)
    state.hyperparams["momentum"] = jnp.asarray(0.5)
    found, _ = update(second, state, params)
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)


def test_bad_arguments() -> None:
    with pytest.raises(OptionError, match="`scale` must be one of"):
        scale_by_muon(scale="rows")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="`matrices` must say"):
        muon(0.1, matrices="kernel")  # type: ignore[arg-type]
    with pytest.raises(UndecidedError, match=r"these hold none.*\n  b"):
        scale_by_muon().init(PARAMS)
    with pytest.raises(UndecidedError, match="w: "):
        muon(0.1, matrices=Matrices.by_rank2()).init({"w": jnp.ones((2, 3, 4))})
    mesh = jax.make_mesh((1,), ("x",))
    plan = plan_matrices(PARAMS, P(), mesh, Matrices.by_rank2())
    with pytest.raises(OptionError, match="the plan was made for"):
        scale_by_muon(plan=plan, orthogonalize=F32)
    with pytest.raises(PlanError, match=r"the plan was made without these leaves: \['other'\]"):
        scale_by_muon(plan=plan).init({"other": jnp.ones((2, 3))})
    tx = scale_by_muon(plan=plan)
    other = {name: PARAMS[name] for name in ("wo", "sq")} | {"wi": jnp.ones((6, 8))}
    with pytest.raises(PlanError, match=r"wi: planned with the shape \(8, 6\), and is \(6, 8\)"):
        tx.update(other, tx.init(other))


@pytest.mark.parametrize("dtype", ["int32", "complex64"])
def test_other_numbers_than_real_ones_are_refused(dtype: str) -> None:
    with pytest.raises(OptionError, match=f"w: Muon is for real matrices, not {dtype}"):
        scale_by_muon().init({"w": jnp.ones((2, 3), dtype)})


@pytest.mark.sample(1)
@pytest.mark.parametrize("scale", [scale_by_normuon, scale_by_soap])
def test_vectors_are_not_passed_through_as_updates(scale: Any) -> None:
    mesh = jax.make_mesh((1,), ("x",))
    with pytest.raises(UndecidedError, match=r"these hold none.*\n  b"):
        scale(PARAMS, P(), mesh).init(PARAMS)
    matrices = {name: leaf for name, leaf in PARAMS.items() if name != "b"}
    assert scale(PARAMS, P(), mesh).plan.rest == ("b",)
    scale(PARAMS, P(), mesh).init(matrices)  # as below `optax.partition`
