"""Plans: exact sums, reasons, words; against JAX's own shards."""

import dataclasses
import json
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType
from opt_partition import MemoryPlan, memory_plan
from opt_partition._plan import KINDS, NO_PARAMETER
from opt_partition.errors import AxesError, IndivisibleError, UndecidedError

NAMES = ("embed", "mlp", "heads")
MESH = AbstractMesh((4, 2, 2), ("data", "fsdp", "model"))
RULES = [("mlp", "model"), ("embed", "fsdp"), ("heads", None)]


def leaf(*shape: int, dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


PARAMS = {"enc": {"wi": leaf(8, 12), "bias": leaf(12)}, "dec": {"wo": leaf(12, 7)}}
AXES = {"enc": {"wi": ("embed", "mlp"), "bias": ("mlp",)}, "dec": {"wo": ("mlp", "embed")}}


def plan_of(tx: Any = None, params: Any = PARAMS, axes: Any = AXES, **kwargs: Any) -> MemoryPlan:
    rules, mesh = kwargs.pop("rules", RULES), kwargs.pop("mesh", MESH)
    return memory_plan(tx or optax.adam(1e-3), params, axes, rules, mesh, **kwargs)


def jax_bytes(shapes: Any, shardings: Any) -> int:
    """Bytes of one device's shards, as JAX itself computes them."""
    return sum(
        math.prod(sharding.shard_shape(shape.shape)) * shape.dtype.itemsize
        for shape, sharding in zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    )


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Any, Any, list[Any], AbstractMesh, Any]:
    sizes = st.sampled_from([1, 2, 3, 4, 6, 8])
    params, axes = {}, {}
    for n in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(sizes, max_size=3))
        dtype = draw(st.sampled_from(["float32", "bfloat16"]))
        params[f"p{n}"] = leaf(*shape, dtype=dtype)
        axes[f"p{n}"] = tuple(draw(st.permutations([*NAMES, None])))[: len(shape)]
    mesh_axes = ["data", "fsdp", "model"]
    mesh = AbstractMesh(
        tuple(draw(st.sampled_from([1, 2, 4])) for _ in mesh_axes), tuple(mesh_axes)
    )
    rules = [(name, draw(st.sampled_from([*mesh_axes, None]))) for name in NAMES]
    zero = draw(st.sampled_from([None, "data", ("data", "model")]))
    return params, axes, rules, mesh, zero


@settings(max_examples=40, deadline=None)
@given(jobs())
def test_bytes_are_those_of_the_shards_that_jax_makes(job: Any) -> None:
    """However they are added up; and waste is what is beyond an equal share."""
    params, axes, rules, mesh, zero = job
    tx = optax.adam(1e-3)
    plan = memory_plan(
        tx, params, axes, rules, mesh, zero=zero, accumulate="float32", memory_kinds="pinned_host"
    )
    state = jax.eval_shape(tx.init, params)
    wide = jax.tree.map(lambda p: leaf(*p.shape), params)
    assert plan.accumulators is not None
    assert plan.params.bytes_per_device == jax_bytes(params, plan.params.shardings)
    assert plan.grads.bytes_per_device == jax_bytes(params, plan.grads.shardings)
    assert plan.state.bytes_per_device == jax_bytes(state, plan.state.shardings)
    assert plan.accumulators.bytes_per_device == jax_bytes(wide, plan.accumulators.shardings)
    assert plan.state.bytes == sum(p.size * p.dtype.itemsize for p in jax.tree.leaves(state))

    total = plan.total_bytes_per_device
    layouts = (plan.params, plan.grads, plan.accumulators, plan.state)
    assert total == sum(layout.bytes_per_device for layout in layouts)
    assert total == sum(group["total"] for group in plan.groups.values())
    assert total == sum(plan.bytes_per_device_by_memory.values())
    assert plan.bytes_per_device_by_memory["pinned_host"] == plan.state.bytes_per_device
    assert sum(plan.state_fields.values()) == plan.state.bytes_per_device

    for row in plan.rows:
        # All devices together hold the leaf so many times.
        copies = row.leaf.bytes_per_device * mesh.size / row.leaf.bytes
        assert (row.waste > 0) == (copies > 1 and row.leaf.bytes_per_device > 1)
        assert bool(row.reason) == (row.waste > 0)
        assert row.waste == row.leaf.bytes_per_device - math.ceil(row.leaf.bytes / mesh.size)
    wastes = [row.waste for row in plan.replicated]
    assert wastes == sorted((row.waste for row in plan.rows if row.waste), reverse=True)


