"""Hyper-parameters and extra arguments of several groups: which value goes where."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opt_core._groups.table import Group
from opt_core._hyper_params import hyper_param_names
from opt_core.errors import HyperParamError, UnusedArgumentError

if TYPE_CHECKING:
    from opt_core._optimizer import OptimizerDef

OWN = frozenset({"hyper_params", "group_overrides"})


def check_length(hyper_params: Any, names: Sequence[str]) -> None:
    """Raises a `HyperParamError` unless there is one entry per group."""
    is_sequence = isinstance(hyper_params, Sequence) and not isinstance(hyper_params, str)
    if not is_sequence or len(hyper_params) != len(names):
        found = str(len(hyper_params)) if is_sequence else f"a {type(hyper_params).__name__}"
        raise HyperParamError(
            f"`hyper_params` must have {len(names)} entries, one for each of {listed(names)}; got "
            f"{found}"
        )


def by_group(overrides: Any, hyper_params: Any, groups: Sequence[Group]) -> Mapping[str, Any]:
    """Returns `group_overrides`, empty where they are `None`.

    Args:
      overrides: what was given for them.
      hyper_params: what was given by this name, if anything.
      groups: the table.

    Raises:
      HyperParamError: they are no mapping of mappings, name a group that is not updated, or say
        again what `hyper_params` says.
    """
    if overrides is None:
        return {}
    if not isinstance(overrides, Mapping):
        raise HyperParamError(
            "`group_overrides` must map names of groups to overrides, as "
            "`{'embeddings': {'learning_rate': 0.1}}`; got a " + type(overrides).__name__
        )
    _check_names(overrides, groups)
    for name, own in overrides.items():
        if not isinstance(own, Mapping):
            raise HyperParamError(
                f"`group_overrides`: `{name}` must map names of hyper-parameters to values; got a "
                f"{type(own).__name__}"
            )
        if hyper_params is not None and "hyper_params" in own:
            raise HyperParamError(
                f"group `{name}` is given `hyper_params` twice: in `hyper_params=` and in "
                "`group_overrides=`; leave one out"
            )
    return overrides


def check_reach(overrides: Iterable[str], names: Sequence[str]) -> None:
    """Raises a `HyperParamError` where there are overrides for all groups, and no group."""
    if not names and (given := listed(overrides)) != "none":
        raise HyperParamError(
            f"{given}: there is no group to override anything of, all of them are frozen"
        )


def _check_names(by_group: Mapping[str, Any], groups: Sequence[Group]) -> None:
    frozen = {group.name for group in groups if group.is_frozen}
    names = [group.name for group in groups if not group.is_frozen]
    for name in by_group:
        if name not in names:
            what = "is frozen" if name in frozen else "is no group"
            raise HyperParamError(
                f"`group_overrides`: `{name}` {what}; the groups that are updated are "
                f"{listed(names)}"
            )


def has_hyper_param(definition: OptimizerDef, name: str) -> bool:
    """Whether it is the name of a hyper-parameter, of a nested definition's too."""
    return _has_name(definition.hyper_params, name)


def _has_name(hyper_params: Any, name: str) -> bool:
    if isinstance(hyper_params, tuple):
        return any(_has_name(inner, name) for inner in hyper_params)
    return name in hyper_param_names(hyper_params)


@contextlib.contextmanager
def named(group: str) -> Iterator[None]:
    """Says in an error about hyper-parameters which group it is about."""
    try:
        yield
    except UnusedArgumentError:
        raise
    except HyperParamError as error:
        raise HyperParamError(f"group `{group}`: {error}") from error


def listed(names: Iterable[str]) -> str:
    """Returns names for people to read."""
    return ", ".join(f"`{name}`" for name in names) or "none"
