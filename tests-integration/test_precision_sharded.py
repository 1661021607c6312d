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


@functools.cache
def on_one_device(codec: Any) -> Any:
    return run(wrapped(codec), params())[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("codec", [op.dynamic8(), op.log8()], ids=["dynamic8", "log8"])
@pytest.mark.parametrize("number", [2, 8])
def test_every_mesh_makes_the_same_codes(number: int, codec: Any, kind: Any) -> None:
    mesh = mesh_of(number, kind)
    lies = {name: NamedSharding(mesh, spec) for name, spec in ALIGNED.items()}
    with jax.set_mesh(mesh):
        layout = lies if kind == AxisType.Auto else None
        found, text = run(wrapped(codec, layout), params(), lies)
    assert_same(found, on_one_device(codec))
    assert not _COLLECTIVE.findall(text)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_blocks_that_cross_devices_make_the_same_codes(kind: Any) -> None:
    mesh = mesh_of(8, kind)
    lies = {name: NamedSharding(mesh, spec) for name, spec in CROSSED.items()}
    tx = wrapped(op.dynamic8(), lies if kind == AxisType.Auto else None)
    with jax.set_mesh(mesh), pytest.warns(UserWarning, match="blocks of moments lie on several"):
        found, _ = run(tx, params(), lies)
    assert_same(found, on_one_device(op.dynamic8()))


@pytest.mark.slow
def test_without_a_layout_an_auto_mesh_makes_the_same_codes() -> None:
    mesh = mesh_of(8, AxisType.Auto)
    lies = {name: NamedSharding(mesh, spec) for name, spec in ALIGNED.items()}
    found, _ = run(wrapped(op.dynamic8()), params(), lies)
    assert_same(found, on_one_device(op.dynamic8()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.slow)],
    ids=["auto", "explicit"],
)
@pytest.mark.parametrize("name", ["clipped after", pytest.param("lamb", marks=pytest.mark.slow)])
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


OPTIMIZERS: dict[str, Any] = {
    "adamw": optax.adamw(1e-3),
    "lamb": optax.lamb(1e-3),
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "with hyper-parameters": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
}


@pytest.mark.slow
@pytest.mark.parametrize("inner", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_explicit_meshes_need_no_context(inner: Any) -> None:
    """Also for leaves of one element, which are on every device."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    lies = {
        "one": NamedSharding(mesh, P()),
        "scalar": NamedSharding(mesh, P()),
        "wide": NamedSharding(mesh, P("x")),
    }
    start = {"one": jnp.ones(1), "scalar": jnp.ones(()), "wide": jnp.ones((64, 512))}
    start = {name: leaf.astype(jnp.bfloat16) for name, leaf in start.items()}
    held = jax.device_put(start, lies)
    for weights in (op.stochastic_weights, op.master_weights):
        tx: Any = weights(op.quantize_state(inner, op.dynamic8(), chunk_bytes=20_000))
        found = []
        for given in (start, held):
            state = tx.init(given)
            made = jax.jit(tx.apply)(given, state, given)
            before: Any = jax.tree.structure(state)
            assert before == jax.tree.structure(made[1])
            found.append(jax.tree.leaves(made))
        for one, other in zip(*found, strict=True):
            np.testing.assert_allclose(
                np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=1e-2
            )
        assert made[0]["wide"].sharding.is_equivalent_to(lies["wide"], 2)


def test_parts_of_arrays_in_a_function_of_each_device() -> None:
    """In a `shard_map` of the user's, leaves are what this device has of them."""
    mesh = jax.make_mesh((8,), ("x",))
    tx: Any = op.stochastic_weights(op.quantize_state(optax.adamw(1e-3), op.dynamic8()))
    start = {"w": jnp.ones((64, 512), jnp.bfloat16)}
    state = jax.eval_shape(tx.init, start)

    def of_codes(leaf: Any) -> Any:
        return P("x") if leaf.ndim else P()

    specs = {"w": P("x")}, jax.tree.map(of_codes, state)
    step = jax.shard_map(
        lambda p, s, g: tx.apply(p, s, g),
        mesh=mesh,
        in_specs=(*specs, {"w": P("x")}),
        out_specs=specs,
        check_vma=False,
    )
    with jax.set_mesh(mesh):
        lies = NamedSharding(mesh, P("x"))
        held = jax.device_put(start, lies)
        opt_state = jax.jit(tx.init)(held)
        made, _ = jax.jit(step)(held, opt_state, held)
    assert np.abs(np.asarray(made["w"], np.float32) - 1).max() < 0.01
    assert np.any(np.asarray(made["w"], np.float32) != 1)
