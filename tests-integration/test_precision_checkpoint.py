"""Low-precision state in checkpoints: bit by bit on any mesh, and as another way of storing it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import opt_precision as op
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from opt_checkpoint import Checkpointer, TrainingState, named_state, plan_restore
from opt_checkpoint.errors import LeafError, PlanError
from opt_core import Optimizer

P = PartitionSpec
SHAPES = {"bias": (3,), "kernel": (64, 256)}
ALL = frozenset({"cast", "optimizer", "drop", "initialise"})
EIGHT: Any = op.dynamic8()
MAKE: dict[str, Any] = {
    "float32": lambda tx: tx,
    "8 bits": lambda tx: op.quantize_state(tx, EIGHT),
    "remainder": lambda tx: op.master_weights(op.quantize_state(tx, EIGHT), storage="remainder"),
    "remainder8": lambda tx: op.master_weights(op.quantize_state(tx, EIGHT), storage="remainder8"),
    "kahan": lambda tx: op.master_weights(op.quantize_state(tx, op.bfloat16()), storage="kahan"),
    "master": lambda tx: op.master_weights(tx),
    "stochastic": lambda tx: op.stochastic_weights(op.quantize_state(tx, op.log8())),
}


def params(dtype: Any) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    rows = zip(SHAPES.items(), keys, strict=True)
    return {name: jax.random.normal(key, shape).astype(dtype) for (name, shape), key in rows}


def dtype_of(name: str) -> Any:
    return jnp.float32 if name in ("float32", "8 bits") else jnp.bfloat16


def definition(name: str) -> Any:
    return opt.OptaxWrapper(MAKE[name](optax.adamw(1e-3)))


def trained(name: str, steps: int = 2) -> Optimizer:
    optimizer: Optimizer = definition(name).create(params(dtype_of(name)))
    grads = jax.tree.map(lambda p: jnp.cos(p.astype(jnp.float32)), optimizer.target)
    step = jax.jit(lambda optimizer: optimizer.apply_gradient(grads))
    for _ in range(steps):
        optimizer = step(optimizer)
    return optimizer


def adam(optimizer: Optimizer) -> Any:
    nodes = jax.tree.leaves(
        op.decode(optimizer.state.param_states),
        is_leaf=lambda node: isinstance(node, optax.ScaleByAdamState),
    )
    return next(node for node in nodes if isinstance(node, optax.ScaleByAdamState))


def assert_same(one: Any, other: Any) -> None:
    for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


# Largest differences of parameters and moments, relative to the largest of the leaf.
EXACT, BITS16, BITS8 = 1e-6, 0.004, 0.08


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "params_error", "moments_error"),
    [
        ("float32", "remainder", 0, BITS8),
        ("remainder", "float32", 0, EXACT),
        ("remainder", "kahan", 2**-16, BITS16),
        ("remainder", "remainder8", 2**-16, 0),
        ("remainder8", "float32", 0, EXACT),
        ("float32", "8 bits", 0, BITS8),
        ("8 bits", "remainder", 0, 0),
        ("master", "remainder", 0, BITS8),
        ("kahan", "master", 0, EXACT),
        ("remainder", "stochastic", 2**-7, BITS8),
    ],
)
def test_a_state_continues_as_it_is_stored_now(
    old: str, new: str, params_error: float, moments_error: float
) -> None:
    saved, target = trained(old), trained(new, 0)
    restored = plan_restore(named_state(saved), target, allow=ALL).apply()
    assert jax.tree.map(jax.typeof, restored) == jax.tree.map(jax.typeof, target)
    before, after = (op.master_of(o.state.param_states, o.target) for o in (saved, restored))
    rows = [(before, after, params_error)]
    rows += [
        (getattr(adam(saved), f), getattr(adam(restored), f), moments_error) for f in ("mu", "nu")
    ]
    for one, other, limit in rows:
        for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
            assert np.abs(np.asarray(a - b)).max() <= limit * np.abs(np.asarray(a)).max()
    assert int(adam(restored).count) == 2
    restored.apply_gradient(jax.tree.map(jnp.ones_like, restored.target))


@pytest.mark.skipif(jax.__version_info__ < (0, 10, 2), reason="no state on the host")
def test_codes_on_the_host_are_made_and_read() -> None:
    plain = optax.sgd(0.1, momentum=0.9)
    tx = op.quantize_state(op.offload_state(plain), EIGHT)
    host: Optimizer = opt.OptaxWrapper(tx).create(params(jnp.float32))
    saved: Optimizer = opt.OptaxWrapper(plain).create(params(jnp.float32))
    saved = saved.apply_gradient(saved.target)
    there = plan_restore(named_state(saved), host, allow=ALL).apply()
    codes = there.state.param_states.inner[0].trace["kernel"].codes
    assert codes.sharding.memory_kind == "pinned_host"
    back = plan_restore(named_state(there), saved, allow=ALL).apply()
    found, near, wanted = (
        np.asarray(op.decode(state)[0].trace["kernel"])
        for state in (
            back.state.param_states,
            there.state.param_states.inner,
            saved.state.param_states,
        )
    )
    np.testing.assert_array_equal(found, near)
    np.testing.assert_allclose(found, wanted, atol=BITS8 * np.abs(wanted).max())


def test_digits_are_lost_only_where_that_is_admitted() -> None:
    saved = named_state(trained("float32"))
    with pytest.raises(PlanError, match="float32 -> dynamic8"):
        plan_restore(saved, trained("8 bits", 0), allow=ALL - {"cast"}).check()


def test_codes_without_the_package_that_stored_them_are_an_error() -> None:
    saved = named_state(trained("8 bits", 0))
    storage = {how: {**data, "package": "not_here"} for how, data in saved.schema.storage.items()}
    schema = dataclasses.replace(saved.schema, storage=storage)
    with pytest.raises(LeafError, match=r"mu/codes/kernel` is stored as .*: install `not-here`"):
        plan_restore(dataclasses.replace(saved, schema=schema), trained("float32", 0))


def test_parameters_without_their_remainder_reset_it() -> None:
    saved: Optimizer = opt.adamw(1e-3).create(params(jnp.bfloat16))
    plan = plan_restore(named_state(saved), trained("remainder"), allow=ALL)
    assert "params/kernel: bfloat16 -> float32, saved without its remainder, which is reset" in str(
        plan
    )
    restored = plan.apply()
    assert not any(leaf.any() for leaf in jax.tree.leaves(restored.state.param_states.low))
    assert_same(restored.target, saved.target)


def test_what_is_stored_alike_is_carried_bit_by_bit() -> None:
    saved = trained("remainder")
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    target: Optimizer = opt.OptaxWrapper(MAKE["remainder"](tx)).create(params(jnp.bfloat16))
    rules: Any = [("params/bias", "cast")]  # with rules everything is planned as if in float32
    for given in ((), rules):
        restored = plan_restore(named_state(saved), target, allow=ALL, rules=given).apply()
        assert_same(restored, saved)


def mesh_of(number: int) -> Any:
    shape = {1: (1, 1), 4: (2, 2), 8: (4, 2)}[number]
    kinds = (AxisType.Auto,) * 2
    return jax.make_mesh(shape, ("a", "b"), axis_types=kinds, devices=jax.devices()[:number])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:blocks of moments lie on several devices")
@pytest.mark.parametrize("name", ["remainder", "stochastic"])
def test_eight_devices_then_four_then_one(name: str, tmp_path: Path) -> None:
    specs = {"bias": P(), "kernel": P("a", "b"), "wide": P(None, "b")}
    start = {**params(jnp.bfloat16), "wide": jnp.ones((8, 1024), jnp.bfloat16)}
    grads = jax.tree.map(lambda p: jnp.cos(p.astype(jnp.float32)), start)

    def tx_on(mesh: Any) -> tuple[Any, Any]:
        lies = {k: NamedSharding(mesh, spec) for k, spec in specs.items()}
        inner: Any = op.quantize_state(optax.adamw(1e-3), EIGHT, layout=lies)
        if name == "stochastic":
            return op.stochastic_weights(inner), lies
        return op.master_weights(inner, storage="remainder"), lies

    def stepped(state: Any) -> Any:
        step = jax.jit(state.tx.apply)
        new, opt_state = step(state.params, state.opt_state, grads)
        return state.replace(params=new, opt_state=opt_state, step=state.step + 1)

    def created(number: int) -> TrainingState:
        mesh = mesh_of(number)
        tx, lies = tx_on(mesh)
        held = jax.device_put(start, lies)

        def on_mesh(leaf: jax.Array) -> jax.Array:
            is_placed = isinstance(leaf.sharding, NamedSharding)
            return leaf if is_placed else jax.device_put(leaf, NamedSharding(mesh, P()))

        return TrainingState(tx, held, jax.tree.map(on_mesh, tx.init(held)))

    expected = created(1)
    state = created(8)
    for number in (4, 1):
        state, expected = stepped(state), stepped(expected)
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(int(state.step), state)
        target = created(number)
        state = Checkpointer(tmp_path, read_only=True).restore_latest(target)
        assert_same((state.params, state.opt_state), (expected.params, expected.opt_state))
        for leaf, like in zip(*map(jax.tree.leaves, (state, target)), strict=True):
            if isinstance(like, jax.Array) and like.committed:
                assert leaf.sharding == like.sharding
    assert_same(stepped(state).params, stepped(expected).params)
