"""Hyper-parameters are frozen dataclasses; overriding one makes a new dataclass."""

from __future__ import annotations

import dataclasses
from typing import Any

from opt_core._paths import listed
from opt_core.errors import HyperParamError


def replace_hyper_params(hyper_params: Any, **overrides: Any) -> Any:
    """Returns `hyper_params` with some fields replaced."""
    if not overrides:
        return hyper_params
    names = hyper_param_names(hyper_params)
    unknown = [name for name in overrides if name not in names]
    if unknown:
        raise HyperParamError(
            f"no such hyper-parameter: {listed(unknown)}; this optimizer has "
            f"{listed(names, none='none to override')}"
        )
    return dataclasses.replace(hyper_params, **overrides)


def hyper_param_names(hyper_params: Any) -> tuple[str, ...]:
    """Returns the field names of a dataclass instance; none for anything else."""
    if not dataclasses.is_dataclass(hyper_params):
        return ()
    return tuple(field.name for field in dataclasses.fields(hyper_params))


def check_missing(missing: str) -> None:
    """Raises a `HyperParamError` for anything but `'error'` and `'ignore'`."""
    if missing not in ("error", "ignore"):
        raise HyperParamError(f"`missing` must be 'error' or 'ignore'; got {missing!r}")
