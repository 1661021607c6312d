"""Gradient accumulation on 8 virtual devices: equal values, and what moves between devices."""

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from opt_accumulate import accumulate_gradients
from opt_accumulate.errors import BatchError, OptionError
from opt_partition import Collective, read_collectives
from opt_partition._hlo import flat_types, parse

P = PartitionSpec
Tree = Any
Reduce = Literal["auto", "deferred"]

NUM = 4
SHAPES = {"w": (16, 8), "v": (16, 12)}
SPECS = {"w": P(None, "model"), "v": P(None, "model")}
ZERO2 = {"w": P("data", "model"), "v": P("model", "data")}


def make_params() -> Tree:
    random = np.random.RandomState(0)
    return {k: jnp.asarray(random.randint(-2, 3, s), jnp.float32) for k, s in SHAPES.items()}


def make_batch() -> Tree:
    """Small whole numbers, whose sums are exact in any order; masks of all densities."""
    random = np.random.RandomState(1)
    x = jnp.asarray(random.randint(-2, 3, (64, 16)), jnp.float32)
    return {"x": x, "mask": jnp.asarray(random.rand(64) < np.linspace(0, 1, 64))}


def row_losses(params: Tree, batch: Tree) -> jax.Array:
    w, v = (jnp.square(batch["x"] @ params[name]).sum(-1) for name in ("w", "v"))
    return w + v


def loss_fn(params: Tree, batch: Tree) -> tuple[jax.Array, jax.Array]:
    return jnp.where(batch["mask"], row_losses(params, batch), 0.0).sum(), batch["mask"].sum()


def whole_batch(params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
    """Of all rows at once, on one device."""
    weight = batch["mask"].sum().astype(jnp.float32)
    loss, grads = jax.value_and_grad(lambda p: loss_fn(p, batch)[0])(params)
    return loss / weight, jax.tree.map(lambda g: g / weight, grads)


def assert_equal(a: Tree, b: Tree) -> None:
    """Bit for bit but for the last division: XLA multiplies by the reciprocal where it likes."""

    def check(a: Any, b: Any) -> None:
        if np.issubdtype(np.asarray(b).dtype, np.floating):
            np.testing.assert_array_max_ulp(np.asarray(a), np.asarray(b), 2)
        else:
            np.testing.assert_array_equal(a, b)

    jax.tree.map(check, jax.device_get(a), jax.device_get(b))


def make_mesh(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)


def use(mesh: jax.sharding.Mesh) -> AbstractContextManager[Any]:
    """Explicit meshes have to be the current one."""
    if AxisType.Explicit not in mesh.axis_types:
        return contextlib.nullcontext()
    set_mesh: Any = jax.set_mesh
    context: AbstractContextManager[Any] = set_mesh(mesh)
    return context


def put(tree: Tree, mesh: jax.sharding.Mesh, specs: Tree) -> Tree:
    return jax.device_put(tree, on(mesh, specs))


def on(mesh: jax.sharding.Mesh, specs: Tree) -> Tree:
    is_spec = lambda leaf: isinstance(leaf, P)  # noqa: E731
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)


def compiled(f: Callable[..., Any], *args: Any) -> jax.stages.Compiled:
    return jax.jit(f).lower(*args).compile()


def moved(program: jax.stages.Compiled, mesh: jax.sharding.Mesh) -> list[Collective]:
    """The collectives that run over `data`, how often in `count`."""
    found = read_collectives(program, mesh)
    return [c for c in found if c.axes is None or set(c.axes) & {"data", "replica"}]


# Values and collectives.


