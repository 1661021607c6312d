"""States and numbers that bridges must not take for something else."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_legacy_stax as ours
import optax
import pytest
from jax.sharding import PartitionSpec as P
from opt_legacy_stax import errors
from optax import contrib

ARGUMENTS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"mass": 0.5},
    "adagrad": {},
    "rmsprop_momentum": {},
    "adam": {},
    "sm3": {},
}


private: Any = vars(contrib)["differentially_private_aggregate"]  # not exported for mypy


def noisy(rate: float) -> ours.Optimizer:
    @ours.optimizer
    def make() -> Any:
        def update(i: Any, g: Any, state: Any) -> Any:
            x, key = state
            return x - rate * g * jax.random.uniform(key), jax.random.fold_in(key, i)

        return lambda x: (x, jax.random.key(0)), update, lambda state: state[0]

    return make()


def test_keys_in_states_stay_keys() -> None:
    triple, params = noisy(0.5), {"w": jnp.ones(2)}
    state = triple.update_fn(0, params, triple.init_fn(params))
    _, key = jax.tree.leaves(state)
    assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    moved: Any = triple.params_fn(state)
    tx: Any = ours.to_optax(triple)
    definition = ours.to_optimizer_def(triple)
    found, _ = tx.apply(params, tx.init(params), params)
    np.testing.assert_array_equal(found["w"], moved["w"])
    target = definition.create(params).apply_gradient(params).target
    np.testing.assert_array_equal(target["w"], moved["w"])
    other = ours.from_optax(private(1.0, 0.1, jax.random.key(1)))
    assert other.update_fn(0, {"w": jnp.ones((3, 2))}, other.init_fn(params))


@pytest.mark.parametrize("names", [("mu", "nu"), ("trace", "ema"), ("count", "sum_of_squares")])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_parameters_may_be_named_as_fields_of_optax(name: str, names: tuple[str, ...]) -> None:
    equivalent = ours.optax_equivalent(name, step_size=0.1, **ARGUMENTS[name])
    params = {key: jnp.arange(1.0, 4.0) + n for n, key in enumerate(names)}
    state = equivalent.triple.update_fn(0, params, equivalent.triple.init_fn(params))
    back, i = equivalent.convert_state_back(*equivalent.convert_state(state, 1))
    assert int(i) == 1
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("name", "other", "expected", "found"),
    [
        ("adam", ours.sgd(0.1), "(x, m, v)", "an array"),
        ("adam", ours.momentum(0.1, 0.9), "(x, m, v)", "a tuple of 2"),
        ("sgd", ours.adam(0.1), "(x)", "a tuple of 3"),
        ("sm3", ours.adam(0.1), "(x, m, vs, shape)", "a tuple of 3"),
    ],
)
def test_a_state_of_another_optimizer_is_refused(
    name: str, other: ours.Optimizer, expected: str, found: str
) -> None:
    equivalent = ours.optax_equivalent(name, step_size=0.1)
    with pytest.raises(errors.LayoutError) as caught:
        equivalent.convert_state(other.init_fn({"w": jnp.ones(2)}), 0)
    assert str(caught.value) == (
        f"`opt_state` is not a state of `{name}`, which keeps {expected}: for parameter `w` found "
        f"{found}. Pass a state of this optimizer; convert states of older JAX versions with "
        "`convert_old_layout`."
    )


def test_a_state_of_another_transformation_is_refused() -> None:
    equivalent = ours.optax_equivalent("adam", step_size=0.1)
    params = {"w": jnp.ones(2)}
    with pytest.raises(errors.LayoutError) as caught:
        equivalent.convert_state_back(params, optax.adam(0.1).init(params))
    assert str(caught.value) == (
        "`opt_state` is not a state of the equivalent of `adam`: expected (ScaleByAdamState, "
        "ScaleByScheduleState), found (ScaleByAdamState, EmptyState). Pass a state returned by "
        "`transformation` or `convert_state`."
    )
    for foreign in (None, optax.EmptyState(), {"w": 1}):
        with pytest.raises(errors.LayoutError, match="is not a state of the equivalent of `adam`"):
            equivalent.convert_state_back(params, foreign)
    for others in ({"v": jnp.ones(2)}, {"w": jnp.ones(3)}):
        with pytest.raises(errors.LayoutError, match="`opt_state` does not belong to `params`"):
            equivalent.convert_state_back(params, equivalent.transformation.init(others))


def test_between_two_updates_there_is_no_switch() -> None:
    equivalent = ours.optax_equivalent("sgd", step_size=0.1)
    state = equivalent.triple.init_fn(jnp.ones(2))
    with pytest.raises(errors.StepError) as caught:
        equivalent.convert_state(state, 2.5)
    assert str(caught.value) == "`i` must be a number of updates; got 2.5. Pass a whole number."


def run_both(equivalent: Any, params: Any, dtype: Any) -> tuple[Any, Any]:
    """The state of the triple after four updates; and after two, and two of Optax."""
    triple, tx = equivalent.triple, equivalent.transformation
    grads = [jnp.asarray(np.sin(np.arange(4.0) + i) * 3, dtype) for i in range(4)]
    update = jax.jit(triple.update_fn)

    @jax.jit
    def optax_step(params: Any, state: Any, g: Any) -> Any:
        updates, state = tx.update(g, state, params)
        return optax.apply_updates(params, updates), state

    state = triple.init_fn(params)
    for i in (0, 1):
        state = update(jnp.int32(i), grads[i], state)
    switched: Any = equivalent.convert_state(state, 2)
    for i in (2, 3):
        state = update(jnp.int32(i), grads[i], state)
        switched = optax_step(*switched, grads[i])
    back, i = equivalent.convert_state_back(*switched)
    assert int(i) == 4
    return state, back


@pytest.mark.parametrize(
    ("rate", "dtypes", "exact"),
    [
        (0.1, ("float32", "float32"), True),
        (0.1, ("bfloat16", "bfloat16"), True),
        (np.float32(0.1), ("float32", "float32"), True),
        (np.float32(0.1), ("bfloat16", "bfloat16"), False),
        (ours.exponential_decay(0.1, 3, 0.5), ("float32", "float32"), True),
        (ours.piecewise_constant([2], [0.1, 0.03]), ("float16", "float16"), False),
        (0.1, ("bfloat16", "float32"), False),
    ],
)
def test_exact_for_says_what_is_so(rate: Any, dtypes: tuple[str, str], exact: bool) -> None:
    dtype, grads_dtype = dtypes
    params = jnp.asarray(np.linspace(-1.7, 2, 4), dtype)
    for name, arguments in [("sgd", {}), ("nesterov", {"mass": 0.8})]:
        equivalent = ours.optax_equivalent(name, step_size=rate, **arguments)
        grads = jax.ShapeDtypeStruct((4,), grads_dtype)
        assert equivalent.is_exact_for(params, grads) == exact
        for mine, other in zip(
            *map(jax.tree.leaves, run_both(equivalent, params, grads_dtype)), strict=True
        ):
            assert mine.dtype == other.dtype == dtype  # the triple's, whatever Optax kept
            if exact:
                np.testing.assert_array_equal(mine, other)
    adam = ours.optax_equivalent("adam", step_size=0.1)
    assert not adam.is_exact_for(params)
    with jax.enable_x64(True):
        assert equivalent.is_exact_for(params, grads) == (exact and type(rate) is float)


def test_no_axis_twice() -> None:
    @ours.optimizer
    def full() -> Any:  # keeps a matrix of a vector
        return lambda x: (x, jnp.outer(x, x)), lambda i, g, s: (s[0] - g, s[1]), lambda s: s[0]

    definition = ours.to_optimizer_def(full())
    optimizer = definition.create({"b": jnp.ones(4)})
    axes = definition.derive_logical_axes(optimizer, {"b": P("a")})
    assert axes.state.param_states["b"][1] == P("a", None)
