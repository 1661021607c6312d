"""Optimizers of T5X's facade against the real T5X: trajectories, checkpoints, logical axes."""

import contextlib
from typing import Any

import golden_cases as g
import jax
import jax.numpy as jnp
import pytest
from opt_core import Optimizer
from opt_core.errors import RestoreError

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
# The state has other paths now: `restore_legacy` moves them.
MOVED = {"t5x/noisy_sgd_0", "t5x/noisy_sgd_dict", "t5x/wrapper_inject_hyperparams"}
# Drawn by JAX before `jax_threefry_partitionable` became the default.
OLD_RANDOMNESS = {"t5x/dpsgd_0", "t5x/dpsgd_noise"}

TRAIN_STATE = "t5x/TrainState_adafactor"
WRAPPED, IN_GROUPS = g.case_ids(), g.case_ids(g.GROUPS)
CASES = [*WRAPPED, *IN_GROUPS]
REPLAYED = [name for name in CASES if name not in CHANGED]
CHECKPOINTS = [
    *(name for name in g.ids_with("checkpoint") if name not in MOVED),
    *g.ids_with("checkpoint", g.GROUPS),
]
AXES = "derived_logical_axes"
WITH_AXES = [*g.ids_with(AXES), *g.ids_with(AXES, g.GROUPS)]
WITH_AXES = [name for name in WITH_AXES if name not in MOVED]
RATE = 7.0  # T5X's trainer gives one; wrapped optimizers ignore it


@pytest.fixture(autouse=True)
def _randomness(request: pytest.FixtureRequest) -> Any:
    name = request.node.callspec.params.get("name") if hasattr(request.node, "callspec") else None
    old = jax.threefry_partitionable(False) if name in OLD_RANDOMNESS else contextlib.nullcontext()
    with old:
        yield


def load(name: str) -> g.Case:
    return g.load(name, g.GROUPS if name in IN_GROUPS else g.WRAPPED)


def create(case: g.Case, api: Any = g.FACADE) -> Optimizer:
    """As T5X's trainer does: it tells the axes before it creates."""
    definition = g.build(case.spec, api)
    if case.index.get("set_param_axes") or case.id == TRAIN_STATE:
        definition.set_param_axes(case.param_axes)
    optimizer: Optimizer = definition.create(case.params)
    return optimizer


def overrides(case: g.Case, optimizer: Optimizer, t: int) -> dict[str, Any]:
    """What T5X's trainer gave with the gradients of a step."""
    if case.id in WRAPPED:
        return {"learning_rate": RATE}
    if rates := case.index.get("learning_rates"):
        return {"learning_rate": rates[t]}
    return g.overrides(case, optimizer.optimizer_def, t)


@pytest.mark.sample(2)
@pytest.mark.parametrize("api", [g.FACADE, g.OURS], ids=["facade", "ours"])
@pytest.mark.parametrize("name", REPLAYED)
def test_trajectories_are_those_of_t5x(name: str, api: Any) -> None:
    """Wrapped definitions of the packages do not ignore a rate, and are given none."""
    case = load(name)
    ignores = api is g.OURS and name in WRAPPED
    run = [create(case, api)]
    for t, grads in enumerate(case.grads):
        given = {} if ignores else overrides(case, run[-1], t)
        run.append(run[-1].apply_gradient(grads, **given))
    tolerance = g.BFLOAT16 if case.is_bfloat16 else g.OP_BY_OP
    if name in IN_GROUPS:
        tolerance = g.Tolerance(0.0, 1e-6)  # what JAX repeats of Adafactor
    for t, optimizer in enumerate(run):
        found = g.flatten(optimizer.state_dict())
        assert g.deviations(found, g.entry(case, t), tolerance) == [], f"after {t} steps"


# Logical axes.


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", WITH_AXES)
def test_derived_axes_are_those_of_t5x_and_the_factors_have_theirs(name: str) -> None:
    """T5X leaves the factors without axes: replicated."""
    case, optimizer = load(name), create(load(name))
    by_t5x = case.index[AXES]
    for reference in (optimizer, jax.eval_shape(lambda: create(case))):
        definition = reference.optimizer_def
        derived = definition.derive_logical_axes(reference, case.param_axes)
        assert structure(derived) == structure(optimizer)
        found = g.flatten(derived.state_dict())
        lists = {path: None if spec is None else list(spec) for path, spec in found.items()}
        differing = {path for path in by_t5x if lists[path] != by_t5x[path]}
        assert {path.rpartition("/")[2] for path in differing} <= {"v_row", "v_col"}
        assert all(lists[path] for path in differing)


def structure(tree: Any) -> Any:
    return jax.tree.structure(tree, is_leaf=lambda leaf: leaf is None)


# Checkpoints.


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_restore_bit_for_bit(name: str) -> None:
    case = load(name)
    fresh = create(case)
    restored = fresh.restore_state(case.checkpoint)
    found = g.flatten(restored.state_dict())
    assert g.deviations(found, g.entry(case, len(case.grads)), g.EXACT) == []
    assert g.deviations(found, g.without_mutables(g.flatten(case.checkpoint)), g.EXACT) == []
    assert structure(restored) == structure(fresh)


def test_a_leaf_that_t5x_left_out_stays_without_state() -> None:
    """`None` at its path is what belongs there; an array is not."""
    case = load("t5x/Multi_partial")
    path = case.index["none_keys"][0]
    flat = g.entry(case, 3) | {path: jnp.zeros(2)}
    with pytest.raises(RestoreError, match=path):
        create(case, g.OURS).restore_state(g.unflatten(flat))
