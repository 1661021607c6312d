"""Gradients over microbatches against those of the whole batch at once."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from opt_accumulate import accumulate_gradients
from opt_accumulate.errors import BatchError

ROWS = 12
FLOAT32_EPS = float(np.finfo(np.float32).eps)

Tree = Any


@pytest.fixture(autouse=True)
def _strict_promotion() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"):
        yield


def make_params() -> Tree:
    w = np.random.RandomState(0).randint(-2, 3, (3, 2))
    return {"w": jnp.asarray(w, jnp.float32), "b": jnp.asarray([1.0, -2.0], jnp.float32)}


def make_batch(mask: np.ndarray[Any, Any] | None = None, rows: int = ROWS) -> Tree:
    """Small whole numbers: every sum of them is exact in float32, in whatever order."""
    random = np.random.RandomState(1)
    mask = random.randint(0, 2, (rows, 2)) if mask is None else mask
    return {
        "x": jnp.asarray(random.randint(-3, 4, (rows, 3)), jnp.float32),
        "mask": jnp.asarray(mask, jnp.float32),
    }


def token_losses(params: Tree, batch: Tree) -> jax.Array:
    out: jax.Array = jnp.square(batch["x"] @ params["w"] + params["b"])
    return out


def loss_sum(params: Tree, batch: Tree) -> tuple[jax.Array, jax.Array]:
    losses = token_losses(params, batch) * batch["mask"]
    return losses.sum(), batch["mask"].sum().astype(jnp.int32)


def whole_batch(params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
    """JAX's own gradient of total loss / total weight; the division comes last, as in ours."""
    weight = loss_sum(params, batch)[1].astype(jnp.float32)
    loss, grads = jax.value_and_grad(lambda p: loss_sum(p, batch)[0])(params)
    return loss / weight, jax.tree.map(lambda g: g / weight, grads)


def mean_over_tokens(params: Tree, batch: Tree) -> jax.Array:
    total, weight = loss_sum(params, batch)
    return total / weight.astype(jnp.float32)


def masked_tokens(batch: Tree) -> jax.Array:
    out: jax.Array = batch["mask"].sum().astype(jnp.int32)
    return out


def assert_equal(a: Tree, b: Tree) -> None:
    chex.assert_trees_all_equal(a, b)
    chex.assert_trees_all_equal_dtypes(a, b)


# Weights.


@functools.cache
def in_microbatches(size: int) -> Any:
    return jax.jit(accumulate_gradients(loss_sum, microbatch_size=size))


@hypothesis.given(
    mask=st.lists(st.booleans(), min_size=2 * ROWS, max_size=2 * ROWS).filter(any),
    size=st.integers(1, ROWS),
)
@hypothesis.settings(max_examples=8, deadline=None)
def test_ragged_masks_give_the_gradient_of_the_whole_batch_bit_for_bit(
    mask: list[bool], size: int
) -> None:
    params, batch = make_params(), make_batch(np.reshape(mask, (ROWS, 2)))
    with jax.numpy_dtype_promotion("strict"):
        assert_equal(in_microbatches(size)(params, batch), whole_batch(params, batch))


@pytest.mark.sample(1)
@pytest.mark.parametrize("reduce", ["auto", "deferred"])
@pytest.mark.parametrize("options", [{"num_microbatches": 5}, {"num_microbatches": 16}])
def test_rows_that_do_not_divide_are_padded_with_rows_of_weight_zero(
    options: Any, reduce: Any
) -> None:
    """In any form that a weight may have; keys of rows, scalars and outputs of rows among them."""
    params, batch = make_params(), make_batch()
    keys = jax.random.split(jax.random.key(1), ROWS)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def with_outputs(params: Tree, batch: Tree) -> Any:
        losses = token_losses(params, batch["inner"]).sum(-1)
        return loss_sum(params, batch["inner"]), {"losses": losses, "key": batch["key"]}

    vg = accumulate_gradients(
        with_outputs, has_aux=True, aux="concat", reduce=reduce, mesh=mesh, **options
    )
    (loss, aux), grads = jax.jit(vg)(params, {"inner": batch, "key": keys, "scalar": 3})
    assert_equal((loss, grads), whole_batch(params, batch))
    np.testing.assert_array_equal(aux["losses"], token_losses(params, batch).sum(-1))
    assert (aux["key"] == keys).all()
    of_mean = accumulate_gradients(
        mean_over_tokens, weights=masked_tokens, reduce=reduce, mesh=mesh, **options
    )
    chex.assert_trees_all_close(of_mean(params, batch), whole_batch(params, batch), rtol=1e-6)


