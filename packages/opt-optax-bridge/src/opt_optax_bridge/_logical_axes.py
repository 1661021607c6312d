"""Logical axes of a state whose subtrees mirror the parameters.

A subtree of the state that has the containers and keys of the parameters, holes allowed, follows
them leaf by leaf. A leaf of another shape than its parameter follows nothing, and so does every
leaf outside such a subtree: those get `None`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from opt_core import children, flatten_with_paths, path_str
from opt_core.errors import TreeMismatchError


def align_axes(params: Any, state: Any, param_axes: Any) -> tuple[Any, Any]:
    """Returns the axes of the parameters and of the state, in their own containers.

    Args:
      params: parameters; arrays or `jax.ShapeDtypeStruct` leaves.
      state: the state of a transformation for them.
      param_axes: a `PartitionSpec` (or `None`) per parameter; containers may be of another kind.

    Raises:
      TreeMismatchError: a parameter has no axes, or axes name no parameter; lists the paths.
    """
    axes = dict(flatten_with_paths(param_axes))
    paths = dict.fromkeys(names for names, _ in flatten_with_paths(params))
    if axes.keys() != paths.keys():
        lines = [f"  {path_str(p)}: no axes are given" for p in paths if p not in axes]
        lines += [f"  {path_str(p)}: there is no such parameter" for p in axes if p not in paths]
        raise TreeMismatchError("`param_axes` do not fit the parameters:\n" + "\n".join(lines))
    target = _map_leaves(lambda names, _: axes[names], params, ())
    return target, _align(params, state, axes)


def _align(params: Any, state: Any, axes: Mapping[tuple[str, ...], Any]) -> Any:
    if _mirrors(params, state):
        return _axes_of_mirror(params, state, axes, ())
    node = children(state)
    if node is None:
        return None
    return node.rebuild([_align(params, child, axes) for _, child in node.children])


def _mirrors(params: Any, state: Any) -> bool:
    """Whether `state` looks like `params`, where an empty node may stand for any subtree."""
    theirs, ours = children(params), children(state)
    if ours is not None and not ours.children:
        return theirs is None or bool(theirs.children) or type(params) is type(state)
    if theirs is None or ours is None:
        return theirs is None and ours is None
    if type(params) is not type(state) or len(theirs.children) != len(ours.children):
        return False
    return all(
        a == b and _mirrors(p, s)
        for (a, p), (b, s) in zip(theirs.children, ours.children, strict=True)
    )


def _axes_of_mirror(
    params: Any, state: Any, axes: Mapping[tuple[str, ...], Any], names: tuple[str, ...]
) -> Any:
    theirs, ours = children(params), children(state)
    if ours is None:
        same = state is not None and np.shape(state) == np.shape(params)
        return axes[names] if same else None
    if theirs is None:
        return state
    below = dict(theirs.children)
    return ours.rebuild(
        [_axes_of_mirror(below[n], child, axes, (*names, n)) for n, child in ours.children]
    )


def _map_leaves(function: Any, tree: Any, names: tuple[str, ...]) -> Any:
    node = children(tree)
    if node is None:
        return function(names, tree)
    return node.rebuild([_map_leaves(function, c, (*names, n)) for n, c in node.children])
