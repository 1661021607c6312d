"""Leaves that are stored in other arrays, and what an optimizer is without that: plain float32.

A node of a state may stand for one leaf (`opt_core.protocols.StoresLeaf`), or hold more of the
parameters than these can (`StoresParams`). Whoever moves a state to an optimizer that stores it
differently moves it as float32, by `PlainOptimizer`, and lets that store it again. What the arrays
mean only the package of such a node knows: its `Storage` decodes and encodes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import NamedSharding, PartitionSpec

from opt_core._arrays import committed_sharding, is_abstract, placed
from opt_core._groups.multi_optimizer import leaf_groups
from opt_core._optimizer import Optimizer
from opt_core.errors import LeafError
from opt_core.protocols import Storage, StoresLeaf, StoresParams

Carry: TypeAlias = Callable[[Storage, Sequence[Any]], Sequence[Any] | None]
"""From how a leaf is stored and where: the arrays that it is stored in, if they are known."""


def storages(tree: Any) -> list[Storage | None]:
    """Returns for each array of a state how it is stored; `None` for leaves as they are."""
    nodes, ways, _ = _flatten(tree)
    rows = zip(nodes, ways, strict=True)
    return [how for node, how in rows for _ in jax.tree.leaves(node)]


def read_storage(data: Mapping[str, Any], what: str) -> Storage:
    """Returns a storage from its data, read by the package that wrote them."""
    package = data["package"]
    try:
        read = importlib.import_module(package).read_storage
    except (ImportError, AttributeError) as error:
        raise LeafError(
            f"{what}, which only `{package}` can decode: install `{package.replace('_', '-')}`, in "
            "a release that has `read_storage`"
        ) from error
    try:
        storage: Storage = read(data)
    except ValueError as error:
        raise LeafError(f"{what}: {error}") from error
    return storage


def _is_stored_leaf(node: Any) -> bool:
    # `_flatten` has numbers in place of leaves: to check the protocol would take long
    return type(node) is not int and isinstance(node, StoresLeaf)


def _is_params_store(node: Any) -> bool:
    return type(node) is not int and isinstance(node, StoresParams)


def _is_childless(node: Any) -> bool:
    return not jax.tree.leaves(node)


def _flatten(states: Any) -> tuple[list[Any], list[Storage | None], Any]:
    """The nodes of a state in the place of leaves, how they are stored, and what is around them."""
    structure: Any = jax.tree.structure(states)
    numbers = structure.unflatten(range(structure.num_leaves))
    extras: dict[Any, Storage] = {}
    for store in jax.tree.leaves(numbers, is_leaf=_is_params_store):
        if not isinstance(store, int):
            field, how = store.params_storage()
            extras |= dict.fromkeys(jax.tree.leaves(getattr(store, field)), how)
    tree: Any = jax.tree.structure(numbers, is_leaf=_is_stored_leaf)
    places = tree.flatten_up_to(numbers)
    nodes: list[Any] = tree.flatten_up_to(states)
    ways = [
        extras.get(place) if isinstance(place, int) else node.leaf_storage()
        for place, node in zip(places, nodes, strict=True)
    ]
    return nodes, ways, tree


class PlainOptimizer:
    """An optimizer with every leaf as it would be in plain float32, and the way back.

    Args:
      optimizer: of any definition.

    Attributes:
      optimizer: without codes, scales, and what is kept besides parameters. Leaves that stand for
        others are `jax.ShapeDtypeStruct`s of these.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._params, params = jax.tree.flatten(optimizer.target)
        states = optimizer.state.param_states
        self._nodes, self._ways, self._tree = _flatten(states)
        places = _extras_of_params(optimizer)
        self._extras = {i: (how, at) for i, at in places if (how := self._ways[at]) is not None}
        plain = list(self._params)
        for i, (how, at) in self._extras.items():
            arrays = [plain[i], self._nodes[at]]
            plain[i] = _plain(how, arrays, has_value=not is_abstract(plain[i]))
        state = optimizer.state.replace(param_states=self.plain_state(states))
        self.optimizer: Optimizer = optimizer.replace(
            target=jax.tree.unflatten(params, plain), state=state
        )

    def ways(self, count: int) -> list[Storage | None]:
        """Returns how each of so many leaves was stored: parameters first, states last."""
        first = [self._extras.get(i, (None, 0))[0] for i in range(len(self._params))]
        last = [how for how in self._ways if not _is_of_params(how)]
        return [*first, *[None] * (count - len(first) - len(last)), *last]

    def plain_state(self, states: Any) -> Any:
        """Returns `param_states`, or those of a group, with leaves in place of arrays for them."""
        nodes, ways, tree = _flatten(states)
        return tree.unflatten(map(_plain_node, nodes, ways))

    def stored_again(self, plain: Optimizer, carry: Sequence[Carry]) -> Optimizer:
        """Returns an optimizer that stores its leaves, and places them, as the given one does."""
        target, tree = jax.tree.flatten(plain.target)
        nodes = list(self._nodes)
        for i, (how, at) in self._extras.items():
            were = [self._params[i], nodes[at]]
            target[i], nodes[at] = _stored(how, were, target[i], carry[i])
        states = jax.tree.leaves(plain.state.param_states)
        leaves = iter(zip(states, carry[len(carry) - len(states) :], strict=True))
        for at, (node, way) in enumerate(zip(self._nodes, self._ways, strict=True)):
            if not _is_of_params(way):
                nodes[at], known = next(leaves)
                if way is not None:
                    arrays = _stored(way, jax.tree.leaves(node), nodes[at], known)
                    nodes[at] = jax.tree.unflatten(jax.tree.structure(node), arrays)
        state = plain.state.replace(param_states=self._tree.unflatten(nodes))
        again: Optimizer = plain.replace(target=jax.tree.unflatten(tree, target), state=state)
        return again


