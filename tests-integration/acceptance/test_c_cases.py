"""Acceptance, C: shapes, dtypes and shardings."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_accumulate
import opt_adafactor
import opt_optax_bridge
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from opt_core import MultiOptimizer, OptimizerDef
from opt_core.errors import TreeMismatchError
from opt_partition import Layout, memory_plan
from opt_partition.errors import AxesError, IndivisibleError
from partition_oracles import shard_bytes

P = PartitionSpec


def untouchable(params: Any) -> Any:
    """An `init` that must only be traced."""
    assert isinstance(jax.tree.leaves(params)[0], jax.core.Tracer | jax.ShapeDtypeStruct)
    return optax.adam(1e-3).init(params)


MESH = AbstractMesh((4, 2), ("data", "model"))
MATRIX = {"w": jax.ShapeDtypeStruct((8, 6), jnp.float32)}
ODD = {"w": jax.ShapeDtypeStruct((7, 6), jnp.float32)}
RULES = [("embed", "data"), ("mlp", "model")]
UNFIT: dict[str, tuple[Any, P, type[Exception], str]] = {
    "unknown logical axis": (MATRIX, P("embed", "heads"), AxesError, "'heads', of w: no rule"),
    "indivisible by a rule": (ODD, P("embed", "mlp"), IndivisibleError, "w"),
    "unknown mesh axis": (MATRIX, P("tensor"), AxesError, "w: .*tensor"),
    "duplicate axis": (MATRIX, P("data", "data"), AxesError, "w: .*data"),
    "too high a rank": (MATRIX, P("data", None, "model"), AxesError, "w: "),
    "indivisible": (ODD, P("data"), AxesError, "w: "),
}


@pytest.mark.parametrize("name", UNFIT)
def test_c4_axes_that_do_not_fit_are_errors_before_any_io(name: str) -> None:
    """Unknown or duplicate axis, indivisible, too high rank: an error from shapes alone."""
    params, spec, error, message = UNFIT[name]
    with pytest.raises(error, match=message):
        lay_out(params, spec)


def lay_out(params: Any, spec: P) -> None:
    """By rules, where the axes are logical."""
    if spec[0] == "embed":
        options: Any = {"on_indivisible": "error"}
        memory_plan(untouchable, params, {"w": spec}, RULES, MESH, **options)
    else:
        Layout.from_specs({"w": spec}, params, MESH)


DEFINITIONS: dict[str, Callable[[], OptimizerDef]] = {
    "Optax": lambda: opt_optax_bridge.adam(1e-2),
    "Adafactor": lambda: opt_adafactor.Adafactor(1e-2),
    "MultiSteps": lambda: opt_optax_bridge.OptaxWrapper(
        opt_accumulate.MultiSteps(optax.adam(1e-2), 2)
    ),
    "groups": lambda: MultiOptimizer(
        (("w", opt_optax_bridge.adam(1e-2)), ("b", opt_adafactor.Adafactor(1e-2)))
    ),
}
W, B = jnp.ones((2, 3)), jnp.ones(3)
WRONG: dict[str, tuple[Any, str]] = {
    "a shape that broadcasts": ({"w": jnp.ones((1, 3)), "b": B}, r"w: expected .*\(2, 3\)"),
    "a transpose": ({"w": W.T, "b": B}, r"w: expected .*\(2, 3\)"),
    "complex": ({"w": W + 0j, "b": B}, "w: expected .*float32, found complex64"),
    "integers": ({"w": W.astype(jnp.int32), "b": B}, "w: expected .*float32, found int32"),
    "a leaf is missing": ({"w": W}, "b: expected .*, found nothing"),
    "a leaf too many": ({"w": W, "b": B, "c": B}, "c: expected nothing"),
    "another container": ([W, B], "expected a dict, found a list"),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("definition", DEFINITIONS)
@pytest.mark.parametrize("difference", WRONG)
def test_c5_gradients_unlike_the_parameters_are_errors_when_traced(
    difference: str, definition: str
) -> None:
    """Gradients of another shape, kind of number or tree are errors at trace time."""
    grads, message = WRONG[difference]
    optimizer = jax.eval_shape(DEFINITIONS[definition]().create, {"w": W, "b": B})
    with pytest.raises(TreeMismatchError, match=message):
        jax.eval_shape(lambda o, g: o.apply_gradient(g), optimizer, grads)


PLANNED: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optax.adamw(1e-3),
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=4, momentum=0.9),
    "MultiSteps": lambda: optax.MultiSteps(optax.lion(1e-3, mu_dtype=jnp.bfloat16), 4),
}
LOGICAL = {"wi": P("embed", "mlp"), "wo": P("mlp", "embed"), "scale": P("embed"), "head": P("mlp")}


def model(embed: int, mlp: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        "wi": jax.ShapeDtypeStruct((embed, mlp), jnp.bfloat16),
        "wo": jax.ShapeDtypeStruct((mlp, embed), jnp.float32),
        "scale": jax.ShapeDtypeStruct((embed,), jnp.float32),
        "head": jax.ShapeDtypeStruct((mlp,), jnp.float32),
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize("zero", [None, "data"])
@pytest.mark.parametrize("name", PLANNED)
def test_c7_a_plan_for_512_devices_has_the_bytes_of_8_real_ones(name: str, zero: Any) -> None:
    """A plan on an abstract mesh of 64 x 8 is what 8 devices hold of a model as much smaller."""
    tx = PLANNED[name]()
    rules = [("mlp", "model"), ("embed", None if zero else "data")]
    large = memory_plan(
        tx,
        model(64 * 6, 8 * 6),
        LOGICAL,
        rules,
        AbstractMesh((64, 8), ("data", "model")),
        zero=zero,
    )
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    small = model(4 * 6, 2 * 6)
    plan = memory_plan(tx, small, LOGICAL, rules, mesh, zero=zero)

    def init() -> Any:
        params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), small)
        return params, tx.init(params)

    lie = plan.params.shardings, plan.state.shardings
    params, state = jax.jit(init, out_shardings=lie)()
    assert set(shard_bytes(state)) == {large.state.bytes_per_device}
    if zero:  # the parameters are whole over `data`, and 16 times as large there
        over_data = large.params.shapes["head"], plan.params.shapes["head"]
        assert over_data[0].shape == (48,)
        assert large.params.bytes_per_device == 16 * shard_bytes(params)[0] - 15 * (4 * 6)
    else:
        assert set(shard_bytes(params)) == {large.params.bytes_per_device}


def aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """A NumPy array on a boundary of 64 bytes: JAX would share its memory on a CPU."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    buffer = np.empty(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    array: np.ndarray = buffer[start : start + size].view(dtype).reshape(shape)
    return array


