"""Gradients must match the parameters; checked once, at trace time, listing every path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from opt_core._paths import children, path_str
from opt_core.errors import TreeMismatchError


def check_gradients(params: Any, grads: Any) -> None:
    """Raises unless `grads` has the containers, keys, shapes and kinds of numbers of `params`.

    Costs nothing in a compiled step. Gradients may be of another precision. Those of floating-point
    parameters must be floating-point: complex ones would lose their imaginary part, and integers or
    booleans are not gradients. Those of complex parameters may be real.

    Args:
      params: the parameters.
      grads: the gradients.

    Raises:
      TreeMismatchError: lists every path that differs.
    """
    leaves, grad_leaves = jax.tree.leaves(params), jax.tree.leaves(grads)
    treedef: Any = jax.tree.structure(params)
    grad_treedef: Any = jax.tree.structure(grads)
    if treedef == grad_treedef and all(map(_is_gradient_of, leaves, grad_leaves)):
        return
    found = list(_differences(params, grads, ()))
    if not found:
        found = [f"static data: expected {treedef}, found {grad_treedef}"]
    raise _mismatch(found)


def gradient_leaves(params: Any, grads: Any, needed: Set[tuple[str, ...]]) -> list[Any]:
    """Returns the gradient of every leaf of `params`, in order.

    Args:
      params: the parameters.
      grads: a tree like them. Where no leaf is needed it may have `None`, or nothing at all.
      needed: the paths of the leaves that must have a gradient.

    Returns:
      One gradient per leaf, of any shape; `None` for those that are not needed and not there.

    Raises:
      TreeMismatchError: containers or keys differ; lists every path.
    """
    treedef: Any = jax.tree.structure(grads)
    expected: Any = jax.tree.structure(params)
    if treedef == expected:
        return jax.tree.leaves(grads)
    prefixes = {names[:n] for names in needed for n in range(len(names) + 1)}
    problems: list[str] = []

    def walk(param: Any, grad: Any, names: tuple[str, ...]) -> Iterator[Any]:
        count = len(jax.tree.leaves(param))
        opened, found = children(param), children(grad)
        if names not in prefixes and (grad is None or (found is not None and not found.children)):
            yield from [None] * count
            return
        if opened is None:
            if not count:  # `None`, which is not a leaf
                problems.extend(_extra(grad, names))
                return
            if grad is None or found is not None:
                problems.append(f"{path_str(names)}: expected {_leaf(param)}, found {_kind(grad)}")
            yield grad
            return
        if found is None or type(param) is not type(grad):
            problems.append(f"{path_str(names)}: expected {_kind(param)}, found {_kind(grad)}")
            yield from [None] * count
            return
        theirs = dict(found.children)
        for name, child in opened.children:
            if name in theirs:
                yield from walk(child, theirs.pop(name), (*names, name))
            elif (*names, name) in prefixes:
                line = f"{path_str((*names, name))}: expected {_kind(child)}, found nothing"
                problems.append(line)
            else:
                yield from [None] * len(jax.tree.leaves(child))
        for name, child in theirs.items():
            line = f"{path_str((*names, name))}: expected nothing, found {_kind(child)}"
            problems.append(line)

    found = list(walk(params, grads, ()))
    if problems or len(found) != expected.num_leaves:
        raise _mismatch(problems or [f"static data: expected {expected}, found {treedef}"])
    return found


def _extra(grad: Any, names: tuple[str, ...]) -> list[str]:
    where = f"{path_str(names)}: expected nothing, found {_kind(grad)}"
    return [] if grad is None else [where]


def check_frozen_gradients(
    leaves: Iterable[tuple[tuple[str, ...], Any, Any]], *, is_per_example: Callable[[], bool]
) -> None:
    """Raises a `TreeMismatchError` for unused gradients of another shape.

    Args:
      leaves: path, parameter and gradient (`None` where there is none) of every frozen leaf.
      is_per_example: returns whether gradients have a leading axis of examples; called if they may.
    """
    odd = [
        (names, param, grad)
        for names, param, grad in leaves
        if grad is not None and np.shape(grad) != np.shape(param)
    ]
    has_axis = all(np.shape(grad)[1:] == np.shape(param) for _, param, grad in odd)
    if odd and not (has_axis and is_per_example()):
        raise _mismatch(
            [f"{path_str(n)}: expected {_leaf(p)}, found {_kind(g)}" for n, p, g in odd]
        )


def _mismatch(found: list[str]) -> TreeMismatchError:
    return TreeMismatchError(
        "`grads` do not match the parameters:\n"
        + "\n".join(f"  {line}" for line in found)
        + "\nDifferentiate with respect to the optimizer's own `target`, or convert the gradients' "
        "containers to those of the parameters."
    )


def _is_gradient_of(param: Any, grad: Any) -> bool:
    return np.shape(param) == np.shape(grad) and _same_numbers(param, grad)


def _same_numbers(param: Any, grad: Any) -> bool:
    """Whether only precision is lost in a gradient; Python numbers have no dtype."""
    dtype, found = (getattr(leaf, "dtype", None) for leaf in (param, grad))
    if dtype is None or found is None or not jnp.issubdtype(dtype, jnp.inexact):
        return True
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    return bool(jnp.issubdtype(found, jnp.inexact if is_complex else jnp.floating))


def _differences(params: Any, grads: Any, names: tuple[str, ...]) -> Iterator[str]:
    expected, found = children(params), children(grads)
    path = path_str(names)
    if expected is None and found is None:
        if (params is None) != (grads is None):
            yield f"{path}: expected {_leaf(params)}, found {_leaf(grads)}"
        elif np.shape(params) != np.shape(grads):
            yield f"{path}: expected shape {np.shape(params)}, found {np.shape(grads)}"
        elif not _same_numbers(params, grads):
            yield f"{path}: expected a gradient of {params.dtype}, found {grads.dtype}"
        return
    if expected is None or found is None or type(params) is not type(grads):
        yield f"{path}: expected {_kind(params)}, found {_kind(grads)}"
        return
    theirs = dict(found.children)
    for name, child in expected.children:
        if name in theirs:
            yield from _differences(child, theirs.pop(name), (*names, name))
        else:
            yield f"{path_str((*names, name))}: expected {_kind(child)}, found nothing"
    for name, child in theirs.items():
        yield f"{path_str((*names, name))}: expected nothing, found {_kind(child)}"


def _kind(node: Any) -> str:
    return _leaf(node) if children(node) is None else f"a {type(node).__name__}"


def _leaf(leaf: Any) -> str:
    return "None" if leaf is None else f"an array of shape {np.shape(leaf)}"
