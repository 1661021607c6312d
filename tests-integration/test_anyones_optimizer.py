"""Optax, TrainState and NNX: foreign files of one on a mesh resume as another, on another mesh."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from opt_checkpoint import (
    TrainingState,
    named_state,
    open_foreign,
    plan_restore,
)

P = PartitionSpec
X = np.random.default_rng(0).standard_normal((32, 16)).astype(np.float32)
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))


def mesh(*shape: int) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def placed(tree: Any, on: Mesh, move: Callable[[Any, NamedSharding], Any]) -> Any:
    """Kernels and their moments are cut along both axes, all else is whole everywhere."""

    def place(leaf: Any) -> Any:
        spec = P("data", "model") if np.ndim(leaf) == 2 else P()
        return move(leaf, NamedSharding(on, spec))

    return jax.tree.map(place, tree)


def abstract(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def loss(kernel: Any, bias: Any) -> Any:
    return jnp.mean((jnp.asarray(X) @ kernel + bias - 1.0) ** 2)


def params() -> dict[str, Any]:
    return {"bias": jnp.zeros(8), "kernel": jnp.full((16, 8), 0.1)}


def of_optax() -> TrainingState:
    return TrainingState(TX, params(), TX.init(params()), jnp.int32(0))


@jax.jit
def step_of_optax(state: Any) -> Any:
    grads = jax.grad(lambda p: loss(**p))(state.params)
    updates, opt_state = state.tx.update(grads, state.opt_state, state.params)
    tree = optax.apply_updates(state.params, updates)
    return state.replace(params=tree, opt_state=opt_state, step=state.step + 1)


def of_flax() -> Any:
    state = TrainState.create(apply_fn=None, params=params(), tx=TX)
    return state.replace(step=jnp.int32(0))


@jax.jit
def step_of_flax(state: Any) -> Any:
    return state.apply_gradients(grads=jax.grad(lambda p: loss(**p))(state.params))


def of_nnx() -> Any:
    model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    model.kernel = nnx.Param(params()["kernel"])
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


@nnx.jit
def _step_of_nnx(model: Any, optimizer: Any) -> None:
    optimizer.update(model, nnx.grad(lambda m: loss(m.kernel[...], m.bias[...]))(model))


def step_of_nnx(pair: Any) -> Any:
    _step_of_nnx(*pair)
    return pair


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "optax": (of_optax, step_of_optax),
    "flax": (of_flax, step_of_flax),
    "nnx": (of_nnx, step_of_nnx),
}


def trained(kind: str, on: Mesh, steps: int) -> Any:
    create, step = KINDS[kind]
    target = placed(create(), on, jax.device_put)
    for _ in range(steps):
        target = step(target)
    return jax.block_until_ready(target) if kind != "nnx" else target


def fresh(kind: str, on: Mesh) -> Any:
    create = KINDS[kind][0]
    made = nnx.eval_shape(create) if kind == "nnx" else jax.eval_shape(create)
    return placed(made, on, abstract)


def assert_close(found: Any, expected: Any) -> None:
    one, other = named_state(found), named_state(expected)
    assert list(one) == list(other)
    for name, leaf in one.items():
        np.testing.assert_allclose(np.asarray(leaf), np.asarray(other[name]), rtol=1e-5, atol=1e-6)


def assert_placed(found: Any, on: Mesh) -> None:
    for name, leaf in named_state(found).items():
        spec = P("data", "model") if leaf.ndim == 2 else P()
        assert leaf.sharding.is_equivalent_to(NamedSharding(on, spec), leaf.ndim), name


def foreign_tree(kind: str) -> Any:
    target = trained(kind, mesh(4, 2), 2)
    if kind == "nnx":
        return nnx.state(target)
    return target if kind == "flax" else (target.params, target.opt_state, target.step)


@pytest.mark.slow
@pytest.mark.parametrize("new", KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_foreign_checkpoints_continue(kind: str, new: str, tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path / "orbax") as manager:
        manager.save(2, args=ocp.args.StandardSave(foreign_tree(kind)))
    on = mesh(2, 2)
    source = open_foreign(tmp_path / "orbax/2", written_by=fresh(kind, on))
    plan = plan_restore(source, fresh(new, on))
    assert plan.is_exact, str(plan)
    restored = plan.apply()
    assert_placed(restored, on)
    assert_close(KINDS[new][1](restored), trained(new, on, 3))
