"""How the leaves of a state are stored, and what an optimizer is without that: plain float32.

A node of a state may stand for one leaf, of which it has codes (`opt_core.protocols.StoresLeaf`),
or hold more of the parameters than these can (`StoresParams`). Whoever moves a state to an
optimizer that stores it differently moves it as float32, by `PlainOptimizer`, and lets that store
it again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from opt_core._groups.leaf_groups import leaf_groups
from opt_core._optimizer import Optimizer
from opt_core._shardings import committed_sharding, placed
from opt_core.protocols import StoresLeaf, StoresParams

__all__ = [
    "EXTRAS",
    "PlainOptimizer",
    "decode",
    "join",
    "split",
    "storages",
    "stored_as",
]

EXTRAS: Final = frozenset({"f32", "remainder", "kahan"})
"""What may be kept besides a parameter: the words of `opt_core.protocols.StoresParams`."""

Carry: TypeAlias = Callable[[str, Sequence[Any]], Sequence[Any] | None]
"""Given how a leaf is stored and where, returns the arrays that it is stored in, if they are known.

They are codes and scales, or a parameter and what is kept besides it.
"""


def storages(tree: Any) -> dict[str, Mapping[str, Any]]:
    """Returns what the codes in a state mean: see `StoresLeaf.leaf_storage`; by name."""
    nodes, ways, _ = _flatten(tree)
    found = zip(nodes, ways, strict=True)
    return {how: dict(node.leaf_storage()) for node, how in found if how and how not in EXTRAS}


def stored_as(tree: Any) -> Iterator[str]:
    """Yields for each leaf of a state how it stands for another, or for digits of a parameter.

    Args:
      tree: the state.

    Yields:
      A name of `storages`, a word of `EXTRAS`, or an empty string.
    """
    nodes, ways, _ = _flatten(tree)
    for node, how in zip(nodes, ways, strict=True):
        yield from [how] * len(jax.tree.leaves(node))


def _is_stored_leaf(node: Any) -> bool:
    # `_flatten` has numbers in place of leaves: to check the protocol would take long
    return type(node) is not int and isinstance(node, StoresLeaf)


def _is_params_store(node: Any) -> bool:
    return type(node) is not int and isinstance(node, StoresParams)


def _is_childless(node: Any) -> bool:
    return not jax.tree.leaves(node)


def _name(node: StoresLeaf) -> str:
    data = node.leaf_storage()
    kind = f"{data['codec']}-v{data['version']}{' squared' if data['squared'] else ''}"
    blocks = f" {data['block']} along {data['axis']}" if data["block"] else ""
    return f"{kind}{blocks} {data['dtype']}"


def _flatten(states: Any) -> tuple[list[Any], list[str], Any]:
    """The nodes of a state in the place of leaves, how they are stored, and what is around them."""
    structure: Any = jax.tree.structure(states)
    numbers = structure.unflatten(range(structure.num_leaves))
    extras: dict[Any, str] = {}
    for store in jax.tree.leaves(numbers, is_leaf=_is_params_store):
        if not isinstance(store, int):
            field, how = store.params_storage()
            extras |= dict.fromkeys(jax.tree.leaves(getattr(store, field)), how)
    tree: Any = jax.tree.structure(numbers, is_leaf=_is_stored_leaf)
    places = tree.flatten_up_to(numbers)
    nodes: list[Any] = tree.flatten_up_to(states)
    ways = [
        extras.get(place, "") if isinstance(place, int) else _name(node)
        for place, node in zip(places, nodes, strict=True)
    ]
    return nodes, ways, tree


def decode(data: Mapping[str, Any], codes: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    """Returns the values of codes.

    Args:
      data: see `StoresLeaf.leaf_storage`.
      codes: the codes.
      scale: their scales, if they have any.

    Examples:
      >>> data = {'table': (0.0, 0.5, 1.0), 'squared': True, 'axis': 0, 'block': 2}
      >>> codes, scale = jnp.array([1, 2, 2], jnp.uint8), jnp.array([2.0, 3.0])
      >>> decode({**data, 'dtype': 'float32'}, codes, scale).tolist()
      [1.0, 4.0, 9.0]
    """
    key = tuple(data["table"]), data["squared"], data["axis"], data["block"], data["dtype"]
    made: jax.Array = _untyped(_decoder(*key), codes, jax.typeof(codes).sharding)(codes, scale)
    return made


def _untyped(function: Any, operand: Any, results: Any) -> Any:
    """The function where shardings are not types: explicit ones forbid to look up by an index."""
    if not jax.typeof(operand).sharding.mesh.explicit_axes:
        return function
    return jax.sharding.auto_axes(function, out_sharding=results)


@functools.lru_cache(maxsize=64)
def _decoder(table: tuple[float, ...], squared: bool, axis: int, block: int, dtype: str) -> Any:
    def values(codes: jax.Array, scale: jax.Array | None = None) -> jax.Array:
        codes, scale = _fetched((codes, scale))
        if scale is None:
            return codes.astype(dtype)
        if jnp.issubdtype(codes.dtype, jnp.integer):
            codes = codes.astype(jnp.int32) % len(table)
        else:
            codes = lax.bitcast_convert_type(codes, jnp.uint8)
        size = codes.shape[axis]
        each = lax.slice_in_dim(jnp.repeat(scale, block, axis=axis), 0, size, axis=axis)
        found = jnp.asarray(np.asarray(table, np.float32))[codes] * each
        return (found * found if squared else found).astype(dtype)

    return jax.jit(values)


def _fetched(tree: Any) -> Any:
    """Traced arrays in the memory of the device, where they can be computed with."""
    space = jax.memory.Space
    return jax.tree.map(
        lambda x: (
            jax.device_put(x, space.Device) if jax.typeof(x).memory_space == space.Host else x
        ),
        tree,
    )


@functools.partial(jax.jit, static_argnums=0)
def join(how: str, param: jax.Array, extra: jax.Array) -> jax.Array:
    """Returns a parameter in float32.

    Args:
      how: a word of `EXTRAS`.
      param: the parameter, bfloat16.
      extra: what is kept besides it.
    """
    if how == "f32":
        return extra
    if how == "kahan":
        return param.astype(jnp.float32) + extra.astype(jnp.float32)
    low = lax.bitcast_convert_type(extra, jnp.uint16).astype(jnp.uint32)
    high = lax.bitcast_convert_type(param, jnp.uint16).astype(jnp.uint32) - (low >> 15)
    return lax.bitcast_convert_type((high << 16) | low, jnp.float32)


@functools.partial(jax.jit, static_argnums=0)
def split(how: str, master: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns a parameter of float32 as bfloat16, and what is kept besides it.

    Args:
      how: a word of `EXTRAS`.
      master: the parameter.
    """
    bits = lax.bitcast_convert_type(master, jnp.uint32)
    if how == "kahan":
        nearest = lax.reduce_precision(master, exponent_bits=8, mantissa_bits=7)
        left = lax.reduce_precision(master - nearest, exponent_bits=8, mantissa_bits=7)
        return nearest.astype(jnp.bfloat16), left.astype(jnp.bfloat16)
    low = bits & np.uint32(0xFFFF)
    high = ((bits >> 16) + (low >> 15)).astype(jnp.uint16)
    visible = lax.bitcast_convert_type(high, jnp.bfloat16)
    if how == "f32":
        return visible, master
    return visible, lax.bitcast_convert_type(low.astype(jnp.uint16), jnp.int16)