def test_padding_that_counts_is_an_error_or_nan() -> None:
    params, batch = make_params(), make_batch()

    def every_row(params: Tree, batch: Tree) -> tuple[jax.Array, jax.Array]:
        losses = token_losses(params, batch)
        return losses.sum(), jnp.int32(losses.size)

    def odd_mask(params: Tree, batch: Tree) -> tuple[jax.Array, jax.Array]:
        mask = batch["mask"] != 7  # of rows of zeros, too
        return jnp.where(mask, token_losses(params, batch), 0.0).sum(), mask.sum()

    rules: list[tuple[Any, Any]] = [(every_row, "returned")]
    rules += [(mean_over_tokens, rule) for rule in ("examples", "mean_of_means", lambda batch: 3)]
    for loss_fn, rule in rules:
        vg = accumulate_gradients(loss_fn, microbatch_size=5, weights=rule)
        words = (
            "`microbatch_size` is 5. Rows of padding would count.* Take one of 1, 2, 3, 4, 6, 12;"
        )
        with pytest.raises(BatchError, match=words):
            vg(params, batch)

    def not_masked(params: Tree, batch: Tree) -> tuple[jax.Array, jax.Array]:
        losses = token_losses(params, batch)
        return losses.sum(), batch["mask"].sum()

    for loss_fn in (odd_mask, not_masked):
        vg = accumulate_gradients(loss_fn, microbatch_size=5, with_metrics=True)
        (loss, metrics), grads = jax.jit(vg)(params, batch)
        assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves((loss, grads, metrics.weight)))
        divided = jax.jit(accumulate_gradients(loss_fn, microbatch_size=4))
        assert not np.isnan(divided(params, batch)[0])


@pytest.mark.parametrize("fn", [loss_sum, mean_over_tokens])
def test_no_weight_at_all_gives_zeros_and_says_so(fn: Callable[..., Any]) -> None:
    params, batch = make_params(), make_batch(np.zeros((ROWS, 2)))
    rule: Any = "returned" if fn is loss_sum else masked_tokens
    vg = accumulate_gradients(fn, num_microbatches=3, weights=rule, with_metrics=True)
    (loss, metrics), grads = jax.jit(vg)(params, batch)
    assert_equal((loss, grads), (jnp.float32(0), jax.tree.map(jnp.zeros_like, params)))
    assert (int(metrics.weight), metrics.weights.tolist()) == (0, [0, 0, 0])
    assert not metrics.skipped.any()


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32])
def test_counts_that_int32_does_not_hold_together_do_not_wrap(dtype: Any) -> None:
    count = 600_000_000

    def loss_fn(w: jax.Array, x: jax.Array) -> Any:
        return (w * x.mean() * jnp.float32(count), jnp.asarray(count, dtype)), x.mean()

    vg = accumulate_gradients(
        loss_fn, num_microbatches=8, has_aux=True, aux="mean", with_metrics=True
    )
    (loss, aux, metrics), grad = jax.jit(vg)(jnp.float32(2), jnp.arange(8.0))
    np.testing.assert_allclose((loss, grad, aux), (7.0, 3.5, 3.5), rtol=1e-6)
    np.testing.assert_allclose(metrics.weight, 8.0 * count, rtol=1e-6)
    assert (metrics.weight.dtype, metrics.weights.dtype) == (jnp.float32, dtype)


