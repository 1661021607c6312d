"""State that is born sharded: what each of 8 devices holds, during and after."""

import math
import re
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from opt_partition import Layout, extend_over
from opt_partition._init import init_sharded, jit_init
from opt_partition.errors import AxesError

P = PartitionSpec
contrib: Any = optax.contrib  # it exports nothing explicitly

TRANSFORMATIONS: dict[str, Callable[[], Any]] = {
    "adam": lambda: optax.adam(1e-3),
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=32),
    "lbfgs": lambda: optax.lbfgs(memory_size=4),
    "flatten": lambda: optax.flatten(optax.adam(1e-3)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-3), 4),
    "schedule_free": lambda: contrib.schedule_free_adamw(1e-3),  # z is the parameters
    "prodigy": lambda: contrib.prodigy(),  # params0 is the parameters
}


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request: pytest.FixtureRequest) -> Mesh:
    assert jax.device_count() == 8
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(request.param,) * 2)


def make_params(mesh: Mesh) -> dict[str, jax.Array]:
    shardings = {"w": NamedSharding(mesh, P("data", "model")), "b": NamedSharding(mesh, P("model"))}

    def make() -> dict[str, jax.Array]:
        return {"w": jnp.arange(512.0 * 256).reshape(512, 256), "b": jnp.arange(256.0)}

    # Not by `device_put`, which on CPU lets shards share the memory of a NumPy array.
    params: dict[str, jax.Array] = jax.jit(make, out_shardings=shardings)()
    return params


def plan(init: Any, mesh: Mesh | AbstractMesh) -> Layout:
    """Every leaf over the whole mesh, as far as it divides."""
    params = {"w": np.zeros((512, 256), np.float32), "b": np.zeros(256, np.float32)}
    shapes = jax.eval_shape(init, params)
    return extend_over(jax.tree.map(lambda _: P(), shapes), shapes, mesh, ("data", "model"))


def bytes_on(state: Any) -> dict[jax.Device, int]:
    """What each device really holds."""
    held = dict.fromkeys(jax.devices(), 0)
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return held


def largest_array(compiled: jax.stages.Compiled) -> int:
    """The elements of the largest array that a program handles on a device."""
    shapes = re.findall(r"\b[a-z]+\d+\[([\d,]*)\]", compiled.as_text() or "")
    return max(math.prod(int(n) for n in shape.split(",") if n) for shape in shapes)


def shardings_of(state: Any) -> list[Any]:
    return [leaf.sharding for leaf in jax.tree.leaves(state)]


# What a program may keep besides the state while it runs: copies of the parameters come by way of
# one more share of them, in whatever order the compiler likes.
COPIES = {"schedule_free": 1, "prodigy": 1}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_no_device_holds_more_than_its_share(name: str, mesh: Mesh) -> None:
    init = TRANSFORMATIONS[name]().init
    params, layout = make_params(mesh), plan(init, mesh)
    share = layout.bytes_per_device
    assert share < layout.bytes / 7  # only scalars stay whole
    state = init_sharded(init, params, layout)

    # After: every leaf lies as asked, and holds what `init` makes.
    assert bytes_on(state) == dict.fromkeys(jax.devices(), share)
    assert shardings_of(state) == jax.tree.leaves(layout.shardings)
    chex.assert_trees_all_equal(
        jax.tree.map(np.asarray, state), init(jax.tree.map(np.asarray, params))
    )

    # During: nothing larger than a shard is ever made, and next to nothing besides the state.
    compiled = jit_init(init, params, layout).lower(params).compile()
    params_share = bytes_on(params)[jax.devices()[0]]
    copied = COPIES.get(name, 0) * params_share
    memory: Any = compiled.memory_analysis()
    assert memory.argument_size_in_bytes == copied
    assert memory.output_size_in_bytes == share + 8 * len(layout.rows)  # and a table of pointers
    assert memory.temp_size_in_bytes <= 1.5 * copied
    assert largest_array(compiled) == max(math.prod(row.shard_shape) for row in layout.rows)


