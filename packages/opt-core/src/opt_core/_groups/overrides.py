"""Hyper-parameters and extra arguments of several groups: which group gets which value."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opt_core._groups.table import Group
from opt_core._hyper_params import check_missing, hyper_param_names
from opt_core.errors import HyperParamError, UnusedArgumentError

if TYPE_CHECKING:
    from opt_core._optimizer import OptimizerDef

OWN = frozenset({"hyper_params", "group_overrides", "missing"})


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
    """Returns `group_overrides`, empty if they are `None`.

    Args:
      overrides: the value given for it.
      hyper_params: the value given by this name, if any.
      groups: the table.

    Raises:
      HyperParamError: they are not a mapping of mappings, name a group that is not updated, or
        repeat what `hyper_params` sets.
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


def of_groups(
    overrides: Mapping[str, Any],
    names: Sequence[str],
    definitions: Sequence[OptimizerDef],
    *,
    missing: str,
) -> list[dict[str, Any]]:
    """Returns each group's share of the overrides for all groups.

    Args:
      overrides: values by name, for every group; or mappings from names of groups to values.
      names: of the groups that are updated.
      definitions: theirs.
      missing: `'ignore'` to leave out the groups that do not have a name.

    Raises:
      HyperParamError: there is no group; no group has a name; or a mapping names groups and
        something that is not a group.
    """
    check_missing(missing)
    _check_reach(overrides, names)
    found: list[dict[str, Any]] = [{} for _ in names]
    for name, value in overrides.items():
        is_by_group = isinstance(value, Mapping) and not value.keys().isdisjoint(names)
        if is_by_group and (unknown := [group for group in value if group not in names]):
            raise HyperParamError(
                f"`{name}` is given to {listed(unknown)}; the groups that are updated are "
                f"{listed(names)}"
            )
        has = [definition.has_hyper_param(name) for definition in definitions]
        if missing == "ignore" and not any(has):
            known = dict.fromkeys(n for d in definitions for n in _names(d.hyper_params))
            raise HyperParamError(
                f"no group has a hyper-parameter `{name}`; the groups have {listed(known)}"
            )
        for i, group in enumerate(names):
            if is_by_group and group in value:
                found[i][name] = value[group]
            elif not is_by_group and (has[i] or missing == "error"):
                found[i][name] = value
    return found


def _check_reach(overrides: Iterable[str], names: Sequence[str]) -> None:
    """Raises a `HyperParamError` for overrides for all groups if there are no groups."""
    if not names and (given := listed(overrides)) != "none":
        raise HyperParamError(f"{given}: there is no group to override: all of them are frozen")


def _check_names(by_group: Mapping[str, Any], groups: Sequence[Group]) -> None:
    frozen = {group.name for group in groups if group.is_frozen}
    names = [group.name for group in groups if not group.is_frozen]
    for name in by_group:
        if name not in names:
            what = "is frozen" if name in frozen else "is not a group"
            raise HyperParamError(
                f"`group_overrides`: `{name}` {what}; the groups that are updated are "
                f"{listed(names)}"
            )


def _names(hyper_params: Any) -> list[str]:
    """The names of hyper-parameters, including those of nested groups."""
    if isinstance(hyper_params, tuple):
        return [name for inner in hyper_params for name in _names(inner)]
    return list(hyper_param_names(hyper_params))


@contextlib.contextmanager
def named(group: str) -> Iterator[None]:
    """Adds the name of the group to errors about hyper-parameters."""
    try:
        yield
    except UnusedArgumentError:
        raise
    except HyperParamError as error:
        raise HyperParamError(f"group `{group}`: {error}") from error


def listed(names: Iterable[str]) -> str:
    """Returns names as a list for messages."""
    return ", ".join(f"`{name}`" for name in names) or "none"
