"""Adafactor among the other packages: axes, bytes, and in groups with wrapped Optax."""

from collections.abc import Mapping
from typing import Any

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
from opt_core import FROZEN, MultiOptimizer, Optimizer, OptimizerDef
from opt_optax_bridge import t5x
from partition_oracles import shard_bytes

# The real Adafactor, wrapped Optax, a nested table and frozen leaves in one `MultiOptimizer`.

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
GROUPS = {"table": ("embed",), "stack": ("stack",), "head": ("head",)}
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


def nested() -> MultiOptimizer:
    """Scanned kernels by their logical axes, the norms unfactored."""
    by_axes = adafactor(logical_factor_rules=standard_logical_factor_rules())
    return MultiOptimizer.from_rules(
        [("kernels", ".*kernel", by_axes), ("norms", ".*scale", Adafactor(0.02, factored=False))]
    )


SCHEDULE = optax.linear_schedule(0.0, 1e-2, 3)

# Definitions of `table`, `stack` and `head`; with a wrapped one, states are kept by group.
MIXTURES: dict[str, tuple[Any, Any, Any]] = {
    "adafactors": (adafactor, nested, lambda: adafactor(clipping_threshold=0.5)),
    "with adamw": (adafactor, nested, lambda: opt.adamw(SCHEDULE, weight_decay=0.1)),
}


def definitions(mixture: str) -> dict[str, OptimizerDef]:
    return {name: make() for name, make in zip(GROUPS, MIXTURES[mixture], strict=True)}


def definition_of(mixture: str, api: Any = MultiOptimizer) -> Any:
    rules = [(name, f"{name}/.*", d) for name, d in definitions(mixture).items()]
    rules[0] = ("table", "embed/.*", rules[0][2])
    definition = api.from_rules([*rules, ("old", "old_head/.*", FROZEN)])
    definition.set_param_axes(AXES)
    return definition


def subtree(name: str, tree: Mapping[str, Any]) -> Any:
    return {key: tree[key] for key in GROUPS[name]}


def alone(mixture: str, name: str) -> Optimizer:
    """One group without the others."""
    definition: Any = definitions(mixture)[name]
    if hasattr(definition, "set_param_axes"):
        definition.set_param_axes(subtree(name, AXES))
    optimizer: Optimizer = definition.create(subtree(name, make_params()))
    return optimizer


def apply(optimizer: Optimizer, t: int, names: Any = tuple(SHAPES), **given: Any) -> Optimizer:
    grads = make_params(t + 1)
    return optimizer.apply_gradient({name: grads[name] for name in names}, **given)


