"""Gradients must match the parameters; checked once, at trace time, listing every path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from opt_core._paths import Names, children, flatten_with_paths, path_str
from opt_core.errors import TreeMismatchError

_ABSENT: Any = object()
_ADVICE = (
    "Differentiate with respect to the optimizer's own `target`, or convert the gradients' "
    "containers to those of the parameters."
)
_OF_EXAMPLES = (
    "Groups do not take the gradients of every example: give these to a definition alone, and "
    "divide the parameters inside it, with `optax.partition`."
)


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
    gradients, problems = _align(params, grads, None)
    problems += _lines(
        params, gradients, lambda param, grad: _shape(param, grad) or _numbers(param, grad)
    )
    expected: Any = jax.tree.structure(params)
    found: Any = jax.tree.structure(grads)
    if not problems and expected != found:
        problems.append(f"static data: expected {expected}, found {found}")
    if problems:
        raise _mismatch(problems)


def gradient_leaves(params: Any, grads: Any, *, optional: frozenset[int]) -> list[Any]:
    """Returns the gradient of every leaf of `params`, in order, of its shape.

    Leaves at the `optional` positions may have `None`, or nothing at all: then it is `None`.
    """
    gradients, problems = _align(params, grads, optional)
    problems += _lines(params, gradients, _shape)
    if problems:
        pairs = zip(jax.tree.leaves(params), gradients, strict=True)
        are_stacked = all(np.shape(x)[1:] == np.shape(param) for param, x in pairs if _is_there(x))
        raise _mismatch(problems, _OF_EXAMPLES if are_stacked else _ADVICE)
    return gradients


def _align(params: Any, grads: Any, optional: frozenset[int] | None) -> tuple[list[Any], list[str]]:
    """Returns the gradient of every leaf, and lines about other containers."""
    expected: Any = jax.tree.structure(params)
    if expected == jax.tree.structure(grads):
        return jax.tree.leaves(grads), []
    problems: list[str] = []
    return list(_walk(params, grads, (), 0, optional, problems)), problems


def _walk(
    param: Any,
    grad: Any,
    names: Names,
    start: int,
    optional: frozenset[int] | None,
    problems: list[str],
) -> Iterator[Any]:
    """Yields the gradient of every leaf of a subtree, the first of which is number `start`."""
    count = len(jax.tree.leaves(param))
    expected, found = children(param), None if grad is _ABSENT else children(grad)
    is_empty = grad is _ABSENT or grad is None or (found is not None and not found.children)
    if is_empty and optional is not None and optional.issuperset(range(start, start + count)):
        yield from [None] * count
        return
    line = f"{path_str(names)}: expected {_kind(param)}, found {_kind(grad)}"
    if param is None:  # a container without leaves
        problems.extend([] if grad is None else [line])
        return
    if expected is None:
        is_leaf = not is_empty and found is None
        problems.extend([] if is_leaf else [line])
        yield grad if is_leaf else _ABSENT
        return
    if found is None or type(param) is not type(grad):
        problems.append(line)
        yield from [_ABSENT] * count
        return
    theirs = dict(found.children)
    for name, child in expected.children:
        there = theirs.pop(name, _ABSENT)
        yield from _walk(child, there, (*names, name), start, optional, problems)
        start += len(jax.tree.leaves(child))
    for name, child in theirs.items():
        problems.append(f"{path_str((*names, name))}: expected nothing, found {_kind(child)}")


def _lines(params: Any, gradients: list[Any], check: Callable[[Any, Any], str]) -> list[str]:
    """What is wrong with gradients that are there, by path."""
    pairs = zip(jax.tree.leaves(params), gradients, strict=True)
    lines = {
        i: line
        for i, (param, grad) in enumerate(pairs)
        if _is_there(grad) and (line := check(param, grad))
    }
    if not lines:
        return []
    paths = [names for names, leaf in flatten_with_paths(params) if leaf is not None]
    return [f"{path_str(paths[i])}: {line}" for i, line in lines.items()]


def _is_there(grad: Any) -> bool:
    return grad is not None and grad is not _ABSENT


def _mismatch(problems: list[str], advice: str = _ADVICE) -> TreeMismatchError:
    lines = [f"  {line}" for line in sorted(problems)]
    return TreeMismatchError("\n".join(["`grads` do not match the parameters:", *lines, advice]))


def _shape(param: Any, grad: Any) -> str:
    if np.shape(param) == np.shape(grad):
        return ""
    return f"expected shape {np.shape(param)}, found {np.shape(grad)}"


def _numbers(param: Any, grad: Any) -> str:
    """Why a gradient loses more than precision; Python numbers have no dtype."""
    dtype, found = (getattr(leaf, "dtype", None) for leaf in (param, grad))
    if dtype is None or found is None or not jnp.issubdtype(dtype, jnp.inexact):
        return ""
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    fits = jnp.issubdtype(found, jnp.inexact if is_complex else jnp.floating)
    return "" if fits else f"expected a gradient of {dtype}, found {found}"


def _kind(node: Any) -> str:
    if node is _ABSENT:
        return "nothing"
    if children(node) is not None:
        return f"a {type(node).__name__}"
    return "None" if node is None else f"an array of shape {np.shape(node)}"
