"""opt-precision with the other packages: on meshes, in plans, groups, NNX and checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_matrix
import opt_nnx
import opt_optax_bridge as opt
import opt_precision as op
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from opt_checkpoint import named_state, plan_restore
from opt_checkpoint.errors import LeafError, PlanError
from opt_core import MultiOptimizer, Optimizer, describe
from opt_partition import memory_plan, shard_optimizer_state
from opt_precision.errors import OrderError
from optax_table import TABLE
from partition_oracles import (
    EQUAL,
    QUICK,
    random_data,
    shard_bytes,
    step_of,
    strongly_typed,
    structs,
)

# opt-precision on meshes: the same codes and parameters everywhere, and nothing is sent.

P = PartitionSpec
_COLLECTIVE = re.compile(r" (all-reduce|all-gather|all-to-all|collective-permute)(-start)?\(")
# Those that are alike are compiled once.
SHAPES = {"wide0": (64, 1024), "wide1": (64, 1024), "tall": (512, 64), "vector": (8192,)}
_WIDE, _CUT = P("data", "model"), P(None, ("data", "model"))
ALIGNED = {"wide0": _WIDE, "wide1": _WIDE, "tall": P(("data", "model")), "vector": P("model")}
CROSSED = {"wide0": _CUT, "wide1": _CUT, "tall": _WIDE, "vector": P("data")}


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
    """Two steps, and the text of the compiled step."""

    def put(tree: Any) -> Any:
        return tree if lies is None else jax.device_put(tree, lies)

    held = put(start)
    state = tx.init(held)
    step: Any = jax.jit(tx.apply).lower(held, state, put(grads(0))).compile()
    text = step.as_text() or ""
    for number in range(2):
        held, state = step(held, state, put(grads(number)))
    return jax.tree.map(np.asarray, jax.tree.leaves((held, state))), text


def mesh_of(number: int, kind: Any = AxisType.Auto) -> Any:
    shape = {1: (1, 1), 2: (2, 1), 4: (2, 2), 8: (4, 2)}[number]
    devices = jax.devices()[:number]
    return jax.make_mesh(shape, ("data", "model"), axis_types=(kind,) * 2, devices=devices)


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def assert_same(one: Any, other: Any) -> None:
    assert bits(one) == bits(other)


@functools.cache
def run_on_one_device(codec: Any) -> Any:
    return run(wrapped(codec), params())[0]


@pytest.fixture
def on_one_device(codec: Any) -> Any:
    return run_on_one_device(codec)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("codec", [op.dynamic8(), op.log8()], ids=["dynamic8", "log8"])
@pytest.mark.parametrize("number", [2, 8])
def test_every_mesh_makes_the_same_codes(
    number: int, codec: Any, kind: Any, on_one_device: Any
) -> None:
    mesh = mesh_of(number, kind)
    lies = {name: NamedSharding(mesh, spec) for name, spec in ALIGNED.items()}
    with jax.set_mesh(mesh):
        layout = lies if kind == AxisType.Auto else None
        found, text = run(wrapped(codec, layout), params(), lies)
    assert_same(found, on_one_device)
    assert not _COLLECTIVE.findall(text)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_blocks_that_cross_devices_make_the_same_codes(kind: Any) -> None:
    mesh = mesh_of(8, kind)
    lies = {name: NamedSharding(mesh, spec) for name, spec in CROSSED.items()}
    tx = wrapped(op.dynamic8(), lies if kind == AxisType.Auto else None)
    with jax.set_mesh(mesh), pytest.warns(UserWarning, match="blocks of moments lie on several"):
        found, _ = run(tx, params(), lies)
    assert_same(found, run_on_one_device(op.dynamic8()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_sums_over_leaves_send_numbers_only(kind: Any) -> None:
    inner = optax.chain(optax.adamw(1e-2), optax.clip_by_global_norm(0.1))
    tx: Any = op.stochastic_weights
    expected, _ = run(tx(op.quantize_state(inner, op.dynamic8(), chunk_bytes=40_000)), params())
    mesh = mesh_of(8, kind)
    lies = {name: NamedSharding(mesh, spec) for name, spec in ALIGNED.items()}
    with jax.set_mesh(mesh):
        layout = lies if kind == AxisType.Auto else None
        ours: Any = op.quantize_state(inner, op.dynamic8(), chunk_bytes=40_000, layout=layout)
        found, text = run(tx(ours), params(), lies)
    # Sums are made in another order, so a stochastic rounding may be another now and then.
    for one, other in zip(found, expected, strict=True):
        assert np.mean(np.asarray(one) != np.asarray(other)) <= 1e-3
    assert {kind for kind, _ in _COLLECTIVE.findall(text)} == {"all-reduce"}


# opt-partition and the state of opt-precision: placed and planned to the byte, and verified.

PLANNED_SHAPES = {
    "long": (8192,),
    "odd": (512, 1000),
    "short": (128, 3, 4, 32),
    "wide": (512, 1024),
}
AXES = {"long": ("m",), "odd": ("e", "m"), "short": ("e", None, "m", None), "wide": ("e", "m")}
RULES = [("e", "data"), ("m", "model")]


def planned_params() -> Any:
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in PLANNED_SHAPES.items()
    }


def with_remainder(**options: Any) -> Any:
    inner: Any = op.quantize_state(optax.adamw(1e-3), op.dynamic8(), **options)
    return op.master_weights(inner, storage="remainder")


def plan_of_remainders(zero: Any = None) -> Any:
    params, rules = planned_params(), op.partition_rules()
    return memory_plan(
        with_remainder(), params, AXES, RULES, mesh_of(8), zero=zero, derivation_rules=rules
    )


@pytest.mark.parametrize("zero", [None, "data"])
def test_the_plan_is_to_the_byte_and_scales_lie_where_their_blocks_do(zero: Any) -> None:
    plan = plan_of_remainders(zero)
    assert "temporaries, at most" in str(plan)
    assert "no symbols" not in str(plan)
    ones = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), planned_params())
    state = jax.jit(with_remainder().init, out_shardings=plan.state.shardings)(ones)
    assert set(shard_bytes(state)) == {plan.state.bytes_per_device}
    if zero is not None:
        tx, rules = with_remainder(), op.partition_rules()
        args = tx, planned_params(), RULES, mesh_of(8), zero
        layouts = shard_optimizer_state(*args, param_axes=AXES, derivation_rules=rules)
        assert layouts.opt_state == plan.state
    else:
        specs = {row.leaf.path: tuple(row.leaf.spec) for row in plan.rows if row.kind == "state"}
        under = "inner/0/nu/"
        assert specs[under + "wide/codes"] == specs[under + "wide/scale"] == ("data", "model")
        assert specs[under + "long/scale"] == ("model",)
        assert specs[under + "short/scale"] == (None, None, "model", None)  # a block over 4 devices
        assert any("scale" in note for note in plan.notes)


# opt-precision where transformations go: windows, guards, run-time numbers, NNX.


def kernel() -> dict[str, Any]:
    return {"kernel": (0.02 * jax.random.normal(jax.random.key(0), (64, 256))).astype(jnp.bfloat16)}


def kernel_grads(step: int) -> dict[str, Any]:
    return {"kernel": jax.random.normal(jax.random.key(step), (64, 256))}


PRECISIONS: dict[str, Any] = {
    "body": op.Precision(weights="stochastic", state=op.dynamic8()),
    "head": op.Precision(weights="kahan", state=op.bfloat16()),
    "rest": None,
}


def in_groups(precisions: Any, learning_rate: float = 1e-2) -> MultiOptimizer:
    plain = opt.adamw(learning_rate)
    rows = [
        (name, f"{name}/.*", plain if precision is None else plain.with_precision(precision))
        for name, precision in precisions.items()
    ]
    return MultiOptimizer.from_rules(rows)


def groups_of_params() -> dict[str, Any]:
    return {name: kernel() for name in PRECISIONS}


def groups_of_grads(step: int) -> dict[str, Any]:
    return {name: kernel_grads(step) for name in PRECISIONS}


def test_each_group_has_a_precision() -> None:
    optimizer: Optimizer = in_groups(PRECISIONS).create(groups_of_params())
    by_hand: dict[str, Any] = {
        "body": op.stochastic_weights(op.quantize_state(optax.adamw(0.1), op.dynamic8())),
        "head": op.master_weights(
            op.quantize_state(optax.adamw(0.1), op.bfloat16()), storage="kahan"
        ),
        "rest": optax.adamw(0.1),
    }
    rows = [(name, f"{name}/.*", opt.OptaxWrapper(tx)) for name, tx in by_hand.items()]
    expected: Optimizer = MultiOptimizer.from_rules(rows).create(groups_of_params())
    step: Any = jax.jit(lambda o, g, rate: o.apply_gradient(g, learning_rate=rate))
    plain: Any = jax.jit(lambda o, g: o.apply_gradient(g))
    for number in range(2):
        optimizer = step(optimizer, groups_of_grads(number), 0.1)
        expected = plain(expected, groups_of_grads(number))
    assert step._cache_size() == 1
    assert bits(optimizer.target) == bits(expected.target)
    assert bits(optimizer.state) == bits(expected.state)
    known = op.master_of(optimizer.state, optimizer.target)
    assert bits(known["head"]) != bits(op.master_of((), optimizer.target["head"]))
    assert [row.precision for row in describe(optimizer).rows] == [
        "stochastic weights, dynamic8 state",
        "kahan weights, bfloat16 state",
        "",
    ]


@pytest.mark.slow
def test_groups_that_are_alike_do_not_share_noise() -> None:
    both = dict.fromkeys(("body", "head"), PRECISIONS["body"])
    optimizer: Optimizer = in_groups(both).create({name: kernel() for name in both})
    optimizer = optimizer.apply_gradient({name: kernel_grads(0) for name in both})
    one, other = (np.asarray(optimizer.target[name]["kernel"], np.float32) for name in both)
    assert 0 < np.count_nonzero(one != other) < one.size
    np.testing.assert_allclose(one, other, rtol=2**-7)


def test_nnx_optimizers() -> None:
    """Flax's makes the same steps as ours."""
    x = jax.random.normal(jax.random.key(1), (8, 64))
    precision = op.Precision(weights="remainder8", state=op.dynamic8())

    @nnx.jit
    def step(model: Any, optimizer: Any) -> Any:
        loss, kernel_grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, kernel_grads)
        return loss

    def trained(make: Any) -> tuple[list[float], Any]:
        model = nnx.Linear(64, 256, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        optimizer = make(model, precision(optax.adamw(1e-2)), wrt=nnx.Param)
        losses = [float(step(model, optimizer)) for _ in range(20)]
        assert "uint8" in {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(optimizer))}
        return losses, nnx.state(model, nnx.Param)

    ours, theirs = trained(opt_nnx.Optimizer), trained(nnx.Optimizer)
    assert ours[0] == theirs[0]
    assert bits(ours[1]) == bits(theirs[1])
    assert ours[0][-1] < 0.5 * ours[0][0]


