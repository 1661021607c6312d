"""opt-matrix on eight devices and with the other packages: planned collectives, Optax's numbers."""

import functools
import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matrix_plans
import numpy as np
import opt_optax_bridge as opt
import optax
import optax.contrib
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from opt_checkpoint import named_state, plan_restore
from opt_core import MultiOptimizer
from opt_matrix import (
    Dims,
    Matrices,
    MatrixPlan,
    distribute,
    hyperball,
    muon,
    newton_schulz,
    plan_matrices,
    scale_by_muon,
    scale_by_normuon,
    scale_by_soap,
)
from opt_matrix.errors import OptionError, PlanError, PlanMismatchError
from opt_partition import read_collectives

# Muon on eight devices: the planned collectives and no other, the numbers of one device.

contrib: Any = optax.contrib
RNG = np.random.default_rng(0)
F32 = newton_schulz(dtype=None)
RANK2 = Matrices.by_rank2()
STACKS = Matrices.by_path({".*": (-2, -1)})


def mesh_of(shape: tuple[int, ...], kind: AxisType = AxisType.Auto) -> Any:
    names = ("x", "y", "z")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


def normal(*shape: int) -> Any:
    return RNG.normal(size=shape).astype(np.float32)


def many(count: int, *shape: int) -> dict[str, Any]:
    return {f"w{n:02}": normal(*shape) for n in range(count)}


def compiled(tx: Any, params: Any, sharding: Any) -> Any:
    """The program of an update that is given gradients and state away, as a step does."""
    placed = jax.tree.map(
        lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to),
        params,
        sharding if isinstance(sharding, dict) else jax.tree.map(lambda _: sharding, params),
    )
    state = jax.eval_shape(tx.init, placed)._replace(mu=placed)
    return jax.jit(tx.update, donate_argnums=(0, 1)).lower(placed, state).compile()


def close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(np.asarray(a) - np.asarray(b)).max() <= tolerance * np.abs(b).max()


def ten_steps(tx: Any, params: Any, place: Any = lambda tree: tree) -> Any:
    params, update = place(params), jax.jit(tx.update)
    state, rng = tx.init(params), np.random.default_rng(3)
    for _ in range(10):
        grads = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), params)
        updates, state = update(place(grads), state, params)
        params = optax.apply_updates(params, updates)
    return jax.device_get(params)


PARAMS = many(16, 32, 64)


@functools.cache
def expected() -> Any:
    """Ten steps of Optax on one device."""
    return ten_steps(contrib.muon(0.1), PARAMS)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize(("shape", "spec"), [((8,), P(None, "x")), ((4, 2), P("x", "y"))])
def test_two_collectives_and_optax_numbers(
    shape: tuple[int, ...], spec: Any, kind: AxisType
) -> None:
    mesh = mesh_of(shape, kind)
    sharding = NamedSharding(mesh, spec)
    large = {name: jax.ShapeDtypeStruct((256, 512), np.float32) for name in PARAMS}
    bound = 9 << 19  # a part of the stack, its copy in transit, and what two matrices need
    plan = plan_matrices(large, sharding, mesh, RANK2, fn=F32, max_group_bytes=bound)
    (group,) = plan.groups
    assert group.ideal_flops == 16 * 5 * 2 * (2 * 256 * 256 * 512 + 256**3) / 8
    with jax.set_mesh(mesh):
        program = compiled(scale_by_muon(plan=plan), large, sharding)
        rows = read_collectives(program)
        assert sum(row.count for row in rows) <= 2
        sent = sum(row.count * math.prod(row.shape) * 4 for row in rows)
        assert sent <= 2 * (16 * 256 * 512 * 4) / 8
        assert program.cost_analysis()["flops"] <= 1.05 * group.ideal_flops
        assert program.memory_analysis().temp_size_in_bytes <= 1.1 * bound

        plan = plan_matrices(PARAMS, sharding, mesh, RANK2, fn=F32)
        given = plan if kind == AxisType.Auto else None  # types are enough on an Explicit mesh
        tx = muon(0.1, matrices=RANK2, plan=given, orthogonalize=F32)
        found = ten_steps(tx, PARAMS, lambda tree: jax.device_put(tree, sharding))
    close(found, expected())


