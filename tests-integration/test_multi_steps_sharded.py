"""`MultiSteps` on 8 devices: where the state lies, and when devices talk to one another."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from opt_accumulate import MultiSteps, skip_not_finite

P = PartitionSpec
SPECS = {"w": P("data", "model"), "b": P("model")}
INNER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
_COLLECTIVE = re.compile(r" (all-reduce|all-gather|all-to-all|collective-permute)(-start)?\(")


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request: pytest.FixtureRequest) -> Mesh:
    assert jax.device_count() == 8
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(request.param,) * 2)


def tree_at(mesh: Mesh, index: int) -> dict[str, jax.Array]:
    values = {
        "w": np.random.default_rng(index).standard_normal((16, 8)).astype(np.float32),
        "b": np.linspace(-1.0, 1.0, 8, dtype=np.float32) * index,
    }
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    tree: dict[str, jax.Array] = jax.device_put(values, shardings)
    return tree


def assert_sharded(tree: Any, mesh: Mesh) -> None:
    for name, spec in SPECS.items():
        leaf = tree[name]
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), leaf.ndim), name


def collectives(program: Any) -> tuple[int, int]:
    """Returns how many there are in the entry computation, and how many in all."""
    text = program.as_text()
    entry = text[text.index("\nENTRY ") :]
    entry = entry[: entry.index("\n}")]
    return len(_COLLECTIVE.findall(entry)), len(_COLLECTIVE.findall(text))


@pytest.mark.sample(1)
def test_every_leaf_stays_where_its_parameter_is(mesh: Mesh) -> None:
    with jax.set_mesh(mesh):
        steps: Any = MultiSteps(INNER, 2, should_skip_update_fn=skip_not_finite)
        params = tree_at(mesh, 0)
        state = steps.init(params)
        apply = jax.jit(steps.apply)
        for index in range(1, 4):
            params, state = apply(params, state, tree_at(mesh, index))
            adam = state.inner_opt_state[1][0]
            for tree in (params, state.acc_grads, adam.mu, adam.nu):
                assert_sharded(tree, mesh)
        updates, updated = jax.jit(steps.update)(tree_at(mesh, 4), state, params)
        flushed, _ = jax.jit(steps.flush)(state, params)
        for tree in (updates, updated.acc_grads, flushed):
            assert_sharded(tree, mesh)


OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {"every_k_schedule": 2},
    "sum": {"every_k_schedule": 2, "use_grad_mean": False},
    "schedule": {"every_k_schedule": lambda step: jnp.where(step < 1, 1, 2)},
    "skip": {"every_k_schedule": 2, "should_skip_update_fn": optax.skip_not_finite},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", OPTIONS)
def test_numbers_are_those_of_optax_on_one_device(mesh: Mesh, options: str) -> None:
    single = jax.make_mesh((1, 1), ("data", "model"), devices=jax.devices()[:1])
    ours, theirs = (kind(INNER, **OPTIONS[options]) for kind in (MultiSteps, optax.MultiSteps))
    results = []
    for steps, place in ((ours, mesh), (theirs, single)):
        with jax.set_mesh(place):
            params: Any = tree_at(place, 0)
            state: Any = steps.init(params)
            update = jax.jit(steps.update)
            for index in range(1, 6):
                grads = tree_at(place, index)
                if index == 2 and options == "skip":
                    grads["b"] = grads["b"] * jnp.inf
                updates, state = update(grads, state, params)
                params = jax.jit(optax.apply_updates)(params, updates)
        results.append(jax.tree.map(np.asarray, (params, state)))
    # A global norm is summed in another order over 8 devices.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *results)


@pytest.mark.sample(1)
def test_devices_talk_only_to_emit(mesh: Mesh) -> None:
    def optax_step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = theirs.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    ours, theirs = MultiSteps(INNER, 2), optax.MultiSteps(INNER, 2)
    with jax.set_mesh(mesh):
        params = tree_at(mesh, 0)
        lowered = jax.jit(ours.apply).lower(params, ours.init(params), params)
        always, ever = collectives(lowered.compile())
        assert always == 0
        assert ever > 0  # the norm, in the loop
        lowered = jax.jit(optax_step).lower(params, theirs.init(params), params)
        assert collectives(lowered.compile())[0] > 0
