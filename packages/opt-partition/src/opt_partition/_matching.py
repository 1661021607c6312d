"""Matching of state leaves to parameters by the structure of the state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import optax

from opt_partition._param_axes import Parameter
from opt_partition._trees import KeyPath, is_index

_EMPTY_STATE = jax.tree.structure(optax.EmptyState())


def match_leaves(
    params: Any, state: Any, paths: Sequence[KeyPath], table: Sequence[Parameter]
) -> list[tuple[int, ...]]:
    """Returns the indices of the parameters that each state leaf may belong to.

    A subtree with the containers and keys of the parameters is matched leaf by leaf; masked
    parameters may be empty nodes, and the state of a parameter may be a subtree. Outside of such
    subtrees, the longest run of keys that is a suffix of a parameter path decides; it may match
    several parameters.
    """
    matches = _match_mirrors(jax.tree.structure(params), jax.tree.structure(state))
    if None not in matches:
        return [(index,) for index in matches if index is not None]
    suffixes = _suffixes(table)
    return [
        _match_suffix(path, suffixes) if index is None else (index,)
        for path, index in zip(paths, matches, strict=True)
    ]


class _Params:
    """A tree of parameters, expanded once, as each query of a tree definition takes linear time."""

    def __init__(self, treedef: Any) -> None:
        self.treedef = treedef
        self.kind = treedef.node_data()
        self.num_leaves: int = treedef.num_leaves
        self.children = [_Params(child) for child in treedef.children()]

    @property
    def is_leaf(self) -> bool:
        return self.kind is None and self.num_leaves == 1


def _match_mirrors(params: Any, state: Any) -> list[int | None]:
    """Returns, for each leaf of the tree definition `state`, its parameter in a mirror."""
    root = _Params(params)
    matches: list[int | None] = []

    def visit(node: Any) -> None:
        mirrored = _mirror(root, node)
        if mirrored is not None:
            matches.extend(mirrored)
        elif not node.children():
            matches.extend([None] * node.num_leaves)
        else:
            for child in node.children():
                visit(child)

    visit(state)
    return matches


def _mirror(root: _Params, node: Any) -> list[int] | None:
    """Returns the parameter of each leaf of `node` if it mirrors the parameters, else `None`."""
    if node.num_leaves == 0:
        return None
    if node == root.treedef:
        return list(range(root.num_leaves))
    found: list[int] = []
    return found if _follow(root, node, 0, found, root) else None


def _follow(params: _Params, node: Any, first: int, found: list[int], root: _Params) -> bool:
    if node.num_leaves == 0:
        return bool(node != _EMPTY_STATE)  # an empty state is not a mask
    if params.is_leaf:
        # A tuple of states is not a tuple of parameters if an entry mirrors all of them.
        if not root.is_leaf and _holds_mirror(node, root):
            return False
        found.extend([first] * node.num_leaves)
        return True
    below = node.children()
    if len(below) != len(params.children) or params.kind != node.node_data():
        return False
    for theirs, child in zip(params.children, below, strict=True):
        if not _follow(theirs, child, first, found, root):
            return False
        first += theirs.num_leaves
    return True


def _holds_mirror(node: Any, root: _Params) -> bool:
    """Whether a subtree of `node` mirrors all parameters, which are not a single leaf."""
    return any(
        _mirror(root, child) is not None or _holds_mirror(child, root)
        for child in node.children()
        if child.node_data() is not None
    )


def _suffixes(table: Sequence[Parameter]) -> Mapping[KeyPath, list[int]]:
    """Maps every suffix of a parameter path to the parameters."""
    suffixes: dict[KeyPath, list[int]] = defaultdict(list)
    for index, parameter in enumerate(table):
        path = parameter.key_path
        for start in range(len(path)):
            suffixes[path[start:]].append(index)
    return suffixes


def _match_suffix(path: KeyPath, suffixes: Mapping[KeyPath, list[int]]) -> tuple[int, ...]:
    for start, stop in _windows(len(path)):
        # Numeric keys alone are ambiguous: they occur in chains as well as in lists of parameters.
        is_named = not all(map(is_index, path[start:stop]))
        if is_named and (indices := suffixes.get(path[start:stop])):
            return tuple(indices)
    return ()


def _windows(length: int) -> Iterator[tuple[int, int]]:
    """Yields all windows, longest first, and of equal length the last first."""
    for size in range(length, 0, -1):
        for start in range(length - size, -1, -1):
            yield start, start + size
