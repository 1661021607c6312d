"""A tree divided into groups: extracting the leaves of one and putting them back."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax.core import FrozenDict

from opt_core._groups.patterns import Leaf, LogicalAxes, matched
from opt_core._groups.table import Frozen, Group, assign
from opt_core._paths import Names, children, flatten_with_paths, path_names, path_str
from opt_core.errors import GroupError

_DICTS = (dict, OrderedDict, FrozenDict)
MASKED_NODE = ()
"""Placeholder without leaves, for a leaf of another group in a container that keeps its shape."""


def prune(tree: Any, keep: Callable[[Names], bool | None], *, keep_keys: bool) -> Any:
    """Returns a tree with some of its leaves.

    Args:
      tree: any pytree, or one of the same containers with anything in place of leaves.
      keep: whether the node with these names along its path is a leaf to keep (`True`) or to omit
        (`False`); `None` if it is not a leaf.
      keep_keys: whether dicts keep the keys of omitted leaves, as other containers always do.

    Examples:
      >>> tree = {'a': {'w': 1, 'b': 2}, 'c': {'b': 3}, 'd': [4, 5]}
      >>> kernels = {('a', 'w'): True, ('a', 'b'): False, ('c', 'b'): False, ('d', '1'): True}
      >>> prune(tree, lambda names: kernels.get(names), keep_keys=False)
      {'a': {'w': 1}, 'd': [(), 5]}
      >>> prune(tree, lambda names: kernels.get(names), keep_keys=True)
      {'a': {'b': (), 'w': 1}, 'c': {'b': ()}, 'd': [(), 5]}
    """
    return _prune(tree, keep, (), keep_keys)[0]


def _prune(
    node: Any, keep: Callable[[Names], bool | None], names: Names, keep_keys: bool
) -> tuple[Any, bool]:
    kept = keep(names)
    if kept is not None:
        return (node, True) if kept else (MASKED_NODE, False)
    opened = children(node)
    if opened is None:
        return (None if node is None else MASKED_NODE), False
    parts = [_prune(child, keep, (*names, name), keep_keys) for name, child in opened.children]
    has_any = any(has for _, has in parts)
    if type(node) in _DICTS and not keep_keys:
        chosen = {name for (name, _), (_, has) in zip(opened.children, parts, strict=True) if has}
        by_name = {name: part for (name, _), (part, _) in zip(opened.children, parts, strict=True)}
        return type(node)({k: by_name[str(k)] for k in node if str(k) in chosen}), has_any
    return opened.rebuild([part for part, _ in parts]), has_any


def at_paths(tree: Any, wanted: Collection[Names]) -> Iterator[tuple[Names, Any]]:
    """Yields the subtree at each of the `wanted` paths."""
    wanted, prefixes = set(wanted), _prefixes(wanted)

    def walk(node: Any, names: Names) -> Iterator[tuple[Names, Any]]:
        if names in wanted:
            yield names, node
        elif names in prefixes and (opened := children(node)) is not None:
            for name, child in opened.children:
                yield from walk(child, (*names, name))

    yield from walk(tree, ())


def replace_at(tree: Any, values: Mapping[Names, Any]) -> Any:
    """Returns `tree` with `values` at their paths."""
    prefixes = _prefixes(values)

    def walk(node: Any, names: Names) -> Any:
        if names in values:
            return values[names]
        opened = children(node) if names in prefixes else None
        if opened is None:
            return node
        return opened.rebuild([walk(child, (*names, name)) for name, child in opened.children])

    return walk(tree, ())


def _prefixes(paths: Collection[Names]) -> set[Names]:
    return {names[:n] for names in paths for n in range(len(names))}


@dataclasses.dataclass(frozen=True)
class GroupSelection:
    """One group's share of the leaves.

    Attributes:
      group: the group.
      members: positions of its leaves among all.
      treedef: the structure of the tree that its definition sees.
    """

    group: Group
    members: tuple[int, ...]
    treedef: Any

    def cut(self, leaves: Sequence[Any]) -> Any:
        """Returns the tree that the definition sees, out of all leaves."""
        return self.treedef.unflatten([leaves[i] for i in self.members])

    def paste(self, tree: Any, leaves: list[Any]) -> None:
        """Puts the parts of `tree` at its leaves into the list of all."""
        for i, leaf in zip(self.members, self.treedef.flatten_up_to(tree), strict=True):
            leaves[i] = leaf


@dataclasses.dataclass(frozen=True)
class Selection:
    """A tree divided into groups.

    Attributes:
      treedef: the structure of the whole.
      paths: the names along the path of every leaf.
      owners: the position of the group of every leaf, by path.
      parts: one per group, frozen ones included.
    """

    treedef: Any
    paths: tuple[Names, ...]
    owners: Mapping[Names, int]
    parts: tuple[GroupSelection, ...]

    @property
    def trained(self) -> tuple[GroupSelection, ...]:
        """The groups that are not frozen."""
        return tuple(part for part in self.parts if not part.group.is_frozen)

    @property
    def frozen(self) -> tuple[int, ...]:
        """The positions of the frozen leaves."""
        return tuple(i for part in self.parts if part.group.is_frozen for i in part.members)

    def cut_by_path(self, tree: Any, position: int, *, keep_keys: bool = False) -> Any:
        """Returns one group's part of a tree with these paths and any leaves."""
        owners = self.owners
        return prune(
            tree,
            lambda names: owners[names] == position if names in owners else None,
            keep_keys=keep_keys,
        )


