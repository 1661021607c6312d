"""Adafactor among the other packages: derived axes, sharded state, run-time hyper-parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_adafactor as ada
import opt_optax_bridge
import opt_partition
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

SHAPES = {
    "query": (16, 4, 8, 8),  # scanned layers in the middle
    "wi": (16, 4, 32),
    "scale": (16, 4),
    "embedding": (64, 16),
    "square": (16, 16),
    "gate": (1,),
    "norm": (16,),
}
AXES = {
    "query": P("embed", "layers", "heads", "kv"),
    "wi": P("embed", "layers", "mlp"),
    "scale": P("embed", "layers"),
    "embedding": P("vocab", "embed"),
    "square": P("embed", "mlp"),
    "gate": P(None),
    "norm": P("embed"),
}
RULES = ada.standard_logical_factor_rules()
TO_MESH = {"embed": "data", "mlp": "model", "heads": "model", "vocab": "model"}
OPTIONS: dict[str, Any] = {
    "beta1": 0.9,
    "logical_factor_rules": RULES,
    "min_dim_size_to_factor": 8,
    "weight_decay_rate": 0.01,
}


def params_of(seed: int = 0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in SHAPES.items()}


def make(**options: Any) -> tuple[ada.Adafactor, Any]:
    """Both faces."""
    options = {**OPTIONS, **options}
    definition = ada.Adafactor(0.1, **options).with_param_axes(AXES)
    return definition, ada.adafactor(0.1, param_axes=AXES, **options)


def padded(spec: Any, rank: int) -> tuple[Any, ...]:
    names = tuple(spec or ())
    return (*names, *(None,) * (rank - len(names)))


def by_slot(tree: Any, slot: str) -> Any:
    return {path: getattr(state, slot) for path, state in tree.items()}


@pytest.mark.sample(1)
@pytest.mark.parametrize("respect", [False, True])
def test_both_ways_to_derive_the_axes_agree(respect: bool) -> None:
    definition, tx = make(respect_rank2_rules=respect)
    abstract = jax.eval_shape(params_of)
    optimizer = jax.eval_shape(definition.create, abstract)
    derived = definition.derive_logical_axes(optimizer, AXES).state.param_states
    explanation = opt_partition.explain(tx, abstract, AXES, strict=True)  # nothing is left open
    axes = explanation.axes
    for slot in ("v_row", "v_col", "v", "m"):
        ours, shapes = by_slot(derived, slot), by_slot(optimizer.state.param_states, slot)
        for path, spec in getattr(axes, slot).items():
            rank = len(shapes[path].shape)
            assert padded(spec, rank) == padded(ours[path], rank), f"{slot}/{path}"
    assert tuple(axes.v_row["wi"]) == ("embed", "layers")
    assert tuple(axes.v_col["query"]) == ("layers", "heads", "kv")
    assert tuple(axes.v_row["square"]) == ("embed",)  # not its columns, of the same size


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request: pytest.FixtureRequest) -> Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(request.param,) * 2)


def on_mesh(spec: Any) -> P:
    return P(*(TO_MESH.get(axis) for axis in spec or ()))


@pytest.mark.sample(1)
def test_sharded_statistics_make_the_same_updates(mesh: Mesh) -> None:
    definition, _ = make(clipping_threshold=0.5)
    derived = definition.derive_logical_axes(jax.eval_shape(definition.create, params_of()), AXES)
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, on_mesh(spec)),
        derived,
        is_leaf=lambda x: x is None or isinstance(x, P),
    )
    params = jax.device_put(params_of(), shardings.target)
    grads = [params_of(t + 1) for t in range(2)]

    def step(optimizer: Any, grads: Any) -> Any:
        return optimizer.apply_gradient(grads)

    compiled = jax.jit(step, out_shardings=shardings, donate_argnums=0)
    with jax.set_mesh(mesh):
        sharded = jax.jit(definition.create, out_shardings=shardings)(params)
        plain = jax.tree.map(np.array, sharded)
        for g in grads:
            sharded = compiled(sharded, jax.device_put(g, shardings.target))
    for g in grads:
        plain = jax.jit(step)(plain, g)
    row = sharded.state.param_states["wi"].v_row
    assert row.sharding.spec == P("data", None)
    assert {shard.data.shape for shard in row.addressable_shards} == {(4, 4)}
    col = sharded.state.param_states["query"].v_col
    assert {shard.data.shape for shard in col.addressable_shards} == {(4, 4, 8)}
    for found, expected in zip(jax.tree.leaves(sharded), jax.tree.leaves(plain), strict=True):
        scale = float(np.max(np.abs(np.asarray(expected))))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.slow
def test_wrapped_for_run_time_hyper_parameters() -> None:
    adafactor = opt_optax_bridge.wrap_optax_optimizer(ada.adafactor)
    params, grads = params_of(), params_of(1)
    options = {**OPTIONS, "param_axes": AXES}
    wrapped = adafactor(learning_rate=0.1, **options).create(params)
    step = jax.jit(lambda o, lr: o.apply_gradient(grads, learning_rate=lr))
    definition, _ = make()
    optimizer = jax.jit(definition.create)(params)
    for t, rate in enumerate((0.1, 0.05)):
        wrapped = step(wrapped, jnp.float32(rate))
        optimizer = step(optimizer, jnp.float32(rate))
        assert int(wrapped.state.step) == int(wrapped.state.param_states.count) == t + 1
    for path, found in wrapped.target.items():
        np.testing.assert_allclose(found, optimizer.target[path], rtol=1e-5, atol=1e-5)
    restored = wrapped.restore_state(wrapped.state_dict())
    assert jax.tree.all(jax.tree.map(jnp.array_equal, restored, wrapped))


def test_the_compiled_step_touches_no_more_bytes_than_optax() -> None:
    params = {k: p for k, p in params_of().items() if p.ndim <= 2}
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