def test_no_gradient_flows_through_weights() -> None:
    def loss_fn(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (w * x).sum(), (w * x).sum()

    _, grad = accumulate_gradients(loss_fn, num_microbatches=2)(jnp.float32(2), jnp.ones(4))
    assert float(grad) == 4 / 8  # by the quotient rule it would be 0


# Auxiliary outputs and metrics.


def loss_and_aux(params: Tree, batch: Tree) -> tuple[Any, Tree]:
    losses = token_losses(params, batch)
    aux = {
        "losses": losses,
        "tokens": {"kept": masked_tokens(batch), "any": batch["mask"].any()},
        "mean": jax.lax.stop_gradient(losses[:, 0]).mean().astype(jnp.bfloat16),
        "none": None,
    }
    return loss_sum(params, batch), aux


def test_auxiliary_outputs_by_a_tree_of_rules() -> None:
    params, batch = make_params(), make_batch()
    rules = {"losses": "concat", "tokens": "sum", "mean": "mean", "none": None}
    vg = accumulate_gradients(loss_and_aux, microbatch_size=5, has_aux=True, aux=rules)
    (_, aux), _ = jax.jit(vg)(params, batch)
    losses, tokens = token_losses(params, batch), masked_tokens(batch)
    np.testing.assert_array_equal(aux["losses"], losses)  # in the order of the batch
    assert aux["tokens"] == {"kept": tokens, "any": jnp.int32(3)}
    assert {leaf.dtype for leaf in aux["tokens"].values()} == {np.dtype("int32")}
    padded = {"x": jnp.zeros((15, 3)), "mask": jnp.zeros((15, 2))}
    padded = jax.tree.map(lambda zeros, leaf: zeros.at[:ROWS].set(leaf), padded, batch)
    parts = [jax.tree.map(lambda leaf, i=i: leaf[i::3], padded) for i in range(3)]
    means = [float(loss_and_aux(params, part)[1]["mean"]) for part in parts]
    weights = [float(part["mask"].sum()) for part in parts]
    assert aux["mean"].dtype == jnp.float32
    np.testing.assert_allclose(aux["mean"], np.average(means, weights=weights), rtol=1e-6)


def test_outputs_of_microbatches_without_weight_are_in_no_mean_but_in_sums() -> None:
    mask = np.ones((ROWS, 2))
    mask[1::3] = 0
    params, batch = make_params(), make_batch(mask)

    def loss_fn(params: Tree, batch: Tree) -> tuple[Any, Tree]:
        total, count = loss_sum(params, batch)
        mean = token_losses(params, batch).mean(where=batch["mask"] > 0)  # 0/0 without tokens
        return (total, count), {"mean": mean, "rows": jnp.int32(batch["x"].shape[0])}

    def with_its_mean(params: Tree, batch: Tree) -> tuple[Any, Tree]:
        (total, count), aux = loss_fn(params, batch)
        return total / count.astype(jnp.float32), aux

    options: dict[str, Any] = {
        "num_microbatches": 3, "has_aux": True, "aux": {"mean": "mean", "rows": "sum"}
    }  # fmt: skip
    returned = accumulate_gradients(loss_fn, **options)
    function = accumulate_gradients(with_its_mean, weights=masked_tokens, **options)
    for vg in (returned, function):
        (_, aux), _ = jax.jit(vg)(params, batch)
        np.testing.assert_allclose(aux["mean"], whole_batch(params, batch)[0], rtol=1e-6)
        assert int(aux["rows"]) == ROWS


# Randomness.


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [2, 10])
def test_keys_of_rows_do_not_depend_on_the_microbatches(size: int) -> None:
    def loss_fn(w: jax.Array, x: jax.Array, scale: jax.Array, rng: jax.Array) -> tuple[Any, Any]:
        noise = jax.vmap(jax.random.normal)(rng)
        return (w * x * noise * scale).mean(), noise

    vg = accumulate_gradients(
        loss_fn,
        microbatch_size=size,
        rng="rows",
        weights="examples",
        has_aux=True,
        aux="concat",
    )
    key = jax.random.key(3)
    (_, noise), grad = jax.jit(vg)(jnp.float32(1), jnp.ones(10), jnp.float32(2), rng=key)
    expected = [jax.random.normal(jax.random.fold_in(key, row)) for row in range(10)]
    np.testing.assert_array_equal(noise, expected)
    np.testing.assert_allclose(grad, 2 * np.mean(expected), rtol=1e-6)


# Dropped microbatches.


@pytest.mark.sample(1)
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("rule", ["returned", "callable"])
def test_a_microbatch_that_is_not_finite_is_as_if_it_were_not_there(bad: float, rule: str) -> None:
    weights: Any
    params, batch = make_params(), make_batch(np.ones((ROWS, 2)))
    poisoned = {**batch, "x": batch["x"].at[5, 1].set(bad)}
    kept = jax.tree.map(lambda leaf: leaf[np.arange(ROWS) % 4 != 1], batch)
    fn, weights = (
        (loss_sum, "returned") if rule == "returned" else (mean_over_tokens, masked_tokens)
    )
    vg = functools.partial(accumulate_gradients, fn, num_microbatches=4, weights=weights)
    loss, grads = jax.jit(vg())(params, poisoned)
    assert not any(np.isfinite(leaf).all() for leaf in [loss, grads["w"]])
    (loss, metrics), grads = jax.jit(vg(skip_fn="non_finite", with_metrics=True))(params, poisoned)
    chex.assert_trees_all_close((loss, grads), whole_batch(params, kept), rtol=4e-7)
    assert metrics.skipped.tolist() == [False, True, False, False]
    assert (metrics.weights.tolist(), int(metrics.weight)) == ([6, 0, 6, 6], 18)


def test_microbatches_without_weight_are_empty_and_not_skipped() -> None:
    """The mean over nothing is NaN; one over something is judged."""
    mask = np.ones((ROWS, 2))
    mask[1::4] = 0
    params, batch = make_params(), make_batch(mask)
    batch["x"] = batch["x"].at[2, 1].set(jnp.nan)
    vg = accumulate_gradients(
        mean_over_tokens,
        num_microbatches=4,
        weights=masked_tokens,
        skip_fn="non_finite",
        with_metrics=True,
    )
    (loss, metrics), grads = vg(params, batch)
    assert metrics.skipped.tolist() == [False, False, True, False]
    assert metrics.weights.tolist() == [6, 0, 0, 6]
    rows = np.arange(ROWS) % 4
    kept = jax.tree.map(lambda leaf: leaf[(rows == 0) | (rows == 3)], batch)
    chex.assert_trees_all_close((loss, grads), whole_batch(params, kept), rtol=4e-7)