def test_numbers_by_hand() -> None:
    plan = plan_of(zero="data", zero_level=2, accumulate="bfloat16")
    # wi over fsdp and model: 96 / 4; bias over model: 12 / 2; wo over model: 84 / 2.
    assert plan.params.bytes_per_device == 4 * (24 + 6 + 42)
    # data divides what is left of wi, neither 6 nor (6, 7).
    assert plan.grads.bytes_per_device == 4 * (6 + 6 + 42)
    assert plan.accumulators is not None
    assert plan.accumulators.bytes_per_device == 2 * (6 + 6 + 42)
    assert plan.state.bytes_per_device == 2 * 4 * (6 + 6 + 42) + 4
    assert plan.state.bytes == 2 * 4 * (96 + 12 + 84) + 4
    assert plan.groups == {
        "dec": {"params": 168, "grads": 168, "accumulators": 84, "state": 336, "total": 756},
        "enc": {"params": 120, "grads": 48, "accumulators": 24, "state": 96, "total": 288},
        NO_PARAMETER: {"params": 0, "grads": 0, "accumulators": 0, "state": 4, "total": 4},
    }
    assert plan.state_fields == {
        "ScaleByAdamState.count": 4,
        "ScaleByAdamState.mu": 216,
        "ScaleByAdamState.nu": 216,
    }


class Own(NamedTuple):
    mu: Any


@pytest.mark.parametrize(
    ("tx", "params", "fields"),
    [
        (
            optax.partition(
                {"x": optax.trace(0.9), "y": optax.scale_by_rss()}, {"w": "x", "b": "y"}
            ),
            {"w": leaf(2), "b": leaf(3)},
            {"TraceState.trace": 8, "ScaleByRssState.sum_of_squares": 12},
        ),
        # Custom states: one for each parameter, and one without names.
        (
            lambda params: {name: Own(jnp.zeros_like(p)) for name, p in params.items()},
            {"w": leaf(2), "b": leaf(3)},
            {"Own.mu": 20},
        ),
        (lambda params: ({"momentum": params},), {"w": leaf(2)}, {"momentum": 8}),
    ],
)
def test_fields_are_those_of_the_innermost_state(
    tx: Any, params: Any, fields: dict[str, int]
) -> None:
    axes = jax.tree.map(lambda _: None, params)
    assert plan_of(tx, params, axes).state_fields == fields


def test_groups_are_the_caller_s() -> None:
    plan = plan_of(group_by=lambda path: "bias" if path.endswith("bias") else "matrices")
    assert list(plan.groups) == ["matrices", "bias", NO_PARAMETER]
    assert plan.groups["bias"]["params"] == 24


def test_accumulators_are_as_asked_and_none_by_default() -> None:
    params = {"w": leaf(8, dtype="bfloat16"), "n": leaf(3, dtype="int32")}
    for dtype, expected in ((None, 0), ("float32", 8 * 4), ("bfloat16", 8 * 2)):
        plan = plan_of(optax.identity(), params, dict.fromkeys(params), accumulate=dtype)
        assert plan.to_data()["accumulator_bytes"] == expected


def test_gradients_of_integers_have_no_bytes_and_complex_ones_no_real_dtype() -> None:
    params = {"c": leaf(3, dtype="complex64"), "n": leaf(5, dtype="int32"), "w": leaf(4)}
    axes = dict.fromkeys(params)
    plan = plan_of(optax.identity(), params, axes)
    assert plan.grads.bytes == 3 * 8 + 0 + 4 * 4
    plan = plan_of(optax.identity(), params, axes, grad_dtype=jnp.bfloat16)
    assert plan.grads.bytes == 3 * 8 + 0 + 4 * 2
    assert plan.notes == ("grads c: the gradient keeps complex64, as bfloat16 is real",)
    assert [row.leaf.dtype for row in plan.rows if row.kind == "grads"][1] == jax.dtypes.float0


def test_why_leaves_are_not_sharded_further() -> None:
    params = {"square": leaf(8, 8), "odd": leaf(7), "scale": leaf(3), "temperature": leaf()}
    axes = {"square": ("embed", "heads"), "odd": ("mlp",), "scale": None, "temperature": None}
    plan = plan_of(optax.trace(0.9), params, axes, zero="data", zero_min_bytes=16)
    reasons = {(row.kind, row.leaf.path): row.reason for row in plan.replicated}
    assert reasons["params", "square"] == (
        "not over data=4, model=2: no rule shards 'heads'; no rule uses 'data'"
    )
    assert reasons["params", "temperature"] == "not over data=4, fsdp=2, model=2: a scalar"
    assert reasons["grads", "odd"] == (
        "not over data=4, fsdp=2, model=2: dimension 0 ('mlp', 7) is not divisible by model=2; "
        "no rule uses 'data'"
    )
    assert reasons["state", "trace/odd"] == (
        "not over data=4, fsdp=2, model=2: dimension 0 ('mlp', 7) is not divisible by model=2; "
        "ZeRO: stays replicated over data=4: no dimension of (7,) is divisible"
    )
    assert reasons["state", "trace/scale"] == (
        "not over data=4, fsdp=2, model=2: no dimension has a logical name; "
        "ZeRO: 12 bytes are below min_bytes=16"
    )
    assert reasons["state", "trace/square"] == "not over model=2: no rule shards 'heads'"


