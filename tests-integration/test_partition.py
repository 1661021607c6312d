"""opt-partition on 8 virtual devices and with Flax: axes, rules, plans to the byte, init."""

import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from flax.core import freeze
from flax.linen.partitioning import AxisMetadata
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from opt_partition import (
    Layout,
    derive_logical_axes,
    explain,
    extend_over,
    logical_to_mesh,
    memory_plan,
)
from opt_partition._init import init_sharded, jit_init
from opt_partition.errors import AxesError
from partition_oracles import shard_bytes

P = PartitionSpec
contrib: Any = optax.contrib  # it exports nothing explicitly
linen: Any = nn


def step_of(tx: Any) -> Callable[[Any, Any, Any], Any]:
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


# Logical axes as Flax's two interfaces and T5X's metadata hold them.


def test_boxes_of_linen_and_metadata_of_t5x() -> None:
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    dense = nn.Dense(6, kernel_init=init)
    boxed = jax.eval_shape(dense.init, jax.random.key(0), jnp.ones((2, 8)))["params"]
    params = nn.unbox(boxed)
    t5x = {"kernel": AxisMetadata(names=P("embed", "mlp")), "bias": AxisMetadata(names=P())}
    for axes in (boxed, freeze(boxed), nn.get_partition_spec(boxed), t5x):
        for given_params in (params, freeze(params)):
            adam = derive_logical_axes(optax.adam(0.1), given_params, axes)[0]
            assert adam.mu["kernel"] == P("embed", "mlp")
            assert not any(adam.nu["bias"])


@pytest.mark.filterwarnings("ignore:'sharding.*' is deprecated")  # the older Flax has no other
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["sharding", "sharding_names", "out_sharding"])
def test_metadata_of_nnx(name: str) -> None:
    """Of a state of variables, whatever the version of Flax calls the metadata."""
    metadata: Any = {name: ("embed", "mlp"), "eager_sharding": False}
    init = nnx.with_metadata(nnx.initializers.lecun_normal(), **metadata)
    model = nnx.eval_shape(lambda: nnx.Linear(8, 6, kernel_init=init, rngs=nnx.Rngs(0)))
    state = nnx.state(model, nnx.Param)
    specs = nnx.get_partition_spec(state)
    forms = [state, dict(state)]
    if nnx.to_pure_dict(specs)["kernel"]:  # the older Flax makes none of the newest name
        forms += [specs, nnx.to_pure_dict(specs)]
    for params in (state, nnx.to_pure_dict(state), dict(state)):
        for axes in forms:
            rows = explain(optax.scale_by_adam(), params, axes, strict=True).rows
            found = {(name in row.path, row.axes) for row in rows for name in ["kernel"]}
            assert found == {(True, ("embed", "mlp")), (False, (None,)), (False, ())}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_in_the_scope_of_a_mesh_and_while_tracing(kind: AxisType) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    tx = optax.chain(optax.adafactor(0.1, min_dim_size_to_factor=2), optax.scale_by_lbfgs(3))
    axes = {"w": ("a", "b")}
    expected = derive_logical_axes(tx, {"w": jnp.ones((8, 8))}, axes)
    with jax.set_mesh(mesh):
        w = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("data", "model")))
        assert derive_logical_axes(tx, {"w": w}, axes) == expected
        found = []
        jax.eval_shape(lambda w: found.append(derive_logical_axes(tx, {"w": w}, axes)), w)
    assert found == [expected]


ABSTRACT = AbstractMesh((4, 2, 2), ("data", "fsdp", "model"))
NAMES = ("batch", "embed", "heads", "mlp", "vocab")
MESH_AXES = (
    st.none()
    | st.sampled_from(ABSTRACT.axis_names)
    | st.permutations(ABSTRACT.axis_names).flatmap(
        lambda axes: st.integers(1, 3).map(lambda n: tuple(axes[:n]))
    )
)


@given(
    names=st.lists(st.sampled_from(NAMES) | st.none(), max_size=5).filter(
        lambda names: len({*names} - {None}) == len([n for n in names if n])
    ),
    rules=st.lists(st.tuples(st.sampled_from(NAMES), MESH_AXES), max_size=10),
)
@example(
    names=["embed", "mlp"], rules=[("embed", "data"), ("mlp", ("data", "model")), ("mlp", "model")]
)
@settings(deadline=None, max_examples=50)
def test_rules_mean_what_they_mean_to_flax(names: list[Any], rules: list[Any]) -> None:
    """Where every dimension divides and no name repeats; Flax knows neither case."""
    leaf = jax.ShapeDtypeStruct((16,) * len(names), "float32")
    layout = logical_to_mesh(P(*names), rules, ABSTRACT, leaf, on_unknown="replicate")
    assert layout.specs == linen.logical_to_mesh_axes(tuple(names), rules)


# Plans, against live arrays and compiled steps.