def orthogonal(plan: MatrixPlan, params: Any, sharding: Any) -> Any:
    tx = scale_by_muon(plan=plan)
    placed = jax.device_put(params, sharding)
    program = compiled(tx, params, sharding)
    plan.check(program)
    assert all("opt_matrix" in row.op_name for row in read_collectives(program))
    return jax.device_get(jax.jit(tx.update)(placed, jax.jit(tx.init)(placed))[0])


@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", [(16, 64), (64, 16)])
@pytest.mark.parametrize("spec", [P("x", "y"), P(None, ("x", "y"))])
@pytest.mark.parametrize("gram", [False, True])
def test_split_matrices(shape: tuple[int, int], spec: Any, gram: bool) -> None:
    mesh = mesh_of((4, 2))
    params = {"w": normal(*shape)}
    fn = newton_schulz(dtype=None, gram=gram)
    plan = plan_matrices(params, spec, mesh, RANK2, fn=fn, split_axes=("x", "y"))
    assert plan.groups[0].choice == "split"
    found = orthogonal(plan, params, NamedSharding(mesh, spec))
    alone = scale_by_muon(orthogonalize=newton_schulz(dtype=None))
    close(found, alone.update(params, alone.init(params))[0], 1e-3 if gram else 1e-4)


def test_layers_share_the_iteration() -> None:
    """What is compiled for 24 layers, in one group or in three, has the products of one group."""
    mesh = mesh_of((8,))

    def products(params: Any, spec: Any, groups: int = 1, **options: Any) -> int:
        sharding = NamedSharding(mesh, spec)
        shared = distribute(F32, params, sharding, mesh, matrices=STACKS, **options)
        assert len(shared.plan.groups) == groups
        placed = {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            for path, leaf in params.items()
        }
        return int(jax.jit(shared.apply).lower(placed).as_text().count("dot_general"))

    one = {"w": jax.ShapeDtypeStruct((8, 32, 64), np.float32)}
    layers = {f"layer_{n}": jax.ShapeDtypeStruct((32, 64), np.float32) for n in range(24)}
    assert products(layers, P("x")) == products(one, P(None, "x")) == 3 * 5
    stack = {"w": jax.ShapeDtypeStruct((24, 32, 64), np.float32)}
    assert products(stack, P(None, "x"), groups=3, max_group_bytes=1) == 3 * 5


