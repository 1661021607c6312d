"""What the loss function gets beside parameters and rows: keywords, scalars of the batch, keys."""

import functools
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from opt_accumulate import accumulate_gradients

ROWS = 12

Tree = Any
Sums = tuple[jax.Array, jax.Array]


def make_mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def loss_sum(
    w: Tree, batch: Tree, offset: Any = 0.0, *, train: Any = False, scale: Any = None
) -> Sums:
    """Whole numbers throughout: exact in any order. Works on arrays and on Python's own."""
    losses = jnp.square(batch["x"] @ w) * batch["factor"] + offset
    losses = jnp.where(train, 2.0 * losses, losses)
    if scale is not None:
        losses = losses * scale["by"]
    return (losses * batch["mask"]).sum(), batch["mask"].sum().astype(jnp.int32)


def mean_loss(*args: Any, **kwargs: Any) -> Any:
    total, weight = loss_sum(*args, **kwargs)
    return total / weight


def make_batch(factor: Any) -> Tree:
    random = np.random.RandomState(0)
    x = jnp.asarray(random.randint(-3, 4, (ROWS, 3)), jnp.float32)
    mask = jnp.asarray(random.randint(0, 2, ROWS), jnp.float32)
    return {"x": x, "mask": mask, "factor": factor, "nested": {"unused": jnp.int32(7)}}


W = jnp.array([1.0, -2.0, 3.0])


def whole_batch(batch: Tree, *args: Any, **kwargs: Any) -> tuple[jax.Array, jax.Array]:
    weight = batch["mask"].sum()
    loss, grad = jax.value_and_grad(lambda w: loss_sum(w, batch, *args, **kwargs)[0])(W)
    return loss / weight, grad / weight


@hypothesis.given(
    factor=st.sampled_from([3, 2.0, np.float32(2), np.array(3.0, np.float32), jnp.float32(-1)]),
    args=st.sampled_from([(), (1.0,), (np.float32(2),), (jnp.float32(3),)]),
    kwargs=st.fixed_dictionaries(
        {},
        optional={
            "train": st.sampled_from([True, False, jnp.array(True)]),
            "scale": st.sampled_from([None, {"by": 2}, {"by": np.full(1, 3.0, np.float32)}]),
        },
    ),
    size=st.sampled_from([1, 3, 4, 5]),
    options=st.sampled_from([{}, {"reduce": "deferred", "mesh": make_mesh()}, {"weights": None}]),
    jit=st.booleans(),
)
@hypothesis.settings(max_examples=4, deadline=None, derandomize=True)
def test_keywords_and_scalars_against_the_whole_batch(
    factor: Any, args: Any, kwargs: Any, size: int, options: Any, jit: bool
) -> None:
    loss_fn: Callable[..., Any] = loss_sum
    batch, options = make_batch(factor), dict(options)
    if options.pop("weights", "") is None:  # a mean, with a weight of the microbatch
        loss_fn = mean_loss
        options["weights"] = lambda part: part["mask"].sum()
    vg: Any = accumulate_gradients(loss_fn, microbatch_size=size, **options)
    found = (jax.jit(vg) if jit else vg)(W, batch, *args, **kwargs)
    for a, b in zip(found, whole_batch(batch, *args, **kwargs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
        assert a.dtype == b.dtype


# Keys


def keyed(w: Any, batch: Any, *, rng: Any, train: bool = True) -> Sums:
    assert train is True
    return w * jax.random.normal(rng, ()) * batch.sum(), jnp.int32(batch.shape[0])


def by_any_name(*args: Any, **kwargs: Any) -> Sums:
    assert kwargs.keys() == {"rng", "train"}
    return keyed(*args, **kwargs)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "loss_fn",
    [
        keyed,
        by_any_name,
        functools.partial(keyed, train=False),
        jax.jit(keyed, static_argnames="train"),
    ],
)
def test_keys_reach_the_loss_function_by_name(loss_fn: Callable[..., Any]) -> None:
    batch = jnp.arange(6.0)
    vg = accumulate_gradients(loss_fn, num_microbatches=3, rng=True)
    for key in jax.random.key(3), jax.random.PRNGKey(3):
        draws = [jax.random.normal(jax.random.fold_in(key, i), ()) for i in range(3)]
        sums = [2 * d * (batch[i] + batch[i + 3]) for i, d in enumerate(draws)]
        loss, _ = vg(jnp.float32(2), batch, train=True, rng=key)
        np.testing.assert_allclose(loss, sum(sums) / 6, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["auto", "deferred"])
def test_python_scalars_of_a_batch_stay_so_outside_of_jit(reduce: Any) -> None:
    seen = []

    def loss_fn(w: Any, batch: Any) -> Sums:
        seen.append(batch["train"])
        losses = w * batch["x"] if batch["train"] else w
        return losses.sum() * batch["power"], jnp.int32(batch["x"].shape[0])

    vg = accumulate_gradients(loss_fn, num_microbatches=2, reduce=reduce, mesh=make_mesh())
    loss, grad = vg(jnp.bfloat16(2), {"x": jnp.ones(4, jnp.bfloat16), "train": True, "power": 3})
    assert seen
    assert all(value is True for value in seen)
    assert (float(loss), float(grad), grad.dtype) == (6.0, 3.0, jnp.float32)
