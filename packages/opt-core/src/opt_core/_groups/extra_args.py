"""Extra arguments of an update: which groups take them, and whether any group uses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

from opt_core._groups.division import Division
from opt_core._groups.overrides import listed, naming
from opt_core._optimizer import OptimizerDef
from opt_core.errors import GroupError, UnusedArgumentError

T = TypeVar("T")


class ExtraArgs:
    """The extra arguments of one update of several groups."""

    def __init__(self, values: Mapping[str, Any], division: Division) -> None:
        self._values, self._division = values, division
        self._used = frozenset[str]()

    def call(self, group: str, definition: OptimizerDef, function: Callable[..., T]) -> T:
        """Calls a method of a group's definition with the arguments that this takes.

        A transformation that accepts any keyword shows only when traced that it does not use one.
        Another group may.
        """
        taken = {name: self._values[name] for name in definition.extra_arg_names(self._values)}
        self._check_scope(group, taken)
        with naming(group):
            while True:
                try:
                    result = function(**taken)
                    break
                except UnusedArgumentError as error:
                    if not error.names & taken.keys():
                        raise
                    taken = {name: taken[name] for name in taken.keys() - error.names}
        self._used |= taken.keys()
        return result

    def _check_scope(self, group: str, taken: Mapping[str, Any]) -> None:
        """Raises a `GroupError` for what is about all parameters, unless the group has them all."""
        if len(self._division.members[group]) == len(self._division.owners):
            return
        for name, value in taken.items():
            if callable(value) or jax.tree.structure(value) == self._division.treedef:
                raise GroupError(
                    f"group `{group}`: `{name}` is about all parameters, and this group has some "
                    "of them. A line search works on all parameters of a definition: make one "
                    "definition, with `optax.partition` for the directions and the search after it."
                )

    def check_used(self) -> None:
        """Raises an `UnusedArgumentError` for arguments that no group used."""
        if unused := sorted(self._values.keys() - self._used):
            raise UnusedArgumentError(
                f"{listed(unused)}: neither a hyper-parameter nor an extra argument that any group "
                "uses",
                unused,
            )
