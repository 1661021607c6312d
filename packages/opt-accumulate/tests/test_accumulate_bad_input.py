"""One clear error that names the leaf or the argument, wherever bad input enters."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from opt_accumulate import (
    MultiSteps,
    Spike,
    accumulate_gradients,
    check_skips,
    guard,
    rollback,
    with_average,
)
from opt_accumulate.errors import BatchError, LossOutputError, OptionError, RollbackError

W = jnp.ones(3)
X = jnp.arange(12.0).reshape(4, 3)
KEY = jax.random.key(0)
SGD: Any = optax.sgd(0.1)
MESH = jax.make_mesh((1,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))


def deleted() -> jax.Array:
    array = jnp.ones((4, 3))
    array.delete()
    return array


def loss_fn(w: Any, batch: Any, temperature: Any = 1.0) -> tuple[jax.Array, jax.Array]:
    x = batch["x"] if isinstance(batch, dict) else batch
    return (x @ w).sum() / temperature, jnp.int32(x.shape[0])


def keyed(w: Any, batch: Any, rng: Any) -> tuple[jax.Array, jax.Array]:
    return loss_fn(w, batch)


def check(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"x": X, "bad": np.array(["a"] * 4)}, "numbers; found\n  bad: an array of dtype <U1"),
        ({"x": jax.ShapeDtypeStruct((4, 3), jnp.float32)}, "  x: a ShapeDtypeStruct"),
        ({"x": deleted()}, "  x: a deleted array (was it donated?)"),
        ({"x": X, "m": {"n": (1.0, jnp.float32(1), np.float32(0), True)}}, "none: m/n."),
        ({"x": X, "y": [np.ones(3)]}, "\n  x: 4 rows of (3,)\n  y/0: 3 rows of ()\n"),
        (jnp.ones((3, 3)), "has 3 rows, which do not divide into microbatches: `num_microbatches"),
    ],
)
def test_batches(batch: Any, words: str) -> None:
    vg = accumulate_gradients(loss_fn, num_microbatches=2)
    check(lambda: vg(W, batch), BatchError, words)


def test_lists_that_are_not_as_long_as_the_batch_are_scalars() -> None:
    batch = {"x": X, "two": [1.0, 2.0], "four": {"a": 1, "b": 2, "c": 3, "d": 4}}
    loss, _ = accumulate_gradients(loss_fn, num_microbatches=2)(W, batch)
    assert float(loss) == 16.5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "Give `num_microbatches` or `microbatch_size`, one of them: they are None and None."),
        ({"microbatch_size": 0}, "`microbatch_size` must be an integer of at least 1, found 0."),
        ({"num_microbatches": 2, "weights": "mean"}, "`weights` is 'mean'; it must be one of "),
        (
            {"num_microbatches": 2, "has_aux": True, "aux": {"a": {"b": "max"}, "c": "sum"}},
            "'concat', or a tree of them; it has\n  a/b: 'max'\n",
        ),
        (
            {"num_microbatches": 2, "mesh": MESH},
            "`data_axes` names 'data', but the mesh has the axes",
        ),
        ({"num_microbatches": 2, "skip_fn": 3}, "it must be one of None, 'non_finite'."),
    ],
)
def test_options(options: dict[str, Any], words: str) -> None:
    check(lambda: accumulate_gradients(loss_fn, **options), OptionError, words)


@pytest.mark.parametrize(
    ("output", "options", "words"),
    [
        (lambda w: w, {}, "must return (sum of losses, weight), not float32 of shape (). That is"),
        (
            lambda w: (w, 1),
            {"weights": "examples"},
            "not a tuple of shapes ((), ()). Does the loss function return (sum, weight)? Then",
        ),
        (lambda w: w, {"weights": lambda b: b}, "The weight that `weights` returns must be one r"),
        (
            lambda w: (w, {"x": jnp.ones(3), "y": w}),
            {"weights": "examples", "has_aux": True, "aux": "concat"},
            "but found\n  x: 'concat' of float32 of shape (3,)\n  y: 'concat' of float32 of",
        ),
    ],
)
def test_outputs(output: Callable[[Any], Any], options: dict[str, Any], words: str) -> None:
    vg = accumulate_gradients(lambda w, batch: output(w), num_microbatches=2, **options)
    check(lambda: vg(jnp.float32(1), jnp.ones(4)), LossOutputError, words)


SEEN = {"w": W, "seen": jnp.int32(0), "rng": {"key": KEY}}
CALLS: list[tuple[dict[str, Any], tuple[Any, ...], dict[str, Any], str]] = [
    ({"rng": True}, (W, X), {}, "rng=True)` needs a key: call the returned function"),
    ({}, (W, X), {"rng": KEY}, "A key `rng` was given, but `loss_fn` takes none"),
    ({}, (SEEN, X), {}, "found\n  rng/key: key<fry>\n  seen: int32\nPass "),
    ({"reduce": "deferred"}, (W, X), {}, "`reduce='deferred'` needs a mesh: give `mesh`, or"),
    (
        {"out_shardings": {"w": None}},
        (W, X),
        {},
        "or a tree like ., which may end above these; it h",
    ),
    ({"out_shardings": {"w": None}}, ({"w": W, "b": W}, X), {}, "above these; it has w."),
]


@pytest.mark.parametrize(("options", "args", "kwargs", "words"), CALLS)
def test_calls(options: Any, args: Any, kwargs: Any, words: str) -> None:
    function = keyed if options.get("rng") else loss_fn
    vg = accumulate_gradients(function, num_microbatches=2, **options)
    check(lambda: vg(*args, **kwargs), OptionError, words)


PARAMS = {"w": W, "b": jnp.zeros(())}
STEPS: Any = MultiSteps(SGD, 2)
STATE = STEPS.init(PARAMS)


def skipping(*answer: Any) -> Any:
    return MultiSteps(SGD, 2, should_skip_update_fn=lambda *_: answer).init(PARAMS)


def scheduled(value: Any) -> Any:
    return MultiSteps(SGD, lambda step: value).update(PARAMS, STATE, PARAMS)


def growing() -> Any:
    """An inner optimizer whose state becomes another one."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return updates, {"seen": jnp.ones(7)}

    inner = optax.GradientTransformation(lambda params: {"seen": jnp.ones(2)}, update)
    steps = MultiSteps(inner, 2)
    return steps.update(PARAMS, steps.init(PARAMS))


