"""The definition: T5X's own cases, values, overrides, containers."""

import pickle
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import opt_adafactor
import pytest
from adafactor_testing import apply_compiled, largest_difference, normal, rule
from opt_adafactor import Adafactor, HParamMap
from opt_core import Optimizer
from opt_core.errors import HyperParamError, RestoreError, TreeMismatchError

PARAMS = {"w": normal(1, (6, 4)), "b": normal(2, (3,))}
GRADS = {"w": normal(3, (6, 4)), "b": normal(4, (3,))}


def run(definition: Adafactor, steps: int = 3, **overrides: Any) -> Optimizer:
    optimizer = definition.create(PARAMS)
    for t in range(steps):
        optimizer = optimizer.apply_gradient(grads_at(t), **overrides)
    return optimizer


def grads_at(t: Any) -> Any:
    """The gradients of a step: each larger than the last, so that decays tell."""
    return jax.tree.map(lambda g: g * jnp.asarray(t + 1).astype(g.dtype), GRADS)


def test_definitions_are_values() -> None:
    def build(**changes: Any) -> Adafactor:
        rules = HParamMap([("w", rule("rc")), ("b", None)])
        return Adafactor(0.1, factor_map=rules, logical_factor_rules={"x": "row"}, **changes)

    a, b = build(), build()
    assert a == b
    assert hash(a) == hash(b)
    assert a != build(beta1=0.0)
    assert a != build(dtype_momentum=jnp.bfloat16)
    axes = a.with_param_axes({"w": ("x", "x")})
    assert a != axes
    for definition in (a, axes):
        twin = pickle.loads(pickle.dumps(definition))
        assert twin == definition
        assert hash(twin) == hash(definition)


def test_everything_is_traceable() -> None:
    definition = Adafactor(0.1)
    abstract = jax.eval_shape(definition.create, PARAMS)
    concrete = definition.create(PARAMS)
    chex.assert_trees_all_equal_shapes_and_dtypes(abstract, concrete)
    assert definition.init_state(abstract.target).param_states["w"].v.shape == (6, 4)

    def body(optimizer: Optimizer, t: Any) -> tuple[Optimizer, None]:
        return optimizer.apply_gradient(grads_at(t)), None

    scanned, _ = jax.lax.scan(body, concrete, jnp.arange(3))
    assert largest_difference(scanned.target, run(definition).target) < 1e-6
    many = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), (PARAMS, GRADS))

    def one(params: Any, grads: Any) -> Any:
        return definition.create(params).apply_gradient(grads).target

    mapped = jax.jit(jax.vmap(one))(*many)
    assert largest_difference(jax.tree.map(lambda x: x[0], mapped), one(PARAMS, GRADS)) < 1e-6


# Overrides.

