"""Matching of state leaves to parameters by the structure of the state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import optax

from opt_partition._param_axes import Parameter
from opt_partition._trees import KeyPath, children, is_index


def match_leaves(
    params: Any, state: Any, paths: Sequence[KeyPath], table: Sequence[Parameter]
) -> list[tuple[int, ...]]:
    """Returns the indices of the parameters that each state leaf may belong to.

    A subtree with the containers and keys of the parameters is matched leaf by leaf; a masked
    parameter may be an empty node, and the state of a parameter a subtree. Outside of such
    subtrees, the longest run of keys that is a suffix of a parameter path decides; it may match
    several parameters.
    """
    matches = list(_Mirrors(params).match(state))
    if None not in matches:
        return [(index,) for index in matches if index is not None]
    suffixes: dict[KeyPath, list[int]] = defaultdict(list)
    for index, parameter in enumerate(table):
        for start in range(len(parameter.key_path)):
            suffixes[parameter.key_path[start:]].append(index)

    def match_suffix(path: KeyPath) -> tuple[int, ...]:
        for size in range(len(path), 0, -1):
            for start in range(len(path) - size, -1, -1):
                keys = path[start : start + size]
                # Numeric keys alone occur in chains as well as in lists of parameters.
                if keys in suffixes and not all(map(is_index, keys)):
                    return tuple(suffixes[keys])
        return ()

    return [
        match_suffix(path) if index is None else (index,)
        for path, index in zip(paths, matches, strict=True)
    ]


class _Mirrors:
    """Finds the subtrees of a state with the structure of the parameters."""

    def __init__(self, params: Any) -> None:
        self.kind, self.keys = type(params), _keys(params)
        self.treedef: Any = jax.tree.structure(params)

    def match(self, node: Any) -> Iterator[int | None]:
        """Yields, for each leaf, its parameter if it is in a mirror of all of them."""
        mirrored = self.of(node)
        below = children(node)
        if mirrored is not None:
            for index, child in enumerate(mirrored):
                yield from [index] * len(jax.tree.leaves(child))
        elif below is not None:
            for _, child in below:
                yield from self.match(child)
        elif node is not None:
            yield None

    def of(self, node: Any) -> list[Any] | None:
        """Returns the subtree of each parameter, if a node has the structure of all of them."""
        if self.keys is None:
            return [node]
        if type(node) is not self.kind or _keys(node) != self.keys:  # cheaper than the error below
            return None
        try:
            found: list[Any] = self.treedef.flatten_up_to(node)
        except ValueError:
            return None
        # A chain of states is not a tuple of parameters.
        is_chain = any(isinstance(x, optax.EmptyState) or self._are_inside(x) for x in found)
        return None if is_chain else found

    def _are_inside(self, node: Any) -> bool:
        """Whether a subtree of `node` mirrors the parameters."""
        below = children(node) or ()
        return bool(below) and (
            self.of(node) is not None or any(self._are_inside(child) for _, child in below)
        )


def _keys(node: Any) -> list[Any] | None:
    below = children(node)
    return None if below is None else [key for key, _ in below]