def test_no_leaf_shares_a_buffer(mesh: Mesh) -> None:
    tx = contrib.schedule_free_adamw(1e-3)  # eagerly, `z` is the parameters themselves
    params = make_params(mesh)
    shapes = jax.eval_shape(tx.init, jax.tree.map(jax.typeof, jax.tree.map(np.asarray, params)))
    like_params = {(512, 256): P("data", "model"), (256,): P("model")}
    layout = Layout.from_specs(
        jax.tree.map(lambda leaf: like_params.get(leaf.shape, P()), shapes), shapes, mesh
    )
    state = init_sharded(tx, params, layout)
    pointers = [
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves((params, state))
        for shard in leaf.addressable_shards
    ]
    assert len(pointers) == len(set(pointers)) == 8 * (2 + len(layout.rows))

    def touch(params: Any, state: Any) -> Any:
        return jax.tree.map(lambda x: x + 1, (params, state))

    before = np.asarray(params["w"])
    new_params, new_state = jax.jit(touch, donate_argnums=(0, 1))(params, state)
    np.testing.assert_array_equal(new_params["w"], before + 1)
    assert shardings_of(new_state) == jax.tree.leaves(layout.shardings)


def test_within_a_mesh_context_and_a_program(mesh: Mesh) -> None:
    tx, params = TRANSFORMATIONS["schedule_free"](), make_params(mesh)
    layout = plan(tx.init, mesh)
    set_mesh: Any = jax.set_mesh  # it is half annotated
    with set_mesh(mesh):
        state = init_sharded(tx, params, layout.shardings)
        again = jax.jit(lambda params: init_sharded(tx, params, layout))(params)
    assert shardings_of(state) == jax.tree.leaves(layout.shardings)
    assert bytes_on(again) == dict.fromkeys(jax.devices(), layout.bytes_per_device)


def test_parameters_that_are_not_on_the_mesh(mesh: Mesh) -> None:
    tx, params = (
        contrib.schedule_free_adamw(1e-3),
        jax.tree.map(np.asarray, make_params(mesh)),
    )
    layout = plan(tx.init, mesh)
    state = init_sharded(tx, params, layout)
    assert shardings_of(state) == jax.tree.leaves(layout.shardings)
    np.testing.assert_array_equal(state.z["w"], params["w"])


def test_an_init_that_needs_types() -> None:
    """What cannot be traced without shardings in types is traced with them."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    sharding = NamedSharding(mesh, P("data"))

    def init(params: Any) -> Any:
        if jax.typeof(params).sharding.mesh.empty:  # the shapes alone
            return jnp.zeros(16)
        assert jax.typeof(params).sharding.spec == P("data")
        return jnp.zeros(16, out_sharding=jax.typeof(params).sharding)

    state = init_sharded(init, jax.device_put(np.ones(16), sharding), sharding)
    assert state.sharding == sharding


def test_host_memory(mesh: Mesh) -> None:
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    if "pinned_host" not in kinds:
        pytest.skip("this platform has no `pinned_host` memory")
    if jax.default_backend() == "cpu" and jax.__version_info__ < (0, 9):
        pytest.skip("the partitioner of this version cannot place outputs in memories on CPU")
    tx, params = optax.adam(1e-3), make_params(mesh)
    shardings = jax.tree.map_with_path(
        lambda path, sharding: sharding.with_memory_kind(
            "pinned_host" if "nu" in jax.tree_util.keystr(path) else "device"
        ),
        plan(tx.init, mesh).shardings,
    )
    state = init_sharded(tx, params, shardings)
    assert shardings_of(state) == jax.tree.leaves(shardings)
    assert state[0].nu["w"].sharding.memory_kind == "pinned_host"
    assert state[0].mu["w"].sharding.memory_kind == "device"


def test_errors_say_where_and_what_to_do(mesh: Mesh) -> None:
    params = make_params(mesh)
    whole = NamedSharding(mesh, P())
    tx = optax.trace(0.9)

    def message(trace: Any) -> str:
        with pytest.raises(AxesError) as caught:
            init_sharded(tx, params, trace)
        return str(caught.value)

    assert message(optax.TraceState({"w": whole, "v": whole})) == (
        "`state_shardings` does not have the tree structure of its leaves:\n"
        "  trace/b: missing\n"
        "  trace/v: unexpected"
    )
    assert message(optax.TraceState({"w": P(), "b": whole})) == (
        "`state_shardings` must be a NamedSharding per leaf or a Layout; found a PartitionSpec at "
        "trace/w"
    )
    assert message(plan(tx.init, AbstractMesh((4, 2), ("data", "model")))) == (
        "`state_shardings` is on an AbstractMesh, which has no devices: use a Mesh"
    )