def by_path(tree: Any, is_leaf: Any = None) -> dict[str, Any]:
    """Wrapped definitions see `()` where other groups' leaves are: no leaf, so no path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def assert_identical(found: Any, expected: Any) -> None:
    found, expected = by_path(found), by_path(expected)
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        assert found[path].dtype == leaf.dtype, path
        np.testing.assert_array_equal(found[path], leaf, err_msg=path)


def assert_groups_are(optimizer: Optimizer, singles: Mapping[str, Optimizer]) -> None:
    parts = optimizer.optimizer_def.split(optimizer)  # type: ignore[attr-defined]
    assert parts.keys() == singles.keys()
    for name, single in singles.items():
        assert_identical(parts[name].target, single.target)
        assert_identical(parts[name].state, single.state)


every_mixture = pytest.mark.parametrize("mixture", MIXTURES)


@pytest.mark.sample(1)
@every_mixture
def test_every_group_is_its_definition_alone_under_overrides_too(mixture: str) -> None:
    """Bit for bit, op by op; what is frozen keeps its buffer and needs no gradient."""
    optimizer = definition_of(mixture).create(make_params())
    singles = {name: alone(mixture, name) for name in GROUPS}
    frozen = optimizer.target["old_head"]["kernel"]
    inner = {"norms": {"learning_rate": 0.5}}
    groups = {"table": {"learning_rate": 0.3}, "stack": {"group_overrides": inner}}
    overrides: dict[str, dict[str, Any]] = {
        "table": {"learning_rate": 0.3},
        "stack": {"learning_rate": 0.2, "group_overrides": inner},
        "head": {"learning_rate": 0.2},
    }
    trained = [name for name in SHAPES if name != "old_head"]
    everything = {"learning_rate": 0.2, "group_overrides": groups}
    for t, (of_all, own) in enumerate([({}, {}), (everything, overrides)]):
        before = singles["stack"]
        optimizer = apply(optimizer, t, trained, **of_all)
        singles = {
            name: apply(single, t, GROUPS[name], **own.get(name, {}))
            for name, single in singles.items()
        }
        assert_groups_are(optimizer, singles)
    plain = apply(before, 1, GROUPS["stack"]).target["stack"]["norm"]["scale"]
    assert not np.array_equal(optimizer.target["stack"]["norm"]["scale"], plain)
    assert optimizer.target["old_head"]["kernel"] is frozen
    states = optimizer.state.param_states
    assert set(states) == set(GROUPS)  # nothing for what is frozen
    assert states["stack"]["kernels"]["stack"]["wi"]["kernel"].v_row.shape == (16, 4)


# Checkpoints.


def through_msgpack(state_dict: Any) -> Any:
    return flax.serialization.msgpack_restore(flax.serialization.msgpack_serialize(state_dict))


@pytest.mark.sample(1)
@every_mixture
@pytest.mark.parametrize("api", [MultiOptimizer, t5x.MultiOptimizer], ids=["opt_core", "t5x"])
def test_through_a_checkpoint(mixture: str, api: Any) -> None:
    optimizer = apply(definition_of(mixture, api).create(make_params()), 0)
    written = through_msgpack(optimizer.state_dict())
    restored = definition_of(mixture, api).create(make_params(9)).restore_state(written)
    assert jax.tree.structure(restored) == jax.tree.structure(optimizer)  # type: ignore[operator]
    assert_identical(restored, optimizer)
    assert_identical(apply(restored, 1), apply(optimizer, 1))
    states = written["state"]["param_states"]
    if mixture == "adafactors":  # T5X's layout, the nested table's groups in it
        assert states.keys() == SHAPES.keys()
        assert states["old_head"] == {"kernel": None}
        assert set(states["stack"]["norm"]["scale"]) == {"v_row", "v_col", "v", "m"}
    else:
        assert states.keys() == GROUPS.keys()
        alike = alone(mixture, "stack").state_dict()["state"]["param_states"]
        assert by_path(states["stack"]).keys() == by_path(alike).keys()


# Logical axes, and where the state lies.


@pytest.mark.sample(1)
@every_mixture
def test_logical_axes_are_those_of_each_group_alone(mixture: str) -> None:
    abstract = jax.eval_shape(definition_of(mixture).create, make_params())
    derived = abstract.optimizer_def.derive_logical_axes(abstract, AXES)
    assert derived.target == AXES
    assert derived.state.step is None
    parts = abstract.optimizer_def.split(derived)
    for name in GROUPS:
        single = alone(mixture, name)
        definition = single.optimizer_def
        expected = definition.derive_logical_axes(single, subtree(name, AXES))
        found = parts[name].state.param_states
        assert by_path(found, is_axes) == by_path(expected.state.param_states, is_axes)
    kernels = parts["stack"].state.param_states["kernels"]
    query = kernels["stack"]["query"]["kernel"]
    assert (query.v_row, query.v_col) == (P("embed", "layers"), P("layers", "heads", "kv"))
    assert query.m == AXES["stack"]["query"]["kernel"]


def is_axes(x: Any) -> bool:
    return x is None or isinstance(x, P)


def layout_of(definition: Any, mesh: Any) -> opt_partition.Layout:
    abstract = jax.eval_shape(definition.create, make_params())
    axes = definition.derive_logical_axes(abstract, AXES)
    return opt_partition.logical_to_mesh(axes, TO_MESH, mesh, abstract, on_unknown="replicate")


@pytest.mark.sample(1)
@every_mixture
def test_on_eight_devices_with_donation(mixture: str, mesh: Mesh) -> None:
    definition = definition_of(mixture)
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

    plain = definition.create(make_params())
    for t in range(2):
        plain = apply(plain, t)
    for a, b in zip(jax.tree.leaves(sharded), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.max(jnp.abs(b))))

    restored = sharded.restore_state(through_msgpack(plain.state_dict()))
    pairs = zip(jax.tree.leaves(restored), jax.tree.leaves(sharded), strict=True)
    assert all(a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in pairs)
    assert_identical(jax.device_get(restored), jax.device_get(plain))


# The definition and the transformation.


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
