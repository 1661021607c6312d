"""The adapters for AXLearn (34aed43c) and Haliax (280f49fb), or for their protocols."""

import dataclasses
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import opt_precision
import optax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from opt_partition import memory_plan
from opt_partition.errors import UndecidedError

ADAPTERS = Path(__file__).parents[1] / "examples" / "adapters"


@dataclasses.dataclass
class TensorSpec:
    """AXLearn's; a leaf."""

    shape: Any
    dtype: Any = None
    mesh_axes: Any = None
    memory_kind: Any = None


@dataclasses.dataclass
class OptParam:
    """AXLearn's; a leaf."""

    value: Any
    factorization_spec: Any = None
    weight_decay_scale: Any = None


class PartitionedGradientTransformation(NamedTuple):
    """AXLearn's."""

    init: Any
    update: Any
    partition: Any


@dataclasses.dataclass(frozen=True)
class Axis:
    """Haliax's."""

    name: str
    size: int


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class NamedArray:
    """Haliax's."""

    array: Any
    axes: tuple[Axis, ...]

    def tree_flatten(self) -> tuple[Any, Any]:
        return (self.array,), self.axes

    @classmethod
    def tree_unflatten(cls, axes: Any, children: Any) -> "NamedArray":
        return cls(children[0], axes)


PROTOCOLS: dict[str, dict[str, Any]] = {
    "axlearn.common.optimizer_base": {
        "OptStateSpec": TensorSpec,
        "OptParam": OptParam,
        "PartitionedGradientTransformation": PartitionedGradientTransformation,
    },
    "haliax": {"Axis": Axis, "NamedArray": NamedArray},
}


def structure(tree: Any) -> Any:
    return jax.tree.structure(tree)


def library(name: str) -> types.ModuleType:
    """The module if it is installed, else one with what the adapter uses of it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        module = types.ModuleType(name)
        vars(module).update(PROTOCOLS[name])
        return module


def load(adapter: str, name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """An adapter, and its library."""
    found = library(name)
    monkeypatch.setitem(sys.modules, name, found)
    spec = importlib.util.spec_from_file_location(adapter, ADAPTERS / f"{adapter}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, found


@pytest.fixture
def axlearn(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    return load("axlearn_partition", "axlearn.common.optimizer_base", monkeypatch)


@pytest.fixture
def haliax(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    return load("haliax_axes", "haliax", monkeypatch)


@pytest.mark.slow
def test_axlearn_learns_the_mesh_axes_of_a_factored_state(axlearn: tuple[Any, Any]) -> None:
    adapter, base = axlearn
    tx = optax.adafactor(1e-3, min_dim_size_to_factor=4, momentum=0.9)
    ours = adapter.partitioned(tx, memory_kind="pinned_host")
    specs = {
        "w": base.OptStateSpec((16, 32), jnp.bfloat16, P("fsdp", ("model", "seq"))),
        "b": base.OptStateSpec([32]),  # as AXLearn writes it: no dtype, no axes
    }
    found = ours.partition(specs)
    factored, trace = found[0], found[4]
    assert trace.ema["w"].mesh_axes == P("fsdp", ("model", "seq"))
    assert factored.v_row["w"].mesh_axes == P("fsdp")
    assert factored.v_col["w"].mesh_axes == P(("model", "seq"))
    assert factored.count.mesh_axes == P()
    assert trace.ema["b"].mesh_axes == P(None)
    assert {spec.memory_kind for spec in jax.tree.leaves(found)} == {"pinned_host"}

    params = {
        "w": base.OptParam(jnp.ones((16, 32), jnp.bfloat16), None, None),
        "b": base.OptParam(jnp.ones(32), None, None),
    }
    state = ours.init(params)
    assert structure(found) == structure(state)
    for spec, leaf in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        assert (tuple(spec.shape), spec.dtype) == (leaf.shape, leaf.dtype)
    values = {name: param.value for name, param in params.items()}
    updates, _ = ours.update(values, state, params)
    expected: Any = tx.update(values, tx.init(values), values)[0]
    assert all((updates[name] == expected[name]).all() for name in values)


def test_what_cannot_be_derived_is_an_error_in_axlearn(axlearn: tuple[Any, Any]) -> None:
    adapter, base = axlearn
    tables = optax.GradientTransformation(
        lambda params: {(16, 32): jnp.zeros(16)}[params["w"].shape], optax.identity().update
    )
    with pytest.raises(UndecidedError, match="cannot be evaluated on symbols"):
        adapter.partitioned(tables).partition(
            {"w": base.OptStateSpec((16, 32), jnp.float32, P("fsdp", "model"))}
        )


def test_haliax_names_its_dimensions(haliax: tuple[Any, Any]) -> None:
    adapter, hax = haliax
    axes = hax.Axis("embed", 8), hax.Axis("mlp", 16)
    params = {"w": hax.NamedArray(jnp.ones((8, 16)), axes), "scale": jnp.ones(8)}
    shapes = jax.eval_shape(lambda: params)
    named = adapter.named_axes(shapes)
    assert named["w"].array == P("embed", "mlp")
    assert structure(named) == structure(shapes)
    plan = memory_plan(
        optax.adafactor(1e-3, min_dim_size_to_factor=4),
        shapes,
        named,
        {"mlp": "model", "embed": "data"},  # an axis mapping, as Levanter has it
        AbstractMesh((4, 2), ("data", "model")),
    )
    factored = plan.state.specs[0]
    assert factored.v_row["w"].array == P("data")
    assert factored.v_col["w"].array == P("model")
    assert plan.params.specs["scale"] == P(None)


def test_codes_have_the_names_of_their_parameter(haliax: tuple[Any, Any]) -> None:
    adapter, hax = haliax
    axes = hax.Axis("embed", 64), hax.Axis("mlp", 128)
    values = jax.random.normal(jax.random.key(0), (64, 128))
    plain = {"w": adapter.Held(values, axes), "b": jnp.ones(8)}  # noise is by path
    params = {**plain, "w": hax.NamedArray(values, axes)}
    tx: Any = opt_precision.quantize_state(optax.adam(0.1), opt_precision.dynamic8())
    named = adapter.for_named_arrays(tx)
    state, expected = named.init(params), tx.init(plain)
    step, of_tx = jax.jit(named.update), jax.jit(tx.update)
    for _ in range(2):
        updates, state = step(params, state, params)
        of_plain, expected = of_tx(plain, expected, plain)
    mu = state.inner[0].mu["w"]
    assert mu.codes.axes == axes
    assert mu.scale.shape == (64, 1)
    assert updates["w"].axes == axes
    np.testing.assert_array_equal(updates["w"].array, of_plain["w"].array)
