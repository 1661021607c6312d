"""Which parameter a leaf of the state belongs to, read from the structure of the state."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import optax

from opt_partition._axes.param_axes import Parameter
from opt_partition._trees import KeyPath, flatten_with_paths, is_index

_EMPTY_STATE = jax.tree.structure(optax.EmptyState())


@dataclasses.dataclass(frozen=True)
class Match:
    """The place of a parameter in the path of a state leaf.

    Attributes:
      parameter: its index.
      start: where its path begins in the leaf's.
      stop: where it ends there.
    """

    parameter: int
    start: int
    stop: int


def match_leaves(params: Any, state: Any, table: Sequence[Parameter]) -> list[tuple[Match, ...]]:
    """Returns for every leaf of the state the parameters that it may belong to.

    A subtree with the containers and keys of the parameters belongs to them leaf by leaf; empty
    nodes may stand for parameters that are masked, and what is a leaf there may be a subtree here.
    Where there is none, the longest run of keys that ends the path of a parameter decides, and it
    may end that of several.

    Args:
      params: the parameters.
      state: the state.
      table: the parameters in JAX's order.
    """
    lengths = [len(parameter.key_path) for parameter in table]
    matches = _match_mirrors(jax.tree.structure(params), jax.tree.structure(state), lengths)
    paths = [path for path, _ in flatten_with_paths(state)]
    result: list[tuple[Match, ...]] = [() if m is None else (m,) for m in matches]
    if any(match is None for match in matches):
        suffixes = _suffixes(table)
        for index, (match, path) in enumerate(zip(matches, paths, strict=True)):
            if match is None:
                result[index] = _match_suffix(path, suffixes)
    return result


class _Params:
    """A tree of parameters, opened once: what a tree definition is asked costs its size.

    Attributes:
      treedef: the tree definition.
      kind: type and keys of its root; `None` if that is a leaf.
      children: its subtrees.
    """

    def __init__(self, treedef: Any) -> None:
        self.treedef = treedef
        self.kind = treedef.node_data()
        self.num_leaves: int = treedef.num_leaves
        self.children = [_Params(child) for child in treedef.children()]

    @property
    def is_leaf(self) -> bool:
        return self.kind is None and self.num_leaves == 1


def _match_mirrors(params: Any, state: Any, lengths: Sequence[int]) -> list[Match | None]:
    """For each leaf of the tree definition `state`, its place in the outermost mirror."""
    root = _Params(params)
    matches: list[Match | None] = []

    def visit(node: Any, depth: int) -> None:
        mirrored = _mirror(root, node)
        if mirrored is not None:
            matches.extend(Match(index, depth, depth + lengths[index]) for index in mirrored)
        elif not node.children():
            matches.extend([None] * node.num_leaves)
        else:
            for child in node.children():
                visit(child, depth + 1)

    visit(state, 0)
    return matches


def _mirror(root: _Params, node: Any) -> list[int] | None:
    """The parameter of each leaf of `node` where that mirrors the parameters; else `None`."""
    if node.num_leaves == 0:
        return None
    if node == root.treedef:
        return list(range(root.num_leaves))
    found: list[int] = []
    return found if _follow(root, node, 0, found, root) else None


def _follow(params: _Params, node: Any, first: int, found: list[int], root: _Params) -> bool:
    if node.num_leaves == 0:
        return bool(node != _EMPTY_STATE)  # a state that holds nothing masks nothing
    if params.is_leaf:
        # A chain of two states is no tree of two parameters: what is below mirrors them all.
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
    """Whether a subtree of `node` mirrors all parameters, which are no single leaf."""
    return any(
        _mirror(root, child) is not None or _holds_mirror(child, root)
        for child in node.children()
        if child.node_data() is not None
    )


def _suffixes(table: Sequence[Parameter]) -> Mapping[KeyPath, list[tuple[int, int]]]:
    """The parameters, and where it begins in their paths, of every end of a path."""
    suffixes: dict[KeyPath, list[tuple[int, int]]] = defaultdict(list)
    for index, parameter in enumerate(table):
        path = parameter.key_path
        for start in range(len(path)):
            suffixes[path[start:]].append((index, start))
    return suffixes


def _match_suffix(
    path: KeyPath, suffixes: Mapping[KeyPath, list[tuple[int, int]]]
) -> tuple[Match, ...]:
    for start, stop in _windows(len(path)):
        # A number alone says nothing: chains, lists of parameters and lists of theirs have it.
        is_named = not all(map(is_index, path[start:stop]))
        if is_named and (found := suffixes.get(path[start:stop])):
            return tuple(Match(index, start, stop) for index, _ in found)
    return ()


def _windows(length: int) -> Iterator[tuple[int, int]]:
    """Longest first; of one length, the last first."""
    for size in range(length, 0, -1):
        for start in range(length - size, -1, -1):
            yield start, start + size