def test_a_plan_as_json() -> None:
    plan = plan_of(zero=["data", "fsdp"], accumulate="float32")
    data = json.loads(plan.to_json())
    assert data["mesh"] == {"data": 4, "fsdp": 2, "model": 2}
    assert data["zero"] == ["data", "fsdp"]
    assert data["total_bytes"] == plan.total_bytes
    assert data["total_bytes_per_device"] == plan.total_bytes_per_device
    assert data["state_fields"] == plan.state_fields
    assert [row["path"] for row in data["rows"]] == [row.leaf.path for row in plan.rows]
    [wi] = [row for row in data["rows"] if row["path"] == "0/mu/enc/wi"]
    assert (wi["axes"], wi["spec"]) == (["embed", "mlp"], [["fsdp", "data"], "model"])
    assert (wi["shape"], wi["shard_shape"]) == ([8, 12], [1, 6])
    assert (wi["bytes"], wi["bytes_per_device"], wi["waste"]) == (384, 24, 0)
    owner = (wi["kind"], wi["parameter"], wi["group"], wi["field"])
    assert owner == ("state", "enc/wi", "enc", "ScaleByAdamState.mu")


@dataclasses.dataclass(frozen=True)
class Odd:
    """A transformation whose state nothing explains."""

    def init(self, params: Any) -> Any:
        # No probe with other shapes gets past this.
        assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, PARAMS)
        return {"table": jnp.zeros((5, 3))}


def test_strict_and_the_choices_of_rules_reach_where_they_matter() -> None:
    plan_of(Odd())
    with pytest.raises(UndecidedError, match="table"):
        plan_of(Odd(), strict=True)
    with pytest.raises(IndivisibleError, match="dec/wo"):
        plan_of(on_indivisible="error")
    with pytest.raises(AxesError, match="'embed'"):
        plan_of(rules=[("mlp", "model")])
    plan = plan_of(rules=[("mlp", "model")], on_unknown="replicate")
    assert "params enc/wi: dimension 0: no rule for 'embed'" in plan.notes


def mesh_of(kind: AxisType) -> AbstractMesh:
    """A mesh whose `data` axis is of the given type."""
    return AbstractMesh((4, 2), ("data", "model"), axis_types=(kind, AxisType.Auto))


def test_explicit_axes_change_nothing() -> None:
    rules = [("mlp", "model"), ("embed", "data")]
    auto, explicit = (
        plan_of(params={"w": leaf(8, 12)}, axes={"w": ("embed", "mlp")}, rules=rules, mesh=mesh)
        for mesh in (mesh_of(AxisType.Auto), mesh_of(AxisType.Explicit))
    )
    assert auto.params.bytes_per_device == 8 * 12 * 4 // 8
    assert explicit.to_data() == auto.to_data()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"zero": ("data", "date")},
            AxesError,
            r"distinct mesh axes: the mesh has data=4, .*; found \('data', 'date'\)",
        ),
        ({"zero_level": 2}, ValueError, "found 2 with `zero=None`. Name the mesh axes in `zero`"),
        ({"grad_dtype": jnp.int8}, ValueError, "`grad_dtype` must be a floating-p.*; found int8"),
        ({"accumulate": "float31"}, ValueError, "`accumulate` must be a .*; found float31"),
    ],
)
def test_arguments_that_mean_nothing(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        plan_of(**options)


def test_a_picture_has_a_bar_for_each_group() -> None:
    """With the bytes of each kind, and the waste among them; equal layers are one bar."""
    pytest.importorskip("matplotlib")
    params = {f"layers_{n}": {"w": leaf(1024, 256)} for n in range(3)} | {"out": leaf(512)}
    axes = {name: {"w": ("embed", "mlp")} for name in params if name != "out"} | {"out": None}
    plan = plan_of(params=params, axes=axes, accumulate="bfloat16", zero="data")
    [drawn] = plan.plot().axes
    names = [label.get_text() for label in drawn.get_yticklabels()]
    assert names == ["layers_* (3)", "out", NO_PARAMETER]
    assert drawn.get_xlabel() == "MiB per device"
    bars = {bar.get_label(): [patch.get_width() for patch in bar] for bar in drawn.containers}
    layers = [sum(plan.groups[f"layers_{n}"][kind] for n in range(3)) for kind in KINDS]
    labels = ["parameters", "gradients", "accumulators", "optimizer state"]
    assert [bars[label][0] * 2**20 for label in labels] == layers
    waste = sum(row.waste for row in plan.rows if row.group == "out")
    assert bars["waste: beyond an equal share"][1] * 2**20 == waste
