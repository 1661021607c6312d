"""Extra arguments of updates, such as the loss: each group is passed those that it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from opt_core._groups.division import Division
from opt_core._groups.overrides import listed
from opt_core._optimizer import OptimizerDef
from opt_core.errors import GroupError, HyperParamError


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


def check_used(extra_args: Mapping[str, Any], used: frozenset[str]) -> None:
    """Raises a `HyperParamError` for arguments that no group takes."""
    if unused := sorted(extra_args.keys() - used):
        raise HyperParamError(
            f"{listed(unused)}: neither a hyper-parameter nor an extra argument of any group"
        )
