"""opt-precision on meshes: the same codes and parameters everywhere, and nothing is sent."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_precision as op
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

P = PartitionSpec
_COLLECTIVE = re.compile(r" (all-reduce|all-gather|all-to-all|collective-permute)(-start)?\(")
_SHAPES: Any = {"wide": (64, 1024), "tall": (512, 64), "vector": (8192,)}
_ALIGNED: Any = {
    "wide": P("data", "model"),
    "tall": P(("data", "model"), None),
    "vector": P("model"),
}
_CROSSED: Any = {
    "wide": P(None, ("data", "model")),
    "tall": P("data", "model"),
    "vector": P("data"),
}
# Two of each are compiled once, the third is alone.
SHAPES, ALIGNED, CROSSED = (
    {f"{name}{i}": of[name] for name in _SHAPES for i in range(1 if name == "tall" else 2)}
    for of in (_SHAPES, _ALIGNED, _CROSSED)
)


def params() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(0.02 * rng.normal(size=shape), jnp.bfloat16)
        for name, shape in SHAPES.items()
    }


def grads(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def wrapped(codec: Any, layout: Any = None) -> Any:
    inner: Any = op.quantize_state(optax.adamw(1e-3), codec, chunk_bytes=40_000, layout=layout)
    return op.stochastic_weights(inner)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_state_begins_where_the_parameters_lie(kind: AxisType) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    across = NamedSharding(mesh, P("data"))
    start = jax.device_put({"large": jnp.ones((64, 1024)), "small": jnp.ones(8)}, across)
    start = {name: leaf.astype(jnp.bfloat16) for name, leaf in start.items()}
    for tx in (op.quantize_state(optax.adamw(1e-3), op.dynamic8()), optax.adamw(1e-3)):
        state: Any = op.master_weights(tx).init(start)
        leaves = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
        assert len(leaves) in (6, 8)
        for leaf in leaves:
            assert leaf.sharding.is_equivalent_to(across, leaf.ndim)


def run(tx: Any, start: Any, lies: Any = None) -> tuple[Any, str]:
    """Three steps, and the text of the compiled step."""

    def put(tree: Any) -> Any:
        return tree if lies is None else jax.device_put(tree, lies)

    held = put(start)
    state = tx.init(held)
    step = jax.jit(tx.apply)
    text = step.lower(held, state, put(grads(0))).compile().as_text() or ""
    for number in range(3):
        held, state = step(held, state, put(grads(number)))
    return jax.tree.map(np.asarray, jax.tree.leaves((held, state))), text


class Plain:
    """Raw Optax, with our `apply`."""

    def __init__(self, tx: Any) -> None:
        self.init = tx.init
        self.apply = functools.partial(op.apply, tx)


def mesh_of(number: int, kind: Any) -> Any:
    shape = {1: (1, 1), 2: (2, 1), 8: (4, 2)}[number]
    devices = jax.devices()[:number]
    return jax.make_mesh(shape, ("data", "model"), axis_types=(kind,) * 2, devices=devices)


def assert_same(one: Any, other: Any) -> None:
    for a, b in zip(one, other, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("codec", [op.dynamic8(), op.log8()], ids=["dynamic8", "log8"])
def test_every_mesh_makes_the_same_codes(codec: Any, kind: Any) -> None:
    expected, _ = run(wrapped(codec), params())
    for number in (2, 8):
        mesh = mesh_of(number, kind)
        lies = {name: NamedSharding(mesh, spec) for name, spec in ALIGNED.items()}
        with jax.set_mesh(mesh):
            layout = lies if kind == AxisType.Auto else None
            found, text = run(wrapped(codec, layout), params(), lies)
        assert_same(found, expected)
        assert not _COLLECTIVE.findall(text)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_blocks_that_cross_devices_make_the_same_codes(kind: Any) -> None:
    expected, _ = run(wrapped(op.dynamic8()), params())
    mesh = mesh_of(8, kind)
    lies = {name: NamedSharding(mesh, spec) for name, spec in CROSSED.items()}
    with jax.set_mesh(mesh):
        layout = lies if kind == AxisType.Auto else None
        found, _ = run(wrapped(op.dynamic8(), layout), params(), lies)
    assert_same(found, expected)


def test_without_a_layout_an_auto_mesh_makes_the_same_codes() -> None:
    expected, _ = run(wrapped(op.dynamic8()), params())
    mesh = mesh_of(8, AxisType.Auto)
    lies = {name: NamedSharding(mesh, spec) for name, spec in ALIGNED.items()}
    found, _ = run(wrapped(op.dynamic8()), params(), lies)
    assert_same(found, expected)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", ["lamb", "clipped after"])
def test_sums_over_leaves_send_numbers_only(name: str, kind: Any) -> None:
    inner: Any = {
        "lamb": optax.lamb(1e-2),
        "clipped after": optax.chain(optax.adamw(1e-2), optax.clip_by_global_norm(0.1)),
    }[name]
    tx: Any = op.stochastic_weights
    expected, _ = run(tx(op.quantize_state(inner, op.dynamic8(), chunk_bytes=40_000)), params())
    mesh = mesh_of(8, kind)
    lies = {name: NamedSharding(mesh, spec) for name, spec in ALIGNED.items()}
    with jax.set_mesh(mesh):
        layout = lies if kind == AxisType.Auto else None
        ours: Any = op.quantize_state(inner, op.dynamic8(), chunk_bytes=40_000, layout=layout)
        found, text = run(tx(ours), params(), lies)
        _, theirs = run(Plain(inner), params(), lies)
    # Sums are made in another order, so a stochastic rounding may be another now and then.
    for one, other in zip(found, expected, strict=True):
        assert np.mean(np.asarray(one) != np.asarray(other)) <= 1e-3
    assert {kind for kind, _ in _COLLECTIVE.findall(text)} == {"all-reduce"}
    assert len(_COLLECTIVE.findall(text)) <= len(_COLLECTIVE.findall(theirs))
