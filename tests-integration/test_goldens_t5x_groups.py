"""Groups of the real Adafactor against the real T5X, and both in T5X's train state.

Every case of `goldens/groups.json` runs through `opt_core.MultiOptimizer` and through the facade's.
"""

import functools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import flax.core
import flax.serialization
import golden_cases as g
import jax
import jax.numpy as jnp
import opt_core
import pytest
from jax.sharding import PartitionSpec
from opt_adafactor import Adafactor
from opt_core import Optimizer
from opt_core.errors import RestoreError
from opt_core.protocols import DerivesLogicalAxes, TakesParamAxes
from opt_optax_bridge import t5x

APIS = {
    "opt_core": SimpleNamespace(Adafactor=Adafactor, MultiOptimizer=opt_core.MultiOptimizer),
    "t5x": SimpleNamespace(Adafactor=Adafactor, MultiOptimizer=t5x.MultiOptimizer),
}
# What jax 0.10.2 repeats of Adafactor, op by op; the goldens' README.
OP_BY_OP = g.Tolerance(0.0, 1e-6)
TRAIN_STATE = "t5x/TrainState_adafactor"

CASES = g.case_ids(g.GROUPS)
MULTI = [name for name in CASES if name != TRAIN_STATE]
CHECKPOINTS = g.ids_with("checkpoint", g.GROUPS)
RUNS = [*((name, api) for name in MULTI for api in APIS), (TRAIN_STATE, "opt_core")]

every_run = pytest.mark.parametrize(("name", "api"), RUNS)


def load(name: str) -> g.Case:
    return g.load(name, g.GROUPS)


def create(case: g.Case, api: str = "opt_core") -> Optimizer:
    """As T5X's trainer does: it tells the axes before it creates."""
    definition = g.build(case.spec, APIS[api])
    if case.index.get("set_param_axes") or case.id == TRAIN_STATE:
        assert isinstance(definition, TakesParamAxes)
        definition.set_param_axes(case.param_axes)
    optimizer: Optimizer = definition.create(case.params)
    return optimizer


def overrides(case: g.Case, optimizer: Optimizer, t: int) -> dict[str, Any]:
    if rates := case.index.get("learning_rates"):
        return {"learning_rate": rates[t]}
    given = dict((case.index.get("overrides") or [{}] * len(case.grads))[t])
    if "hyper_params" in given:
        own = optimizer.optimizer_def.hyper_params
        pairs = zip(own, given["hyper_params"], strict=True)
        given["hyper_params"] = [hyper.replace(**new) for hyper, new in pairs]
    return given


def steps(case: g.Case, optimizer: Optimizer, first: int = 0) -> list[Optimizer]:
    run = [optimizer]
    for t in range(first, len(case.grads)):
        given = overrides(case, optimizer, t)
        run.append(run[-1].apply_gradient(case.grads[t], **given))
    return run


@functools.cache
def replay(name: str, api: str) -> list[Optimizer]:
    return steps(load(name), create(load(name), api))


def recorded(case: g.Case, t: int) -> g.Flat:
    """T5X's state dict after `t` steps, without what its train state adds."""
    return {k: v for k, v in g.entry(case, t).items() if not k.startswith("flax_mutables/")}


def assert_follows(case: g.Case, run: list[Optimizer], tolerance: g.Tolerance) -> None:
    first = len(case.grads) + 1 - len(run)
    for t, optimizer in enumerate(run, first):
        found = g.flatten(optimizer.state_dict())
        assert g.deviations(found, recorded(case, t), tolerance) == [], f"after {t} steps"


@every_run
def test_groups_follow_t5x(name: str, api: str) -> None:
    assert_follows(load(name), replay(name, api), OP_BY_OP)