def _is_of_params(how: Storage | None) -> bool:
    return how is not None and not how.fields


def _extras_of_params(optimizer: Optimizer) -> Iterator[tuple[int, int]]:
    """Positions of parameters, with those of what is kept besides them among the state's nodes."""
    nodes, _, tree = _flatten(optimizer.state.param_states)
    numbers: Any = jax.tree.structure(optimizer.target)
    tags = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.tree.leaves(optimizer.target)]
    number = {id(tag): i for i, tag in enumerate(tags)}
    states = tree.unflatten(range(len(nodes)))
    state = optimizer.state.replace(param_states=states)
    for _, part in leaf_groups(optimizer.replace(target=numbers.unflatten(tags), state=state)):
        params = jax.tree.leaves(part.target, is_leaf=_is_childless)
        for store in jax.tree.leaves(part.state.param_states, is_leaf=_is_params_store):
            if _is_params_store(store):
                kept = getattr(store, store.params_storage()[0])
                found = jax.tree.leaves(kept, is_leaf=_is_childless)
                for tag, at in zip(params, found, strict=True):
                    if not _is_childless(at):
                        yield number[id(tag)], at


def _plain(how: Storage, arrays: Sequence[Any], *, has_value: bool) -> Any:
    """The leaf that arrays stand for, or its shape."""
    if has_value:
        return how.decode(*arrays)
    first = arrays[0]
    return jax.ShapeDtypeStruct(first.shape, how.dtype, sharding=committed_sharding(first))


def _plain_node(node: Any, how: Storage | None) -> Any:
    """What a plain state has in the place of a node."""
    if how is None:
        return node
    arrays = jax.tree.leaves(node)
    if _is_of_params(how):
        return ()
    return _plain(how, arrays, has_value=isinstance(arrays[0], jax.core.Tracer))


def _stored(how: Storage, arrays: Sequence[Any], value: Any, carry: Carry) -> Iterator[Any]:
    """The arrays of a value, where those of another are."""
    places = _places(arrays, value)
    known = carry(how, places)
    return map(placed, how.encode(value) if known is None else known, places)


def _places(leaves: Sequence[Any], value: Any) -> list[Any]:
    """Where arrays are to lie: their own places, else those of the value that they stand for."""
    like: Any = committed_sharding(value)
    whole = like.update(spec=PartitionSpec()) if isinstance(like, NamedSharding) else like
    return [committed_sharding(x) or (like if x.shape == value.shape else whole) for x in leaves]
