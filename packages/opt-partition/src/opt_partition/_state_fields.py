"""Names of the optimizer state field that each leaf belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey

from opt_partition._trees import children, key_name

_FIELD_KEYS = (GetAttrKey, FlattenedIndexKey)


def state_fields(state: Any, params: Any) -> list[str]:
    """Returns the field name of every leaf of an optimizer state, e.g. `ScaleByAdamState.mu`.

    This is the innermost field whose container type does not occur in the parameters, so that `mu`
    of an Equinox model is a single field. Leaves outside of such containers are named after the
    first string among their keys.
    """
    return list(_walk(state, None, None, frozenset(_containers(params))))


def _walk(
    node: Any, field: str | None, key: str | None, of_params: frozenset[type]
) -> Iterator[str]:
    """Yields the names of leaves below `node`, which is inside `field` or the string `key`."""
    opened = children(node)
    if opened is None:
        # JAX does not treat None and other nodes without children as leaves.
        yield from [field or key or type(node).__name__] * len(jax.tree.leaves(node))
        return
    container = type(node)
    for child_key, child in opened:
        below, name = field, key
        if isinstance(child_key, _FIELD_KEYS) and container not in of_params:
            below = f"{container.__name__}.{key_name(child_key)}"
        if isinstance(child_key, DictKey) and isinstance(child_key.key, str):
            name = key or child_key.key
        yield from _walk(child, below, name, of_params)


def _containers(tree: Any) -> Iterator[type]:
    """Yields the type of every node of a tree."""
    opened = children(tree)
    if opened is not None:
        yield type(tree)
        for _, child in opened:
            yield from _containers(child)
