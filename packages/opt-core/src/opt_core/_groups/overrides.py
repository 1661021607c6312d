"""What an update of groups is given: overrides and extra arguments, with errors that name them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from opt_core._groups.division import Division
from opt_core._groups.table import Group
from opt_core._hyper_params import hyper_param_names
from opt_core._optimizer import OptimizerDef
from opt_core._paths import listed
from opt_core.errors import GroupError, HyperParamError

RESERVED = frozenset({"hyper_params", "group_overrides", "missing"})


def check_length(hyper_params: Any, names: Sequence[str]) -> None:
    """Raises a `HyperParamError` unless there is one entry per group."""
    is_sequence = isinstance(hyper_params, Sequence) and not isinstance(hyper_params, str)
    if not is_sequence or len(hyper_params) != len(names):
        got = str(len(hyper_params)) if is_sequence else f"a {type(hyper_params).__name__}"
        raise HyperParamError(
            f"`hyper_params` must have {len(names)} entries, one for each of {listed(names)}; got "
            f"{got}"
        )


def check_group_overrides(overrides: Any, hyper_params: Any, groups: Sequence[Group]) -> None:
    """Raises a `HyperParamError` for `group_overrides` of another form, or of unknown groups."""
    if not isinstance(overrides, Mapping):
        raise HyperParamError(
            "`group_overrides` must map names of groups to overrides, as "
            "`{'embeddings': {'learning_rate': 0.1}}`; got a " + type(overrides).__name__
        )
    frozen = {group.name for group in groups if group.is_frozen}
    names = [group.name for group in groups if not group.is_frozen]
    for name, values in overrides.items():
        if name not in names:
            what = "is frozen" if name in frozen else "is not a group"
            raise HyperParamError(
                f"`group_overrides`: `{name}` {what}; the groups that are updated are "
                f"{listed(names)}"
            )
        if not isinstance(values, Mapping):
            raise HyperParamError(
                f"`group_overrides`: `{name}` must map names of hyper-parameters to values; got a "
                f"{type(values).__name__}"
            )
        if hyper_params is not None and "hyper_params" in values:
            raise HyperParamError(
                f"group `{name}` is given `hyper_params` twice: in `hyper_params=` and in "
                "`group_overrides=`; leave one out"
            )


def known_names(hyper_params: Any) -> list[str]:
    """Returns the names of hyper-parameters, including those of nested groups."""
    if isinstance(hyper_params, tuple):
        return [name for inner in hyper_params for name in known_names(inner)]
    return list(hyper_param_names(hyper_params))


@contextlib.contextmanager
def naming(group: str) -> Iterator[None]:
    """Adds the name of the group to errors about hyper-parameters."""
    try:
        yield
    except HyperParamError as error:
        raise HyperParamError(f"group `{group}`: {error}") from error


def taken_args(
    definition: OptimizerDef, extra_args: Mapping[str, Any], division: Division, group: str
) -> dict[str, Any]:
    """Returns the extra arguments that the definition of a group takes."""
    taken = {name: extra_args[name] for name in definition.extra_arg_names(extra_args)}
    if len(division.members[group]) == len(division.owners):
        return taken
    for name, value in taken.items():
        if callable(value) or jax.tree.structure(value) == division.treedef:
            raise GroupError(
                f"group `{group}`: `{name}` is about all parameters, and this group has some of "
                "them. A line search works on all parameters of a definition: make one definition, "
                "with `optax.partition` for the directions and the search after it."
            )
    return taken
