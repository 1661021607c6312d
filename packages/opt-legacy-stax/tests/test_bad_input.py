"""States of something else, leaves that are no arrays: one error that says what and where."""

import functools
import io
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_legacy_stax as ours
import optax
import pytest
from jax.example_libraries import optimizers as theirs
from opt_legacy_stax import errors

PARAMS: Any = {"w": jnp.ones((2, 3)), "b": jnp.zeros(())}
GRADS = jax.tree.map(jnp.ones_like, PARAMS)
KEEPS = {"sgd": 1, "momentum": 2, "nesterov": 2, "rmsprop": 2, "adagrad": 3, "adam": 3}
KEEPS |= {"rmsprop_momentum": 3, "adamax": 3, "sm3": 4}


def triple_of(name: str, module: Any = ours) -> Any:
    rest = (0.9,) if name in ("momentum", "nesterov") else ()
    return getattr(module, name)(0.1, *rest)


@pytest.mark.parametrize("maker", KEEPS)
@pytest.mark.parametrize("module", [ours, theirs], ids=["ours", "jax"])
def test_states_of_optimizers_that_keep_more_or_less(maker: str, module: Any) -> None:
    """72 pairs; the names of the others are in files only."""
    state = triple_of(maker, module).init_fn(PARAMS)
    for name, count in KEEPS.items():
        triple = triple_of(name)
        if count == KEEPS[maker]:
            triple.params_fn(triple.update_fn(0, GRADS, state))
            continue
        words = rf"`opt_state` is not a state of `{name}`, which keeps .*: for parameter `b` found "
        functions: list[Callable[[], Any]] = [
            functools.partial(triple.update_fn, 0, GRADS, state),
            functools.partial(triple.params_fn, state),
            functools.partial(ours.to_optax(triple).convert_state, state, 0),
            functools.partial(ours.to_optimizer_def(triple).convert_state, state, 0),
        ]
        for function in functions:
            with pytest.raises(errors.LayoutError, match=words):
                function()


@pytest.mark.parametrize("state", [3, None, PARAMS, (1, 2, 3), ({}, {}, {})], ids=repr)
def test_what_is_not_a_state(state: Any) -> None:
    triple = ours.adam(0.1)
    from_optax = ours.from_optax(optax.adam(0.1))
    functions: list[Callable[[], Any]] = [
        lambda: triple.update_fn(0, GRADS, state),
        lambda: triple.params_fn(state),
        lambda: from_optax.update_fn(0, GRADS, state),
        lambda: from_optax.params_fn(state),
        lambda: ours.unpack_optimizer_state(state),
        lambda: ours.optax_equivalent("adam", step_size=0.1).convert_state(state, 0),
        lambda: ours.to_optax(triple).convert_state(state, 0),
        lambda: ours.to_optimizer_def(triple).convert_state(state, 0),
    ]
    for function in functions:
        with pytest.raises(errors.LayoutError, match="`opt_state` must be an OptimizerState; got"):
            function()
    with pytest.raises(errors.SaveError, match="`state` must be an OptimizerState; got"):
        ours.save(io.BytesIO(), state)
    with pytest.raises(TypeError, match="`like`"):
        ours.load(io.BytesIO(), like=state)


def test_a_state_of_a_triple_is_not_a_state_of_optax() -> None:
    triple = ours.from_optax(optax.adam(0.1))
    state = ours.adam(0.1).init_fn(PARAMS)
    for function in (triple.params_fn, triple.convert_state_back):
        with pytest.raises(errors.LayoutError, match="must be a state of a `from_optax` triple"):
            function(state)


def test_a_state_that_a_triple_of_ones_own_does_not_make() -> None:
    @ours.optimizer
    def pairs() -> Any:
        return lambda x: (x, jnp.zeros(3)), lambda i, g, s: s, lambda s: s[0]

    state = ours.momentum(0.1, 0.9).init_fn(PARAMS)
    words = (
        r"not a state of the triple: for parameter `b` expected .* with shapes "
        r"\[\(\), \(3,\)\], found"
    )
    for convert in (ours.to_optax, ours.to_optimizer_def):
        with pytest.raises(errors.LayoutError, match=words):
            convert(pairs()).convert_state(state, 0)
        convert(pairs()).convert_state(pairs().init_fn(PARAMS), 0)


