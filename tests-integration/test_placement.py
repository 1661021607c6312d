"""Where a restore puts leaves that the target does not place: never all of them on one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_nnx
import opt_optax_bridge as opt
import optax
import pytest
from flax import nnx
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)
from opt_checkpoint import (
    Checkpointer,
    Rename,
    TrainingState,
    named_state,
    open_foreign,
    plan_restore,
)
from opt_checkpoint.errors import LeafError
from opt_core import MultiOptimizer, Optimizer
from opt_partition import init_sharded, logical_to_mesh, memory_plan
from opt_precision import dynamic8, quantize_state

P = PartitionSpec
AXES = {"wi": ("embed", "mlp"), "wo": ("mlp", "embed"), "b": ("embed",)}
RULES = [("mlp", "model"), ("embed", None)]
X = np.sin(np.arange(16 * 16, dtype=np.float32)).reshape(16, 16)
ADAM = optax.adam(1e-2)


def mesh_of(count: int, kind: AxisType = AxisType.Auto) -> Mesh:
    shape = (count // 2, 2) if count > 1 else (1, 1)
    devices = jax.devices()[:count]
    return jax.make_mesh(shape, ("data", "model"), axis_types=(kind,) * 2, devices=devices)


def init_params() -> dict[str, jax.Array]:
    waves = jnp.sin(jnp.arange(16 * 32, dtype=jnp.float32)).reshape(16, 32) / 4
    return {"wi": waves, "wo": waves.T, "b": jnp.zeros(16)}


def loss_fn(params: Any) -> jax.Array:
    return jnp.mean((jnp.tanh(X @ params["wi"]) @ params["wo"] + params["b"] - X) ** 2)


@dataclasses.dataclass
class Case:
    """One kind of target: how it is made on a mesh, abstractly, and updated."""

    tx: Any
    create: Callable[[Any], Any]
    update: Callable[[Any, Any], Any]
    joined: Callable[[Any, Any], Any]

    def plan(self, mesh: Any) -> Any:
        return memory_plan(self.tx, jax.eval_shape(init_params), AXES, RULES, mesh, zero="data")

    def made(self, mesh: Mesh) -> Any:
        plan = self.plan(mesh)
        params = jax.jit(init_params, out_shardings=plan.params.shardings)()
        return self.joined(params, init_sharded(self.tx, params, plan.state))

    def abstract(self) -> Any:
        return jax.eval_shape(lambda: self.create(init_params()))


def of_definition(definition: Any) -> Case:
    return Case(
        definition,
        definition.create,
        lambda optimizer, grads: optimizer.apply_gradient(grads),
        lambda params, state: Optimizer(definition, state, params),
    )


def training_state(tx: Any, params: Any, opt_state: Any = None) -> TrainingState:
    state = tx.init(params) if opt_state is None else opt_state
    return TrainingState(tx, params, state, jnp.zeros((), jnp.int32))


def updated(state: TrainingState, grads: Any) -> TrainingState:
    updates, opt_state = ADAM.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainingState(ADAM, params, opt_state, state.step + 1)


CASES = {
    "definition": of_definition(opt.adamw(1e-2)),
    "MultiOptimizer": of_definition(
        MultiOptimizer.from_rules([("bias", "b", opt.sgd(1e-2, momentum=0.9))], rest=opt.adam(1e-2))
    ),
    "TrainingState": Case(
        ADAM, partial(training_state, ADAM), updated, partial(training_state, ADAM)
    ),
}


def step_of(case: Case, example: Any) -> Any:
    """The compiled step, whose results lie where its arguments do."""

    def step(state: Any) -> Any:
        return case.update(state, jax.grad(loss_fn)(state.params))

    shardings = jax.tree.map(lambda leaf: leaf.sharding, example)
    return jax.jit(step, out_shardings=shardings)


def on_mesh(case: Case, mesh: Mesh, steps: int = 2) -> Any:
    """A trained state, every leaf of it on the mesh."""
    whole = NamedSharding(mesh, P())
    made = jax.tree.map(
        lambda x: x if isinstance(x.sharding, NamedSharding) else jax.device_put(x, whole),
        case.made(mesh),
    )
    step = step_of(case, made)
    for _ in range(steps):
        made = jax.block_until_ready(step(made))
    return made


def saved(folder: Path, state: Any) -> Checkpointer:
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(2, state)
    return Checkpointer(folder, read_only=True)


def assert_equal(found: Any, expected: Any) -> None:
    a, b = named_state(found), named_state(expected)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(np.asarray(a[name]), np.asarray(b[name]), err_msg=name)


def assert_goes_on(case: Case, state: Any) -> None:
    step = step_of(case, state)
    for _ in range(3):
        state = jax.block_until_ready(step(state))
    assert step._cache_size() == 1


def shardings(state: Any) -> list[Any]:
    return [leaf.sharding for leaf in jax.tree.leaves(state)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_an_abstract_target_goes_where_the_checkpoint_was(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    before = on_mesh(case, mesh_of(8))
    restored = saved(tmp_path, before).restore_latest(case.abstract())
    assert_equal(restored, before)
    assert shardings(restored) == shardings(before)
    step = step_of(case, before)
    for state in (before, restored, restored):
        jax.block_until_ready(step(state))
    assert step._cache_size() == 1  # also for the cache of JAX they are the same


@pytest.mark.sample(1)
@pytest.mark.parametrize("count", [4, 1])
@pytest.mark.parametrize("name", CASES)
def test_a_plan_says_where_on_fewer_devices(name: str, count: int, tmp_path: Path) -> None:
    case = CASES[name]
    before = on_mesh(case, mesh_of(8))
    plan = case.plan(mesh_of(count))
    restored = saved(tmp_path, before).restore_latest(case.abstract(), placement=plan)
    assert_equal(restored, before)
    assert shardings(restored.params) == jax.tree.leaves(plan.params.shardings)
    for leaf in jax.tree.leaves(restored):
        assert len(leaf.sharding.device_set) == count
    if count == 4:
        leaves = named_state(restored).items()
        moment = next(leaf for name, leaf in leaves if name.endswith("adam/mu/wi"))
        shard = moment.addressable_shards[0].data
        assert shard.size == 16 * 32 // 4  # ZeRO: over both axes
    assert_goes_on(case, restored)


def test_a_layout_says_where(tmp_path: Path) -> None:
    """Of the whole optimizer, of its state, or of its parameters; and shardings themselves."""
    case = CASES["definition"]
    before = on_mesh(case, mesh_of(8))
    checkpointer, abstract, half = saved(tmp_path, before), case.abstract(), mesh_of(4)
    names = {name: P(*axes) for name, axes in AXES.items()}
    axes = case.tx.derive_logical_axes(abstract, names)
    whole = logical_to_mesh(axes, RULES, half, abstract)
    params = logical_to_mesh(names, RULES, half, abstract.target)
    one = NamedSharding(half, P())
    plan = case.plan(half)
    for placement in (whole, whole.shardings, plan.state, params, one):
        restored = checkpointer.restore_latest(abstract, placement=placement)
        assert_equal(restored, before)
        assert all(leaf.sharding.mesh == half for leaf in jax.tree.leaves(restored))
        if placement is not one:
            assert restored.target["wi"].sharding.spec == P(None, "model")
        if placement in (whole, whole.shardings):
            assert shardings(restored) == jax.tree.leaves(whole.shardings)
        if placement in (plan.state, params):  # what it does not say is sharded as it was
            assert named_state(restored)["state/adam/mu/wi"].sharding.spec == P("data", "model")


def test_a_placement_of_other_leaves_is_refused(tmp_path: Path) -> None:
    case = CASES["definition"]
    checkpointer = saved(tmp_path, on_mesh(case, mesh_of(8)))
    other = CASES["MultiOptimizer"].plan(mesh_of(4))
    with pytest.raises(LeafError, match="`placement` says nothing of `state/"):
        checkpointer.restore_latest(case.abstract(), placement=other)
    with pytest.raises(TypeError, match="`placement`: expected a plan"):
        checkpointer.restore_latest(case.abstract(), placement=dict.fromkeys(AXES, 1))
    with pytest.raises(TypeError, match=r"shardings, found str$"):
        checkpointer.restore_latest(case.abstract(), placement="data")
    place = NamedSharding(mesh_of(4), P(None, None, "data"))
    with pytest.raises(LeafError, match=r"`placement`: `params/.*` of shape .* cannot be P"):
        checkpointer.restore_latest(case.abstract(), placement=place)


@pytest.mark.parametrize("is_abstract", [False, True])
@pytest.mark.parametrize("placement", [None, SingleDeviceSharding(jax.devices()[0])])
def test_what_is_new_beside_what_was_read_compiles_once(
    placement: Any, is_abstract: bool, tmp_path: Path
) -> None:
    """On one device: what is committed to it there, and is not here, is compiled for again."""
    params = {"w": jnp.ones((6, 4))}
    target = opt.adam(1e-3).create(params)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, opt.sgd(1e-3).create(params))
        restored = checkpointer.restore_latest(
            jax.eval_shape(lambda: target) if is_abstract else target,
            allow={"initialise", "drop"},
            placement=placement,
        )
    step: Any = jax.jit(lambda optimizer: optimizer.apply_gradient(params))
    for _ in range(2):
        restored = step(restored)
    assert step._cache_size() == 1


def test_a_sharding_that_does_not_divide_is_told_before_anything_is_read() -> None:
    optimizer = opt.adam(1e-3).create({"w": jnp.ones((6, 4))})
    sharding = NamedSharding(Mesh(jax.devices(), ("data",)), PartitionSpec("data"))

    def wanted(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding if x.ndim else None)

    plan = plan_restore(named_state(optimizer), jax.tree.map(wanted, optimizer))
    with pytest.raises(LeafError, match=r"`params/w` of shape \(6, 4\) cannot be P"):
        plan.apply()


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_devices_that_are_gone_are_an_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    before = on_mesh(case, mesh_of(8))
    checkpointer, abstract = saved(tmp_path, before), case.abstract()
    plan, devices = case.plan(mesh_of(1)), jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    words = r"`params/b` and \d+ more: saved on a mesh of 8 devices \(data=4, model=2\)"
    with pytest.raises(LeafError, match=words) as caught:
        checkpointer.restore_latest(abstract)
    for advice in ("`placement=`", "`mesh=` of `opt_nnx.Optimizer`", "SingleDeviceSharding("):
        assert advice in str(caught.value)
    with pytest.raises(LeafError, match="placement"):  # not committed to a device either
        checkpointer.restore_latest(case.create(init_params()))
    assert_equal(checkpointer.restore_latest(abstract, placement=plan), before)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_create_of_abstract_parameters_keeps_shardings(kind: AxisType, tmp_path: Path) -> None:
    case = CASES["definition"]
    plan = case.plan(mesh_of(8, kind))
    made = case.tx.create(plan.params.shapes)
    assert made.state.step.sharding.spec == P()
    adam = made.state.param_states[0]
    assert adam.count.sharding.spec == P()
    for moment in (adam.mu, adam.nu):
        assert jax.tree.map(lambda x: x.sharding, moment) == plan.params.shardings
    checkpointer = saved(tmp_path, on_mesh(case, mesh_of(4)))
    restored = checkpointer.restore_latest(made)
    assert shardings(restored) == shardings(made)


def test_explicit_meshes_are_those_of_the_context(tmp_path: Path) -> None:
    """`eval_shape` keeps their axes, but not their devices."""
    case = CASES["definition"]
    mesh = mesh_of(4, AxisType.Explicit)
    checkpointer = saved(tmp_path, on_mesh(case, mesh_of(8)))
    params = jax.jit(init_params, out_shardings=case.plan(mesh).params.shardings)()
    abstract = jax.eval_shape(lambda: case.create(params))
    coded = opt.OptaxWrapper(quantize_state(ADAM, dynamic8(min_size=1)))
    targets = abstract, jax.eval_shape(lambda: coded.create(params))
    for target in targets:
        with jax.set_mesh(mesh):
            restored = checkpointer.restore_latest(target, allow={"cast", "optimizer"})
        assert shardings(restored.target) == shardings(params)
        assert all(leaf.sharding.mesh == mesh for leaf in jax.tree.leaves(restored))
    with pytest.raises(
        LeafError, match=r"`AbstractMesh`, which has no devices\. Pass `placement=`"
    ):
        checkpointer.restore_latest(abstract)
    half = NamedSharding(mesh_of(2), P())
    restored = checkpointer.restore_latest(abstract, placement=half)
    assert {leaf.sharding for leaf in jax.tree.leaves(restored)} == {half}


def test_new_and_renamed_state_lies_like_what_it_follows(tmp_path: Path) -> None:
    """Leaves that the checkpoint lacks: like others of their parameter; ZeRO too."""
    checkpointer = saved(tmp_path, on_mesh(CASES["TrainingState"], mesh_of(8)))
    tx, params = optax.chain(ADAM, optax.trace(0.9)), init_params()
    params["up"] = params.pop("wi")
    target = jax.eval_shape(lambda: training_state(tx, params))
    rules = [("(params|state/adam/..)/up", Rename(r"\1/wi"))]
    allow = {"optimizer", "initialise"}
    restored = named_state(checkpointer.restore_latest(target, allow=allow, rules=rules))
    assert restored["params/up"].sharding.spec == P(None, "model")
    for name in ("up", "wo"):
        old, new = restored[f"state/adam/mu/{name}"], restored[f"state/trace/trace/{name}"]
        assert new.sharding == old.sharding
        assert not new.sharding.is_fully_replicated


@pytest.mark.slow
def test_codes_lie_where_the_values_lay_that_they_stand_for(tmp_path: Path) -> None:
    put = NamedSharding(mesh_of(8), P("data", "model"))
    params = {"w": jax.device_put(jnp.ones((64, 128)), put)}
    checkpointer = saved(tmp_path, opt.OptaxWrapper(ADAM).create(params))
    tx = opt.OptaxWrapper(quantize_state(ADAM, dynamic8()))
    target = jax.eval_shape(lambda: tx.create(params))
    allow = {"cast", "initialise", "optimizer"}
    restored = checkpointer.restore_latest(target, allow=allow)
    codes = [x for x in jax.tree.leaves(restored.state) if x.shape == (64, 128)]
    assert codes[0].sharding == put
    half = NamedSharding(mesh_of(4), P())
    restored = checkpointer.restore_latest(target, allow=allow, placement=half)
    assert {leaf.sharding.mesh for leaf in jax.tree.leaves(restored)} == {mesh_of(4)}


def test_a_foreign_checkpoint_says_where_it_was(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    case = CASES["TrainingState"]
    before = on_mesh(case, mesh_of(8))
    with ocp.StandardCheckpointer() as writer:
        writer.save(tmp_path / "theirs", {"params": before.params, "opt_state": before.opt_state})
    source = open_foreign(tmp_path / "theirs", written_by=case.abstract())
    restored = plan_restore(source, case.abstract()).apply()
    assert shardings(restored.params) == shardings(before.params)
    assert shardings(restored.opt_state) == shardings(before.opt_state)
    assert_equal(restored, before)


# Flax NNX: the optimizer itself knows where its state lies.


class Model(nnx.Module):
    def __init__(self) -> None:
        self.wi = nnx.Linear(16, 32, rngs=nnx.Rngs(0))
        self.wo = nnx.Linear(32, 16, rngs=nnx.Rngs(1))
        self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x: Any) -> jax.Array:
        return self.wo(jnp.tanh(self.wi(x)))


def nnx_pair(tx: Any, mesh: Mesh) -> tuple[Model, Any]:
    model = Model()
    return model, opt_nnx.Optimizer(model, tx, mesh=mesh, zero="data")


def nnx_shardings(pair: Any) -> list[Any]:
    return [leaf.sharding for leaf in jax.tree.leaves((nnx.state(pair[0]), nnx.state(pair[1])))]


@nnx.jit
def nnx_step(model: Any, optimizer: Any) -> None:
    optimizer.update(model, nnx.grad(lambda model: jnp.mean((model(X) - X) ** 2))(model))
    model.calls[...] += 1


@pytest.mark.slow
@pytest.mark.parametrize("count", [8, 4])
def test_a_pair_of_shapes_goes_where_its_optimizer_says(count: int, tmp_path: Path) -> None:
    kernels = ("kernels", r".*/kernel", opt.adam(1e-2))
    tx = MultiOptimizer.from_rules([kernels], rest=opt.sgd(1e-2, momentum=0.9))
    before = nnx_pair(tx, mesh_of(8))
    before[0].calls[...] = jax.device_put(before[0].calls[...], NamedSharding(mesh_of(8), P()))
    nnx_step(*before)
    mesh = mesh_of(count)
    restored = saved(tmp_path, before).restore_latest(nnx.eval_shape(lambda: nnx_pair(tx, mesh)))
    assert_equal(restored, before)
    placed = nnx_shardings(restored)
    assert all(place.mesh == mesh for place in placed)
    states, fresh = (
        jax.tree.leaves(nnx.state(optimizer, nnx.OptState))
        for optimizer in (restored[1], nnx_pair(tx, mesh)[1])
    )
    assert [x.sharding.spec for x in states] == [x.sharding.spec for x in fresh]
    nnx_step(*restored)
    assert nnx_shardings(restored) == placed


def test_a_pair_goes_where_a_plan_of_its_state_says(tmp_path: Path) -> None:
    """The paths of variables end in `value`, those of the pair's parameters do not."""
    before = nnx_pair(opt.adamw(1e-2), mesh_of(8))
    checkpointer = saved(tmp_path, before)
    params: Any = nnx.state(nnx.eval_shape(Model), nnx.Param)
    axes: Any = nnx.get_partition_spec(params)
    plan = memory_plan(opt.adamw(1e-2), params, axes, [], mesh_of(4), zero="data")

    def create() -> Any:
        model = Model()
        return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    restored = checkpointer.restore_latest(nnx.eval_shape(create), placement=plan)
    mu = restored[1].opt_state[0].mu["wi"]["kernel"][...]
    assert mu.sharding == NamedSharding(mesh_of(4), P(None, "data"))
    assert all(place.mesh == mesh_of(4) for place in nnx_shardings(restored))
    leaves = jax.tree.leaves(nnx.state(restored[1]))
    assert sum(x.addressable_shards[0].data.nbytes for x in leaves) == plan.state.bytes_per_device
    expected, found = (jax.tree.leaves(nnx.state(pair)) for pair in (before, restored))
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(found, expected, strict=True))
