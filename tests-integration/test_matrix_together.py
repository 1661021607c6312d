"""Muon with the other packages: checkpoints, groups, accumulation, 8-bit momentum, memory plans."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import optax
import optax.contrib
import pytest
from opt_checkpoint import Stack, Unstack, named_state, plan_restore
from opt_core import MultiOptimizer
from opt_matrix import Matrices, hyperball, muon, newton_schulz, scale_by_muon

contrib: Any = optax.contrib
RNG = np.random.default_rng(0)
F32 = newton_schulz(dtype=None)
LAYERS = 3
UNROLLED = Matrices.by_path({".*/wi": (-2, -1), ".*/b|head": None})


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def layers() -> dict[str, Any]:
    each = {f"layers_{n}": {"b": normal(8), "wi": normal(8, 16)} for n in range(LAYERS)}
    return {**each, "head": normal(5)}


def stacked(tree: dict[str, Any]) -> dict[str, Any]:
    each = [tree[f"layers_{n}"] for n in range(LAYERS)]
    return {"head": tree["head"], "layers": jax.tree.map(lambda *x: jnp.stack(x), *each)}


def stepped(optimizer: Any, grads: Any) -> Any:
    return optimizer.apply_gradient(grads)


def ours(matrices: Matrices = UNROLLED) -> Any:
    return opt.wrap_optax_optimizer(muon)(0.1, matrices=matrices, orthogonalize=F32)


def theirs(params: Any) -> Any:
    """Optax's, given which leaves of these parameters are matrices."""

    def dims(params: Any) -> Any:
        def one(path: Any, leaf: Any) -> Any:
            if path[-1].key != "wi":
                return None
            return contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1)

        return jax.tree_util.tree_map_with_path(one, params)

    make = opt.wrap_optax_optimizer(contrib.muon)
    return make(0.1, muon_weight_dimension_numbers=dims)


def close(found: Any, expected: Any, tolerance: float) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance)


STACK = [(r"(.*)/layers/(.*)", Stack(r"\1/layers_{i}/\2"))]
UNSTACK = [(r"(.*)/layers_(\d+)/(.*)", Unstack(r"\1/layers/\3", index=r"\2"))]


@pytest.mark.slow
def test_a_state_of_optax_is_restored_and_restacked_and_goes_back() -> None:
    params, first, second = layers(), layers(), layers()
    before = stepped(theirs(params).create(params), first)

    target = ours().create(params)
    plan = plan_restore(named_state(before), target)
    assert plan.is_exact, str(plan)
    same = plan.apply()
    close(same.state, before.state, 0)  # bit for bit
    expected = stepped(before, second).target
    close(stepped(same, second).target, expected, 1e-5)

    target = ours().create(stacked(params))
    scanned = plan_restore(named_state(before), target, rules=STACK).apply()
    close(stepped(scanned, stacked(second)).target, stacked(expected), 1e-5)

    target = theirs(params).create(params)
    back = plan_restore(named_state(scanned), target, rules=UNSTACK).apply()
    close(back, before, 0)


@opt.wrap_optax_optimizer
def muonh(learning_rate: Any) -> Any:
    direction = scale_by_muon(matrices=UNROLLED, orthogonalize=F32)
    return hyperball(direction, UNROLLED, learning_rate, rest=optax.adam(1e-2))


@pytest.mark.slow
def test_hyperball_is_restored_and_goes_on_bit_for_bit() -> None:
    params, first, second = layers(), layers(), layers()
    before = stepped(muonh(optax.linear_schedule(0.1, 0.0, 9)).create(params), first)
    target = muonh(optax.linear_schedule(0.1, 0.0, 9)).create(layers())
    plan = plan_restore(named_state(before), target)
    assert plan.is_exact, str(plan)
    close(stepped(plan.apply(), second), stepped(before, second), 0)
    whole = muonh(0.1).create(params).apply_gradient(first, learning_rate=0.05).target
    close(whole, stepped(muonh(0.05).create(params), first).target, 1e-6)


def test_groups_and_a_learning_rate_at_run_time() -> None:
    params, grads = layers(), layers()
    definition = MultiOptimizer.from_rules(
        [
            ("vectors", ".*/b|head", opt.sgd(0.5)),
            ("matrices", ".*/wi", ours(Matrices.by_path({".*": (-2, -1)}))),
        ]
    )
    optimizer = definition.create(params)
    whole = optimizer.apply_gradient(grads, learning_rate=0.1).target
    halved = optimizer.apply_gradient(grads, learning_rate=0.05).target
    alone = stepped(ours().create(params), grads).target
    for name in ("layers_0", "layers_2"):
        close(whole[name]["wi"], alone[name]["wi"], 1e-6)
        moved = params[name]["wi"] - whole[name]["wi"]
        close(params[name]["wi"] - halved[name]["wi"], 0.5 * moved, 1e-5)
    close(whole["head"], params["head"] - 0.1 * grads["head"], 1e-6)


DECODER = """
import json, math, sys
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from opt_matrix import Matrices, plan_matrices, scale_by_muon
from opt_partition import read_collectives

d, ff, heads, kv, size = 8192, 28672, 64, 8, 128  # 70B, of which two layers
shapes = {
    "q": ((d, heads, size), ("embed", "heads", "kv")),
    "k": ((d, kv, size), ("embed", "kv_heads", "kv")),
    "v": ((d, kv, size), ("embed", "kv_heads", "kv")),
    "o": ((heads, size, d), ("heads", "kv", "embed")),
    "gate": ((d, ff), ("embed", "mlp")),
    "up": ((d, ff), ("embed", "mlp")),
    "down": ((ff, d), ("mlp", "embed")),
}
over = {"embed": "fsdp", "heads": "tp", "kv_heads": "tp", "mlp": "tp"}
mesh = jax.make_mesh((32, 8), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
axes = {f"{n}/{k}": P(*a) for n in range(2) for k, (_, a) in shapes.items()}
params = {
    f"{n}/{k}": jax.ShapeDtypeStruct(
        s, np.float32, sharding=NamedSharding(mesh, P(*map(over.get, a)))
    )
    for n in range(2)
    for k, (s, a) in shapes.items()
}
shardings = {path: leaf.sharding for path, leaf in params.items()}
plan = plan_matrices(params, shardings, mesh, Matrices.by_logical_axes(axes))
tx = scale_by_muon(plan=plan)
state = jax.eval_shape(tx.init, params)._replace(mu=params)
program = jax.jit(tx.update, donate_argnums=(0, 1)).lower(params, state).compile()
plan.check(program, exclusive=True)
width = {"f32": 4, "u16": 2, "bf16": 2}
found = sum(
    row.count * math.prod(row.shape) * width[row.dtype] for row in read_collectives(program)
)
print(json.dumps([plan.bytes_per_device, found]))
"""


@pytest.mark.slow
def test_bytes_of_a_large_decoder_are_those_of_the_program_for_256_devices(tmp_path: Path) -> None:
    flags = "--xla_force_host_platform_device_count=256"
    done = subprocess.run(
        [sys.executable, "-c", DECODER],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    planned, found = json.loads(done.stdout.splitlines()[-1])
    assert found == pytest.approx(planned, rel=0.05)
