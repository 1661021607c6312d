"""Adafactor among the other packages: axes, bytes, and in groups with wrapped Optax."""

from typing import Any

import chex
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import opt_adafactor as ada
import opt_optax_bridge as opt
import opt_partition
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from opt_adafactor import Adafactor, standard_logical_factor_rules
from opt_core import FROZEN, MultiOptimizer, Optimizer
from partition_oracles import shard_bytes

SHAPES: Any = {
    "embed": {"embedding": (64, 16)},
    "stack": {
        "query": {"kernel": (16, 4, 8, 8)},
        "wi": {"kernel": (16, 4, 32)},
        "norm": {"scale": (16, 4)},
    },
    "head": {"kernel": (16, 24), "bias": (24,)},
    "old_head": {"kernel": (16, 8)},
}
AXES: Any = {
    "embed": {"embedding": P("vocab", "embed")},
    "stack": {
        "query": {"kernel": P("embed", "layers", "heads", "kv")},
        "wi": {"kernel": P("embed", "layers", "mlp")},
        "norm": {"scale": P("embed", "layers")},
    },
    "head": {"kernel": P("embed", "mlp"), "bias": P("mlp")},
    "old_head": {"kernel": P("embed", "mlp")},
}
TO_MESH = {"embed": "data", "mlp": "model", "heads": "model", "vocab": "model"}


def make_params(seed: int = 0) -> Any:
    draw = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(draw.normal(size=shape), jnp.float32),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def adafactor(**options: Any) -> Adafactor:
    options = {"beta1": 0.9, "min_dim_size_to_factor": 8, "weight_decay_rate": 1e-3, **options}
    return Adafactor(0.1, **options)


def grouped() -> MultiOptimizer:
    """Adafactor, wrapped Optax, a nested table and frozen leaves."""
    by_axes = adafactor(logical_factor_rules=standard_logical_factor_rules())
    nested = MultiOptimizer.from_rules(
        [("kernels", ".*kernel", by_axes), ("norms", ".*scale", Adafactor(0.02, factored=False))]
    )
    rules = [
        ("table", "embed/.*", adafactor()),
        ("stack", "stack/.*", nested),
        ("head", "head/.*", opt.adamw(optax.linear_schedule(0.0, 1e-2, 3), weight_decay=0.1)),
    ]
    definition = MultiOptimizer.from_rules(rules, rest=FROZEN)
    definition.set_param_axes(AXES)
    return definition


def by_path(tree: Any, is_leaf: Any = None) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def is_axes(x: Any) -> bool:
    return x is None or isinstance(x, P)


def layout_of(definition: Any, mesh: Any) -> opt_partition.Layout:
    abstract = jax.eval_shape(definition.create, make_params())
    axes = definition.derive_logical_axes(abstract, AXES)
    return opt_partition.logical_to_mesh(axes, TO_MESH, mesh, abstract, on_unknown="replicate")


@pytest.mark.sample(1)
def test_on_eight_devices_with_donation(mesh: Mesh) -> None:
    definition = grouped()
    layout = layout_of(definition, mesh)
    shardings: Any = layout.shardings
    traces = []

    def step(optimizer: Optimizer, grads: Any) -> Optimizer:
        traces.append(1)
        return optimizer.apply_gradient(grads)

    compiled = jax.jit(step, out_shardings=shardings, donate_argnums=0)
    with jax.set_mesh(mesh):
        params = jax.device_put(make_params(), shardings.target)
        sharded = jax.jit(definition.create, out_shardings=shardings)(params)
        assert set(shard_bytes(sharded)) == {layout.bytes_per_device}
        for t in range(2):
            given = sharded
            sharded = compiled(sharded, jax.device_put(make_params(t + 1), shardings.target))
    assert len(traces) == 1
    # XLA may not use a donated scalar; JAX deletes what was used.
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given) if leaf.ndim > 1)
    pairs = zip(jax.tree.leaves(sharded), jax.tree.leaves(shardings), strict=True)
    assert all(a.sharding.is_equivalent_to(s, a.ndim) for a, s in pairs)

    kernels = sharded.state.param_states["stack"]["kernels"]["stack"]
    assert kernels["wi"]["kernel"].v_row.shape == (16, 4)
    plain, alone = definition.create(make_params()), jax.jit(Optimizer.apply_gradient)
    for t in range(2):
        plain = alone(plain, make_params(t + 1))
    for a, b in zip(jax.tree.leaves(sharded), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.max(jnp.abs(b))))
    written = flax.serialization.msgpack_serialize(plain.state_dict())
    restored = sharded.restore_state(flax.serialization.msgpack_restore(written))
    pairs = zip(jax.tree.leaves(restored), jax.tree.leaves(sharded), strict=True)
    assert all(a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in pairs)
    chex.assert_trees_all_equal(restored, plain, strict=True)


def trimmed(spec: Any) -> P:
    """Dimensions without a name at the end say nothing."""
    names = tuple(spec or ())
    return P(*names[: max((i + 1 for i, name in enumerate(names) if name), default=0)])


@pytest.mark.sample(1)
@pytest.mark.parametrize("respect", [False, True])
def test_both_ways_to_derive_the_axes_agree(respect: bool) -> None:
    options: dict[str, Any] = {
        "beta1": 0.9,
        "logical_factor_rules": standard_logical_factor_rules(),
        "min_dim_size_to_factor": 8,
        "respect_rank2_rules": respect,
    }
    definition = Adafactor(0.1, **options).with_param_axes(AXES)
    tx = ada.adafactor(0.1, param_axes=AXES, **options)
    abstract = jax.eval_shape(make_params)
    optimizer = jax.eval_shape(definition.create, abstract)
    derived = definition.derive_logical_axes(optimizer, AXES).state.param_states
    axes = opt_partition.explain(tx, abstract, AXES, strict=True).axes  # nothing is left open

    def of_slot(slot: str) -> dict[str, Any]:
        def one(state: Any) -> Any:
            return getattr(state, slot)

        is_state = lambda node: hasattr(node, slot)  # noqa: E731
        return by_path(jax.tree.map(one, derived, is_leaf=is_state), is_axes)

    for slot in ("v_row", "v_col", "v", "m"):
        ours = of_slot(slot)
        for path, spec in by_path(getattr(axes, slot), is_axes).items():
            assert trimmed(spec) == trimmed(ours[path]), f"{slot}/{path}"
    assert tuple(axes.v_row["stack"]["wi"]["kernel"]) == ("embed", "layers")
    assert tuple(axes.v_col["stack"]["query"]["kernel"]) == ("layers", "heads", "kv")


def test_the_compiled_step_touches_no_more_bytes_than_optax() -> None:
    params = make_params()["head"] | make_params()["embed"]
    ours = ada.adafactor(0.1, min_dim_size_to_factor=8)
    theirs = optax.adafactor(0.1, min_dim_size_to_factor=8)

    def cost(tx: Any) -> float:
        def step(params: Any, state: Any, grads: Any) -> Any:
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        compiled = jax.jit(step).lower(params, tx.init(params), params).compile()
        analysis: Any = compiled.cost_analysis()
        return float(analysis["bytes accessed"])

    assert cost(ours) <= cost(theirs)