def of_rank_two() -> Any:
    return opt_matrix.muon(1e-2, matrices=opt_matrix.Matrices.by_rank2())


@pytest.mark.parametrize(
    "tx",
    [
        of_rank_two(),
        op.quantize_state(of_rank_two(), op.dynamic8()),
        op.master_weights(op.quantize_state(optax.adamw(1e-2), op.dynamic8())),
        op.stochastic_weights(optax.adamw(1e-2)),
    ],
    ids=["muon", "muon in 8 bits", "remainder and 8 bits", "stochastic"],
)
def test_a_loop_without_an_optimizer_of_flax_may_give_states_of_variables(tx: Any) -> None:
    model = nnx.Linear(64, 256, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    step: Any = jax.jit(lambda params, state: op.apply(tx, params, state, params))

    def trained(params: Any) -> Any:
        after = params, tx.init(params)
        given: Any = jax.tree.structure(after)
        for _ in range(2):
            after = step(*after)
        assert jax.tree.structure(after) == given
        return after

    params = nnx.state(model, nnx.Param)
    assert bits(trained(params)) == bits(trained(nnx.to_pure_dict(params)))
    assert step._cache_size() == 2  # one for each kind of tree


def test_what_becomes_of_a_state_of_variables_is_explained() -> None:
    params = nnx.state(nnx.Linear(64, 256, rngs=nnx.Rngs(0)), nnx.Param)
    tx = op.quantize_state(of_rank_two(), op.dynamic8())
    found = op.explain_precision(tx, params)
    assert found.whole == ("kernel",)
    assert found.bytes == op.explain_precision(tx, nnx.to_pure_dict(params)).bytes


def test_codes_are_sharded_in_flax_as_the_parameter_is_and_scales_are_not_cut() -> None:
    kernel_init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "x"))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        model = nnx.Linear(64, 256, kernel_init=kernel_init, rngs=nnx.Rngs(0))
        tx = op.quantize_state(optax.adamw(1e-2), op.dynamic8())
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        step = nnx.jit(lambda m, o: o.update(m, nnx.state(m, nnx.Param)))
        for _ in range(2):
            step(model, optimizer)
        mu = optimizer.opt_state.inner[0].mu["kernel"]
        assert isinstance(mu, op.Encoded)
        specs = nnx.get_partition_spec((mu.codes, mu.scale))
    assert [tuple(spec) for spec in jax.tree.leaves(specs)] == [(None, "x"), ()]
    assert mu.codes[...].addressable_shards[0].data.shape == (64, 128)