@pytest.mark.parametrize(("name", "api"), [*((name, "t5x") for name in MULTI), RUNS[-1]])
def test_groups_follow_t5x_when_compiled(name: str, api: str) -> None:
    """The overrides are traced: rates that change do not compile again."""
    case, traces = load(name), []

    @jax.jit
    def step(optimizer: Optimizer, grads: Any, given: Any) -> Optimizer:
        traces.append(frozenset(given))
        given = overrides_of(optimizer, given)
        return optimizer.apply_gradient(grads, **given)

    run = [create(case, api)]
    for t, grads in enumerate(case.grads):
        run.append(step(run[-1], grads, numbers(overrides(case, run[-1], t))))
    assert_follows(case, run, g.COMPILED)
    assert len(traces) == len(set(traces))


def numbers(given: Mapping[str, Any]) -> dict[str, Any]:
    """Only the learning rates: hyper-parameters hold more than a traced function takes."""
    return {
        name: [h.learning_rate for h in value] if name == "hyper_params" else value
        for name, value in given.items()
    }


def overrides_of(optimizer: Optimizer, given: Mapping[str, Any]) -> dict[str, Any]:
    own = optimizer.optimizer_def.hyper_params
    return {
        name: [h.replace(learning_rate=r) for h, r in zip(own, value, strict=True)]
        if name == "hyper_params"
        else value
        for name, value in given.items()
    }


@pytest.mark.parametrize("name", MULTI)
def test_both_faces_are_one(name: str) -> None:
    for ours, theirs in zip(replay(name, "opt_core"), replay(name, "t5x"), strict=True):
        found, expected = (g.flatten(o.state_dict()) for o in (ours, theirs))
        assert g.deviations(found, expected, g.EXACT) == []


@every_run
def test_layout_is_that_of_the_index(name: str, api: str) -> None:
    index = load(name).index
    for optimizer in (replay(name, api)[0], replay(name, api)[-1]):
        leaves = g.flatten(optimizer.state_dict())
        nones = [path for path, leaf in leaves.items() if leaf is None]
        assert nones == sorted(index.get("none_keys", []))
        if name == TRAIN_STATE:
            added = "flax_mutables/flax_mut/stats/count"
            assert sorted([*leaves, added]) == index["state_dict_keys"]
            continue
        arrays = {path: leaf for path, leaf in leaves.items() if leaf is not None}
        assert {path: list(leaf.shape) for path, leaf in arrays.items()} == index["shapes"]
        assert {path: str(leaf.dtype) for path, leaf in arrays.items()} == index["dtypes"]
        assert isinstance(optimizer.target, flax.core.FrozenDict)
        for states in optimizer.state.param_states.values():
            assert isinstance(states, flax.core.FrozenDict)


# Logical axes.


def axes_of(name: str) -> dict[str, list[str]]:
    """The parameters' axes: the case's own, or where it has none those of the same model."""
    same = (c for c in CASES if load(c).index["problem"] == load(name).index["problem"])
    found = (load(c).index.get("param_logical_axes") for c in (name, *same))
    return next(axes for axes in found if axes is not None)


def param_axes(name: str) -> Any:
    axes = axes_of(name)
    return jax.tree_util.tree_map_with_path(
        lambda path, _: PartitionSpec(
            *axes[jax.tree_util.keystr(path, simple=True, separator="/")]
        ),
        load(name).params,
    )


def expected_axes(name: str, optimizer: Optimizer) -> dict[str, list[str] | None]:
    """Of each dimension, the parameter's axis of that size: no parameter has one size twice."""
    leaves = g.flatten(optimizer.state_dict())
    shapes = {path: None if leaf is None else leaf.shape for path, leaf in leaves.items()}
    expected: dict[str, list[str] | None] = {}
    for path, shape in shapes.items():
        owner = next((p for p in axes_of(name) if f"/{p}" in path), None)
        if owner is None or shape is None:
            expected[path] = None
            continue
        sizes = shapes[f"target/{owner}"]
        assert sizes is not None
        assert len(set(sizes)) == len(sizes)
        names = dict(zip(sizes, axes_of(name)[owner], strict=True))
        is_placeholder = shape == (1,) != sizes
        expected[path] = None if is_placeholder else [names[size] for size in shape]
    return expected


