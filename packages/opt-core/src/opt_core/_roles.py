"""What each leaf of a state is for: which parameter it follows, and as what.

Two states fit where their leaves have the same roles. A role is made of types and names along the
path, so Adam's second moment is not taken for AdaBelief's, nor one parameter's for another's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import jax

from opt_core._groups import Names
from opt_core._paths import children, flatten_with_paths

Steps: TypeAlias = tuple[tuple[type, str], ...]


class Role(NamedTuple):
    """What a leaf of a state is for.

    Attributes:
      outer: types and names down to where the containers of the parameters begin.
      param: the path of the parameter that it follows, if it follows one.
      inner: types and names below the parameter's place.
    """

    outer: Steps
    param: Names | None
    inner: Steps


def roles(params: Any, param_states: Any) -> list[Role]:
    """Returns the role of every leaf of a state.

    A part of the state that has the containers of the parameters is taken to follow them.

    Args:
      params: the parameters.
      param_states: the state that belongs to them.

    Returns:
      One role per leaf, in the order of `jax.tree.leaves(param_states)`.

    Examples:
      >>> params = {'w': 1.0, 'b': 2.0}
      >>> found = roles(params, (3, {'w': 4.0, 'b': {'v': 5.0}}))
      >>> [(role.param, [name for _, name in role.inner]) for role in found]
      [(None, []), (('b',), ['v']), (('w',), [])]
    """
    treedef = jax.tree.structure(params)
    paths = [names for names, leaf in flatten_with_paths(params) if leaf is not None]
    return list(_walk(param_states, (), treedef, paths))


def _walk(node: Any, outer: Steps, treedef: Any, paths: list[Names]) -> Iterator[Role]:
    parts = _parts(node, treedef)
    if parts is not None:
        for names, part in zip(paths, parts, strict=True):
            for inner in _steps(part, ()):
                yield Role(outer, names, inner)
        return
    opened = children(node)
    if opened is None:
        if node is not None:
            yield Role(outer, None, ())
        return
    for name, child in opened.children:
        yield from _walk(child, (*outer, (type(node), name)), treedef, paths)


def _parts(node: Any, treedef: Any) -> list[Any] | None:
    """What `node` has at each parameter, or `None` where it does not have their containers."""
    if treedef.num_leaves == 0:
        return None
    try:
        parts: list[Any] = treedef.flatten_up_to(node)
    except (ValueError, TypeError, KeyError):
        return None
    return parts


def _steps(node: Any, names: Steps) -> Iterator[Steps]:
    opened = children(node)
    if opened is None:
        if node is not None:
            yield names
        return
    for name, child in opened.children:
        yield from _steps(child, (*names, (type(node), name)))