RULES = [("mlp", "model"), ("vocab", "model"), ("heads", "model"), ("embed", "fsdp")]
PARAMS = {
    "embedding": jnp.zeros((16, 8), jnp.bfloat16),
    "query": jnp.zeros((8, 4, 6)),
    "wi": jnp.zeros((8, 12)),
    "odd": jnp.zeros((5, 7)),
    "square": jnp.zeros((8, 8)),
    "bias": jnp.zeros((12,)),
    "temperature": jnp.zeros(()),
}
AXES = {
    "embedding": ("vocab", "embed"),
    "query": ("embed", "heads", None),
    "wi": ("embed", "mlp"),
    "odd": ("embed", "mlp"),
    "square": ("embed", None),
    "bias": ("mlp",),
    "temperature": (),
}


def _labels(params: Any) -> Any:
    return jax.tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "other", params)


# What every transformation keeps, `test_partition_table.py` lays over devices.
PLANNED: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optax.adamw(1e-3),
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=4, momentum=0.9),
    "lion": lambda: optax.lion(1e-3, mu_dtype=jnp.bfloat16),
    "sm3": lambda: optax.sm3(1e-3),
    "multisteps": lambda: optax.MultiSteps(optax.adam(1e-3), every_k_schedule=4),
    "partition": lambda: optax.partition(
        {"matrix": optax.adafactor(1e-3, min_dim_size_to_factor=4), "other": optax.adam(1e-3)},
        _labels,
    ),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1)),
}


def mesh_of_three() -> Mesh:
    return jax.make_mesh((2,) * 3, ("data", "fsdp", "model"), axis_types=(AxisType.Auto,) * 3)


@pytest.mark.sample(3)
@pytest.mark.parametrize("zero", [None, "data", ("data", "model")], ids=str)
@pytest.mark.parametrize("name", PLANNED)
def test_a_plan_agrees_with_live_arrays_to_the_byte(name: str, zero: Any) -> None:
    tx = PLANNED[name]()
    plan = memory_plan(tx, PARAMS, AXES, [*RULES], mesh_of_three(), zero=zero)
    params = jax.jit(lambda tree: tree, out_shardings=plan.params.shardings)(PARAMS)
    state = jax.jit(tx.init, out_shardings=plan.state.shardings)(params)
    assert set(shard_bytes(params)) == {plan.params.bytes_per_device}
    assert set(shard_bytes(state)) == {plan.state.bytes_per_device}
    by_field: Counter[str] = Counter()
    rows = [row for row in plan.rows if row.kind == "state"]
    for row, array in zip(rows, jax.tree.leaves(state), strict=True):
        by_field[row.field] += shard_bytes(array)[3]
    assert plan.state_fields == by_field


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["adamw", "adafactor", "multisteps", "partition"])
def test_a_plan_agrees_with_the_arguments_of_the_compiled_step(name: str) -> None:
    tx = PLANNED[name]()
    plan = memory_plan(tx, PARAMS, AXES, RULES, mesh_of_three(), zero="data", zero_level=2)
    shardings = (plan.params.shardings, plan.state.shardings, plan.grads.shardings)
    jitted = jax.jit(
        step_of(tx),
        in_shardings=shardings,
        out_shardings=shardings[:2],
        donate_argnums=(0, 1),
        keep_unused=True,
    )
    lowered = jitted.lower(plan.params.shapes, plan.state.shapes, plan.grads.shapes)
    # The CPU adds no padding: the arguments are the arrays and nothing else.
    analysis: Any = lowered.compile().memory_analysis()
    assert analysis.argument_size_in_bytes == plan.total_bytes_per_device
    aliased = plan.params.bytes_per_device + plan.state.bytes_per_device
    assert analysis.alias_size_in_bytes == aliased


# State that is born sharded: what each device holds, during and after.

BORN: dict[str, Callable[[], Any]] = {
    "adam": lambda: optax.adam(1e-3),
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=32),
    "lbfgs": lambda: optax.lbfgs(memory_size=4),
    "flatten": lambda: optax.flatten(optax.adam(1e-3)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-3), 4),
    "schedule_free": lambda: contrib.schedule_free_adamw(1e-3),  # z is the parameters
    "prodigy": lambda: contrib.prodigy(),  # params0 is the parameters
}
# What a program may keep besides the state while it runs: copies of the parameters come by way of
# one more share of them, in whatever order the compiler likes.
COPIES = {"schedule_free": 1, "prodigy": 1}


def make_params(mesh: Mesh) -> dict[str, jax.Array]:
    shardings = {"w": NamedSharding(mesh, P("data", "model")), "b": NamedSharding(mesh, P("model"))}

    def make() -> dict[str, jax.Array]:
        return {"w": jnp.arange(512.0 * 256).reshape(512, 256), "b": jnp.arange(256.0)}

    # Not by `device_put`, which on CPU lets shards share the memory of a NumPy array.
    params: dict[str, jax.Array] = jax.jit(make, out_shardings=shardings)()
    return params