@every_run
def test_derived_axes_are_those_of_t5x_and_the_factors_have_theirs(name: str, api: str) -> None:
    """T5X leaves the factors without axes: replicated."""
    optimizer = replay(name, api)[0]
    expected = expected_axes(name, optimizer)
    for reference in (optimizer, jax.eval_shape(lambda: create(load(name), api))):
        definition = reference.optimizer_def
        assert isinstance(definition, DerivesLogicalAxes)
        axes = definition.derive_logical_axes(reference, param_axes(name))
        found = {
            path: None if spec is None else list(spec)
            for path, spec in g.flatten(axes.state_dict()).items()
        }
        assert found == expected
        differing = {
            path
            for path, names in load(name).index.get("derived_logical_axes", found).items()
            if found[path] != names
        }
        assert {path.rpartition("/")[2] for path in differing} <= {"v_row", "v_col"}
        assert all(found[path] for path in differing)
    assert any(path.endswith("/v_row") and names for path, names in expected.items())


# Checkpoints.


@pytest.mark.parametrize(("name", "api"), [run for run in RUNS if run[0] in CHECKPOINTS])
def test_checkpoints_restore_bit_for_bit_and_continue(name: str, api: str) -> None:
    case = load(name)
    fresh = create(case, api)
    restored = fresh.restore_state(case.checkpoint)
    found = g.flatten(restored.state_dict())
    assert g.deviations(found, recorded(case, len(case.grads)), g.EXACT) == []
    last = replay(name, api)[-1]
    assert structure(restored) == structure(last) == structure(fresh)
    resumed, continued = (
        o.apply_gradient(case.grads[0], learning_rate=0.1) for o in (restored, last)
    )
    found, expected = (g.flatten(o.state_dict()) for o in (resumed, continued))
    assert g.deviations(found, expected, g.OP_BY_OP) == []


def structure(tree: Any) -> Any:
    return jax.tree.structure(tree)


@every_run
def test_training_resumes_where_t5x_stood_halfway(name: str, api: str) -> None:
    """From T5X's own numbers after half of the steps, through msgpack, T5X's own follow."""
    case = load(name)
    half = len(case.grads) // 2
    written = flax.serialization.msgpack_serialize(g.unflatten(g.entry(case, half)))
    resumed = create(case, api).restore_state(flax.serialization.msgpack_restore(written))
    assert_follows(case, steps(case, resumed, half), OP_BY_OP)


def test_a_leaf_that_t5x_left_out_stays_without_state() -> None:
    """`None` at its path is what belongs there; an array is not."""
    case = load("t5x/Multi_partial")
    path = case.index["none_keys"][0]
    flat = g.entry(case, 3) | {path: jnp.zeros(2)}
    with pytest.raises(RestoreError, match=path):
        create(case).restore_state(g.unflatten(flat))


def test_groups_with_axes_do_not_change_each_other() -> None:
    """One Adafactor in two models: T5X's second one overwrites the axes of the first."""
    case = load("t5x/Multi_scan_rules")
    shared = g.build(case.spec["args"][0][0]["$pair"][1], APIS["opt_core"])
    kernels = opt_core.MultiOptimizer((".*kernel", shared))
    kernels.set_param_axes(case.param_axes)
    other = opt_core.MultiOptimizer((".*kernel", shared))
    model = {"kernel": jnp.ones((4, 2, 3))}
    other.set_param_axes({"kernel": PartitionSpec("layers", "mlp", "embed")})
    assert other.create(model).state.param_states["0"]["kernel"].v_row.shape == (4, 3)
    states = kernels.create(case.params).state.param_states["0"]
    assert states["decoder"]["layers"]["mlp"]["wi"]["kernel"].v_row.shape == (6, 3)