def test_named_arrays_on_a_mesh_are_refused() -> None:
    named = jax.tree_util.register_dataclass(
        dataclasses.make_dataclass("NamedArray", ["array", "axes"]), ["array"], ["axes"]
    )
    params = {"w": named(jnp.ones((64, 64)), ("embed", "mlp"))}
    tx = op.quantize_state(optax.adam(0.1), op.dynamic8())
    tx.init(params)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh), pytest.raises(op.errors.PrecisionError, match="`for_named_arrays"):
        tx.init(params)


# Low-precision state in checkpoints: bit by bit on any mesh, and as another way of storing it.

SAVED = {"bias": (3,), "kernel": (64, 256)}
ALL = frozenset({"cast", "optimizer", "drop", "initialise"})
EIGHT: Any = op.dynamic8()
MAKE: dict[str, Any] = {
    "float32": lambda tx: tx,
    "8 bits": lambda tx: op.quantize_state(tx, EIGHT),
    "remainder": lambda tx: op.master_weights(op.quantize_state(tx, EIGHT), storage="remainder"),
    "remainder8": lambda tx: op.master_weights(op.quantize_state(tx, EIGHT), storage="remainder8"),
    "kahan": lambda tx: op.master_weights(op.quantize_state(tx, op.bfloat16()), storage="kahan"),
    "master": lambda tx: op.master_weights(tx),
    "stochastic": lambda tx: op.stochastic_weights(op.quantize_state(tx, op.log8())),
}


