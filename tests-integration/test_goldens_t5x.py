"""Wrapped optimizers against the real T5X: trajectories, state dicts, checkpoints, logical axes.

Every case of `goldens/` is replayed with the tolerances that its README gives. Where Optax itself
has changed its mind since, `CHANGED` says so, and installed Optax, run by hand, takes T5X's place.
"""

import contextlib
import functools
from typing import Any

import flax.core
import flax.serialization
import golden_cases as g
import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge
import optax
import pytest
from opt_core import Optimizer
from opt_core.errors import RestoreError
from opt_core.protocols import DerivesLogicalAxes
from opt_optax_bridge import t5x

# Optax 0.1.3, under the T5X of 2022, meant something else by these.
CHANGED = {
    **dict.fromkeys(
        ("t5x/adabelief_0", "t5x/adabelief_dict"),
        "optax#1130 (2024): the prediction error is that of the new mu",
    ),
    **dict.fromkeys(
        ("t5x/noisy_sgd_0", "t5x/noisy_sgd_dict"),
        "optax#369: the noise comes before the learning rate, and so does its state",
    ),
    "t5x/wrapper_inject_hyperparams": (
        "optax#415: the schedule starts at 0 instead of 1, and the state has its counts"
    ),
}
# The state has other paths now: their checkpoints are refused, and fit what `OLD_LAYOUT` does.
MOVED = {
    "t5x/noisy_sgd_0": [
        "state/param_states/0/count: missing",
        "state/param_states/0/rng_key: missing",
        "state/param_states/1/count: extra",
        "state/param_states/1/rng_key: extra",
    ],
    "t5x/wrapper_inject_hyperparams": [
        "state/param_states/hyperparams_states/learning_rate/count: missing",
    ],
}
# Drawn by JAX before `jax_threefry_partitionable` became the default.
OLD_RANDOMNESS = {"t5x/dpsgd_0", "t5x/dpsgd_noise"}

CASES = g.case_ids()
CHECKPOINTS = [name for name in g.ids_with("checkpoint") if name not in MOVED]
RATE = 7.0  # T5X's trainer gives one; wrapped optimizers ignore it


@pytest.fixture(autouse=True)
def _randomness(request: pytest.FixtureRequest) -> Any:
    name = request.node.callspec.params.get("name") if hasattr(request.node, "callspec") else None
    old = jax.threefry_partitionable(False) if name in OLD_RANDOMNESS else contextlib.nullcontext()
    with old:
        yield


def create(case: g.Case, api: Any = t5x) -> Optimizer:
    optimizer: Optimizer = g.build(case.spec, api).create(case.params)
    return optimizer


def step(optimizer: Optimizer, grads: Any) -> Optimizer:
    return optimizer.apply_gradient(grads, learning_rate=RATE)


@functools.cache
def replay(name: str) -> list[Optimizer]:
    """The facade's optimizers after 0, 1, ... steps, op by op."""
    case = g.load(name)
    run = [create(case)]
    for grads in case.grads:
        run.append(step(run[-1], grads))
    return run


def state_dicts(run: list[Optimizer]) -> list[g.Flat]:
    return [g.flatten(optimizer.state_dict()) for optimizer in run]


def expected_trajectory(case: g.Case, *, jit: bool = False) -> list[g.Flat]:
    if case.id in CHANGED:
        return g.raw_optax_trajectory(case, jit=jit)
    return [without_mutables(g.entry(case, t)) for t in range(len(case.grads) + 1)]


def without_mutables(flat: g.Flat) -> g.Flat:
    """Without what T5X's train state adds to the optimizer's state dict."""
    return {k: v for k, v in flat.items() if not k.startswith("flax_mutables/")}


def op_by_op(case: g.Case) -> g.Tolerance:
    if case.id in CHANGED:
        return g.EXACT  # the same Optax
    return g.BFLOAT16 if case.is_bfloat16 else g.OP_BY_OP


def assert_same_run(found: list[g.Flat], expected: list[g.Flat], tolerance: g.Tolerance) -> None:
    assert len(found) == len(expected)
    for t, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert g.deviations(ours, theirs, tolerance) == [], f"after {t} steps"


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", CASES)
def test_facade_follows_t5x(name: str) -> None:
    case = g.load(name)
    assert_same_run(state_dicts(replay(name)), expected_trajectory(case), op_by_op(case))


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", CASES)
def test_facade_follows_t5x_when_compiled(name: str) -> None:
    case = g.load(name)
    traces = 0

    @jax.jit
    def compiled(optimizer: Optimizer, grads: Any) -> Optimizer:
        nonlocal traces
        traces += 1
        return step(optimizer, grads)

    run = [create(case)]
    for grads in case.grads:
        run.append(compiled(run[-1], grads))
    tolerance = g.BFLOAT16 if case.is_bfloat16 else g.COMPILED
    assert_same_run(state_dicts(run), expected_trajectory(case, jit=True), tolerance)
    assert traces == 1


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith("_bf16")])
def test_twins_follow_t5x(name: str) -> None:
    case = g.load(name)
    run = [create(case, opt_optax_bridge)]
    for grads in case.grads:
        run.append(run[-1].apply_gradient(grads))
    assert_same_run(state_dicts(run), state_dicts(replay(name)), g.EXACT)
    assert_same_run(state_dicts(run), expected_trajectory(case), op_by_op(case))