ODD: dict[str, tuple[tuple[int, ...], dict[str, tuple[tuple[int, ...], Any]], dict[str, Any]]] = {
    "smaller than the mesh": ((8,), {"w": ((4, 4), P()), "v": ((3, 5), P())}, {}),
    "one shape, three layouts": (
        (4, 2),
        {"a": ((16, 16), P()), "b": ((16, 16), P("x", "y")), "c": ((2, 16, 16), P(None, "y"))},
        {},
    ),
    "three axes": (
        (2, 2, 2),
        {"a": ((8, 16), P(("z", "x"), "y")), "b": ((3, 8, 16), P(None, "z", "y"))},
        {},
    ),
    "handed out and split": ((4, 2), {"w": ((3, 8, 16), P(None, "x", "y"))}, {"split_axes": ["y"]}),
    "no leaves": ((8,), {}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_odd_trees_have_the_numbers_of_optax(name: str) -> None:
    shape, leaves, options = ODD[name]
    mesh = mesh_of(shape)
    rng = np.random.default_rng(8)
    params = {path: rng.normal(size=size).astype(np.float32) for path, (size, _) in leaves.items()}
    shardings = {path: NamedSharding(mesh, spec) for path, (_, spec) in leaves.items()}
    matrices = STACKS if leaves else RANK2
    plan = plan_matrices(params, shardings, mesh, matrices, fn=F32, **options)
    if leaves:
        orthogonal(plan, params, shardings)
    ours = muon(1.0, matrices=matrices, plan=plan)
    dims = {
        path: contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1) for path, x in params.items()
    }
    theirs = contrib.muon(1.0, muon_weight_dimension_numbers=dims)
    results: list[Any] = []
    for tx, given in (ours, jax.device_put(params, shardings)), (theirs, params):
        state, update = tx.init(given), jax.jit(tx.update)
        for _ in range(2):
            updates, state = update(given, state, given)
        results.append(updates)
    assert set(results[0]) == set(params)
    for path, x in results[0].items():
        np.testing.assert_allclose(x, results[1][path], atol=1e-5)


def test_a_mesh_that_types_say_half_of_needs_a_plan() -> None:
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Auto))
    params, spec = many(3, 8, 16), P("x", "y")
    alone: Any = scale_by_muon(orthogonalize=F32)
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, NamedSharding(mesh, spec))
        with pytest.raises(PlanError, match=r"w00 .* nothing of \('y',\): give a `plan`"):
            alone.update(placed, alone.init(placed))
        tx: Any = scale_by_muon(plan=plan_matrices(placed, spec, mesh, RANK2, fn=F32))
        found, _ = jax.jit(tx.update)(placed, jax.jit(tx.init)(placed))
    close(found, alone.update(params, alone.init(params))[0])


def test_check_fails_where_more_moves_than_planned() -> None:
    mesh = mesh_of((8,))
    sharding = NamedSharding(mesh, P("x"))
    plan = plan_matrices(PARAMS, sharding, mesh, RANK2, fn=F32)
    dims = dict.fromkeys(PARAMS, contrib.MuonDimensionNumbers())
    theirs = contrib.scale_by_muon(weight_dimension_numbers=dims)
    with pytest.raises(PlanMismatchError, match="found 0 and 0; is the program of"):
        plan.check(compiled(theirs, PARAMS, sharding))
    narrow = plan_matrices(PARAMS, sharding, mesh, RANK2)
    program = compiled(scale_by_muon(plan=plan), PARAMS, sharding)
    with pytest.raises(PlanMismatchError, match="planned 2 collectives and 16,384 bytes, found 2"):
        narrow.check(program)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_hyperball_holds_norms_of_shards_and_adds_sums_of_a_number_a_matrix(kind: AxisType) -> None:
    mesh = mesh_of((4, 2), kind)
    rng = np.random.default_rng(9)
    params = {
        "experts": rng.normal(size=(2, 4, 16, 32)).astype(np.float32),
        "fused": rng.normal(size=(16, 24)).astype(np.float32),
    }
    specs = {"experts": P(None, "x", None, "y"), "fused": P("x", "y")}
    shardings = {path: NamedSharding(mesh, spec) for path, spec in specs.items()}
    matrices = Matrices.by_path({"experts": (-2, -1), "fused": Dims((0,), (1,), split=(16, 4, 4))})
    alone = scale_by_muon(orthogonalize=F32, matrices=matrices)
    expected = ten_steps(hyperball(alone, matrices, 0.1), params)
    close(
        np.linalg.norm(expected["experts"], axis=(2, 3)),
        np.linalg.norm(params["experts"], axis=(2, 3)),
    )
    with jax.set_mesh(mesh):
        plan = plan_matrices(params, shardings, mesh, matrices, fn=F32)
        tx = hyperball(scale_by_muon(plan=plan), matrices, 0.1)
        close(ten_steps(tx, params, lambda tree: jax.device_put(tree, shardings)), expected)
        placed = jax.device_put(params, shardings)
        program = jax.jit(tx.update).lower(placed, tx.init(placed), placed).compile()
    plan.check(program)
    planned = sum(group.collectives for group in plan.groups)
    rows = [row for row in read_collectives(program) if "opt_matrix" not in row.op_name]
    assert len(read_collectives(program)) - len(rows) == planned
    assert {row.kind for row in rows} == {"all-reduce"}
    assert sum(math.prod(row.shape) for row in rows) <= 3 * (2 * 4 + 24)