# What the definition has, and what one step gets.
OVERRIDES: dict[str, tuple[Any, Any]] = {
    "learning_rate": (0.1, 0.05),
    "beta1": (0.9, 0.5),
    "decay_rate": (0.8, 0.5),
    "step_offset": (0, 2),
    "clipping_threshold": (1.0, 0.2),
    "weight_decay_rate": (0.01, 0.1),
    "epsilon1": (0.01, 0.1),
    "epsilon2": (1e-3, 3.0),
    "weight_decay_rate_lr_exponent": (1.0, 2.0),
    "global_norm_clip_threshold": (0.0, 0.5),
    "max_parameter_scale": (9.0, 0.1),
    "multiply_by_parameter_scale": (True, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OVERRIDES)
def test_overrides_traced_or_not_are_as_good_as_arguments(name: str) -> None:
    options = {name: own for name, (own, _) in OVERRIDES.items()}
    other = OVERRIDES[name][1]
    overridden = Adafactor(**options)
    expected = run(Adafactor(**{**options, name: other}), steps=2)
    assert largest_difference(run(overridden, 2).target, expected.target) > 1e-4
    traced = overridden.create(PARAMS)
    dtypes = {int: jnp.int32, float: jnp.float32}
    given = {**options, name: other}
    is_scaled = {"multiply_by_parameter_scale": given.pop("multiply_by_parameter_scale")}
    values = {k: jnp.asarray(v, dtypes[type(v)]) for k, v in given.items()}
    for t in range(2):
        step = jax.jit(lambda o, g, v: o.apply_gradient(g, **v, **is_scaled))
        traced = step(traced, grads_at(t), values)
    for found in (run(overridden, 2, **{name: other}), traced):
        assert largest_difference(found.target, expected.target) < 1e-6
        assert largest_difference(found.state, expected.state) < 1e-6


def test_learning_rate_as_a_function_of_the_step() -> None:
    scheduled = run(Adafactor(lambda step: 0.1 / (step.astype(jnp.float32) + 1.0)))
    optimizer = Adafactor().create(PARAMS)
    for t in range(3):
        optimizer = optimizer.apply_gradient(grads_at(t), learning_rate=0.1 / (t + 1))
    assert largest_difference(scheduled.target, optimizer.target) < 1e-6


@pytest.mark.parametrize(
    ("name", "value"),
    [("factored", False), ("min_dim_size_to_factor", 2), ("factor_map", HParamMap([]))],
)
def test_what_shapes_the_state_cannot_be_overridden(name: str, value: Any) -> None:
    override = {name: value}
    optimizer = Adafactor(0.1).create(PARAMS)
    with pytest.raises(HyperParamError, match=f"`{name}` cannot be overridden for one step"):
        optimizer.apply_gradient(GRADS, **override)
    hyper_params = optimizer.optimizer_def.hyper_params.replace(**override)
    with pytest.raises(HyperParamError, match=f"`{name}` cannot"):
        optimizer.apply_gradient(GRADS, hyper_params=hyper_params)


def test_momentum_is_not_switched_by_an_override() -> None:
    without, with_ = Adafactor(0.1).create(PARAMS), Adafactor(0.1, beta1=0.9).create(PARAMS)
    with pytest.raises(HyperParamError, match=r"`beta1`: the definition has no momentum"):
        without.apply_gradient(GRADS, beta1=0.9)
    with pytest.raises(HyperParamError, match=r"has momentum.*off.*override `beta1=0.0`"):
        with_.apply_gradient(GRADS, beta1=None)


def test_unknown_and_missing_hyper_params() -> None:
    optimizer = Adafactor().create(PARAMS)
    with pytest.raises(HyperParamError, match=r"`lr`; this optimizer has `learning_rate`"):
        optimizer.apply_gradient(GRADS, lr=0.1)
    with pytest.raises(HyperParamError, match=r"no `learning_rate`: pass one to the definition"):
        optimizer.apply_gradient(GRADS)


# Defects of T5X that this does not have.


def test_a_step_before_the_offset_is_a_first_step() -> None:
    offset = run(Adafactor(0.1, step_offset=1_000_000, min_dim_size_to_factor=4), steps=1)
    plain = run(Adafactor(0.1, min_dim_size_to_factor=4), steps=1)
    chex.assert_trees_all_equal(offset.target, plain.target)
    chex.assert_trees_all_equal(offset.state, plain.state)
    chex.assert_tree_all_finite(run(Adafactor(0.1, step_offset=2), steps=4))


def test_the_last_step_of_int32_has_the_decay_of_a_late_step() -> None:
    optimizer = Adafactor(0.1).create(PARAMS)
    late = optimizer.replace(state=optimizer.state.replace(step=jnp.int32(2**31 - 1)))
    v = late.apply_gradient(GRADS).state.param_states["w"].v
    assert float(v.max()) < 1e-5  # next to nothing of the new gradient


def test_no_weight_decay_is_none_and_zero_is_zero() -> None:
    plain = run(Adafactor(0.1)).target
    zero = run(Adafactor(0.1, weight_decay_rate=0.0, weight_decay_rate_lr_exponent=2.0)).target
    chex.assert_trees_all_equal(zero, plain)  # T5X takes 0.0 for 1.0 here
    constant = run(Adafactor(0.1, weight_decay_rate=0.1)).target
    power = run(Adafactor(0.1, weight_decay_rate=0.1, weight_decay_rate_lr_exponent=0.0)).target
    assert largest_difference(power, constant) < 1e-6
    with pytest.raises(ValueError, match=r"`weight_decay_rate_lr_exponent` 0 without"):
        Adafactor(0.1, weight_decay_rate_lr_exponent=0.0)


def test_weight_decay_on_parameters_of_every_dtype() -> None:
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        p = jnp.asarray([1.0, -2.0, 4.0], dtype)
        optimizer = Adafactor(0.0, weight_decay_rate=0.25, beta1=0.5).create(p)
        optimizer = optimizer.apply_gradient(p)
        assert optimizer.target.dtype == dtype
        assert optimizer.target.tolist() == [0.75, -1.5, 3.0]


def test_a_parameter_of_one_entry_is_not_a_placeholder() -> None:
    optimizer = Adafactor(0.1).create({"gate": jnp.full((1,), 2.0)})
    optimizer = optimizer.apply_gradient({"gate": jnp.ones((1,))})
    assert optimizer.state.param_states["gate"].v.tolist() == [1.0]
    assert optimizer.target["gate"].tolist() == pytest.approx([1.8])


def test_gradients_and_states_must_look_like_the_parameters() -> None:
    optimizer = Adafactor(0.1).create(PARAMS)
    with pytest.raises(TreeMismatchError, match=r"`grads`.*\n.*b: expected an array of shape"):
        optimizer.apply_gradient({"w": GRADS["w"]})
    broken = optimizer.replace(state=optimizer.state.replace(param_states={"w": 1.0}))
    with pytest.raises(TreeMismatchError, match="`param_states` do not have the tree structure"):
        broken.apply_gradient(GRADS)
    small = Adafactor(0.1, min_dim_size_to_factor=2).create(PARAMS)
    with pytest.raises(TreeMismatchError, match=r"w: expected `v_row` of shape \(4,\), found \(1,"):
        small.replace(state=optimizer.state).apply_gradient(GRADS)
    with pytest.raises(RestoreError, match="state/param_states/w/v_row: shape: expected"):
        optimizer.restore_state(small.state_dict())


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"beta1": True}, TypeError, "`beta1` must be a number or None, found True"),
        ({"clipping_threshold": 0.0}, ValueError, "`clipping_threshold` must be positive"),
        ({"skip_nan_updates": "all"}, ValueError, "`skip_nan_updates` must be False, or True"),
        (
            {"dtype_momentum": jnp.int8},
            TypeError,
            "`dtype_momentum` must be a floating-point dtype",
        ),
        ({"factor_map": {"a": None}}, TypeError, "`factor_map` must be.*found dict"),
    ],
)
def test_arguments_are_checked(options: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        Adafactor(**options)
    with pytest.raises(error, match=words):
        opt_adafactor.adafactor(**options)


def test_under_64_bit_mode_states_stay_in_float32() -> None:
    enable_x64: Any = jax.enable_x64
    with enable_x64(True):
        params = {"w": jnp.asarray(np.ones((6, 4))), "s": jnp.float32(1.0)}
        optimizer = Adafactor(0.1, beta1=0.9, min_dim_size_to_factor=4).create(params)
        stepped = apply_compiled(optimizer, params)
        assert stepped.target["w"].dtype == jnp.float64
        dtypes = {x.dtype.name for x in jax.tree.leaves(stepped.state)}
        assert dtypes == {"float32", "int32"}
        chex.assert_trees_all_equal_shapes_and_dtypes(optimizer, stepped)
