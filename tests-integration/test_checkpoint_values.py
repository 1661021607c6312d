"""Rules that change values, with T5X's Adafactor, groups, meshes and steps on disk."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from opt_adafactor import Adafactor, HParamMap
from opt_checkpoint import (
    Checkpointer,
    Map,
    Pad,
    Plan,
    Rule,
    Stack,
    Unstack,
    named_state,
    plan_restore,
)
from opt_core import Optimizer

LAYERS = 3
ROLES = ("row", "batch", "column")


def adafactor(**settings: Any) -> Any:
    return Adafactor(0.1, min_dim_size_to_factor=4, beta1=0.9, **settings)


def scanned(rule: Any = ROLES) -> Any:
    return adafactor(factor_map=HParamMap([(".*/w", rule), (".*", None)]))


def random(shape: tuple[int, ...], seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def per_layer(shape: tuple[int, ...], seed: int = 0) -> dict[str, Any]:
    return {f"layers_{i}": {"w": random(shape, seed + i)} for i in range(LAYERS)}


def together(tree: Any) -> Any:
    return {"layers": {"w": jnp.stack([tree[f"layers_{i}"]["w"] for i in range(LAYERS)], 1)}}


STACK: list[Rule] = [(r"(.*)/layers/(.*)", Stack(r"\1/layers_{i}/\2", 1))]
UNSTACK: list[Rule] = [(r"(.*)/layers_(\d+)/(.*)", Unstack(r"\1/layers/\3", r"\2", 1))]


# T5X calls the shorter dimension of a matrix its row, and the first of two alike.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "rule", "swaps"),
    [
        ((6, 4), ROLES, True),
        ((4, 6), ROLES, False),
        ((5, 5), ROLES, False),
        ((5, 5), ("column", "batch", "row"), True),
        ((4, 6), ("column", "batch", "row"), True),
    ],
)
def test_layers_of_adafactor_continue_together_as_each_did(
    shape: tuple[int, ...], rule: Any, swaps: bool
) -> None:
    params, grads = per_layer(shape), per_layer(shape, 10)
    one: Optimizer = adafactor().create(params).apply_gradient(grads)
    target = scanned(rule).create(together(params))
    plan = plan_restore(named_state(one), target, rules=STACK)
    assert ("rows and columns change places" in str(plan)) == swaps
    stacked = plan.apply()
    expected = together(one.apply_gradient(per_layer(shape, 20)).target)
    found = stacked.apply_gradient(together(per_layer(shape, 20)))
    np.testing.assert_allclose(
        found.target["layers"]["w"], expected["layers"]["w"], rtol=2e-6, atol=1e-7
    )
    apart = plan_restore(named_state(stacked), one, rules=UNSTACK).apply()
    assert_equal(apart, one)


def assert_equal(found: Optimizer, expected: Optimizer) -> None:
    one, other = named_state(found), named_state(expected)
    assert one.keys() == other.keys()
    wrong = [n for n in one if not np.array_equal(np.asarray(one[n]), np.asarray(other[n]))]
    assert not wrong


def mesh(kind: AxisType) -> Mesh:
    devices = np.array(jax.devices()).reshape(2, 4)
    return Mesh(devices, ("data", "model"), axis_types=(kind, kind))


def placed(shape: tuple[int, ...], on: Mesh, spec: P) -> Any:
    return jax.device_put(jnp.ones(shape), NamedSharding(on, spec))


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_values_change_on_their_way_to_a_mesh(tmp_path: Path, kind: AxisType) -> None:
    params = {
        "embed": random((6, 8), 0),
        **{n: random((8, 8), i) for i, n in enumerate("qkv")},
        **{f"l{i}": random((8, 4), 9 + i) for i in range(4)},
        "t": random((6, 8), 5),
    }
    with jax.numpy_dtype_promotion("standard"):
        one = opt.adamw(0.1).create(params).apply_gradient(params)
    on = mesh(kind)
    target = opt.adamw(0.1).create(
        {
            "embed": placed((16, 8), on, P("data", "model")),
            "qkv": placed((8, 24), on, P("data", "model")),
            "l": placed((4, 8, 4), on, P("data", "model")),
            "t": placed((8, 6), on, P("model", "data")),
        }
    )
    rules: list[Rule] = [
        ("(.*)/embed", Pad(0, 16)),
        (
            "(.*)/qkv",
            Map((r"\1/q", r"\1/k", r"\1/v"), lambda *given: jnp.concatenate(given, 1)),
        ),
        ("(.*)/l", Stack(r"\1/l{i}")),
        ("(.*)/t", Map(r"\1/t", jnp.transpose)),
    ]
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, one)
        checkpointer.wait()
        plan: Plan[Any] = plan_restore(checkpointer.at(1), target, rules=rules)
        found = named_state(plan.apply())
    old = {name: np.asarray(leaf) for name, leaf in named_state(one).items()}
    for name, leaf in found.items():
        front = name.rpartition("/")[0]
        match name.rpartition("/")[2]:
            case "embed":
                expected = np.pad(old[name], [(0, 10), (0, 0)])
            case "qkv":
                expected = np.concatenate([old[f"{front}/{n}"] for n in "qkv"], 1)
            case "l":
                expected = np.stack([old[f"{front}/l{i}"] for i in range(4)])
            case "t":
                expected = old[name].T
            case _:
                expected = old[name]
        assert np.array_equal(np.asarray(leaf), expected)
        wanted = named_state(target)[name]
        assert not wanted.committed or leaf.sharding == wanted.sharding