def saved_params(dtype: Any) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), len(SAVED))
    rows = zip(SAVED.items(), keys, strict=True)
    return {name: jax.random.normal(key, shape).astype(dtype) for (name, shape), key in rows}


def dtype_of(name: str) -> Any:
    return jnp.float32 if name in ("float32", "8 bits") else jnp.bfloat16


def definition(name: str) -> Any:
    return opt.OptaxWrapper(MAKE[name](optax.adamw(1e-3)))


def trained_as(name: str, steps: int = 2) -> Optimizer:
    optimizer: Optimizer = definition(name).create(saved_params(dtype_of(name)))
    grads = jax.tree.map(lambda p: jnp.cos(p.astype(jnp.float32)), optimizer.target)
    step = jax.jit(lambda optimizer: optimizer.apply_gradient(grads))
    for _ in range(steps):
        optimizer = step(optimizer)
    return optimizer


def adam(optimizer: Optimizer) -> Any:
    nodes = jax.tree.leaves(
        op.decode(optimizer.state.param_states),
        is_leaf=lambda node: isinstance(node, optax.ScaleByAdamState),
    )
    return next(node for node in nodes if isinstance(node, optax.ScaleByAdamState))


# Largest differences of parameters and moments, relative to the largest of the leaf.
EXACT, BITS16, BITS8 = 1e-6, 0.004, 0.08


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "params_error", "moments_error"),
    [
        ("float32", "remainder", 0, BITS8),
        ("remainder", "float32", 0, EXACT),
        ("remainder", "remainder8", 2**-16, 0),
        ("master", "remainder", 0, BITS8),
        ("kahan", "master", 0, EXACT),
        ("remainder", "stochastic", 2**-7, BITS8),
    ],
)
def test_a_state_continues_as_it_is_stored_now(
    old: str, new: str, params_error: float, moments_error: float
) -> None:
    saved, target = trained_as(old), trained_as(new, 0)
    restored = plan_restore(named_state(saved), target, allow=ALL).apply()
    assert jax.tree.map(jax.typeof, restored) == jax.tree.map(jax.typeof, target)
    before, after = (op.master_of(o.state.param_states, o.target) for o in (saved, restored))
    rows = [(before, after, params_error)]
    rows += [
        (getattr(adam(saved), f), getattr(adam(restored), f), moments_error) for f in ("mu", "nu")
    ]
    for one, other, limit in rows:
        for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
            assert np.abs(np.asarray(a - b)).max() <= limit * np.abs(np.asarray(a)).max()
    assert int(adam(restored).count) == 2
    restored.apply_gradient(jax.tree.map(jnp.ones_like, restored.target))


def test_digits_are_lost_only_where_that_is_admitted() -> None:
    saved = named_state(trained_as("float32"))
    with pytest.raises(PlanError, match="float32 -> dynamic8"):
        plan_restore(saved, trained_as("8 bits", 0), allow=ALL - {"cast"}).check()


