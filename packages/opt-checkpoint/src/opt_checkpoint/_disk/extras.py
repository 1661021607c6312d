"""What a run saves besides its optimizer: the leaves of a pytree, and its structure as JSON data.

The structure of `{"position": 3, "rng": [key, None]}` is

    {"dict": [["position", "python"], ["rng", {"list": ["jax", null]}]]}

Leaves are the words that say what they were; `None` is itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from opt_core.extend import LeafInfo, Names, children, named_leaves

from opt_checkpoint._disk.manifest import PYTHON, is_scalar
from opt_checkpoint.errors import LeafError, LoadError

EXTRA: Final = "extra"


def extra_leaves(extras: Any) -> tuple[list[LeafInfo], list[Any]]:
    """Returns the leaves of a pytree and what they are, under `extra/`."""
    try:
        flat = named_leaves(extras)
    except (TypeError, ValueError) as error:
        text = " ".join(str(error).split())[:200]
        raise LeafError(f"`extras`: expected a pytree of named leaves: {text}") from error
    infos = [_extra_info((EXTRA, *path), leaf) for path, leaf in flat]
    return infos, [leaf for _, leaf in flat]


def _extra_info(path: Names, leaf: Any) -> LeafInfo:
    if is_scalar(leaf):
        return LeafInfo(path, (), PYTHON, EXTRA)
    if isinstance(leaf, np.generic | np.ndarray) or hasattr(leaf, "dtype"):
        return LeafInfo(path, tuple(np.shape(leaf)), str(leaf.dtype), EXTRA)
    expected = "an array, a typed PRNG key or a Python scalar"
    raise LeafError(f"`{'/'.join(path)}`: expected {expected}, found {type(leaf).__name__}")


def structure_of(tree: Any) -> Any:
    """Returns the structure of a pytree as JSON data.

    Nodes other than dicts, lists and tuples become dicts by the names of their children; so do keys
    that JSON does not have become strings.
    """
    opened = children(tree)
    if tree is None:
        return None
    if opened is None:
        if isinstance(tree, np.generic | np.ndarray):
            return "numpy" if isinstance(tree, np.ndarray) else "scalar"
        return "python" if is_scalar(tree) else "jax"
    if isinstance(tree, dict):
        named = [(_key(key), child) for key, child in tree.items()]
    elif type(tree) in (list, tuple):
        return {type(tree).__name__: [structure_of(child) for child in tree]}
    else:
        named = list(opened.children)
    return {"dict": [[key, structure_of(child)] for key, child in named]}


def _key(key: Any) -> Any:
    is_exact = key is None or type(key) in (bool, int, float, str)
    return key if is_exact else str(key)


def rebuilt(structure: Any, leaf: Callable[[Names], Any], path: Names = (EXTRA,)) -> Any:
    """Returns a pytree of the leaves at its paths; the inverse of `structure_of`."""
    match structure:
        case None:
            return None
        case "python" | "jax":
            return leaf(path)
        case "numpy":
            return np.array(leaf(path))
        case "scalar":
            return np.asarray(leaf(path))[()]
        case {"list": list(members)} | {"tuple": list(members)}:
            nodes = [rebuilt(x, leaf, (*path, str(i))) for i, x in enumerate(members)]
            return nodes if "list" in structure else tuple(nodes)
        case {"dict": list(members)}:
            return dict(_item(member, leaf, path) for member in members)
    raise LoadError(f"`extras`: {structure!s:.40} is not the structure of a pytree")


def _item(member: Any, leaf: Callable[[Names], Any], path: Names) -> tuple[Any, Any]:
    match member:
        case [None | bool() | int() | float() | str() as key, inner]:
            return key, rebuilt(inner, leaf, (*path, str(key)))
    raise LoadError(f"`extras`: {member!s:.40} is not a key and a structure")