def normuon_reference(grads: list[Any], fn: Any) -> Any:
    """The paper's lines, one matrix at a time."""
    found = {}
    for name in grads[0]:
        mu: Any = 0.0
        nu: Any = 0.0
        for own in grads:
            g = own[name]
            mu = 0.9 * mu + 0.1 * g
            y = np.asarray(fn(jnp.asarray(0.9 * mu + 0.1 * g)))
            nu = 0.8 * nu + 0.2 * np.mean(y * y, axis=0)
            y = y / (np.sqrt(nu) + 1e-8)
            found[name] = 0.2 * np.sqrt(y.size) / np.linalg.norm(y) * y
    return found


def soap_basis(covariance: Any, basis: Any) -> tuple[Any, Any]:
    values = np.diag(basis.T @ covariance @ basis)
    shift = 1e-3 * values.max()
    order = np.argsort(-np.where(values > shift, values, 0), kind="stable")
    return np.linalg.qr((covariance + shift * np.eye(len(basis))) @ basis[:, order])[0], order


def soap_reference(grads: list[Any], every: int) -> Any:
    found = {}
    for number, name in enumerate(grads[0]):
        rows, columns = grads[0][name].shape
        left, right = np.zeros((rows, rows)), np.zeros((columns, columns))
        q, p = np.eye(rows), np.eye(columns)
        mu = nu = 0.0
        for step, own in enumerate(grads, start=1):
            g = own[name].astype(np.float64)
            mu = 0.9 * mu + 0.1 * g
            nu = 0.8 * nu + 0.2 * (q.T @ g @ p) ** 2
            direction = q.T @ mu @ p / (1 - 0.9**step)
            found[name] = q @ (direction / (np.sqrt(nu / (1 - 0.8**step)) + 1e-8)) @ p.T
            left, right = 0.7 * left + 0.3 * g @ g.T, 0.7 * right + 0.3 * g.T @ g
            if (step + number) % every == 0:
                q, by_row = soap_basis(left, q)
                p, by_column = soap_basis(right, p)
                nu = nu[by_row][:, by_column]
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["normuon", "soap"])
@pytest.mark.parametrize(
    ("shape", "spec", "kind"),
    [
        ((1,), P(), AxisType.Auto),
        ((4, 2), P("x", "y"), AxisType.Auto),
        ((4, 2), P("x", "y"), AxisType.Explicit),
    ],
)
def test_normuon_and_soap_equal_plain_references(
    name: str, shape: Any, spec: Any, kind: AxisType
) -> None:
    mesh = mesh_of(shape, kind)
    sharding = NamedSharding(mesh, spec)
    rng = np.random.default_rng(5)
    grads = [
        {f"w{n}": rng.normal(size=(8, 8)).astype(np.float32) for n in range(5)} for _ in range(6)
    ]
    if name == "normuon":
        tx = scale_by_normuon(grads[0], sharding, mesh, momentum=0.9, beta2=0.8, orthogonalize=F32)
        wanted = normuon_reference(grads, F32)
    else:
        tx = scale_by_soap(grads[0], sharding, mesh, b1=0.9, b2=0.8, average=0.7, refresh_every=3)
        wanted = soap_reference(grads, 3)
    state: Any = tx.init(jax.device_put(grads[0], sharding))
    update = jax.jit(tx.update)
    if name == "normuon" and kind == AxisType.Explicit:  # as ZeRO may place it
        state = state._replace(nu=jax.device_put(state.nu, NamedSharding(mesh, P(None, "y"))))
    places = jax.tree.map(jax.typeof, state)
    for own in grads:
        found, state = update(jax.device_put(own, sharding), state)
    close(found, wanted, 1e-3)
    assert jax.tree.map(jax.typeof, state) == places


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"), [("normuon", AxisType.Explicit), ("soap", AxisType.Auto)]
)
def test_a_state_goes_on_in_the_stacks_of_another_plan(name: str, kind: AxisType) -> None:
    rng = np.random.default_rng(6)
    grads = [
        {
            "a": rng.normal(size=(24, 8, 8)).astype(np.float32),
            "b": rng.normal(size=(8, 8)).astype(np.float32),
        }
        for _ in range(3)
    ]
    matrices = Matrices.by_path({".*": (-2, -1)})

    def made(shape: tuple[int, ...], specs: Any, **options: Any) -> tuple[Any, Any]:
        mesh = mesh_of(shape, kind)
        shardings = {path: NamedSharding(mesh, spec) for path, spec in specs.items()}
        if name == "normuon":
            options["orthogonalize"] = F32
        scale = scale_by_normuon if name == "normuon" else scale_by_soap
        return scale(grads[0], shardings, mesh, matrices=matrices, **options), shardings

    old, old_shardings = made((8,), {"a": P(), "b": P("x")}, max_group_bytes=1)
    new, shardings = made((4, 2), {"a": P(None, "x"), "b": P("x", "y")})
    assert len(old.plan.groups) != len(new.plan.groups)
    state, update = jax.jit(old.init)(grads[0]), jax.jit(old.update)
    for own in grads[:2]:
        _, state = update(jax.device_put(own, old_shardings), state)
    expected, _ = update(jax.device_put(grads[2], old_shardings), state)
    there = jax.jit(lambda state: new.restack(state, old.plan))
    back = jax.jit(lambda state: old.restack(state, new.plan))
    moved = there(jax.device_get(state))
    found, _ = jax.jit(new.update)(jax.device_put(grads[2], shardings), moved)
    close(found, expected, 1e-4)
    close(back(jax.device_get(moved)), state, 0)