def test_codes_without_the_package_that_stored_them_are_an_error() -> None:
    saved = named_state(trained_as("8 bits", 0))
    storage = {how: {**data, "package": "not_here"} for how, data in saved.schema.storage.items()}
    schema = dataclasses.replace(saved.schema, storage=storage)
    with pytest.raises(LeafError, match=r"mu/codes/kernel` is stored as .*: install `not-here`"):
        plan_restore(dataclasses.replace(saved, schema=schema), trained_as("float32", 0))


def test_parameters_without_their_remainder_reset_it() -> None:
    saved: Optimizer = opt.adamw(1e-3).create(saved_params(jnp.bfloat16))
    plan = plan_restore(named_state(saved), trained_as("remainder"), allow=ALL)
    assert "params/kernel: bfloat16 -> float32, saved without its remainder, which is reset" in str(
        plan
    )
    restored = plan.apply()
    assert not any(leaf.any() for leaf in jax.tree.leaves(restored.state.param_states.kept))
    assert_same(restored.target, saved.target)


def test_what_is_stored_alike_is_carried_bit_by_bit() -> None:
    saved = trained_as("remainder")
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    target: Optimizer = opt.OptaxWrapper(MAKE["remainder"](tx)).create(saved_params(jnp.bfloat16))
    rules: Any = [("params/bias", "cast")]  # with rules everything is planned as if in float32
    for given in ((), rules):
        restored = plan_restore(named_state(saved), target, allow=ALL, rules=given).apply()
        assert_same(restored, saved)


# Every transformation of Optax under `quantize_state`: nothing changes, and what is a moment.


def trained_with(name: str, tx: Any, data: list[Any]) -> tuple[Any, Any]:
    start, *targets = data
    state = jax.tree.map(strongly_typed, tx.init(start))
    step = jax.jit(step_of(TABLE[name], tx), compiler_options=QUICK)
    for target in targets:
        start, state = step(start, state, target)
    return start, state


def is_refused(name: str, tx: Any, params: Any) -> bool:
    """Whether a wrapper belongs outside, or the state grows, which no wrapper can keep."""
    # Parameters that are pairs; an update of a shape that is not the parameter's.
    if TABLE[name].grows or name in ("lookahead", "scale_by_distance_over_gradients"):
        return True
    try:
        jax.eval_shape(tx.init, params)
    except OrderError:
        return True
    return False


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", TABLE)
def test_the_identity_changes_no_bit_and_eight_bits_no_type(name: str) -> None:
    case = TABLE[name]
    shapes = structs(EQUAL, case)
    tx = case.build(shapes)
    ours = op.quantize_state(tx, op.identity())
    if is_refused(name, ours, shapes):
        pytest.skip("belongs around `quantize_state`, or grows")
    data = random_data(shapes, 3)
    one, other = trained_with(name, tx, data), trained_with(name, ours, data)
    for a, b in zip(*map(jax.tree.leaves, (one[0], other[0])), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(*map(jax.tree.leaves, (one[1], other[1].inner)), strict=True):
        if not jax.numpy.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(a, b)
    eight = op.quantize_state(tx, op.dynamic8(min_size=1))
    state = jax.eval_shape(eight.init, shapes)
    step = step_of(case, eight)
    new = jax.eval_shape(step, data[0], state, data[1])[1]
    types: Any = jax.tree.map(jax.typeof, new)
    assert types == jax.tree.map(jax.typeof, state)


# The comparison of precisions: what the specification asks of the losses and the updates.

PROGRAM = Path(__file__).resolve().parents[1] / "examples" / "compare_precisions.py"


@pytest.mark.slow  # four to ten minutes
def test_every_method_learns_as_float32_does_but_casting(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, PROGRAM, "--out", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((tmp_path / "runs.json").read_text())
    runs, ratchets = found["runs"], found["ratchet"]
    exact = runs.pop("float32")
    largest = max(max(run["largest"][20:]) for run in exact)
    for name, own in runs.items():
        pairs = zip(own, exact, strict=True)
        mean = np.mean([run["held_out"] - of["held_out"] for run, of in pairs])
        most = max(max(run["largest"][20:]) for run in own)
        if name == "bfloat16, cast":
            assert mean >= 0.04
        elif name == "nearest 8 bits":
            assert most > 100 * largest
        else:
            assert mean <= 0.01, name
            assert most <= 2 * largest, name
    end = ratchets["float32"][-1]
    assert ratchets["8 bits"][-1] == pytest.approx(end, rel=0.05)
    assert ratchets["bfloat16"][-1] == pytest.approx(end, rel=0.05)
    assert ratchets["8 bits, nearest"][-1] > 100 * end
    assert (tmp_path / "precision.png").read_bytes().startswith(b"\x89PNG")
