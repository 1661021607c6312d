"""On a GPU or TPU every package does what it does on the CPU, in place, and what Optax does.

Run by the accelerator workflow, or by whoever has a device, with
`hatch run dev:integration tests-integration/test_accelerator.py -m accelerator`; skipped where
there is none. The file needs nothing but the packages. What needs several devices is skipped on
one.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_adafactor
import opt_legacy_stax as legacy
import opt_nnx
import opt_optax_bridge as opt
import optax
import pytest
from flax import nnx
from opt_accumulate import MultiSteps
from opt_checkpoint import Checkpointer
from opt_core import FROZEN, MultiOptimizer, Optimizer
from opt_partition import Expected, init_sharded, verify

pytestmark = pytest.mark.accelerator

SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 100)
DEFINITIONS: dict[str, Callable[[], opt.OptaxWrapper]] = {
    "adamw": lambda: opt.adamw(SCHEDULE),
    "lion": lambda: opt.lion(1e-2),
    "adafactor": lambda: opt.adafactor(1e-2, min_dim_size_to_factor=8),
    "muon": lambda: opt.muon(1e-2),
}


def make_params() -> dict[str, jax.Array]:
    w = jax.random.normal(jax.random.key(0), (256, 128))
    return {"w": w, "b": jnp.zeros(128)}


def train(definition: opt.OptaxWrapper, device: jax.Device) -> Optimizer:
    with jax.default_device(device):
        optimizer = definition.create(make_params())

        traces = []

        @functools.partial(jax.jit, donate_argnums=0)
        def step(optimizer: Optimizer) -> Optimizer:
            traces.append(optimizer)
            return optimizer.apply_gradient(jax.tree.map(jnp.sin, optimizer.target))

        for _ in range(4):
            optimizer = step(optimizer)
    assert len(traces) == 1
    return optimizer


@pytest.mark.parametrize("name", DEFINITIONS)
def test_accelerator_equals_cpu(name: str) -> None:
    definition = DEFINITIONS[name]()
    with jax.default_matmul_precision("highest"):
        here = train(definition, jax.devices()[0])
        there = train(definition, jax.devices("cpu")[0])
    assert {leaf.device for leaf in jax.tree.leaves(here.target)} == {jax.devices()[0]}
    for a, b in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_compiled_step_costs_what_optax_costs(name: str) -> None:
    definition = DEFINITIONS[name]()
    tx = definition.optax_optimizer
    optimizer = definition.create(make_params())

    def raw(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    wrapped = jax.jit(lambda o, g: o.apply_gradient(g), donate_argnums=0)
    ours = wrapped.lower(optimizer, optimizer.target).compile().cost_analysis()
    theirs = jax.jit(raw, donate_argnums=(0, 1))
    lowered = theirs.lower(optimizer.target, optimizer.state.param_states, optimizer.target)
    cost = lowered.compile().cost_analysis()
    assert ours is not None
    assert cost is not None
    assert ours["bytes accessed"] - cost["bytes accessed"] <= 64  # the step counter
    assert ours.get("flops", 0.0) - cost.get("flops", 0.0) <= 8


def test_state_dict_crosses_devices() -> None:
    definition = opt.adamw(SCHEDULE)
    here = train(definition, jax.devices()[0])
    state_dict = jax.device_get(here.state_dict())
    with jax.default_device(jax.devices("cpu")[0]):
        there = definition.create(make_params()).restore_state(state_dict)
    back = definition.create(make_params()).restore_state(jax.device_get(there.state_dict()))
    for a, b in zip(jax.tree.leaves(here), jax.tree.leaves(back), strict=True):
        np.testing.assert_array_equal(a, b)


def sharded(mesh: jax.sharding.Mesh, *axes: str | None) -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))


def assert_equal(one: Any, other: Any) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs several accelerators")
def test_zero_keeps_state_in_its_place_and_moves_what_it_should() -> None:
    n = jax.device_count()
    mesh = jax.make_mesh((n,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = optax.adamw(1e-2)
    params = {"w": jnp.ones((64 * n, 256))}
    whole, divided = sharded(mesh), sharded(mesh, "data")
    params = jax.device_put(params, whole)
    specs = jax.tree.map(lambda x: divided if x.ndim else whole, jax.eval_shape(tx.init, params))
    state = init_sharded(tx, params, specs)

    def step(params: Any, state: Any, batch: Any) -> Any:
        grads = jax.grad(lambda p: jnp.mean((batch @ p["w"]) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    jitted = jax.jit(
        step,
        in_shardings=(whole, specs, divided),
        out_shardings=(whole, specs),
        donate_argnums=(0, 1),
    )
    lowered = jitted.lower(params, state, jax.ShapeDtypeStruct((8 * n, 64 * n), "float32"))
    report = verify(lowered, Expected(inputs=(whole, specs), outputs=(whole, specs)))
    assert report.ok, report
    # A gradient is summed to where its moments lie, and its update or parameter gathered: once.
    assert {row.kind for row in report.collectives} <= {
        "all-gather",
        "all-reduce",
        "reduce-scatter",
    }
    assert sum(row.kind == "all-gather" for row in report.collectives) == 1


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_donated_step_holds_nothing_twice(name: str) -> None:
    optimizer = DEFINITIONS[name]().create(make_params())
    step = jax.jit(lambda o, g: o.apply_gradient(g), donate_argnums=0)
    compiled = step.lower(optimizer, optimizer.target).compile()
    # Optax's Adafactor has placeholders of one element, which the step does not use.
    leaves = [leaf for leaf in jax.tree.leaves(optimizer) if leaf.size > 1]
    memory: Any = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(leaf.nbytes for leaf in leaves)
    step(optimizer, jax.tree.map(jnp.copy, optimizer.target))
    assert all(leaf.is_deleted() for leaf in leaves)


def test_a_bfloat16_step_casts_no_parameter_to_float32_and_back() -> None:
    # Moments in float32: each leaf is read once as bfloat16 and written once as bfloat16.
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), make_params())
    optimizer = opt.adamw(1e-2, mu_dtype=jnp.float32).create(params)
    step = jax.jit(lambda o, g: o.apply_gradient(g), donate_argnums=0)
    text = step.lower(optimizer, params).compile().as_text() or ""
    entry = text[text.index("\nENTRY ") :]
    assert "convert(" not in entry, "a cast that is not fused with what needs it"


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_resumed_run_is_the_run(name: str) -> None:
    definition = DEFINITIONS[name]()

    @jax.jit
    def step(optimizer: Optimizer) -> Optimizer:
        return optimizer.apply_gradient(jax.tree.map(jnp.sin, optimizer.target))

    half = step(step(definition.create(make_params())))
    saved = jax.device_get(half.state_dict())
    resumed = definition.create(make_params()).restore_state(saved)
    assert_equal(step(step(half)), step(step(resumed)))


def test_adafactor_in_place() -> None:
    definition = opt_adafactor.Adafactor(1e-2, min_dim_size_to_factor=8)
    step = jax.jit(lambda o: o.apply_gradient(jax.tree.map(jnp.sin, o.target)), donate_argnums=0)
    with jax.default_matmul_precision("highest"):
        here = step(step(definition.create(make_params())))
        with jax.default_device(jax.devices("cpu")[0]):
            there = step(step(definition.create(make_params())))
    for a, b in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_mini_step_holds_no_temporaries() -> None:
    params = make_params()
    steps = MultiSteps(optax.adamw(1e-2), 4)
    state = steps.init(params)
    jitted = jax.jit(steps.apply, donate_argnums=(0, 1))
    memory: Any = jitted.lower(params, state, params).compile().memory_analysis()
    assert memory.temp_size_in_bytes < params["w"].nbytes / 2
    grads, theirs = jax.tree.map(jnp.sin, params), optax.MultiSteps(optax.adamw(1e-2), 4)
    expected, their_state = jax.tree.map(jnp.copy, params), theirs.init(params)
    for _ in range(4):
        params, state = jitted(params, state, grads)
        updates, their_state = theirs.update(grads, their_state, expected)
        expected = optax.apply_updates(expected, updates)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_groups_keep_frozen_leaves_in_place() -> None:
    definition = MultiOptimizer.from_rules([("w", opt.adamw(1e-2))], rest=FROZEN)
    before = make_params()
    step = jax.jit(lambda o, g: o.apply_gradient(g))
    after = step(definition.create(before), before)
    np.testing.assert_array_equal(after.target["b"], before["b"])
    assert not np.array_equal(after.target["w"], before["w"])


def test_checkpoint_comes_back_to_the_device(tmp_path: Path) -> None:
    definition = opt.adamw(SCHEDULE)
    optimizer = train(definition, jax.devices()[0])
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(4, optimizer)
        checkpointer.wait()
        restored = checkpointer.restore(4, definition.create(make_params()))
    assert_equal(optimizer, restored)
    assert {leaf.device for leaf in jax.tree.leaves(restored)} == {jax.devices()[0]}


def test_legacy_triples() -> None:
    init, update, get_params = legacy.adam(1e-2)
    step = jax.jit(update, static_argnums=0)
    states = []
    for device in (jax.devices()[0], jax.devices("cpu")[0]):
        with jax.default_device(device):
            state = init(make_params())
            for i in range(3):
                state = step(i, jax.tree.map(jnp.sin, get_params(state)), state)
            states.append(jax.device_get(get_params(state)))
    for a, b in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_nnx_keeps_everything_on_the_device() -> None:
    kernels = []
    for device in (jax.devices()[0], jax.devices("cpu")[0]):
        with jax.default_device(device), jax.default_matmul_precision("highest"):
            model = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
            optimizer = opt_nnx.Optimizer(model, optax.adamw(1e-2))
            x = jnp.sin(jnp.arange(32.0).reshape(4, 8))

            @nnx.jit
            def step(model: Any, optimizer: Any, x: Any = x) -> None:
                grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
                optimizer.update(model, grads)

            for _ in range(3):
                step(model, optimizer)
            leaves = jax.tree.leaves((nnx.state(model), nnx.state(optimizer)))
            assert {leaf.device for leaf in leaves} == {device}
            kernels.append(jax.device_get(model.kernel.get_value()))
    np.testing.assert_allclose(kernels[0], kernels[1], rtol=1e-4, atol=1e-5)