def test_a_state_of_other_matrices_is_not_restacked() -> None:
    mesh = mesh_of((8,))
    old, new = (scale_by_soap(many(count, 8, 8), P(), mesh) for count in (2, 3))
    state = old.init({})
    with pytest.raises(PlanError, match=r"they differ in \['w02'\]"):
        new.restack(state, old.plan)
    with pytest.raises(PlanError, match="`state` is of 0 groups, and `before` has 1"):
        old.restack((), old.plan)
    with pytest.raises(PlanError, match="`state` is of 0 groups, and the plan has 1"):
        old.update(many(2, 8, 8), ())


def test_functions_and_meshes_that_do_not_fit_are_named() -> None:
    mesh, params, spec = mesh_of((8,)), many(2, 8, 8), P("x")
    with pytest.raises(OptionError, match=r"of w00 it was given \(1, 8, 8\) .* \(1, 8, 7\)"):
        distribute(lambda x: x[..., 1:], params, spec, mesh).apply(params)
    rows: Any = distribute(F32, params, spec, mesh, init=lambda stack, numbers: jnp.zeros(3))
    with pytest.raises(OptionError, match=r"each of 1 matrices; got one of shape \(3,\) for w00"):
        rows.init()
    explicit = AbstractMesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    tx = scale_by_muon(plan=plan_matrices(params, spec, explicit, RANK2, fn=F32))
    with pytest.raises(PlanError, match=r"w00: planned for an abstract mesh, .* `jax.set_mesh`"):
        tx.update(params, tx.init(params))
    any_function: Any = scale_by_normuon(params, spec, mesh, orthogonalize=jnp.sign)
    found, _ = any_function.update(params, any_function.init(params))
    close(jax.tree.map(jnp.abs, found), jax.tree.map(lambda x: np.full_like(x, 0.2), params))


# Muon with the other packages: checkpoints, groups, accumulation, 8-bit momentum, memory plans.

LAYERS = 3
UNROLLED = Matrices.by_path({".*/wi": (-2, -1), ".*/b|head": None})


