"""The role of each leaf of a state: the parameter it follows, and as what.

Two states match where their leaves have the same roles. A role consists of types and names along
the path, so Adam's second moment is not confused with AdaBelief's, nor one parameter's with
another's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from opt_core._paths import Names, children, flatten_with_paths

Steps: TypeAlias = tuple[tuple[type, str], ...]


class Role(NamedTuple):
    """The role of a leaf of a state.

    Attributes:
      outer: types and names down to where the containers of the parameters begin.
      param: the path of the parameter that it follows, if it follows one.
      inner: types and names below the parameter's place.
    """

    outer: Steps
    param: Names | None
    inner: Steps


def roles(params: Any, param_states: Any, *, whole_tree: bool = False) -> list[Role]:
    """Returns the role of every leaf of a state.

    A part of the state that has the containers of the parameters follows them. Empty containers may
    differ: where a leaf belongs to another group, the parameters have `()` and the state of
    `optax.masked` a `MaskedNode`.

    A tuple may be a container of the parameters or, for instance, the state of a chain. Shapes
    decide: it is not the parameters' if something inside it has their containers and exact shapes,
    unless it has an entry per parameter whose leaves all have the parameter's shape.

    Args:
      params: the parameters; arrays, or anything that has shapes.
      param_states: the state that belongs to them.
      whole_tree: whether there is one state for all parameters, as in Optax; then the innermost
        containers are the parameters'.

    Returns:
      One role per leaf, in the order of `jax.tree.leaves(param_states)`.

    Examples:
      >>> params = {'w': 1.0, 'b': 2.0}
      >>> found = roles(params, (3, {'w': 4.0, 'b': {'v': 5.0}}))
      >>> [(role.param, [name for _, name in role.inner]) for role in found]
      [(None, []), (('b',), ['v']), (('w',), [])]
      >>> found = roles((np.ones(2), np.ones(3)), (7, (np.ones(2), np.ones(3))))
      >>> [role.param for role in found]
      [None, ('0',), ('1',)]
    """
    known = [(names, leaf) for names, leaf in flatten_with_paths(params) if leaf is not None]
    return list(_walk(param_states, (), _Params(_open(params), known, whole_tree)))


class _Opened(NamedTuple):
    """A tree of parameters, opened once, with which every part of a state is compared."""

    kind: type
    names: Sequence[str]
    children: Sequence[_Opened] | None
    size: int


def _open(params: Any) -> _Opened:
    opened = children(params)
    if opened is None:
        is_leaf = params is not None
        return _Opened(type(params), (), None if is_leaf else (), int(is_leaf))
    inner = [_open(child) for _, child in opened.children]
    names = [name for name, _ in opened.children]
    return _Opened(type(params), names, inner, sum(child.size for child in inner))


class _Params(NamedTuple):
    """The parameters, their leaves by path, and whether the state is one for all of them."""

    tree: _Opened
    leaves: Sequence[tuple[Names, Any]]
    whole_tree: bool

    def follows(self, node: Any, parts: Sequence[Any]) -> bool:
        """Whether a node with the containers of the parameters follows them."""
        if self.matches(parts):
            return True
        if not self.whole_tree and (self.tree.children is None or self._is_per_parameter(parts)):
            return True
        return not self._has_match(node)

    def matches(self, parts: Sequence[Any]) -> bool:
        """Whether there is one leaf of the parameter's shape, or nothing, for each."""
        return self._is_per_parameter(parts) and all(
            not _steps(part) or children(part) is None for part in parts
        )

    def _is_per_parameter(self, parts: Sequence[Any]) -> bool:
        return all(
            np.shape(leaf) == np.shape(param)
            for (_, param), part in zip(self.leaves, parts, strict=True)
            for leaf in jax.tree.leaves(part)
        )

    def _has_match(self, node: Any) -> bool:
        """Whether something inside of a node has the parameters' containers and shapes."""
        opened = children(node)
        for _, child in opened.children if opened is not None else ():
            parts = _parts(self.tree, child) if jax.tree.leaves(child) else None
            if (parts is not None and self.matches(parts)) or self._has_match(child):
                return True
        return False


def _walk(node: Any, outer: Steps, params: _Params) -> Iterator[Role]:
    parts = _parts(params.tree, node) if params.leaves else None
    if parts is not None and params.follows(node, parts):
        for (names, _), part in zip(params.leaves, parts, strict=True):
            for inner in _steps(part):
                yield Role(outer, names, inner)
        return
    opened = children(node)
    if opened is None:
        if node is not None:
            yield Role(outer, None, ())
        return
    for name, child in opened.children:
        yield from _walk(child, (*outer, (type(node), name)), params)


def _parts(params: _Opened, node: Any) -> list[Any] | None:
    """What `node` has at each parameter, or `None` where it does not have their containers."""
    if params.children is None:
        return [node]
    if not jax.tree.leaves(node):
        return [node] * params.size
    if params.size == 0 or params.kind is not type(node):
        return None
    opened = children(node)
    if opened is None or list(params.names) != [name for name, _ in opened.children]:
        return None
    found: list[Any] = []
    for param, (_, child) in zip(params.children, opened.children, strict=True):
        parts = _parts(param, child)
        if parts is None:
            return None
        found += parts
    return found


def _steps(node: Any, names: Steps = ()) -> list[Steps]:
    """Types and names along the path of every leaf."""
    opened = children(node)
    if opened is None:
        return [] if node is None else [names]
    return [
        found
        for name, child in opened.children
        for found in _steps(child, (*names, (type(node), name)))
    ]