@pytest.mark.parametrize(
    "grad",
    ["text", np.zeros((2, 3), jax.dtypes.float0), jnp.ones((4, 3)), np.array([None])],
    ids=["text", "float0", "shape", "object"],
)
@pytest.mark.parametrize("name", ["sgd", "adam", "sm3"])
def test_what_jax_refuses_is_noted_with_its_parameter(name: str, grad: Any) -> None:
    triple = triple_of(name)
    with pytest.raises((TypeError, ValueError)) as caught:
        triple.update_fn(0, {"w": grad, "b": jnp.ones(())}, triple.init_fn(PARAMS))
    assert "While computing the update of parameter `w`." in caught.value.__notes__


def test_parameters_that_are_not_arrays_are_named() -> None:
    for bad in ("text", np.array([None])):
        with pytest.raises(TypeError) as caught:
            ours.adam(0.1).init_fn({"layers": [1.0, bad]})
        assert "While computing the state of parameter `layers/1`." in caught.value.__notes__


@pytest.mark.parametrize(
    "wrong", [3, (1, 2), ours.adam, "adam"], ids=["3", "pair", "maker", "name"]
)
def test_what_is_not_a_triple(wrong: Any) -> None:
    for function in (ours.to_optax, ours.to_optimizer_def):
        with pytest.raises(TypeError, match="`triple` must be a triple") as caught:
            function(wrong)
        assert "name" not in str(caught.value).partition("; got")[0]
    with pytest.raises(TypeError, match="`tx` must be an Optax gradient transformation"):
        ours.from_optax(wrong)


def test_a_transformation_or_definition_stands_for_its_triple() -> None:
    triple = ours.momentum(0.1, 0.9)
    assert ours.to_optimizer_def(ours.to_optax(triple)).triple == triple  # type: ignore[arg-type]
    assert ours.to_optax(ours.to_optimizer_def(triple)).triple == triple  # type: ignore[arg-type]


@pytest.mark.parametrize("i", [-1, np.int32(-3), -1.0, jnp.int32(-1)])
def test_updates_are_not_less_than_none(i: Any) -> None:
    state = ours.adam(0.1).init_fn(PARAMS)
    for way in (ours.to_optax(ours.adam(0.1)), ours.to_optimizer_def(ours.adam(0.1))):
        with pytest.raises(errors.StepError, match=r"got -\d.*\. Pass 0 or more\."):
            way.convert_state(state, i)


@pytest.mark.parametrize("power", [1.0, 2, 0.5, -1.0])
def test_a_decay_over_no_steps_has_ended(power: Any) -> None:
    for schedule in (
        ours.polynomial_decay(0.1, 0, 0.02, power),
        jax.jit(ours.polynomial_decay(0.1, 0, 0.02, power)),
    ):
        for i in (0, 5):
            expected = np.inf if power < 0 else np.float32(0.02)
            assert float(schedule(i)) == expected
    exact = ours.polynomial_decay(0.1, 0, 0.02, power, upstream_numerics=True)
    np.testing.assert_array_equal(exact(0), theirs.polynomial_decay(0.1, 0, 0.02, power)(0))


def test_no_file_and_no_parameters() -> None:
    triple = ours.adam(0.1)
    state = triple.init_fn(PARAMS)
    for wrong in (None, 3):
        with pytest.raises(
            TypeError, match="`path_or_file` must be a path or a file object opened"
        ):
            ours.save(wrong, state)  # type: ignore[arg-type]
        with pytest.raises(
            TypeError, match="`path_or_file` must be a path or a file object opened"
        ):
            ours.load(wrong, like=state)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`load` with an `optimizer` also needs `params`, or a st"):
        ours.load(io.BytesIO(), optimizer=triple)
