"""The Optax face: the definition's numbers, Optax's own, and life inside other transformations."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import opt_adafactor as ada
import optax
import pytest
from adafactor_testing import largest_difference, normal, rule
from jax.sharding import PartitionSpec as P
from opt_adafactor import Adafactor, HParamMap
from opt_core.errors import TreeMismatchError

PARAMS = {"w": normal(1, (6, 4)), "b": normal(2, (3,)), "cube": normal(3, (4, 3, 5)), "s": 0.5}
PARAMS = jax.tree.map(jnp.float32, PARAMS)
RULES = HParamMap([("cube", rule("cbr")), ("", ada.HEURISTIC_RULE)])
SMALL: dict[str, Any] = {"min_dim_size_to_factor": 4}
FLAT = {"w": PARAMS["w"], "b": PARAMS["b"]}


def grads_at(t: int, params: Any = PARAMS) -> Any:
    return {k: normal(10 * t + i, p.shape, p.dtype) for i, (k, p) in enumerate(params.items())}


def run(tx: Any, params: Any = PARAMS, steps: int = 3) -> tuple[Any, Any]:
    state = tx.init(params)
    for t in range(steps):
        updates, state = tx.update(grads_at(t, params), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def run_definition(definition: Adafactor, params: Any = PARAMS, steps: int = 3) -> Any:
    optimizer = definition.create(params)
    for t in range(steps):
        optimizer = optimizer.apply_gradient(grads_at(t, params))
    return optimizer


OPTIONS: list[dict[str, Any]] = [
    {},
    {"beta1": 0.9, "dtype_momentum": jnp.bfloat16},
    {"weight_decay_rate": 0.1, "weight_decay_rate_lr_exponent": 1.0},
    {"global_norm_clip_threshold": 0.5, "max_parameter_scale": 0.5, "clipping_threshold": None},
    {"step_offset": 2, "decay_rate": 0.5, "epsilon1": 1e-3, "epsilon2": 0.1},
    {"multiply_by_parameter_scale": HParamMap([("b", False), ("", True)])},
    {"factored": False},
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "defaults")
def test_both_faces_have_the_same_numbers(options: dict[str, Any]) -> None:
    if options.get("factored", True):
        options = {**options, "factor_map": RULES}
    params, state = run(ada.adafactor(0.1, **SMALL, **options))
    optimizer = run_definition(Adafactor(0.1, **SMALL, **options))
    assert largest_difference(params, optimizer.target) < 2e-6
    for path, expected in optimizer.state.param_states.items():
        for slot in ("v_row", "v_col", "v", "m"):
            tree = getattr(state, slot)
            if tree is None:
                assert slot == "m"
                assert "beta1" not in options
            else:
                found, want = tree[path], getattr(expected, slot)
                assert found.dtype == want.dtype
                assert largest_difference(found, want) < 2e-6
    assert int(state.count) == 3


# Optax's own Adafactor, for rank 2 and less.

THEIRS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"beta1": 0.9}, {"momentum": 0.9}),
    ({"weight_decay_rate": 0.01}, {"weight_decay_rate": 0.01}),
    ({"multiply_by_parameter_scale": False}, {"multiply_by_parameter_scale": False}),
    ({"clipping_threshold": None}, {"clipping_threshold": None}),
    ({"factored": False}, {"factored": False}),
    ({"decay_rate": 0.5, "epsilon1": 1e-3}, {"decay_rate": 0.5, "eps": 1e-3}),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("ours", "theirs"), THEIRS, ids=lambda o: "-".join(o) or "defaults")
def test_optax_adafactor(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    params = {**FLAT, "square": normal(7, (5, 5))}
    found, _ = run(ada.adafactor(0.1, **SMALL, **ours), params)
    with jax.numpy_dtype_promotion("standard"):
        expected, _ = run(optax.adafactor(0.1, **SMALL, **theirs), params)
    assert largest_difference(found, expected) < 1e-6


def test_a_schedule_and_a_mask_as_optax_has_them() -> None:
    schedule = optax.linear_schedule(0.2, 0.05, 3)
    options: dict[str, Any] = {
        **SMALL,
        "weight_decay_rate": 0.1,
        "weight_decay_mask": lambda params: {k: k == "w" for k in params},
    }
    found, _ = run(ada.adafactor(schedule, **options), FLAT)
    with jax.numpy_dtype_promotion("standard"):
        expected, _ = run(optax.adafactor(schedule, **options), FLAT)
        assert largest_difference(found, expected) < 1e-6
        options["weight_decay_mask"] = {"a": True, "z": False}  # a prefix
        params = {"a": FLAT, "z": FLAT}
        found, expected = (
            tx.update(params, tx.init(params), params)[0]
            for tx in (ada.adafactor(0.1, **options), optax.adafactor(0.1, **options))
        )
    assert largest_difference(found, expected) < 1e-6


def test_scaling_alone_is_that_of_optax() -> None:
    ours = ada.scale_by_generalized_factored_rms(**SMALL)
    theirs = optax.scale_by_factored_rms(**SMALL)
    with jax.numpy_dtype_promotion("standard"):
        state: Any
        state, expected_state = ours.init(FLAT), theirs.init(FLAT)
        chex.assert_trees_all_equal(state, expected_state)
        for t in range(3):
            updates, state = ours.update(grads_at(t, FLAT), state, FLAT)
            expected, expected_state = theirs.update(grads_at(t, FLAT), expected_state, FLAT)
            assert largest_difference(updates, expected) < 1e-6
            # Either continues from the other's state.
            state, expected_state = expected_state, state
    assert isinstance(state, optax.FactoredState)


def test_rules_by_axis() -> None:
    axes = {"w": P("embed", "mlp"), "b": P("mlp"), "cube": P("mlp", "layers", "embed"), "s": P()}
    rules = ada.standard_logical_factor_rules()
    options: dict[str, Any] = {"logical_factor_rules": rules, "param_axes": axes}
    for tx in (ada.adafactor(0.1, **options), ada.scale_by_generalized_factored_rms(**options)):
        state: Any = tx.init(PARAMS)
        assert state.v_row["cube"].shape == (3, 5)
        assert state.v_col["cube"].shape == (4, 3)
    with pytest.raises(ValueError, match="`logical_factor_rules` is given without `param_axes`"):
        ada.adafactor(0.1, logical_factor_rules=rules)
    with pytest.raises(ValueError, match="`param_axes` is given without `logical_factor_rules`"):
        ada.scale_by_generalized_factored_rms(param_axes=axes)


# Inside other transformations.


def test_parameters_are_needed_and_gradients_must_look_like_them() -> None:
    for tx in (ada.adafactor(0.1), ada.scale_by_generalized_factored_rms()):
        state = tx.init(FLAT)
        with pytest.raises(ValueError, match=r"`params` is None: .*`update\(grads, state, params"):
            tx.update(FLAT, state)
        with pytest.raises(TreeMismatchError, match="`grads`"):
            tx.update({"w": FLAT["w"]}, state, FLAT)


@pytest.mark.sample(1)
@pytest.mark.parametrize("skip", [False, True])
def test_tensors_that_are_alike_are_traced_once(skip: bool) -> None:
    tx = ada.adafactor(0.1, min_dim_size_to_factor=8, skip_nan_updates=skip)
    lines = []
    for leaves in 6, 60:
        params = {f"w{i}": jnp.ones((8 + i % 3, 16)) for i in range(leaves)}
        lowered = jax.jit(tx.update).lower(params, jax.eval_shape(tx.init, params), params)
        text = lowered.as_text()
        assert text.count("stablehlo.rsqrt") == 2 * 3  # of rows and columns, for three shapes
        lines.append(len(text.splitlines()))
    assert lines[1] - lines[0] < (60 - 6) * 4