@pytest.mark.sample(1)
@pytest.mark.parametrize("out", [None, ZERO2], ids=["whole", "zero2"])
@pytest.mark.parametrize("reduce", ["deferred", "auto"])
def test_values_shardings_and_metrics(reduce: Reduce, out: Tree, mesh: jax.sharding.Mesh) -> None:
    def loss_and_outputs(p: Tree, b: Tree) -> tuple[Any, Tree]:
        tokens = b["mask"].sum()
        return loss_fn(p, b), {
            "rows": row_losses(p, b), "tokens": tokens, "total": tokens, "w": 2 * p["w"]
        }  # fmt: skip

    vg = accumulate_gradients(
        loss_and_outputs,
        num_microbatches=NUM,
        has_aux=True,
        aux={"rows": "concat", "tokens": "stack", "total": "sum", "w": "mean"},
        skip_fn="non_finite",
        with_metrics=True,
        reduce=reduce,
        mesh=mesh if reduce == "deferred" else None,
        out_shardings=None if out is None else on(mesh, out),
    )
    params, batch = make_params(), make_batch()
    with use(mesh):
        program = compiled(vg, put(params, mesh, SPECS), put(batch, mesh, P("data")))
        (loss, aux, metrics), grads = program(put(params, mesh, SPECS), put(batch, mesh, P("data")))
    assert_equal((loss, grads), whole_batch(params, batch))
    assert_equal(aux["rows"], row_losses(params, batch))
    for name, spec in (out or SPECS).items():
        assert grads[name].sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
    parts = batch["mask"].reshape((4, 4, NUM))  # device, row, microbatch
    expected = parts.sum((0, 1)) if reduce == "auto" else parts.sum(1).ravel()
    assert metrics.weights.tolist() == aux["tokens"].tolist() == expected.tolist()
    assert (int(metrics.weight), int(metrics.skipped.sum())) == (int(batch["mask"].sum()), 0)
    assert int(aux["total"]) == int(metrics.weight)
    np.testing.assert_allclose(aux["w"], 2 * params["w"], rtol=1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("num", [2, 8])
def test_deferred_gradients_are_summed_once_for_any_number_of_microbatches(
    num: int, mesh: jax.sharding.Mesh
) -> None:
    vg = functools.partial(accumulate_gradients, loss_fn, num_microbatches=num)
    with use(mesh):
        args = put(make_params(), mesh, SPECS), put(make_batch(), mesh, P("data"))
        deferred = moved(compiled(vg(reduce="deferred", mesh=mesh), *args), mesh)
        auto = moved(compiled(vg(), *args), mesh)
    # No row leaves its device.
    assert {c.kind for c in deferred} == {c.kind for c in auto} == {"all-reduce"}
    assert {c.count for c in deferred} == {1}
    # Two gradients; the loss and the weight.
    assert sorted(len(c.shape) for c in deferred) == [0, 0, 2, 2]
    in_every_microbatch = [c for c in auto if c.kind == "all-reduce" and len(c.shape) == 2]
    assert [c.count for c in in_every_microbatch] == [num, num]


@pytest.mark.sample(1)
def test_zero2_gradients_are_reduce_scattered_once(mesh: jax.sharding.Mesh) -> None:
    vg = accumulate_gradients(
        loss_fn, num_microbatches=NUM, reduce="deferred", out_shardings=on(mesh, ZERO2)
    )
    with use(mesh):
        args = put(make_params(), mesh, SPECS), put(make_batch(), mesh, P("data"))
        found = moved(compiled(vg, *args), mesh)
    assert {c.count for c in found} == {1}
    scattered = [c for c in found if c.kind == "reduce-scatter"]
    assert sorted(c.shape for c in scattered) == [(4, 4), (8, 3)]  # an eighth of each
    assert {c.axes for c in scattered} == {("data",)}
    assert all(c.shape == () for c in found if c.kind != "reduce-scatter")


def test_zero2_accumulators_of_the_loop_are_parts() -> None:
    mesh = make_mesh(AxisType.Auto)
    args = put(make_params(), mesh, SPECS), put(make_batch(), mesh, P("data"))

    def carried(out: Tree) -> set[tuple[int, ...]]:
        vg = accumulate_gradients(loss_fn, num_microbatches=2, out_shardings=out)
        module = parse(compiled(vg, *args).as_text() or "")
        loops = [
            instruction
            for computation in module.computations.values()
            for instruction in computation.instructions.values()
            if instruction.opcode == "while"
        ]
        assert len(loops) == 1
        return {array.shape for array in flat_types(loops[0].type)}

    # The parameters are carried too; (16, 4) and (16, 6) on a device.
    assert carried(None).isdisjoint({(4, 4), (8, 3)})
    assert carried(on(mesh, ZERO2)) > {(4, 4), (8, 3)}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "spec", [P("data"), P("replica", "data"), P(("model", "data")), P("model")]
)
def test_several_data_axes_and_accumulators_over_any_of_them(spec: PartitionSpec) -> None:
    mesh = jax.make_mesh((2, 2, 2), ("replica", "data", "model"), axis_types=(AxisType.Auto,) * 3)
    out = {"w": NamedSharding(mesh, spec), "v": None}
    vg = accumulate_gradients(
        loss_fn,
        num_microbatches=NUM,
        reduce="deferred",
        data_axes=("replica", "data"),
        out_shardings=out,
    )
    params, batch = make_params(), make_batch()
    args = put(params, mesh, SPECS), put(batch, mesh, P(("replica", "data")))
    program = compiled(vg, *args)
    loss, grads = program(*args)
    assert_equal((loss, grads), whole_batch(params, batch))
    assert grads["w"].sharding.is_equivalent_to(out["w"], 2)
    assert {c.count for c in moved(program, mesh)} == {1}


