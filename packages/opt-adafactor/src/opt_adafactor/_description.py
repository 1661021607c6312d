"""Description of the state: which dimensions of a parameter each statistic keeps."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from typing import Any, Final

import jax
import numpy as np
from opt_core import Bearing, LeafDescription, StateDescription, TransformationDescription
from opt_core.extend import flatten_with_paths, json_settings, path_names

from opt_adafactor._axes import FactorMap
from opt_adafactor._factoring import Factoring
from opt_adafactor._hparam_map import HParamMap
from opt_adafactor._plan import Plan
from opt_adafactor._state import kept_dims

NAME: Final = "adafactor"
_ROLES: Final[dict[str, Any]] = {
    "v_row": "factored",
    "v_col": "factored",
    "v": "second_moment",
    "m": "moment",
}


def describe(
    plan: Plan, hyper_params: Any, params: Any, param_states: Any, dtype_momentum: Any
) -> StateDescription:
    """Returns a description of every leaf of a state; see `Adafactor.describe_state`."""
    has_momentum = hyper_params.beta1 is not None
    keyed, _ = jax.tree_util.tree_flatten_with_path(params)
    entries = plan.treedef.flatten_up_to(param_states)
    leaves = [
        leaf
        for (keys, _), factoring, entry in zip(keyed, plan.factorings, entries, strict=True)
        for leaf in _entry(path_names(keys), factoring, entry, has_momentum=has_momentum)
    ]
    settings = {
        f.name: _setting(getattr(hyper_params, f.name)) for f in dataclasses.fields(hyper_params)
    }
    settings = json_settings({**settings, "dtype_momentum": dtype_momentum})
    # The momentum accumulates updates that are already multiplied by the parameter scale.
    bearing = {"multiply_by_parameter_scale": Bearing("refused")} if has_momentum else {}
    made = TransformationDescription(NAME, settings=settings, bearing=bearing, source="stated")
    return StateDescription(tuple(leaves), (made,))


def _entry(
    param: tuple[str, ...], factoring: Factoring, entry: Any, *, has_momentum: bool
) -> Iterator[LeafDescription]:
    kept = kept_dims(factoring, has_momentum=has_momentum)
    for names, leaf in flatten_with_paths(entry):
        if leaf is None:
            continue
        dims = kept.get(names[-1])
        yield LeafDescription(
            path=(*param, *names),
            group=(),
            transformation=NAME,
            number=1,
            field=names,
            parameter=param,
            # An unused slot is a placeholder of one entry, unrelated to the parameter.
            dimensions=(None,) * np.ndim(leaf) if dims is None else dims,
            role="other" if dims is None else _ROLES[names[-1]],
            source="stated",
        )


def _setting(value: Any) -> Any:
    """Returns a JSON form of a setting; rules derived from axes are implied by the leaves."""
    match value:
        case HParamMap():
            return [[pattern, _setting(found)] for pattern, found in value.rules]
        case FactorMap():
            return "by logical axes"
        case Mapping():
            return {str(name): _setting(found) for name, found in value.items()}
        case tuple() | list():
            return [_setting(found) for found in value]
        case enum.Enum():
            return value.name
    return value
