"""The assignments of one table of groups, by tree structure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from opt_core._groups.patterns import LogicalAxes
from opt_core._groups.selection import Selection, has_shape, select
from opt_core._groups.table import Group
from opt_core._paths import path_str
from opt_core.errors import GroupError

_KEPT = 8
_LISTED = 20


class SelectionCache:
    """The selections of one table, made once per structure and shapes.

    Patterns that read shapes may assign leaves differently once they are stacked, and a group would
    then take over another's states. So a structure keeps the assignments with which optimizers were
    created, and any other is an error.

    Args:
      groups: the table.
      axes: logical axes by path, if known.
      allow_unused: see `opt_core._groups.assign`.
    """

    __slots__ = ("_allow_unused", "_axes", "_created", "_groups", "_selections")

    def __init__(
        self, groups: Sequence[Group], axes: LogicalAxes | None, allow_unused: bool = False
    ) -> None:
        self._groups, self._axes, self._allow_unused = tuple(groups), axes, allow_unused
        self._selections: dict[Any, Selection] = {}
        self._created: dict[Any, list[Selection]] = {}

    def values(self) -> Iterator[Selection]:
        """Returns the known selections, the latest last."""
        return iter(list(self._selections.values()))

    def of(self, tree: Any, *, creates: bool) -> Selection:
        """Returns the groups of a tree of parameters.

        Args:
          tree: the parameters.
          creates: whether a new state is made for them.

        Raises:
          GroupError: the groups do not partition the tree; or differ from those at `create`.
        """
        leaves, treedef = jax.tree.flatten(tree)
        key = (treedef, tuple((x.shape, x.dtype) if has_shape(x) else type(x) for x in leaves))
        if (found := self._selections.get(key)) is None:
            found = select(self._groups, tree, self._axes, allow_unused=self._allow_unused)
        self._check(treedef, found, creates)
        if key not in self._selections:
            while len(self._selections) >= _KEPT:
                self._selections.pop(next(iter(self._selections)))
            self._selections[key] = found
        return found

    def _check(self, treedef: Any, found: Selection, creates: bool) -> None:
        known = self._created.setdefault(treedef, [])
        if any(other is found or other.owners == found.owners for other in known):
            return
        if known and not creates:
            raise GroupError(_message(self._groups, known[-1], found))
        known.append(found)

    def __reduce__(self) -> Any:
        return SelectionCache, (self._groups, self._axes, self._allow_unused)


def _message(groups: Sequence[Group], old: Selection, new: Selection) -> str:
    moved = [
        f"  `{path_str(names)}`: created in {groups[old.owners[names]]}, now in {groups[owner]}"
        for names, owner in new.owners.items()
        if old.owners[names] != owner
    ]
    if len(moved) > _LISTED:
        moved = [*moved[:_LISTED], f"  ... and {len(moved) - _LISTED} more"]
    head = (
        "the patterns now assign these parameters to other groups than when an optimizer with this "
        "structure was created:"
    )
    advice = (
        "A pattern that reads shapes or dtypes may assign parameters to other groups when these "
        "change, for example when they are stacked: decide by the path, or step inside `jax.vmap` "
        "as at `create`. Another model of this structure needs its own `create`."
    )
    return "\n".join([head, *moved, advice])