def decoder_layers() -> dict[str, Any]:
    each = {f"layers_{n}": {"b": normal(8), "wi": normal(8, 16)} for n in range(LAYERS)}
    return {**each, "head": normal(5)}


def stepped(optimizer: Any, grads: Any) -> Any:
    return optimizer.apply_gradient(grads)


def ours(matrices: Matrices = UNROLLED) -> Any:
    return opt.wrap_optax_optimizer(muon)(0.1, matrices=matrices, orthogonalize=F32)


def theirs(params: Any) -> Any:
    """Optax's, given which leaves of these parameters are matrices."""
    matrix = contrib.MuonDimensionNumbers()
    dims = jax.tree.map(lambda leaf: matrix if leaf.ndim == 2 else None, params)
    return opt.wrap_optax_optimizer(contrib.muon)(0.1, muon_weight_dimension_numbers=dims)


def assert_all_close(found: Any, expected: Any, tolerance: float) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance)


def test_a_state_of_optax_is_restored_and_goes_on() -> None:
    params, first, second = decoder_layers(), decoder_layers(), decoder_layers()
    before = stepped(theirs(params).create(params), first)
    plan = plan_restore(named_state(before), ours().create(params))
    assert plan.is_exact, str(plan)
    same = plan.apply()
    assert_all_close(same.state, before.state, 0)  # bit for bit
    assert_all_close(stepped(same, second).target, stepped(before, second).target, 1e-5)


def test_groups_and_a_learning_rate_at_run_time() -> None:
    params, grads = decoder_layers(), decoder_layers()
    definition = MultiOptimizer.from_rules(
        [
            ("vectors", ".*/b|head", opt.sgd(0.5)),
            ("matrices", ".*/wi", ours(Matrices.by_path({".*": (-2, -1)}))),
        ]
    )
    optimizer = definition.create(params)
    whole = optimizer.apply_gradient(grads, learning_rate=0.1).target
    halved = optimizer.apply_gradient(grads, learning_rate=0.05).target
    alone = stepped(ours().create(params), grads).target
    for name in ("layers_0", "layers_2"):
        assert_all_close(whole[name]["wi"], alone[name]["wi"], 1e-6)
        moved = params[name]["wi"] - whole[name]["wi"]
        assert_all_close(params[name]["wi"] - halved[name]["wi"], 0.5 * moved, 1e-5)
    assert_all_close(whole["head"], params["head"] - 0.1 * grads["head"], 1e-6)


# Muon on a decoder's matrices: planned for thousands of devices, compiled for hundreds.


@pytest.mark.sample(4)
@pytest.mark.parametrize(("name", "mesh"), matrix_plans.CASES)
def test_plans_of_all_defaults_cost_what_whole_matrices_do(name: str, mesh: str) -> None:
    start = time.process_time()
    plan = matrix_plans.plan_of(name, mesh)
    assert time.process_time() - start < 2
    devices = math.prod(plan.mesh_shape.values())
    for group in plan.groups:
        assert group.collectives <= 2
        share = matrix_plans.share_of(plan, group)
        stack = len(plan.numbers(group))
        matrices = stack - group.padding * stack // (group.count + group.padding)
        if matrices >= devices:
            assert group.flops_per_device <= 1.1 * group.ideal_flops * stack / matrices
            assert group.bytes_per_device <= 12 * share
        else:
            assert group.flops_per_device == plan.fn.flops(*group.shape)
            whole = math.prod(group.shape) * np.dtype(group.kind.dtype).itemsize
            assert group.bytes_per_device <= 2 * whole
    assert plan.temp_bytes <= max(plan.min_group_bytes, plan.max_group_bytes)
    # What cannot be met is no more than one matrix needs, with a few copies in float32.
    assert plan.min_group_bytes <= 8 * 4 * max(math.prod(group.shape) for group in plan.groups)


def test_the_table_of_the_docs_is_what_is_planned() -> None:
    page = Path(__file__).parents[1] / "docs/performance.md"
    assert matrix_plans.table() in page.read_text()