# Randomness and dropped parts.


@pytest.mark.sample(1)
def test_keys_of_rows_and_of_parts_are_all_different(mesh: jax.sharding.Mesh) -> None:
    """Those of rows are the same deferred or not; part `d` of microbatch `i` is `d * NUM + i`."""

    def with_draws(params: Tree, batch: Tree, rng: jax.Array) -> Tree:
        return loss_fn(params, batch), jax.vmap(jax.random.bits)(rng) if rng.ndim else (
            jax.random.bits(rng)
        )

    key = jax.random.key(5)
    draws = jax.vmap(lambda n: jax.random.bits(jax.random.fold_in(key, n)))(jnp.arange(64))
    rules: Any = (("rows", "concat", 64), (True, "stack", 4 * NUM))
    with use(mesh):
        args = put(make_params(), mesh, SPECS), put(make_batch(), mesh, P("data"))
        for rng, aux, number in rules:
            vg = accumulate_gradients(
                with_draws, num_microbatches=NUM, has_aux=True, aux=aux, rng=rng,
                reduce="deferred", mesh=mesh
            )  # fmt: skip
            (_, found), _ = jax.jit(vg)(*args, rng=key)
            np.testing.assert_array_equal(found, draws[:number])


@pytest.mark.sample(1)
@pytest.mark.parametrize("reduce", ["auto", "deferred"])
def test_what_is_not_finite_is_dropped_with_its_part(
    reduce: Reduce, mesh: jax.sharding.Mesh
) -> None:
    params, batch = make_params(), make_batch()
    batch["mask"] = jnp.ones_like(batch["mask"])
    row = 37  # on device 2; of microbatch 1
    poisoned = {**batch, "x": batch["x"].at[row, 3].set(jnp.nan)}
    rows = np.arange(64)
    dropped = rows % NUM == 1 if reduce == "auto" else (rows % NUM == 1) & (rows // 16 == 2)
    vg = accumulate_gradients(
        loss_fn,
        num_microbatches=NUM,
        skip_fn="non_finite",
        with_metrics=True,
        reduce=reduce,
        mesh=mesh if reduce == "deferred" else None,
    )
    with use(mesh):
        args = put(params, mesh, SPECS), put(poisoned, mesh, P("data"))
        (loss, metrics), grads = jax.jit(vg)(*args)
    kept = jax.tree.map(lambda leaf: leaf[~dropped], batch)
    assert_equal((loss, grads), whole_batch(params, kept))
    assert np.flatnonzero(metrics.skipped).tolist() == [1 if reduce == "auto" else 2 * NUM + 1]
    assert int(metrics.weight) == (~dropped).sum()


# Errors.


def test_rows_that_do_not_divide_over_the_devices() -> None:
    mesh = make_mesh(AxisType.Auto)
    make = functools.partial(accumulate_gradients, num_microbatches=3, reduce="deferred", mesh=mesh)
    vg, batch = make(loss_fn), make_batch()
    with pytest.raises(BatchError, match="`batch` has 16 rows on each of 4 devices, which do not"):
        make(lambda p, b: row_losses(p, b).mean(), weights="examples")(make_params(), batch)
    short = jax.tree.map(lambda leaf: leaf[:63], batch)
    with pytest.raises(BatchError, match="`batch` has 63 rows and `num_microbatches` is 3: the"):
        vg(make_params(), short)


def test_microbatches_smaller_than_the_devices_on_an_explicit_mesh() -> None:
    mesh = make_mesh(AxisType.Explicit)
    vg = accumulate_gradients(loss_fn, num_microbatches=32)
    with use(mesh), pytest.raises(BatchError) as error:
        vg(put(make_params(), mesh, SPECS), put(make_batch(), mesh, P("data")))
    assert str(error.value) == (
        "Microbatches have 2 rows, which do not divide over the 4 devices that the rows of `batch` "
        "lie over (mask: 'data'). Take fewer microbatches, of a multiple of 4 rows."
    )


# Where gradients lie, and where rows do.


@pytest.mark.sample(1)
@pytest.mark.parametrize("num", [1, 4])
def test_gradients_lie_like_parameters_that_are_sharded_over_the_data_axis(num: int) -> None:
    """FSDP on an Explicit mesh, without `out_shardings`."""
    mesh = make_mesh(AxisType.Explicit)
    vg = accumulate_gradients(loss_fn, num_microbatches=num, reduce="deferred")
    params, batch = make_params(), make_batch()
    with use(mesh):
        args = put(params, mesh, ZERO2), put(batch, mesh, P("data"))
        program = compiled(vg, *args)
        loss, grads = program(*args)
    assert_equal((loss, grads), whole_batch(params, batch))
    for name, spec in ZERO2.items():
        assert grads[name].sharding.spec == spec
    found = [c for c in moved(program, mesh) if c.kind == "reduce-scatter"]
    assert [(c.axes, c.count) for c in found] == [(("data",), 1)] * 2


def test_rows_that_would_be_gathered_are_an_error_where_the_mesh_is_known() -> None:
    mesh = make_mesh(AxisType.Auto)
    args = put(make_params(), mesh, SPECS), put(make_batch(), mesh, P("data"))
    vg = functools.partial(accumulate_gradients, loss_fn, num_microbatches=32)  # 16 rows a device
    assert "all-gather" in {c.kind for c in moved(compiled(vg(), *args), mesh)}
    with pytest.raises(BatchError, match=r"do not divide over the 4 devices .*`data_axes`: 'data'"):
        jax.jit(vg(mesh=mesh))(*args)
    assert_equal(
        jax.jit(vg(num_microbatches=16, mesh=mesh))(*args), whole_batch(make_params(), make_batch())
    )


def test_rows_over_axes_that_data_axes_does_not_name() -> None:
    mesh = make_mesh(AxisType.Explicit)
    vg = accumulate_gradients(loss_fn, num_microbatches=2, reduce="deferred")
    with use(mesh), pytest.raises(OptionError) as error:
        jax.jit(vg)(put(make_params(), mesh, P()), put(make_batch(), mesh, P(("data", "model"))))
    words = (
        "`data_axes` has 'data', but rows of `batch` lie over other mesh axes too:\n"
        "  mask: 'data', 'model'\n  x: 'data', 'model'\nName all axes that the rows lie over."
    )
    assert words in str(error.value)


@pytest.mark.sample(1)
@pytest.mark.parametrize("out", [None, P("data", "model")])
@pytest.mark.parametrize("reduce", ["auto", "deferred"])
@pytest.mark.parametrize("explicit", ["data", "model"])
def test_meshes_with_axes_of_both_types(
    explicit: str, reduce: Reduce, out: PartitionSpec | None
) -> None:
    kinds = [AxisType.Explicit if axis == explicit else AxisType.Auto for axis in ("data", "model")]
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=tuple(kinds))
    vg = accumulate_gradients(
        loss_fn,
        num_microbatches=NUM,
        reduce=reduce,
        out_shardings=None if out is None else NamedSharding(mesh, out),
    )
    params, batch = make_params(), make_batch()
    with use(mesh):
        result = jax.jit(vg)(put(params, mesh, SPECS), put(batch, mesh, P("data")))
    assert_equal(result, whole_batch(params, batch))
    expected = NamedSharding(mesh, SPECS["w"] if out is None else out)
    assert result[1]["w"].sharding.is_equivalent_to(expected, 2)


