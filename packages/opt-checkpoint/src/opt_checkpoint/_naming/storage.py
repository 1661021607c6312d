"""What stands in a state for another leaf, or for more digits of a parameter than it holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from opt_core import Optimizer, leaf_groups
from opt_core.protocols import StoresLeaf, StoresParams


def is_stored_leaf(node: Any) -> bool:
    """Whether a node stands for one leaf."""
    return isinstance(node, StoresLeaf)


def is_params_store(node: Any) -> bool:
    """Whether a node has more of the parameters than they hold."""
    return isinstance(node, StoresParams)


def key_of(node: StoresLeaf) -> str:
    """Returns what a schema calls the way in which a leaf is stored."""
    data = node.leaf_storage()
    kind = f"{data['codec']}-v{data['version']}{' squared' if data['squared'] else ''}"
    blocks = f" {data['block']} along {data['axis']}" if data["block"] else ""
    return f"{kind}{blocks} {data['dtype']}"


def storage_of(tree: Any) -> dict[str, Mapping[str, Any]]:
    """Returns what the codes in a state mean, by key."""
    nodes = jax.tree.leaves(tree, is_leaf=is_stored_leaf)
    return {key_of(node): dict(node.leaf_storage()) for node in nodes if is_stored_leaf(node)}


def stored_as(tree: Any) -> Iterator[str]:
    """Yields for each leaf of a state how it stands for another; empty where it does not."""
    extras = dict(_extras_of(tree))
    for node in jax.tree.leaves(tree, is_leaf=is_stored_leaf):
        if is_stored_leaf(node):
            yield from [key_of(node)] * len(jax.tree.leaves(node))
        else:
            yield extras.get(id(node), "")


def _extras_of(tree: Any) -> Iterator[tuple[int, str]]:
    for node in jax.tree.leaves(tree, is_leaf=is_params_store):
        if is_params_store(node):
            field, how = node.params_storage()
            yield from ((id(leaf), how) for leaf in jax.tree.leaves(getattr(node, field)))


@dataclasses.dataclass(frozen=True)
class Extra:
    """What is kept besides one parameter.

    Attributes:
      how: a word of `opt_core.protocols.StoresParams`.
      leaf: the array, or its shape.
    """

    how: str
    leaf: Any


def extras_by_param(optimizer: Optimizer) -> dict[int, Extra]:
    """Returns what is kept besides parameters, by their position among those of the optimizer."""
    tags = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), optimizer.target)
    number = {id(tag): i for i, tag in enumerate(jax.tree.leaves(tags))}
    found: dict[int, Extra] = {}
    for _, part in leaf_groups(optimizer.replace(target=tags)):
        params = jax.tree.leaves(part.target)
        for node in jax.tree.leaves(part.state.param_states, is_leaf=is_params_store):
            if not is_params_store(node):
                continue
            field, how = node.params_storage()
            kept = jax.tree.leaves(getattr(node, field), is_leaf=_is_childless)
            for tag, leaf in zip(params, kept, strict=True):
                if not _is_childless(leaf):
                    found[number[id(tag)]] = Extra(how, leaf)
    return found


def _is_childless(node: Any) -> bool:
    return not jax.tree.leaves(node)