class Definition:
    """As those of opt-core, which this package does not need."""

    def init_state(self, params: Any) -> Any:
        raise NotImplementedError

    def apply_gradient(self, *args: Any) -> Any:
        raise NotImplementedError


GUARDED: Any = guard(SGD)
ROWS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: MultiSteps(SGD, 0), ValueError, "`every_k_schedule` must be an integer of at least 1"),
    (lambda: MultiSteps(SGD, True), OptionError, "must be an integer of at least 1, found True"),
    (lambda: scheduled("4"), TypeError, "`every_k_schedule` must return the number of"),
    (
        lambda: MultiSteps(SGD, 2, accumulator_dtype=jnp.float8_e4m3fn),
        ValueError,
        "`accumulator_dtype` must be a dtype of real",
    ),
    (lambda: skipping(1, ()), ValueError, "`should_skip_update_fn` must return a boolean scalar"),
    (lambda: skipping(True, (), ()), TypeError, "must return (skip, state), found "),
    (lambda: STEPS.init({"a": W, "b": deleted()}), TypeError, "it has\n  b: a deleted array (was"),
    (lambda: STEPS.apply(PARAMS, STATE, {"w": W}), ValueError, "b: expected a leaf, found none"),
    (
        lambda: STEPS.apply({**PARAMS, "w": jnp.ones(4)}, STATE, PARAMS),
        ValueError,
        "w: expected shape (3,), found (4,)",
    ),
    (
        lambda: STEPS.apply(PARAMS, PARAMS, STATE),
        TypeError,
        "`state` must be an `optax.MultiStepsState`, found dict. Mind the order: `update(grads, ",
    ),
    (growing, TypeError, "seen: expected shape (2,), found (7,)"),
    (lambda: with_average(SGD), OptionError, "`decay` is missing"),
    (lambda: with_average(SGD, 1.0), OptionError, "must be at least 0 and less than 1, found 1.0"),
    (lambda: with_average(SGD, 0.9, form="polyak"), OptionError, "neither `decay` nor `warmup`"),
    (
        lambda: with_average(SGD, 0.9, select={"other": True}).init(PARAMS),
        OptionError,
        "`select` must be one value for all, or a tree like b, w",
    ),
    (lambda: guard(SGD, loss=6.0), OptionError, "`loss` must be a `Spike` or None, found 6.0"),  # type: ignore[arg-type]
    (lambda: Spike(window=16), OptionError, "`warmup` must be at most `window`, 16, found 32"),
    (
        lambda: GUARDED.update(PARAMS, GUARDED.init(PARAMS), PARAMS),
        TypeError,
        "`update` needs the argument `loss`",
    ),
    (
        lambda: GUARDED.update(PARAMS, GUARDED.init(PARAMS), PARAMS, value=1.0),
        TypeError,
        "or build `guard(tx, loss=None)`. Passed are ['value']",
    ),
    (
        lambda: GUARDED.update(PARAMS, GUARDED.init(PARAMS), PARAMS, loss=jnp.ones(2)),
        ValueError,
        "`loss` must be a real scalar; found an array of shape (2,)",
    ),
    (
        lambda: guard(SGD, grad_norm=Spike(argument="value")),
        OptionError,
        "`grad_norm` is computed, not passed",
    ),
    (lambda: Spike(argument="the loss"), OptionError, "`argument` must be the name of a keyword"),
    (
        lambda: MultiSteps(Definition(), 2),
        TypeError,
        "an optimizer definition: give `opt_optax_bridge.as_transformation(...)` of it",
    ),
    (lambda: rollback().restore(), RollbackError, "no good state is held"),
    (lambda: check_skips(STATE, 3), OptionError, "nothing in `state` "),
]


@pytest.mark.parametrize(("call", "error", "words"), ROWS)
def test_windows_averages_guards_and_skips(
    call: Callable[[], Any], error: type[Exception], words: str
) -> None:
    check(call, error, words)
