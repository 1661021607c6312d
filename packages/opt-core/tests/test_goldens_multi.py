"""`flax.optim.MultiOptimizer` as it ran: trajectories, layouts, checkpoints."""

from typing import Any

import flax.core
import flax.traverse_util
import jax
import numpy as np
import pytest
from core_testing import structure
from flax_optim import (
    Momentum,
    case,
    case_ids,
    checkpoint,
    definition_of,
    flatten,
    inputs,
    trajectory,
)
from opt_core import MultiOptimizer, Optimizer

OLD_LAYOUT = "Multi_kernel_bias_032"
TOLERANCE = 2e-6  # of the largest entry of an array; what reordered float32 sums were measured at


def overrides_at(definition: Any, given: Any, t: int) -> dict[str, Any]:
    overrides = dict((given or {t: {}})[t])
    if "hyper_params" in overrides:
        pairs = zip(definition.hyper_params, overrides["hyper_params"], strict=True)
        overrides["hyper_params"] = [own.replace(**new) for own, new in pairs]
    return overrides


def run(case_id: str, steps: int | None = None) -> list[Optimizer]:
    definition, (params, grads) = definition_of(case_id), inputs(case_id)
    optimizers = [definition.create(params)]
    for t, gradient in enumerate(grads[:steps]):
        overrides = overrides_at(definition, case(case_id).get("overrides"), t)
        optimizers.append(optimizers[-1].apply_gradient(gradient, **overrides))
    return optimizers


def entry(case_id: str, t: int) -> dict[str, Any]:
    arrays = {path: series[t] for path, series in trajectory(case_id).items()}
    arrays |= dict.fromkeys(case(case_id).get("none_keys", []))
    return arrays | {path: {} for path in case(case_id).get("empty_dict_keys", [])}


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        if value is None or isinstance(value, dict):
            assert found[path] == value, path
            continue
        assert found[path].dtype == value.dtype, path
        atol = TOLERANCE * np.max(np.abs(value), initial=0)
        np.testing.assert_allclose(found[path], value, rtol=0, atol=atol, err_msg=path)


@pytest.mark.parametrize("case_id", [c for c in case_ids() if c != OLD_LAYOUT])
def test_trajectories(case_id: str) -> None:
    optimizers = run(case_id)
    for t, optimizer in enumerate(optimizers):
        assert_close(flatten(optimizer.state_dict()), entry(case_id, t))
        assert type(optimizer.target) is type(inputs(case_id)[0])  # a `FrozenDict`, or a dict


@pytest.mark.parametrize("case_id", [c for c in case_ids() if "checkpoint" in case(c)])
def test_checkpoints_restore_and_continue(case_id: str) -> None:
    last = len(inputs(case_id)[1])
    restored = run(case_id, 0)[0].restore_state(checkpoint(case_id))
    final = run(case_id)[-1]
    assert int(restored.state.step) == last
    assert structure(restored) == structure(final)
    assert_close(flatten(restored.state_dict()), arrays(final))
    gradient = inputs(case_id)[1][0]
    found = restored.apply_gradient(gradient)
    assert_close(flatten(found.state_dict()), arrays(final.apply_gradient(gradient)))


def arrays(optimizer: Optimizer) -> dict[str, Any]:
    return flatten(jax.tree.map(np.asarray, optimizer.state_dict()))


def test_the_list_layout_is_read_to_the_bit() -> None:
    restored = run(OLD_LAYOUT, 0)[0].restore_state(checkpoint(OLD_LAYOUT))
    recorded = entry(OLD_LAYOUT, -1)
    params = flatten(restored.state_dict()["state"]["param_states"])
    assert int(restored.state.step) == recorded["state/0/step"]
    for i, paths in enumerate(
        [("Dense_0/kernel", "Dense_1/kernel"), ("Dense_0/bias", "Dense_1/bias")]
    ):
        for j, path in enumerate(paths):
            names = ("momentum",) if i == 0 else ("grad_ema", "grad_sq_ema")
            for name in names:
                written = recorded[f"state/{i}/param_states/{j}/{name}"]
                assert np.array_equal(params[f"{path}/{name}"], written)
    assert params["norm/scale"] is None


def test_the_list_layout_is_in_the_order_of_the_components() -> None:
    """`ModelParamTraversal` of Flax 0.3.2 sorted the keys of `flatten_dict`, tuples of strings."""
    names = ("block", "block-1", "block.2", "block 3", "block+", "block0", "10", "2")
    params = {name: {"kernel": np.full(2, i, np.float32)} for i, name in enumerate(names)}
    order = sorted(flax.traverse_util.flatten_dict(params))
    assert order != sorted(order, key="/".join)
    states = [{"momentum": 10 * params[a][b]} for a, b in order]
    written = {"target": params, "state": [{"step": np.int32(3), "param_states": states}]}
    definition = MultiOptimizer((".*", Momentum(0.1)))
    restored = definition.create(jax.tree.map(np.zeros_like, params)).restore_state(written)
    found = restored.state_dict()["state"]["param_states"]
    for name, layer in params.items():
        assert np.array_equal(found[name]["kernel"]["momentum"], 10 * layer["kernel"]), name


def test_a_list_that_does_not_fit_says_where() -> None:
    written = checkpoint(OLD_LAYOUT)
    written["state"]["1"]["step"] = np.int32(3)
    written["state"]["0"]["param_states"]["2"] = {"momentum": np.zeros(3, np.float32)}
    del written["state"]["1"]["param_states"]["1"]
    report = run(OLD_LAYOUT, 0)[0].check_state_dict(written)
    assert {m.path: m.kind.value for m in report.mismatches} == {
        "state/1/step": "value",
        "state/0/param_states/2": "extra",
        "state/param_states/Dense_1/bias/grad_ema": "missing",
        "state/param_states/Dense_1/bias/grad_sq_ema": "missing",
    }