@pytest.mark.sample(7)
@pytest.mark.parametrize(
    "name", [c for c in CASES if c not in CHANGED and c in g.ids_with("shapes")]
)
def test_layout_is_that_of_the_index(name: str) -> None:
    index = g.load(name).index
    dtypes = {"python_int": "int32"}
    for optimizer in (replay(name)[0], replay(name)[-1]):
        leaves = g.flatten(optimizer.state_dict())
        assert {path: list(leaf.shape) for path, leaf in leaves.items()} == index["shapes"]
        for path, leaf in leaves.items():
            recorded = index["dtypes"]
            dtype = recorded if isinstance(recorded, str) else recorded[path]
            assert str(leaf.dtype) == dtypes.get(dtype, dtype), path


@pytest.mark.parametrize("name", CHANGED)
def test_optax_has_really_changed(name: str) -> None:
    """Otherwise the case should be compared with T5X."""
    case = g.load(name)
    last = len(case.grads)
    differences = g.deviations(state_dicts(replay(name))[-1], g.entry(case, last), g.OP_BY_OP)
    assert any(line.startswith("target/") for line in differences), CHANGED[name]


def test_modern_t5x_covers_what_changed() -> None:
    assert {"t5x_head/adabelief_new", "t5x_head/noisy_sgd_new", "t5x_head/inject_new"} <= set(CASES)
    assert not {name for name in CHANGED if name.startswith("t5x_head/")}


@pytest.mark.parametrize("name", g.ids_with("param_logical_axes"))
def test_derived_axes_are_those_of_t5x(name: str) -> None:
    case = g.load(name)
    optimizer = replay(name)[0]
    abstract = jax.eval_shape(lambda: create(case))
    for reference in (optimizer, abstract):
        definition = reference.optimizer_def
        assert isinstance(definition, DerivesLogicalAxes)
        axes = definition.derive_logical_axes(reference, case.param_axes)
        found = {
            path: None if spec is None else list(spec)
            for path, spec in g.flatten(axes.state_dict()).items()
        }
        assert found == expected_axes(case, optimizer)
        assert structure(axes) == structure(optimizer)


def structure(tree: Any) -> Any:
    return jax.tree.structure(tree, is_leaf=lambda leaf: leaf is None)


def expected_axes(case: g.Case, optimizer: Optimizer) -> dict[str, list[str] | None]:
    """T5X's, or where it had none or of another layout: those of the parameter at that path."""
    of_params: dict[str, list[str]] = case.index["param_logical_axes"]
    shapes = {path: leaf.shape for path, leaf in g.flatten(optimizer.state_dict()).items()}

    def of(path: str) -> list[str] | None:
        param = next((p for p in of_params if path.endswith(f"/{p}")), None)
        mirrors = param is not None and shapes[path] == shapes[f"target/{param}"]
        return of_params[param] if param is not None and mirrors else None

    by_path = {path: of(path) for path in shapes}
    recorded: dict[str, list[str] | None] | None = case.index.get("derived_logical_axes")
    if recorded is None or case.id in MOVED or case.id == "t5x/noisy_sgd_dict":
        return by_path
    assert recorded == by_path
    return recorded


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_restore_bit_for_bit(name: str) -> None:
    case = g.load(name)
    restored = create(case).restore_state(case.checkpoint)
    found = g.flatten(restored.state_dict())
    last = g.entry(case, len(case.grads))
    assert g.deviations(found, without_mutables(last), g.EXACT) == []
    assert g.deviations(found, without_mutables(g.flatten(case.checkpoint)), g.EXACT) == []
    assert structure(restored) == structure(replay(name)[-1])


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_training_resumes_from_checkpoints(name: str) -> None:
    """As far from T5X's last state as our own run is, and no further after more steps."""
    case = g.load(name)
    resumed, continued = create(case).restore_state(case.checkpoint), replay(name)[-1]
    if name in CHANGED:  # our own run is elsewhere
        start = g.flatten(case.checkpoint)
        again = g.raw_optax_trajectory(case, start=start)
        expected = [{**flat, "state/step": t + 10} for t, flat in enumerate(again)]
        assert_same_run(state_dicts(steps(resumed, case.grads)), expected, g.EXACT)
        return
    pairs = zip(steps(resumed, case.grads[:3]), steps(continued, case.grads[:3]), strict=True)
    for ours, theirs in pairs:
        found, expected_now = (g.flatten(o.state_dict()) for o in (ours, theirs))
        assert g.deviations(found, expected_now, g.OP_BY_OP) == []


def steps(optimizer: Optimizer, grads: Any) -> list[Optimizer]:
    run = [optimizer]
    for gradient in grads:
        run.append(step(run[-1], gradient))
    return run