def has_shape(leaf: Any) -> bool:
    """Whether it is an array, abstract or not."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def select(
    groups: Sequence[Group], tree: Any, axes: LogicalAxes | None, *, allow_unused: bool = False
) -> Selection:
    """Divides a tree.

    Args:
      groups: the table.
      tree: parameters, or anything with their paths; `None` is a leaf if no leaf has a shape.
      axes: logical axes by path, if known.
      allow_unused: see `opt_core._groups.assign`.

    Raises:
      GroupError: the groups do not partition the leaves.
    """
    leaves, treedef = described(tree)
    paths = tuple(leaf.names for leaf in leaves)
    infos = treedef.unflatten([leaf.info for leaf in leaves])
    owners = assign(groups, infos, leaves, axes, allow_unused=allow_unused)
    by_path = dict(zip(paths, owners, strict=True))
    skeleton = treedef.unflatten(range(len(leaves)))
    parts = tuple(_part(group, i, skeleton, by_path) for i, group in enumerate(groups))
    return Selection(treedef, paths, by_path, parts)


def described(tree: Any) -> tuple[list[Leaf], Any]:
    """Returns the properties of leaves that patterns may read, in order, and the structure.

    Raises:
      GroupError: two keys of one container have the same name, such as `1` and `'1'`.
    """
    _check_names(tree)
    values, structure = jax.tree.flatten(tree)
    treedef: Any = structure
    positions = flatten_with_paths(treedef.unflatten(range(len(values))))
    names = {position: names for names, position in positions if position is not None}
    return [Leaf(names[i], value) for i, value in enumerate(values)], treedef


def _check_names(tree: Any) -> None:
    """Raises a `GroupError` if two nodes of the tree have one path."""
    found: dict[Names, Any] = {}
    for keys, _ in jax.tree_util.tree_leaves_with_path(tree):
        names = path_names(keys)
        for n in range(1, len(names) + 1):
            other = found.setdefault(names[:n], keys[:n])
            if other != keys[:n]:
                both = " and ".join(f"`{jax.tree_util.keystr(path)}`" for path in (other, keys[:n]))
                raise GroupError(
                    f"{both} have the same path, `{path_str(names[:n])}`, and could not be "
                    "distinguished; rename one of the keys"
                )


def positions_of(pattern: Any, tree: Any, axes: LogicalAxes | None) -> frozenset[int]:
    """Returns the positions of the leaves of `tree` that a pattern matches."""
    leaves, treedef = described(tree)
    return matched(pattern, treedef.unflatten([leaf.info for leaf in leaves]), leaves, axes)


def _part(
    group: Group, position: int, skeleton: Any, owners: Mapping[Names, int]
) -> GroupSelection:
    keep_keys = not isinstance(group.definition, Frozen) and group.definition.whole_tree
    tree = prune(
        skeleton,
        lambda names: owners[names] == position if names in owners else None,
        keep_keys=keep_keys,
    )
    return GroupSelection(group, tuple(jax.tree.leaves(tree)), jax.tree.structure(tree))
