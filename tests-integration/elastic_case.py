"""A tiny model that trains on any mesh, for tests that stop it and go on elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from opt_checkpoint import named_state
from opt_core import Optimizer, OptimizerState
from opt_partition import memory_plan

ROWS, WIDTH, HIDDEN = 16, 16, 32
AXES = {
    "in": {"kernel": ("embed", "mlp"), "bias": ("mlp",)},
    "out": {"kernel": ("mlp", "embed"), "bias": ("embed",)},
}
RULES = (("mlp", "model"), ("embed", None))
OTHER_RULES = (("mlp", "data"), ("embed", "model"))


def adamw(every_k: Callable[[Any], Any] | None = None) -> Any:
    """Clipped AdamW with a schedule; of windows of gradients, if asked."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, 60)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98))
    return opt.OptaxWrapper(every_k(tx) if every_k else tx)


def momentum() -> Any:
    """What compiles quickly."""
    return opt.OptaxWrapper(optax.sgd(1e-2, momentum=0.9))


def make_mesh(data: int, model: int) -> Mesh:
    devices = jax.devices()[: data * model]
    axes = (AxisType.Auto,) * 2
    return jax.make_mesh((data, model), ("data", "model"), axis_types=axes, devices=devices)


def init_params() -> Any:
    return {
        "in": {"kernel": _waves(WIDTH, HIDDEN), "bias": jnp.zeros(HIDDEN)},
        "out": {"kernel": _waves(HIDDEN, WIDTH), "bias": jnp.zeros(WIDTH)},
    }


def _waves(rows: int, columns: int) -> jax.Array:
    """Values without a pattern that matters; random ones take long to compile."""
    values = jnp.sin(jnp.arange(rows * columns, dtype=jnp.float32) ** 2)
    scaled: jax.Array = values.reshape(rows, columns) / np.sqrt(rows)
    return scaled


def abstract(definition: Any, mesh: Mesh, *, rules: Any = RULES, zero: bool = False) -> Optimizer:
    """The optimizer, of `jax.ShapeDtypeStruct`s with shardings."""

    def init(params: Any) -> Any:
        return definition.init_state(params).param_states

    plan = memory_plan(
        optax.GradientTransformation(init, optax.identity().update),
        jax.eval_shape(init_params),
        AXES,
        rules,
        mesh,
        zero="data" if zero else None,
    )
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    state = OptimizerState(step=step, param_states=plan.state.shapes)
    return Optimizer(definition, state, plan.params.shapes)


def create(target: Optimizer) -> Optimizer:
    """The optimizer before its first step, where `target` says."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, target)

    def make() -> Any:
        return target.optimizer_def.create(init_params())

    made: Optimizer = jax.jit(make, out_shardings=shardings)()
    return made


def compile_step(target: Optimizer, mesh: Mesh, *, donate: bool = True) -> Callable[..., Any]:
    """`step(optimizer, i) -> optimizer, loss`, compiled; the batch is a function of `i`."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, target)
    rows = NamedSharding(mesh, PartitionSpec("data"))

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        hidden = jnp.tanh(batch @ params["in"]["kernel"] + params["in"]["bias"])
        out = batch + hidden @ params["out"]["kernel"] + params["out"]["bias"]
        return jnp.mean((out - jnp.roll(batch, 1, axis=1)) ** 2)

    def step(optimizer: Optimizer, batch: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(optimizer.target, batch)
        return optimizer.apply_gradient(grads), value

    shape = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=rows)
    out = (shardings, NamedSharding(mesh, PartitionSpec()))
    given = (0,) if donate else ()
    compiled = jax.jit(step, donate_argnums=given, out_shardings=out).lower(target, shape).compile()

    def of_index(optimizer: Optimizer, i: int) -> Any:
        batch = np.random.default_rng((7, i)).standard_normal((ROWS, WIDTH), np.float32)
        return compiled(
            optimizer, jax.make_array_from_callback(batch.shape, rows, batch.__getitem__)
        )

    return of_index


def bits(optimizer: Optimizer) -> Mapping[str, Any]:
    """Every leaf by name, in NumPy."""
    return {name: np.array(leaf) for name, leaf in named_state(optimizer).items()}


def assert_same_bits(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        assert found[name].dtype == leaf.dtype, name
        assert found[name].tobytes() == leaf.tobytes(), name


def difference(found: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """The largest difference of a leaf, relative to the largest value of the leaf."""
    return max(
        float(np.abs(found[name].astype(np.float64) - leaf).max() / max(np.abs(leaf).max(), 1e-30))
        for name, leaf in expected.items()
    )