class PlainOptimizer:
    """An optimizer with every leaf as it would be in plain float32, and the way back.

    Args:
      optimizer: of any definition.

    Attributes:
      optimizer: without codes, scales, and what is kept besides parameters. Leaves that stand for
        others are `jax.ShapeDtypeStruct`s of these.
      of_params: how each parameter was stored: a word of `EXTRAS`, or an empty string.
      of_state: how each leaf of the plain `param_states` was: a name of `storages`, or an empty
        string.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._raw = optimizer
        self._params, params = jax.tree.flatten(optimizer.target)
        states = optimizer.state.param_states
        self._nodes, self._ways, self._tree = _flatten(states)
        self._extras = dict(_extras_of_params(optimizer))
        ways = {i: self._ways[at] for i, at in self._extras.items()}
        self.of_params = [ways.get(i, "") for i in range(len(self._params))]
        self.of_state = [how for how in self._ways if how not in EXTRAS]
        plain = [
            _master(how, x, self._nodes[self._extras[i]]) if (how := ways.get(i)) else x
            for i, x in enumerate(self._params)
        ]
        state = optimizer.state.replace(param_states=self.plain_state(states))
        self.optimizer: Optimizer = optimizer.replace(
            target=jax.tree.unflatten(params, plain), state=state
        )

    def plain_state(self, states: Any) -> Any:
        """Returns `param_states` with leaves in place of codes, and nothing besides parameters.

        Args:
          states: of the given optimizer's structure, or of one of its groups. Traced codes become
            values, others the shapes of these.
        """
        nodes, ways, tree = _flatten(states)
        found = zip(nodes, ways, strict=True)
        return tree.unflatten(() if how in EXTRAS else _plain(n) if how else n for n, how in found)

    def stored_again(
        self, plain: Optimizer, params: Sequence[Carry], states: Sequence[Carry]
    ) -> Optimizer:
        """Returns an optimizer that stores its leaves, and places them, as the given one does.

        Args:
          plain: with the structure of `self.optimizer`; it has values.
          params: one per parameter; gives the arrays that it is stored in if nothing changed them.
          states: the same for each leaf of the plain `param_states`.
        """
        target, tree = jax.tree.flatten(plain.target)
        nodes = list(self._nodes)
        for i, at in self._extras.items():
            places = _places([self._params[i], nodes[at]], target[i])
            how = self._ways[at]
            made = params[i](how, places) or split(how, target[i])
            target[i], nodes[at] = map(placed, made, places)
        leaves = iter(zip(jax.tree.leaves(plain.state.param_states), states, strict=True))
        for at, (node, how) in enumerate(zip(self._nodes, self._ways, strict=True)):
            if how in EXTRAS:
                continue
            value, carry = next(leaves)
            nodes[at] = _node(node, how, value, carry) if how else value
        state = plain.state.replace(param_states=self._tree.unflatten(nodes))
        again: Optimizer = plain.replace(target=jax.tree.unflatten(tree, target), state=state)
        return again


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


def _plain(node: Any) -> Any:
    """The leaf that a node stands for."""
    data, codes = node.leaf_storage(), node.codes
    if isinstance(codes, jax.core.Tracer):
        return decode(data, codes, node.scale)
    dtype, place = jnp.dtype(data["dtype"]), committed_sharding(codes)
    return jax.ShapeDtypeStruct(codes.shape, dtype, sharding=place)


def _master(how: str, param: Any, extra: Any) -> Any:
    if isinstance(param, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(param.shape, jnp.float32, sharding=param.sharding)
    return join(how, param, extra)


def _node(node: Any, how: str, value: Any, carry: Carry) -> Any:
    """A node like another, for a value or of the arrays that this is stored in."""
    leaves, tree = jax.tree.flatten(node)
    places = _places(leaves, value)
    made = carry(how, places)
    if made is None:
        whole = jax.typeof(value).sharding.update(spec=PartitionSpec())
        results = jax.tree.unflatten(tree, [place or whole for place in places])
        make = _untyped(lambda x: node.with_values(_fetched(x)), value, results)
        made = jax.tree.leaves(jax.jit(make)(value))
    return jax.tree.unflatten(tree, list(map(placed, made, places)))


def _places(leaves: Sequence[Any], value: Any) -> list[Any]:
    """Where arrays are to lie: their own places, else those of the value that they stand for."""
    like: Any = committed_sharding(value)
    whole = like.update(spec=PartitionSpec()) if isinstance(like, NamedSharding) else like
    return [committed_sharding(x) or (like if x.shape == value.shape else whole) for x in leaves]
