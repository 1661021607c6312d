"""One clear error that names the leaf or the argument, wherever bad input enters."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from opt_accumulate import (
    MultiSteps,
    accumulate_gradients,
    any_of,
    check_skips,
    skip_not_finite,
    skip_outliers,
)
from opt_accumulate.errors import BatchError, LossOutputError, OptionError

W = jnp.ones(3)
X = jnp.arange(12.0).reshape(4, 3)


def deleted() -> jax.Array:
    array = jnp.ones((4, 3))
    array.delete()
    return array


def loss_fn(w: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    x = batch["x"] if isinstance(batch, dict) else batch
    return (x @ w).sum(), jnp.int32(x.shape[0])


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (
            {"x": X, "bad": np.array([None] * 4)},
            "arrays of numbers; found\n  bad: an array of",
        ),
        ({"x": X, "bad": np.array(["a"] * 4)}, "  bad: an array of dtype <U1"),
        ({"x": jax.ShapeDtypeStruct((4, 3), jnp.float32)}, "  x: a ShapeDtypeStruct"),
        ({"x": deleted()}, "  x: a deleted array (was it donated?)"),
        (
            {"x": X, "mask": [1, 1, 0, 1]},
            "a list of 4 numbers that have none: mask. If th",
        ),
        (
            {"x": X, "m": {"n": (1.0, jnp.float32(1), np.float32(0), True)}},
            "none: m/n.",
        ),
        ([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]], "found only scalars: 0/0, 0/1, 0/2, 1/0, 1/1, 1/2"),
        (jnp.zeros((0, 3)), "`batch` has 0 rows"),
    ],
    ids=["object", "text", "abstract", "deleted", "list", "tuple", "lists", "empty"],
)
def test_batches(batch: Any, words: str) -> None:
    with pytest.raises(BatchError) as error:
        accumulate_gradients(loss_fn, num_microbatches=2)(W, batch)
    assert words in str(error.value)


def test_lists_that_are_not_as_long_as_the_batch_are_scalars() -> None:
    batch = {"x": X, "two": [1.0, 2.0], "four": {"a": 1, "b": 2, "c": 3, "d": 4}}
    loss, _ = accumulate_gradients(loss_fn, num_microbatches=2)(W, batch)
    assert float(loss) == 16.5


@pytest.mark.parametrize(
    ("params", "words"),
    [({"a": W, "b": "float32"}, "b: a str"), ({"a": deleted()}, "a: a deleted array (was it don")],
)
def test_params(params: Any, words: str) -> None:
    functions: list[Callable[[], Any]] = [
        lambda: accumulate_gradients(loss_fn, num_microbatches=2)(params, X),
        lambda: MultiSteps(optax.sgd(0.1), 2).init(params),
    ]
    for function in functions:
        with pytest.raises((OptionError, TypeError), match=r"tree of arrays; it has\n  ") as error:
            function()
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("key", "found"),
    [
        (0, "int of shape ()"),
        ("key", "str of shape ()"),
        (jax.random.split(jax.random.key(0), 4), r"key<.*> of shape (4,)"),
        (jnp.zeros(2), "float32 of shape (2,)"),
        (jnp.zeros((4, 2), jnp.uint32), "uint32 of shape (4, 2)"),
    ],
)
def test_keys(key: Any, found: str) -> None:
    vg = accumulate_gradients(lambda w, x, k: loss_fn(w, x), num_microbatches=2, rng=True)
    pattern = re.escape(found).replace(r"\.\*", ".*")
    with pytest.raises(OptionError, match=f"`rng` must be one random key.*; it is {pattern}"):
        vg(W, X, rng=key)


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_keys_that_are_one(make: Callable[[int], Any]) -> None:
    vg = accumulate_gradients(lambda w, x, k: loss_fn(w, x), num_microbatches=2, rng=True)
    vg(W, X, rng=make(0))
    jax.vmap(lambda key: vg(W, X, rng=key))(jax.random.split(make(0), 3))


def test_auxiliary_outputs() -> None:
    def vg(aux: Any, rule: str) -> Any:
        fn = lambda w, x: (loss_fn(w, x), aux)  # noqa: E731
        return accumulate_gradients(fn, num_microbatches=2, has_aux=True, aux=rule)

    with pytest.raises(LossOutputError, match=r"`loss_fn` returned\n  a/0: a str"):
        vg({"a": ["text"]}, "stack")(W, X)
    for rule in ("sum", "mean"):
        with pytest.raises(LossOutputError, match=r"but found\n  a: key<.*>\nTake 'stack'"):
            vg({"a": jax.random.key(0)}, rule)(W, X)
    (_, keys), _ = vg({"a": jax.random.key(0)}, "stack")(W, X)
    assert keys["a"].shape == (2,)


PARAMS = {"w": jnp.ones(3), "b": jnp.zeros(())}
STEPS = MultiSteps(optax.sgd(0.1), 2)
STATE = STEPS.init(PARAMS)


@pytest.mark.parametrize(
    ("grads", "error", "words"),
    [
        ({"w": np.zeros(3, jax.dtypes.float0), "b": 1.0}, TypeError, "w: an array of dtype [('flo"),
        ({"w": W, "b": "text"}, TypeError, "b: a str"),
        ({"w": W, "b": None}, ValueError, "b: expected a leaf, found none"),
    ],
)
def test_gradients(grads: Any, error: type[Exception], words: str) -> None:
    functions: list[Callable[[], Any]] = [
        lambda: STEPS.update(grads, STATE, PARAMS),
        lambda: STEPS.apply(PARAMS, STATE, grads),
    ]
    for function in functions:
        with pytest.raises(error) as caught:
            function()
        assert words in str(caught.value)
        assert str(caught.value).startswith("`updates` ")


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"w": W}, "b: expected a leaf, found none"),
        ({"w": jnp.ones(4), "b": PARAMS["b"]}, "w: expected shape (3,), found (4,)"),
    ],
)
def test_params_of_another_tree(params: Any, words: str) -> None:
    functions: list[Callable[[], Any]] = [
        lambda: STEPS.apply(params, STATE, PARAMS),
        lambda: STEPS.flush(STATE, params),
    ]
    for function in functions:
        with pytest.raises(ValueError, match="`params` do not look like the accumulator") as error:
            function()
        assert words in str(error.value)


@pytest.mark.parametrize(("value", "found"), [(None, "NoneType"), ("4", "str"), ([4], "list")])
def test_schedules_that_return_no_number(value: Any, found: str) -> None:
    steps = MultiSteps(optax.sgd(0.1), lambda step: value)
    words = f"the function `every_k_schedule` must return a number, found {found}"
    with pytest.raises(TypeError, match=words):
        steps.update(PARAMS, steps.init(PARAMS), PARAMS)


def test_guards_and_states() -> None:
    for name in ("factor", "decay", "warmup"):
        arguments: Any = {"factor": 2.0, name: "x"}
        with pytest.raises(TypeError, match=f"`{name}` must be a number, found 'x'"):
            skip_outliers(**arguments)
    skip_outliers(jnp.float32(2), warmup=np.int64(3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"`state` must be an `optax\.MultiStepsState`, found int"):
        STEPS.has_updated(3)  # type: ignore[arg-type]
    guarded = MultiSteps(optax.sgd(0.1), 2, should_skip_update_fn=any_of(skip_not_finite))
    with pytest.raises(OptionError, match="`state` is being traced: `check_skips` reads numbers"):
        jax.jit(lambda state: check_skips(state, 1))(guarded.init(PARAMS))
