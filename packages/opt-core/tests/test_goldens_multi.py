"""`flax.optim.MultiOptimizer` as it ran: trajectories, layouts, checkpoints."""

from typing import Any

import jax
import numpy as np
import pytest
from core_testing import structure
from flax_optim import (
    case,
    case_ids,
    checkpoint,
    definition_of,
    flatten,
    inputs,
    trajectory,
)
from opt_core import Optimizer

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


@pytest.mark.parametrize("case_id", case_ids())
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
