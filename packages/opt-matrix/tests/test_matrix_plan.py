"""Plans are made of shapes: choices, bytes and operations, on meshes of any size."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from opt_matrix import Dims, Matrices, newton_schulz, plan_matrices
from opt_matrix.errors import OptionError, PlanError, UndecidedError

X8 = AbstractMesh((8,), ("x",))
XY = AbstractMesh((4, 2), ("x", "y"))


def leaf(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, "float32")


def planned(params: Any, spec: Any, mesh: Any = XY, matrices: Any = None, **options: Any) -> Any:
    return plan_matrices(params, spec, mesh, matrices or Matrices.by_rank2(), **options)


def many(count: int, *shape: int) -> dict[str, Any]:
    return {f"w{n:02}": leaf(*shape) for n in range(count)}


@pytest.mark.parametrize(("mesh", "spec"), [(X8, P(None, "x")), (XY, P("x", "y"))])
def test_what_is_cut_over_all_axes_is_handed_out_in_two_collectives(mesh: Any, spec: Any) -> None:
    (group,) = planned(many(16, 256, 512), spec, mesh, fn=newton_schulz(dtype=None)).groups
    assert group.choice == "all_to_all"
    assert sorted(group.axes) == sorted(mesh.axis_names)
    assert group.collectives == 2
    assert group.bytes_per_device == 2 * 16 * 256 * 512 * 4 // 8
    assert group.flops_per_device == group.ideal_flops == 1_677_721_600
    assert group.padding == 0
    assert len(group.leaves) == 16


def test_an_axis_that_replicates_takes_part_and_is_gathered_once() -> None:
    (group,) = planned(many(16, 256, 512), P("x")).groups
    assert (group.choice, group.collectives) == ("all_to_all", 3)
    assert group.axes == ("y", "x")
    assert group.flops_per_device == group.ideal_flops
    # In bfloat16: to eight devices and back, and a copy of all of them.
    size = 256 * 512 // 4
    assert group.bytes_per_device == 2 * (2 * 8 * size) + 2 * 16 * size
    work = 4 * 2 * (256 * 512 + 3 * 256 * 256)
    assert group.temp_bytes == 2 * (2 * 8 * size) + 2 * 16 * size + work


def test_few_matrices_on_axes_that_replicate_come_back_by_a_sum_in_float32() -> None:
    (group,) = planned(many(3, 256, 512), P(), X8).groups
    assert (group.padding, group.bytes_per_device) == (5, 4 * 3 * 256 * 512)


def test_whole_matrices_stay_where_they_are() -> None:
    experts = Matrices.by_path({"wi": (-2, -1)})
    (group,) = planned({"wi": leaf(8, 4, 32, 64)}, P("x", "y"), matrices=experts).groups
    assert (group.choice, group.collectives, group.count) == ("local", 0, 4)
    assert group.flops_per_device == group.ideal_flops


@pytest.mark.parametrize("shape", [(64, 64), (1024, 65536)])
def test_one_matrix_is_gathered_whatever_its_size(shape: tuple[int, int]) -> None:
    (group,) = planned({"w": leaf(*shape)}, P(None, "x"), X8).groups
    assert (group.choice, group.axes, group.collectives) == ("gather", ("x",), 1)
    assert group.bytes_per_device == 2 * shape[0] * shape[1]


def test_matrices_are_split_where_that_is_asked_for() -> None:
    (large,) = planned({"w": leaf(1024, 65536)}, P(None, "x"), X8, split_axes=["x"]).groups
    assert (large.choice, large.axes, large.collectives) == ("split", ("x",), 6)
    assert large.bytes_per_device == 5 * 1024 * 1024 * 4 + 4
    assert large.flops_per_device < 1.1 * large.ideal_flops
    options: dict[str, Any] = {"fn": newton_schulz(gram=True), "split_axes": ["x"]}
    (gram,) = planned({"w": leaf(1024, 65536)}, P(None, "x"), X8, **options).groups
    assert (gram.choice, gram.collectives) == ("split", 2)
    (both,) = planned(many(4, 256, 512), P("x", "y"), split_axes=["y"]).groups
    assert (both.way.share, both.way.split) == (("x",), ("y",))


def test_what_cannot_be_split_is_handed_out() -> None:
    beside = Matrices.by_path({"w": Dims((-2,), (-1,), split=(64, 32, 32))})
    odd = Matrices.by_path({"w": (-2, -1)})
    for matrices, shape in (beside, (4, 128, 128)), (odd, (4, 8, 13)):
        params, spec = {"w": leaf(*shape)}, P(None, "x")
        (group,) = planned(params, spec, X8, matrices, split_axes=["x"]).groups
        assert group.choice == "all_to_all"


@pytest.mark.parametrize("bound", [1, 1 << 20, 1 << 30])
def test_no_bound_of_memory_is_bought_with_traffic(bound: int) -> None:
    plan = planned(many(16, 512, 512), P("x"), X8, max_group_bytes=bound)
    assert plan.bytes_per_device == 2 * 2 * 16 * 512 * 512 // 8
    assert plan.flops_per_device == sum(group.ideal_flops for group in plan.groups)
    assert plan.temp_bytes <= max(bound, plan.min_group_bytes)


def test_the_smallest_bound_is_met_and_the_next_smaller_one_is_not() -> None:
    # 5 rounds: of a single matrix more is kept than of two, and one of five is left by itself.
    params = {**many(40, 256, 512), **{f"v{n}": leaf(64, 64) for n in range(8)}}
    least = planned(params, P("x"), X8).min_group_bytes
    assert planned(params, P("x"), X8, max_group_bytes=least).temp_bytes == least
    below = planned(params, P("x"), X8, max_group_bytes=least - 1)
    assert below.temp_bytes == below.min_group_bytes == least
    assert "the smallest bound that can be met is" in str(below)
    assert "the smallest bound" not in str(planned(params, P("x"), X8, max_group_bytes=least))


def test_axes_between_slow_networks_are_not_handed_out_over() -> None:
    mesh = AbstractMesh((2, 4), ("dcn", "ici"))
    plan = planned(many(8, 256, 512), P("ici"), mesh, world_axes=("ici",))
    assert plan.groups[0].axes == ("ici",)
    assert plan.groups[0].flops_per_device == 2 * plan.groups[0].ideal_flops


def test_groups_are_bounded_and_even() -> None:
    params = {"stack": leaf(20, 64, 64), "w": leaf(12, 64, 64)}
    matrices = Matrices.by_path({".*": (-2, -1)})
    whole = planned(params, P(None, "x", "y"), matrices=matrices)
    assert len(whole.groups) == 1
    plan = planned(
        params, P(None, "x", "y"), matrices=matrices, max_group_bytes=whole.temp_bytes // 2
    )
    assert [group.count for group in plan.groups] == [16, 16]
    assert [group.leaves for group in plan.groups] == [("stack",), ("stack", "w")]
    assert [group.parts for group in plan.groups] == [((0, 16),), ((16, 20), (0, 12))]
    assert plan.temp_bytes <= whole.temp_bytes // 2
    assert plan.bytes_per_device == whole.bytes_per_device
    numbers = [number for group in plan.groups for number in plan.numbers(group)]
    assert sorted(numbers) == list(range(32))


def test_numbers_do_not_depend_on_the_mesh() -> None:
    params = {"a": leaf(4, 2, 8, 8), "b": leaf(4, 4, 8, 8)}
    plan = planned(params, P("x", "y"), matrices=Matrices.by_path({".*": (-2, -1)}))
    assert [group.kind.batch_axes for group in plan.groups] == [("x", "y")]
    alone = planned(params, None, AbstractMesh((1,), ("x",)), Matrices.by_path({".*": (-2, -1)}))
    found = sorted(n for group in plan.groups for n in plan.numbers(group) if n >= 0)
    assert found == sorted(alone.numbers(alone.groups[0])) == list(range(24))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (P("z"), r"axes \['z'\], and the mesh has \['x', 'y'\]"),
        (P("x", None, "y"), "more entries than"),
        (P(None, "x"), "does not divide 6"),
        ("x", "expected a `NamedSharding`"),
    ],
)
def test_shardings_must_fit(spec: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        planned({"w": leaf(8, 6)}, {"w": spec})


def test_arguments_must_fit() -> None:
    params = {"w": leaf(8, 8)}
    with pytest.raises(PlanError, match=r"nothing is given for \['w'\]"):
        planned(params, {})
    with pytest.raises(OptionError, match="`world_axes`"):
        planned(params, P(), world_axes=("z",))
    with pytest.raises(OptionError, match=r"`split_axes`: \['z'\] are not axes of the mesh"):
        planned(params, P(), split_axes=("z",))
    with pytest.raises(OptionError, match=r"`split_axes` is \('x',\), and .* needs whole matrices"):
        planned(params, P(), split_axes=["x"], fn=jnp.linalg.inv)
    with pytest.raises(OptionError, match="`max_group_bytes`"):
        planned(params, P(), max_group_bytes=0)
    with pytest.raises(OptionError, match=r"got '1 GiB'.*name it among `static_args`"):
        planned(params, P(), max_group_bytes="1 GiB")
    with pytest.raises(UndecidedError, match="decided by no rule"):
        planned({"w": leaf(2, 8, 8)}, P())