def test_one_dimension_over_axes_of_both_types() -> None:
    kinds = AxisType.Explicit, AxisType.Auto
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)
    out = {"w": NamedSharding(mesh, P(None, ("data", "model"))), "v": None}
    vg = accumulate_gradients(loss_fn, num_microbatches=NUM, out_shardings=out)
    words = r"axes of one type, Auto or Explicit, .* it has\n  w: None, \('data', 'model'\)"
    with use(mesh), pytest.raises(OptionError, match=words):
        jax.jit(vg)(make_params(), make_batch())


# Inside `jax.shard_map`s of others.


def psum_loss(params: Tree, batch: Tree) -> tuple[jax.Array, jax.Array]:
    total, weight = loss_fn(params, batch)
    return jax.lax.psum(total, "data"), jax.lax.psum(weight, "data")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("loss", "options", "check_vma"),
    [
        (loss_fn, {}, True),
        (loss_fn, {}, False),
        (loss_fn, {"skip_fn": "non_finite"}, True),
        (psum_loss, {}, True),
    ],
)
def test_inside_a_shard_map_as_value_and_grad_is(
    loss: Callable[..., Any], options: Any, check_vma: bool
) -> None:
    """Ragged masks: each device divides by its own weight."""
    mesh = make_mesh(AxisType.Auto)

    def run(value_and_grad: Callable[..., Any], params: Tree, batch: Tree) -> Any:
        def on_device(params: Tree, batch: Tree) -> Any:
            value, grads = value_and_grad(params, batch)
            return jax.lax.pmean(value, "data"), grads

        return jax.jit(
            jax.shard_map(
                on_device,
                mesh=mesh,
                in_specs=(P(), P("data")),
                out_specs=P(),
                check_vma=check_vma,
                axis_names={"data"},
            )
        )(params, batch)

    params, batch = make_params(), make_batch()
    batch["mask"] = batch["mask"].at[jnp.arange(0, 64, 16)].set(True)
    ours = run(accumulate_gradients(loss, num_microbatches=NUM, **options), params, batch)

    def mean(params: Tree, batch: Tree) -> jax.Array:
        total, weight = loss(params, batch)
        mean: jax.Array = total / weight.astype(jnp.float32)
        return mean

    # Sums in another order, of up to 64 terms of one magnitude.
    expected = run(jax.value_and_grad(mean), params, batch)
    chex.assert_trees_all_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_deferred_inside_a_shard_map_over_the_data() -> None:
    mesh = make_mesh(AxisType.Auto)
    vg = accumulate_gradients(loss_fn, num_microbatches=2, reduce="deferred", mesh=mesh)
    run = jax.shard_map(vg, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    words = "`reduce='deferred'` inside a `jax.shard_map` over 'data': each device has its own rows"
    with pytest.raises(OptionError, match=words):
        jax.jit(run)(make_params(), make_batch())