@pytest.mark.sample(1)
@pytest.mark.parametrize("where", ["uncommitted", "one device", "sharded", "replicated"])
def test_c8_what_is_restored_shares_no_memory_with_the_callers_arrays(where: str) -> None:
    """Restore from aligned NumPy arrays, write over them: the optimizer stays as it was."""
    optimizer = opt_optax_bridge.adam(1e-2).create({"w": jnp.zeros((8, 16)), "b": jnp.zeros(64)})
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    layouts: dict[str, Callable[[Any], Any]] = {
        "one device": lambda leaf: jax.devices()[0],
        "sharded": lambda leaf: NamedSharding(mesh, P("data") if leaf.ndim else P()),
        "replicated": lambda leaf: NamedSharding(mesh, P()),
    }
    if where in layouts:
        optimizer = jax.device_put(optimizer, jax.tree.map(layouts[where], optimizer))
    state_dict = jax.tree.map(lambda leaf: aligned(leaf.shape, leaf.dtype), optimizer.state_dict())
    for array in jax.tree.leaves(state_dict):
        array[...] = 3
    restored = optimizer.restore_state(state_dict)
    for array in jax.tree.leaves(state_dict):
        array[...] = 5
    for leaf in jax.tree.leaves(restored):
        np.testing.assert_array_equal(leaf, 3)
