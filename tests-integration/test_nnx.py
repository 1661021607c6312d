"""`opt_nnx.Optimizer` on eight devices: every state lies right, and a step compiles once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_nnx
import opt_optax_bridge as opt
import optax
import optax.contrib
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from opt_adafactor import Adafactor
from opt_core import FROZEN, MultiOptimizer
from opt_partition.errors import AxesError

P = PartitionSpec
MESHES: dict[str, Callable[[], Any]] = {
    "auto": lambda: jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2),
    "explicit": lambda: jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Explicit,) * 2),
}
RULES = (("embed", "fsdp"), ("mlp", "tp"))


class Model(nnx.Module):
    """Two matrices with named dimensions, and biases."""

    def __init__(self, *, names: bool = True, dtype: Any = jnp.float32, **metadata: Any) -> None:
        def init(key: jax.Array, shape: Any, dtype: Any) -> jax.Array:
            return 0.1 * jax.random.normal(key, shape, dtype)

        def layer(shape: tuple[int, int], axes: tuple[str, str]) -> nnx.Linear:
            def named(axes: tuple[str, ...]) -> Any:
                return nnx.with_partitioning(init, axes, **metadata) if names else init

            return nnx.Linear(
                *shape,
                kernel_init=named(axes),
                bias_init=named(axes[1:]),
                param_dtype=dtype,
                rngs=nnx.Rngs(0),
            )

        self.wi = layer((16, 32), ("embed", "mlp"))
        self.wo = layer((32, 16), ("mlp", "embed"))

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = jnp.tanh(_dot(x, self.wi.kernel[...]) + self.wi.bias[...])
        return _dot(hidden, self.wo.kernel[...]) + self.wo.bias[...]


def _dot(x: jax.Array, kernel: jax.Array) -> jax.Array:
    if AxisType.Explicit in jax.typeof(kernel).sharding.mesh.axis_types:
        return jnp.einsum("ab,bc->ac", x, kernel, out_sharding=P())
    return x @ kernel


X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)


def loss(model: Any) -> jax.Array:
    return jnp.mean((model(jnp.asarray(X)) - 1.0) ** 2)


def make_step() -> tuple[Any, list[None]]:
    """A compiled step, and a list with an entry for each time that it was traced."""
    traces: list[None] = []

    @nnx.jit
    def step(model: Any, optimizer: Any, **overrides: Any) -> jax.Array:
        traces.append(None)
        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads, **overrides)
        return value

    return step, traces


def shardings(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(tree))
    return {jax.tree_util.keystr(path): leaf.sharding for path, leaf in leaves}


def specs(tree: Any) -> dict[str, tuple[Any, ...]]:
    return {path: _trimmed(found.spec) for path, found in shardings(tree).items()}


def _trimmed(spec: Any) -> tuple[Any, ...]:
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries)


def single(path: str, found: dict[str, Any]) -> Any:
    (value,) = (value for name, value in found.items() if path in name)
    return value


TRANSFORMATIONS: dict[str, Callable[[], Any]] = {
    "adam": lambda: optax.adam(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8, momentum=0.9),
    "muon": lambda: optax.contrib.muon(1e-2),
    "sm3": lambda: optax.sm3(1e-2),
    "galore": lambda: optax.contrib.galore(1e-2, rank=4),
    "adamw_of_ours": lambda: opt.adamw(1e-2),
    "adafactor_of_ours": lambda: Adafactor(1e-2, min_dim_size_to_factor=8, beta1=0.9),
    "groups": lambda: MultiOptimizer.from_rules(
        [("matrices", r".*/kernel", opt.adafactor(1e-2, min_dim_size_to_factor=8))],
        rest=opt.adam(1e-2),
    ),
    "frozen": lambda: MultiOptimizer.from_rules([("wi", r"wi/.*", opt.lion(1e-2))], rest=FROZEN),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2, momentum=0.9)),
}


@pytest.mark.parametrize("zero", [None, "fsdp"])
@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize(
    "name", [name for name in TRANSFORMATIONS if hasattr(optax.contrib, name) or name != "galore"]
)
def test_state_stays_where_it_is_made_and_a_step_compiles_once(
    name: str, kind: str, zero: str | None
) -> None:
    with jax.set_mesh(MESHES[kind]()), nnx.logical_axis_rules(RULES):
        model = Model()
        optimizer = opt_nnx.Optimizer(model, TRANSFORMATIONS[name](), zero=zero)
        before = shardings((model, optimizer))
        assert all(isinstance(s, NamedSharding) for s in before.values())
        step, traces = make_step()
        values = [float(step(model, optimizer)) for _ in range(3)]
        after = shardings((model, optimizer))
    assert values == sorted(values, reverse=True)
    assert len(traces) == 1
    assert {path: (s.mesh, _trimmed(s.spec)) for path, s in after.items()} == {
        path: (s.mesh, _trimmed(s.spec)) for path, s in before.items()
    }
    assert step.jitted_fn._cache_size() == 1  # nor compiled again