@pytest.mark.sample(20)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_training_resumes_where_t5x_stood_halfway(name: str) -> None:
    """From T5X's own numbers after half of the steps, T5X's own numbers follow."""
    case = g.load(name)
    half = len(case.grads) // 2
    saved = flax.serialization.msgpack_serialize(g.unflatten(g.entry(case, half)))
    resumed = create(case).restore_state(flax.serialization.msgpack_restore(saved))
    expected = expected_trajectory(case)[half:]
    if name in CHANGED:
        expected = g.raw_optax_trajectory(case, start=g.entry(case, half), first=half)
    assert_same_run(state_dicts(steps(resumed, case.grads[half:])), expected, op_by_op(case))


@pytest.mark.sample(20)
@pytest.mark.parametrize("name", CASES)
def test_own_checkpoints_resume_exactly(name: str) -> None:
    case = g.load(name)
    half = len(case.grads) // 2
    before = replay(name)[half]
    saved = flax.serialization.to_bytes({"version": 3, "optimizer": before.state_dict()})
    loaded = flax.serialization.msgpack_restore(saved)["optimizer"]
    resumed = step(create(case).restore_state(loaded), case.grads[half])
    expected = g.flatten(replay(name)[half + 1].state_dict())
    assert g.deviations(g.flatten(resumed.state_dict()), expected, g.EXACT) == []


@pytest.mark.parametrize("name", MOVED)
def test_checkpoints_of_another_layout_are_refused(name: str) -> None:
    case = g.load(name)
    optimizer = create(case)
    with pytest.raises(RestoreError) as caught:
        optimizer.restore_state(case.checkpoint)
    report = caught.value.report
    assert sorted(f"{m.path}: {m.kind.value}" for m in report.mismatches) == MOVED[name]
    assert all(m.path in str(caught.value) for m in report.mismatches)
    kept = optimizer.restore_state(case.checkpoint, strict=False)
    assert g.flatten(kept.state_dict())["state/step"] == len(case.grads)
    np.testing.assert_array_equal(
        jax.tree.leaves(kept.target)[0], jax.tree.leaves(case.checkpoint["target"])[0]
    )


def old_noisy_sgd(state_dict: Any) -> tuple[Any, Any]:
    """Scales before it adds the noise, as `noisy_sgd` did."""
    noise = optax.add_noise(eta=0.01, gamma=0.55, key=0)
    return t5x.chain([optax.scale(-0.05), noise]), state_dict


def old_inject_hyperparams(state_dict: Any) -> tuple[Any, Any]:
    """The schedule's count is a state of its own now; it was the one count."""
    state = state_dict["state"]["param_states"]
    counts = {"learning_rate": {"count": state["count"]}}
    state = {**state, "hyperparams_states": counts}
    state = {**state_dict["state"], "param_states": state}
    return None, {**state_dict, "state": state}


OLD_LAYOUT = {
    "t5x/noisy_sgd_0": old_noisy_sgd,
    "t5x/wrapper_inject_hyperparams": old_inject_hyperparams,
}


@pytest.mark.parametrize("name", MOVED)
def test_checkpoints_of_another_layout_can_be_moved(name: str) -> None:
    case = g.load(name)
    definition, moved = OLD_LAYOUT[name](case.checkpoint)
    optimizer = create(case) if definition is None else definition.create(case.params)
    restored = optimizer.restore_state(moved)
    found = g.flatten(restored.state_dict())
    assert g.deviations(found, without_mutables(g.flatten(moved)), g.EXACT) == []
    after = restored.apply_gradient(case.grads[-1])
    assert int(after.state.step) == len(case.grads) + 1


def test_train_state_of_t5x() -> None:
    """Learning rates of the trainer change nothing; what else is in the dict is left alone."""
    case = g.load("t5x/TrainState_adamw")
    optimizer = create(case)
    for grads, rate in zip(case.grads, case.index["learning_rates"], strict=True):
        optimizer = optimizer.apply_gradient(grads, learning_rate=jnp.float32(rate))
    last = g.entry(case, len(case.grads))
    found = g.flatten(optimizer.state_dict())
    assert g.deviations(found, without_mutables(last), g.OP_BY_OP) == []
    assert sorted([*found, "flax_mutables/flax_mut/stats/count"]) == case.index["state_dict_keys"]
    assert g.flatten(case.checkpoint).keys() == set(case.index["state_dict_keys"])
    assert isinstance(optimizer.restore_state(case.checkpoint).target, flax.core.FrozenDict)


@pytest.mark.parametrize(
    "missing", ["state/param_states/0/count", "target/token_embedder/embedding"]
)
def test_missing_paths_are_errors_as_in_t5x(missing: str) -> None:
    case = g.load("t5x/adam_0")
    flat = g.flatten(case.checkpoint)
    del flat[missing]
    with pytest.raises(RestoreError, match=f"{missing}: missing"):
        create(case).restore_state(g.unflatten(flat))