def test_an_infinite_gradient_of_a_finite_loss_is_found() -> None:
    def loss_fn(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sqrt(w * x).sum()

    vg = accumulate_gradients(
        loss_fn, num_microbatches=2, weights="examples", skip_fn="non_finite", with_metrics=True
    )
    (loss, metrics), grad = jax.jit(vg)(jnp.float32(4), jnp.array([1.0, 0.0]))
    assert metrics.skipped.tolist() == [False, True]
    assert (float(loss), float(grad)) == (2.0, 0.25)


def test_dropped_microbatches_leave_sums_and_means_of_outputs_alone() -> None:
    def loss_fn(w: jax.Array, x: jax.Array) -> tuple[jax.Array, Tree]:
        return (w * x).sum(), {"sum": x.sum(), "mean": x.sum(), "stack": x.sum()}

    vg = accumulate_gradients(
        loss_fn,
        num_microbatches=3,
        weights="examples",
        has_aux=True,
        aux={"sum": "sum", "mean": "mean", "stack": "stack"},
        skip_fn="non_finite",
    )
    (loss, aux), grad = jax.jit(vg)(jnp.float32(1), jnp.array([1.0, jnp.inf, 3.0]))
    assert (float(loss), float(grad)) == (2.0, 2.0)
    assert {k: v.tolist() for k, v in aux.items()} == {
        "sum": 4.0,
        "mean": 2.0,
        "stack": [1.0, np.inf, 3.0],
    }


# Precision.


def test_bfloat16_gradients_are_added_in_float32() -> None:
    x = jnp.asarray(np.random.RandomState(3).rand(64, 8), jnp.bfloat16)

    def loss_fn(w: jax.Array, x: jax.Array) -> jax.Array:
        return (w * x.mean(0)).sum()

    vg = functools.partial(accumulate_gradients, loss_fn, num_microbatches=64, weights="examples")
    w = jnp.ones(8, jnp.bfloat16)
    loss, grad = jax.jit(vg())(w, x)
    mean = np.asarray(x, np.float64).mean(0)
    assert (loss.dtype, grad.dtype) == (jnp.float32, jnp.float32)
    # 64 exact addends; a rounding of the sum in each addition.
    np.testing.assert_allclose(grad, mean, rtol=64 * FLOAT32_EPS)
    in_bfloat16 = jax.jit(vg(accumulator_dtype=None))(w, x)[1]
    assert in_bfloat16.dtype == jnp.bfloat16
    assert np.abs(np.asarray(in_bfloat16, np.float64) - mean).max() > 2e-3
    assert vg(accumulator_dtype="float16")(w, x)[1].dtype == jnp.float16


def test_weights_that_do_not_fit_the_accumulator() -> None:
    """A count of 65,536 is infinite in float16: neither products nor quotients are taken in it."""

    def loss_fn(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (w * x).sum(), jnp.int32(2**15)

    vg = accumulate_gradients(loss_fn, num_microbatches=2, accumulator_dtype=jnp.float16)
    _, grad = jax.jit(vg)(jnp.float32(1), jnp.full(2, 2.0**14))
    assert (grad.dtype, float(grad)) == (jnp.float16, 0.5)


# Programs.


def test_memory_is_one_microbatch_of_activations_and_one_accumulator() -> None:
    params = {"a": jnp.zeros((64, 1024)), "b": jnp.zeros((1024, 64))}
    size = sum(leaf.nbytes for leaf in params.values())
    x = jnp.zeros((4096, 64))

    def loss_fn(params: Tree, x: jax.Array) -> jax.Array:
        return jnp.square(jnp.tanh(x @ params["a"]) @ params["b"]).sum(-1).mean()

    def temporaries(f: Callable[..., Any]) -> int:
        analysis = jax.jit(f).lower(params, x).compile().memory_analysis()
        assert analysis is not None
        return int(analysis.temp_size_in_bytes)

    full = temporaries(jax.value_and_grad(loss_fn))
    small = temporaries(lambda params, x: jax.value_and_grad(loss_fn)(params, x[: 4096 // 16]))
    ours = temporaries(accumulate_gradients(loss_fn, num_microbatches=16, weights="examples"))
    assert full > 16 * 1024 * 1024  # the activations, of which there is a 16th in ours
    # Beside one microbatch: its rows, and its gradients next to the accumulator that is an output.
    assert ours <= small + x.nbytes // 16 + 2 * size
    assert ours < full / 6
