"""What the loss function gets beside parameters and rows: keywords, scalars of the batch, keys."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from opt_accumulate import accumulate_gradients

Sums = tuple[jax.Array, jax.Array]
MESH = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
W = jnp.array([1.0, -2.0, 3.0])


@pytest.mark.parametrize("scalar", [2, np.float32(2), jnp.float32(2)])
@pytest.mark.parametrize("options", [{}, {"reduce": "deferred", "mesh": MESH}])
def test_keywords_and_scalars_are_the_same_in_every_microbatch(options: Any, scalar: Any) -> None:
    """Whole numbers throughout: exact in any order."""

    def loss_sum(w: Any, batch: Any, offset: Any, *, train: Any, scale: Any) -> Sums:
        losses = jnp.square(batch["x"] @ w) * batch["factor"] + offset
        losses = jnp.where(train, 2.0 * losses, losses) * scale["by"]
        return (losses * batch["mask"]).sum(), batch["mask"].sum().astype(jnp.int32)

    random = np.random.RandomState(0)
    x = jnp.asarray(random.randint(-3, 4, (12, 3)), jnp.float32)
    mask = jnp.asarray(random.randint(0, 2, 12), jnp.float32)
    batch = {"x": x, "mask": mask, "factor": scalar, "nested": {"unused": jnp.int32(7)}}
    keywords: Any = {"train": True, "scale": {"by": scalar}}
    vg: Any = accumulate_gradients(loss_sum, microbatch_size=5, **options)
    loss, grad = jax.value_and_grad(lambda w: loss_sum(w, batch, scalar, **keywords)[0])(W)
    for function in (vg, jax.jit(vg)):
        found = function(W, batch, scalar, **keywords)
        np.testing.assert_allclose(found[0], loss / mask.sum(), rtol=1e-6)
        np.testing.assert_allclose(found[1], grad / mask.sum(), rtol=1e-6)


def keyed(w: Any, batch: Any, *, rng: Any, train: bool = True) -> Sums:
    assert train is True
    return w * jax.random.normal(rng, ()) * batch.sum(), jnp.int32(batch.shape[0])


def by_any_name(*args: Any, **kwargs: Any) -> Sums:
    assert kwargs.keys() == {"rng", "train"}
    return keyed(*args, **kwargs)


@pytest.mark.parametrize("loss_fn", [keyed, by_any_name, functools.partial(keyed, train=False)])
def test_keys_reach_the_loss_function_by_name(loss_fn: Callable[..., Any]) -> None:
    batch = jnp.arange(6.0)
    vg = accumulate_gradients(loss_fn, num_microbatches=3, rng=True)
    for key in jax.random.key(3), jax.random.PRNGKey(3):
        draws = [jax.random.normal(jax.random.fold_in(key, i), ()) for i in range(3)]
        sums = [2 * d * (batch[i] + batch[i + 3]) for i, d in enumerate(draws)]
        loss, _ = vg(jnp.float32(2), batch, train=True, rng=key)
        np.testing.assert_allclose(loss, sum(sums) / 6, rtol=1e-6)


def test_python_scalars_of_a_batch_stay_so_outside_of_jit() -> None:
    def loss_fn(w: Any, batch: Any) -> Sums:
        assert batch["train"] is True
        return (w * batch["x"]).sum(), jnp.int32(batch["x"].shape[0])

    vg = accumulate_gradients(loss_fn, num_microbatches=2)
    assert float(vg(jnp.float32(2), {"x": jnp.ones(4), "train": True})[0]) == 2.0