def spread(init: Any, mesh: Mesh | AbstractMesh) -> Layout:
    """Every leaf over the whole mesh, as far as it divides."""
    params = {"w": np.zeros((512, 256), np.float32), "b": np.zeros(256, np.float32)}
    shapes = jax.eval_shape(init, params)
    return extend_over(jax.tree.map(lambda _: P(), shapes), shapes, mesh, ("data", "model"))


def largest_array(compiled: jax.stages.Compiled) -> int:
    """The elements of the largest array that a program handles on a device."""
    shapes = re.findall(r"\b[a-z]+\d+\[([\d,]*)\]", compiled.as_text() or "")
    return max(math.prod(int(n) for n in shape.split(",") if n) for shape in shapes)


def assert_lies(state: Any, layout: Layout) -> None:
    shardings = [leaf.sharding for leaf in jax.tree.leaves(state)]
    assert shardings == jax.tree.leaves(layout.shardings)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", BORN)
def test_no_device_holds_more_than_its_share(name: str, mesh: Mesh) -> None:
    init = BORN[name]().init
    params, layout = make_params(mesh), spread(init, mesh)
    share = layout.bytes_per_device
    assert share < layout.bytes / 7  # only scalars stay whole
    state = init_sharded(init, params, layout)
    # After: every leaf lies as asked, and holds what `init` makes.
    assert shard_bytes(state) == [share] * 8
    assert_lies(state, layout)
    chex.assert_trees_all_equal(
        jax.tree.map(np.asarray, state), init(jax.tree.map(np.asarray, params))
    )
    # During: nothing larger than a shard is ever made, and next to nothing besides the state.
    compiled = jit_init(init, params, layout.shardings).lower(params).compile()
    copied = COPIES.get(name, 0) * shard_bytes(params)[0]
    memory: Any = compiled.memory_analysis()
    assert memory.argument_size_in_bytes == copied
    assert memory.output_size_in_bytes == share + 8 * len(layout.rows)  # and a table of pointers
    assert memory.temp_size_in_bytes <= 1.5 * copied
    assert largest_array(compiled) == max(math.prod(row.shard_shape) for row in layout.rows)


def test_no_leaf_shares_a_buffer(mesh: Mesh) -> None:
    tx = contrib.schedule_free_adamw(1e-3)  # eagerly, `z` is the parameters themselves
    params = make_params(mesh)
    shapes = jax.eval_shape(tx.init, jax.tree.map(jax.typeof, jax.tree.map(np.asarray, params)))
    specs = {(512, 256): P("data", "model"), (256,): P("model")}
    of_leaves = jax.tree.map(lambda leaf: specs.get(leaf.shape, P()), shapes)
    layout = Layout.from_specs(of_leaves, shapes, mesh)
    state = init_sharded(tx, params, layout)
    pointers = [
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves((params, state))
        for shard in leaf.addressable_shards
    ]
    assert len(pointers) == len(set(pointers)) == 8 * (2 + len(layout.rows))
    before = np.asarray(params["w"])
    touch = jax.jit(lambda *trees: jax.tree.map(lambda x: x + 1, trees), donate_argnums=(0, 1))
    new_params, new_state = touch(params, state)
    np.testing.assert_array_equal(new_params["w"], before + 1)
    assert_lies(new_state, layout)


def test_init_in_the_scope_of_a_mesh_inside_a_program_and_of_parameters_elsewhere(
    mesh: Mesh,
) -> None:
    tx, params = BORN["schedule_free"](), make_params(mesh)
    layout = spread(tx.init, mesh)
    with jax.set_mesh(mesh):
        state = init_sharded(tx, params, layout.shardings)
        again = jax.jit(lambda params: init_sharded(tx, params, layout))(params)
    assert_lies(state, layout)
    assert shard_bytes(again) == [layout.bytes_per_device] * 8
    on_host = jax.tree.map(np.asarray, params)
    state = init_sharded(tx, on_host, layout)
    assert_lies(state, layout)
    np.testing.assert_array_equal(state.z["w"], on_host["w"])


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


def test_state_in_host_memory(mesh: Mesh) -> None:
    if jax.default_backend() == "cpu" and jax.__version_info__ < (0, 9):
        pytest.skip("the partitioner of this version cannot place outputs in memories on CPU")
    tx, params = optax.adam(1e-3), make_params(mesh)
    shardings = jax.tree.map_with_path(
        lambda path, sharding: sharding.with_memory_kind(
            "pinned_host" if "nu" in jax.tree_util.keystr(path) else "device"
        ),
        spread(tx.init, mesh).shardings,
    )
    state = init_sharded(tx, params, shardings)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == shardings
    assert state[0].nu["w"].sharding.memory_kind == "pinned_host"
    assert state[0].mu["w"].sharding.memory_kind == "device"


def test_init_needs_devices() -> None:
    abstract = spread(optax.trace(0.9).init, AbstractMesh((4, 2), ("data", "model")))
    with pytest.raises(AxesError, match="is on an AbstractMesh, which has no devices: use a Mesh"):
        init_sharded(optax.trace(0.9), {"w": jnp.ones((512, 256)), "b": jnp.ones(256)}, abstract)
