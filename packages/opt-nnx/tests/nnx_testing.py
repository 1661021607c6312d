"""Models, gradients and comparisons that the tests share."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax import nnx

bare = getattr(nnx, "as_pure", None) or nnx.pure  # until Flax 0.12.1

X = jax.random.normal(jax.random.key(0), (8, 4))
Y = jnp.sin(X @ jnp.arange(12.0).reshape(4, 3))


class Model(nnx.Module):
    """Two layers, a statistic and a key."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(4, 6, rngs=rngs)
        self.outer = nnx.Linear(6, 3, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))
        self.noise = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(jnp.tanh(self.inner(x)))


def make_model() -> Model:
    return Model(nnx.Rngs(0))


def loss(model: Any, x: jax.Array = X, y: jax.Array = Y) -> jax.Array:
    return jnp.mean((model(x) - y) ** 2)


def gradients(model: Any, wrt: Any = nnx.Param) -> Any:
    return nnx.grad(loss, argnums=nnx.DiffState(0, wrt))(model)


@nnx.jit
def train_step(model: Any, optimizer: Any) -> Any:
    return optimizer.update(model, nnx.grad(loss)(model))


def copied(tree: Any) -> Any:
    """The state of a graph node, which a later update does not change."""
    return jax.tree.map(jnp.copy, nnx.state(tree))


def flat(tree: Any) -> dict[tuple[Any, ...], Any]:
    """Every leaf of a state of NNX by its path."""
    return dict(nnx.to_flat_state(nnx.state(tree)))


def arrays(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): _array(leaf) for path, leaf in leaves}


def _array(leaf: Any) -> np.ndarray:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def assert_same(a: Any, b: Any) -> None:
    """Two trees are equal, bit for bit and in their dtypes."""
    structure: Any = jax.tree.structure(a)
    assert structure == jax.tree.structure(b)
    first, second = arrays(a), arrays(b)
    for path, leaf in first.items():
        assert leaf.dtype == second[path].dtype, path
        np.testing.assert_array_equal(leaf, second[path], err_msg=path)


CONTRIB: Any = optax.contrib
TRANSFORMATIONS: dict[str, Callable[[], Any]] = {
    "adabelief": lambda: optax.adabelief(0.1),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2, momentum=0.9),
    "adam": lambda: optax.adam(0.1),
    "adamw": lambda: optax.adamw(optax.cosine_decay_schedule(0.1, 10), weight_decay=0.1),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)),
    "inject": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "lamb": lambda: optax.lamb(0.1),
    "muon": lambda: CONTRIB.muon(0.1),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "noisy_sgd": lambda: optax.noisy_sgd(0.1, key=0),
    "rmsprop": lambda: optax.rmsprop(0.1, momentum=0.9),
    "sgd": lambda: optax.sgd(0.1),
    "sgd_momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "sm3": lambda: optax.sm3(0.1),
}
