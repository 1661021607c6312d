"""Logical axes of the state, derived from those of the parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.sharding import PartitionSpec
from opt_core import Optimizer, OptimizerState

from opt_adafactor._axes import axes_by_path, check_covers, flatten_axes
from opt_adafactor._factoring import Factoring
from opt_adafactor._plan import Plan
from opt_adafactor._state import _AdafactorParamState, kept_dims


def derive_logical_axes(
    plan: Plan, optimizer: Optimizer, param_axes: Any, *, has_momentum: bool
) -> Optimizer:
    """Returns the optimizer with axes as leaves; see `Adafactor.derive_logical_axes`."""
    axes = _axes_by_path(plan, param_axes)
    leaves = plan.treedef.flatten_up_to(optimizer.target)
    check_covers({p: np.shape(x) for p, x in zip(plan.paths, leaves, strict=True)}, axes)
    specs = [axes[path] for path in plan.paths]
    states = [
        _state_axes(spec, factoring, has_momentum=has_momentum)
        for spec, factoring in zip(specs, plan.factorings, strict=True)
    ]
    state = OptimizerState(step=None, param_states=plan.treedef.unflatten(states))
    return optimizer.replace(state=state, target=plan.treedef.unflatten(specs))


def _axes_by_path(plan: Plan, param_axes: Any) -> dict[str, PartitionSpec | None]:
    """Returns axes by path; `()` is an empty container if the parameters have one there."""
    try:
        given = plan.treedef.flatten_up_to(param_axes)
    except (ValueError, TypeError, KeyError):
        return flatten_axes(param_axes)  # different container types, or different parameters
    return axes_by_path(zip(plan.paths, given, strict=True))


def _state_axes(
    spec: PartitionSpec | None, factoring: Factoring, *, has_momentum: bool
) -> _AdafactorParamState:
    kept = kept_dims(factoring, has_momentum=has_momentum)
    axes = {
        name: None if spec is None or dims is None else PartitionSpec(*(spec[d] for d in dims))
        for name, dims in kept.items()
    }
    return _AdafactorParamState(**axes)
