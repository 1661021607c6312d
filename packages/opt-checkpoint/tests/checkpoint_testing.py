"""What the tests of checkpoints share."""

import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge
import optax
from flax.training.train_state import TrainState
from opt_checkpoint import LeafInfo, NamedState, Schema, TrainingState
from opt_core.extend import split_path

with warnings.catch_warnings():  # Flax 0.12.0 asks jax 0.8 for names that it deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    from flax import nnx

EVERYTHING = frozenset({"initialise", "drop", "cast", "reshape", "optimizer", "regroup"})

# 64 bits are NumPy's, unless JAX is told.
WIDE = {"int64", "uint64", "float64", "complex128"}


def random_bits(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """An array of any bits: with NaNs of every payload, and subnormals."""
    rng = np.random.default_rng(seed)
    kind = jnp.dtype(dtype)
    if dtype == "bool" or dtype in ("int2", "int4", "float4_e2m1fn"):
        return rng.integers(0, 2, shape).astype(kind)
    words = rng.integers(0, 256, (*shape, kind.itemsize), dtype=np.uint8)
    return words.reshape(*shape[:-1], -1).view(kind)


def structure(tree: Any) -> Any:
    return jax.tree.structure(tree)


def state(leaves: Mapping[str, Any]) -> NamedState:
    """A named state of given leaves."""
    infos = tuple(
        LeafInfo(split_path(name), tuple(np.shape(leaf)), str(leaf.dtype), "state")
        for name, leaf in leaves.items()
    )
    return NamedState(dict(leaves), Schema(infos, versions={"test": "1"}))


def small_state(seed: int = 0) -> NamedState:
    """Three leaves of random bits that do not compress."""
    rng = np.random.default_rng(seed)
    return state(
        {
            "params/w": jnp.asarray(rng.standard_normal((64, 32)), jnp.float32),
            "params/b": jnp.asarray(rng.standard_normal(64), jnp.bfloat16),
            "state/count": jnp.asarray(seed, jnp.int32),
        }
    )


def sealed(body: Any, **changes: Any) -> bytes:
    """A manifest of any content with a hash that is right."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    whole = {"format_version": 1, "needs": "0.1.0", "sha256": sha256, "manifest": body}
    return json.dumps(whole | changes).encode()


def everything(schema: Schema) -> dict[str, Any]:
    """All leaves, wanted on the default device."""
    return {info.name: jax.ShapeDtypeStruct(info.shape, np.dtype("int8")) for info in schema.leaves}


def bits(leaf: Any) -> tuple[str, tuple[int, ...], bytes]:
    """What two leaves have in common if they are the same."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(leaf)
        return str(leaf.dtype), leaf.shape, np.asarray(data).tobytes()
    array = np.asarray(leaf)
    return str(array.dtype), array.shape, array.tobytes()


def same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Whether all leaves are bit for bit the same."""
    return found.keys() == expected.keys() and all(
        bits(found[name]) == bits(expected[name]) for name in expected
    )


def files(folder: Path) -> list[Path]:
    """The files below a folder, in an order that depends on nothing but their kinds and sizes."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return sorted(found, key=lambda path: (path.parent.name, path.stat().st_size, path.name))


# The same training by everyone's optimizer.


def adamw() -> optax.GradientTransformation:
    return optax.chain(optax.clip(1.0), optax.adamw(optax.constant_schedule(0.1)))


def params() -> dict[str, Any]:
    return {"b": jnp.arange(3.0), "layers": [{"w": jnp.ones((2, 3))}, {"w": jnp.full((2, 3), 2.0)}]}


def of_core() -> Any:
    optimizer = opt_optax_bridge.OptaxWrapper(adamw()).create(params())
    for _ in range(2):
        optimizer = optimizer.apply_gradient(params())
    return optimizer


def of_flax(kind: type[TrainState] = TrainState, tree: Any = None, **fields: Any) -> Any:
    tree = params() if tree is None else tree
    state = kind.create(apply_fn=len, params=tree, tx=adamw(), **fields)
    for _ in range(2):
        state = state.apply_gradients(grads=tree)
    return state


def of_optax() -> TrainingState:
    state = of_flax()
    return TrainingState(state.tx, state.params, state.opt_state, 2)


class Layer(nnx.Module):
    def __init__(self, value: float) -> None:
        self.w = nnx.Param(jnp.full((2, 3), value))


class Model(nnx.Module):
    """The parameters, a statistic and a key."""

    def __init__(self) -> None:
        self.b = nnx.Param(jnp.arange(3.0))
        self.layers = nnx.List([Layer(1.0), Layer(2.0)])
        self.mean = nnx.BatchStat(jnp.full(3, 7.0))
        self.noise = nnx.Dropout(0.5, rngs=nnx.Rngs(7))


def of_nnx() -> Any:
    model = Model()
    optimizer = nnx.Optimizer(model, adamw(), wrt=nnx.Param)
    grads = nnx.state(Model(), nnx.Param)
    for _ in range(2):
        optimizer.update(model, grads)
    model.noise(jnp.ones(4))
    return model, optimizer
