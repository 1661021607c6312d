"""Restores between ways of storing one state: everything as it would be in plain float32.

Where a checkpoint and a target store leaves differently, both are planned without that: codes and
scales are the leaf that they stand for, a parameter with its remainder is one of float32. Rules,
groups and other transformations then work as ever. What both store alike is carried bit by bit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from opt_core import Optimizer
from opt_core.state_changes import placed

from opt_checkpoint._naming.schema import LeafInfo, Schema, Source
from opt_checkpoint._naming.storage import extras_by_param, is_stored_leaf, key_of, stored_as
from opt_checkpoint._planning.functions import abstract
from opt_checkpoint._planning.plan import Row
from opt_checkpoint._planning.rules import Policy
from opt_checkpoint._targets.named import named_view
from opt_checkpoint._targets.view import View
from opt_checkpoint.errors import LeafError

CODES, SCALE = "codes", "scale"
EXTRAS = frozenset({"f32", "remainder", "kahan"})
VERSION = 1


def ways(schema: Schema) -> set[tuple[str, str]]:
    """Returns which leaves stand for others, and how."""
    return {(leaf.name, leaf.stored) for leaf in schema.leaves if leaf.stored}


@dataclasses.dataclass(frozen=True)
class Parts:
    """The arrays that a leaf is stored in.

    Attributes:
      how: a key of `Schema.storage`, or a word of `opt_core.protocols.StoresParams`.
      names: of the arrays: codes and scale, or the parameter and what is kept besides it.
    """

    how: str
    names: tuple[str, ...]


class PlainSource:
    """A checkpoint with every leaf as it would be in float32; see `Source`.

    Args:
      source: the checkpoint.

    Raises:
      LeafError: codes of a kind that is not known here.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._saved = source.schema.by_name
        self.parts: dict[str, Parts] = {}
        extras = {leaf.parameter: leaf for leaf in source.schema.leaves if leaf.stored in EXTRAS}
        leaves: list[LeafInfo] = []
        for leaf in source.schema.leaves:
            extra = extras.get(leaf.path[1:]) if leaf.kind == "params" else None
            if leaf.stored in EXTRAS or (leaf.stored and leaf.field[-1] == SCALE):
                continue
            made = leaf
            if extra is not None:
                made = dataclasses.replace(leaf, dtype="float32")
                self.parts[made.name] = Parts(extra.stored, (leaf.name, extra.name))
            elif leaf.stored:
                made = self._of_codes(leaf)
            leaves.append(made)
        self.schema = dataclasses.replace(source.schema, leaves=tuple(leaves), storage={})

    def _of_codes(self, leaf: LeafInfo) -> LeafInfo:
        data = self.source.schema.storage[leaf.stored]
        if data["version"] != VERSION:
            raise LeafError(
                f"`{leaf.name}` is stored as {leaf.stored!r}, which this release cannot read: it "
                f"knows version {VERSION}"
            )
        at = len(leaf.path) - len(leaf.parameter or ()) - 1
        path = (*leaf.path[:at], *leaf.path[at + 1 :])
        made = dataclasses.replace(
            leaf,
            path=path,
            dtype=data["dtype"],
            stored="",
            dimensions=tuple(range(len(leaf.shape))),
        )
        names: tuple[str, ...] = (leaf.name,)
        if data["block"]:
            scale = dataclasses.replace(leaf, path=(*leaf.path[:at], SCALE, *leaf.path[at + 1 :]))
            names += (scale.name,)
        self.parts[made.name] = Parts(leaf.stored, names)
        return made

    def read(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        """Returns leaves where they are wanted; see `Source.read`."""
        raw: dict[str, jax.ShapeDtypeStruct] = {}
        for name, place in wanted.items():
            if name not in self.parts:
                raw[name] = place
                continue
            for part in self.parts[name].names:
                whole = self._saved[part].shape != place.shape
                raw[part] = abstract(self._saved[part], _anywhere(place.sharding, whole))
        read = self.source.read(raw)
        return {name: self._made(name, place, read) for name, place in wanted.items()}

    def _made(self, name: str, place: jax.ShapeDtypeStruct, read: Mapping[str, Any]) -> Any:
        if name not in self.parts:
            return read[name]
        how, names = self.parts[name].how, self.parts[name].names
        arrays = [jnp.asarray(read[part]) for part in names]
        made = joined(how, *arrays) if how in EXTRAS else self._decoded(how, arrays)
        return placed(made, place.sharding)

    def _decoded(self, how: str, arrays: Sequence[jax.Array]) -> jax.Array:
        return decoded(self.source.schema.storage[how], *arrays)

    def read_parts(self, name: str, places: Sequence[Any]) -> list[Any]:
        """Returns the arrays that a leaf is stored in, bit by bit."""
        names = self.parts[name].names
        rows = zip(names, places, strict=True)
        read = self.source.read({part: abstract(self._saved[part], place) for part, place in rows})
        return [jnp.asarray(read[part]) for part in names]


def _anywhere(sharding: Any, whole: bool) -> Any:
    if whole and isinstance(sharding, NamedSharding):
        return sharding.update(spec=PartitionSpec())
    return sharding


def decoded(data: Mapping[str, Any], codes: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    """Returns the values of codes.

    Args:
      data: see `opt_core.protocols.StoresLeaf.leaf_storage`.
      codes: the codes.
      scale: their scales, if they have any.
    """
    key = tuple(data["table"]), data["squared"], data["axis"], data["block"], data["dtype"]
    made: jax.Array = _decoder(*key)(codes, scale)
    return made


@functools.lru_cache(maxsize=64)
def _decoder(table: tuple[float, ...], squared: bool, axis: int, block: int, dtype: str) -> Any:
    def decode(codes: jax.Array, scale: jax.Array | None = None) -> jax.Array:
        if scale is None:
            return codes.astype(dtype)
        if jnp.issubdtype(codes.dtype, jnp.integer):
            codes = codes.astype(jnp.uint8)
        else:
            codes = lax.bitcast_convert_type(codes, jnp.uint8)
        size = codes.shape[axis]
        each = lax.slice_in_dim(jnp.repeat(scale, block, axis=axis), 0, size, axis=axis)
        values = jnp.asarray(np.asarray(table, np.float32))[codes] * each
        return (values * values if squared else values).astype(dtype)

    return jax.jit(decode)


@functools.partial(jax.jit, static_argnums=0)
def joined(how: str, param: jax.Array, extra: jax.Array) -> jax.Array:
    """Returns a parameter in float32, of what it is stored as."""
    if how == "f32":
        return extra
    if how == "kahan":
        return param.astype(jnp.float32) + extra.astype(jnp.float32)
    low = lax.bitcast_convert_type(extra, jnp.uint16).astype(jnp.uint32)
    high = lax.bitcast_convert_type(param, jnp.uint16).astype(jnp.uint32) - (low >> 15)
    return lax.bitcast_convert_type((high << 16) | low, jnp.float32)


@functools.partial(jax.jit, static_argnums=0)
def split(how: str, master: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns what a parameter of float32 is stored as: bfloat16, and what is kept besides it."""
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


class PlainTarget:
    """A target with every leaf as it would be in float32, and the way back.

    Args:
      view: the target.
    """

    def __init__(self, view: View) -> None:
        self._raw = view.optimizer
        self._extras = extras_by_param(self._raw)
        self._states = self._raw.state.param_states
        self._nodes, self._tree = jax.tree.flatten(self._states, is_leaf=is_stored_leaf)
        self._stored = [
            how if how in EXTRAS else "" for node, how in _first_of_each(self._states, self._nodes)
        ]
        others = dict.fromkeys(range(len(view.others)), "")
        params = len(jax.tree.leaves(self._raw.target))
        steps = len(jax.tree.leaves(self._raw.state.step))
        of_params = [self._extras[i].how if i in self._extras else "" for i in range(params)]
        of_state = [
            key_of(node) if is_stored_leaf(node) else ""
            for node, how in zip(self._nodes, self._stored, strict=True)
            if how not in EXTRAS
        ]
        self.ways = [*of_params, *others.values(), *[""] * steps, *of_state]
        self.view = dataclasses.replace(view, optimizer=self.plain(), stored=self)

    def plain(self) -> Optimizer:
        """The optimizer without codes, scales and remainders."""
        params, tree = jax.tree.flatten(self._raw.target)
        target = [
            _master(param, self._extras[i]) if i in self._extras else param
            for i, param in enumerate(params)
        ]
        states = self.plain_state(self._states)
        state = self._raw.state.replace(param_states=states)
        plain: Optimizer = self._raw.replace(target=jax.tree.unflatten(tree, target), state=state)
        return plain

    def plain_state(self, states: Any) -> Any:
        """A state with leaves in the place of codes and scales, and nothing besides parameters.

        Of arrays their values; of shapes, those that are wanted.
        """
        nodes, tree = jax.tree.flatten(states, is_leaf=is_stored_leaf)
        kinds = [how for _, how in _first_of_each(states, nodes)]
        return jax.tree.unflatten(
            tree,
            [
                optax.MaskedNode() if how in EXTRAS else _plain(node)
                for node, how in zip(nodes, kinds, strict=True)
            ],
        )

    def stored_again(
        self, rows: Sequence[Row], source: PlainSource, optimizer: Optimizer
    ) -> Optimizer:
        """Returns the target's own way of storing what was restored in float32."""
        params, tree = jax.tree.flatten(optimizer.target)
        raw = jax.tree.leaves(self._raw.target)
        extras: dict[int, Any] = {}
        for i, extra in self._extras.items():
            row = rows[i]
            places = [_sharding(raw[i]), _sharding(extra.leaf)]
            if self._is_carried(row, source, extra.how):
                params[i], extras[id(extra.leaf)] = source.read_parts(row.sources[0], places)
            else:
                made = split(extra.how, params[i])
                params[i], extras[id(extra.leaf)] = map(placed, made, places)
        restored = iter(jax.tree.leaves(optimizer.state.param_states))
        of_state = iter(rows[len(rows) - sum(how not in EXTRAS for how in self._stored) :])
        nodes = []
        for node, how in zip(self._nodes, self._stored, strict=True):
            if how in EXTRAS:
                nodes.append(extras[id(node)])
                continue
            value, row = next(restored), next(of_state)
            nodes.append(self._node(node, value, row, source) if is_stored_leaf(node) else value)
        states = jax.tree.unflatten(self._tree, nodes)
        again: Optimizer = optimizer.replace(
            target=jax.tree.unflatten(tree, params),
            state=optimizer.state.replace(param_states=states),
        )
        return again

    def _node(self, node: Any, value: Any, row: Row, source: PlainSource) -> Any:
        leaves, tree = jax.tree.flatten(node)
        places = list(map(_sharding, leaves))
        if self._is_carried(row, source, key_of(node)):
            return jax.tree.unflatten(tree, source.read_parts(row.sources[0], places))
        made = jax.jit(node.with_values)(value)
        return jax.tree.unflatten(tree, list(map(placed, jax.tree.leaves(made), places)))

    def _is_carried(self, row: Row, source: PlainSource, how: str) -> bool:
        """Whether a leaf is stored in the checkpoint as it is here, and nothing changes it."""
        if row.how or len(row.sources) != 1 or "reshape" in row.kinds:
            return False
        parts = source.parts.get(row.sources[0])
        return parts is not None and parts.how == how


def _first_of_each(states: Any, nodes: Sequence[Any]) -> list[tuple[Any, str]]:
    """Each node with how its first leaf is stored."""
    kinds = iter(stored_as(states))
    found = []
    for node in nodes:
        own = [next(kinds) for _ in jax.tree.leaves(node)]
        found.append((node, own[0] if own else ""))
    return found


def _plain(node: Any) -> Any:
    if not is_stored_leaf(node):
        return node
    if isinstance(node.codes, jax.core.Tracer):
        return decoded(node.leaf_storage(), node.codes, node.scale)
    return jax.ShapeDtypeStruct(node.codes.shape, node.dtype, sharding=_sharding(node.codes))


def _master(param: Any, extra: Any) -> Any:
    if isinstance(param, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(param.shape, jnp.float32, sharding=param.sharding)
    return joined(extra.how, param, extra.leaf)


def _sharding(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.sharding
    return leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None


def with_ways(
    rows: Sequence[Row], ways: Sequence[str], source: PlainSource, policy: Policy
) -> list[Row]:
    """Says of each leaf how it was stored and is now; what loses digits has to be admitted."""
    return [
        _with_way(row, how, source, policy) if row.sources else row
        for row, how in zip(rows, ways, strict=True)
    ]


def _with_way(row: Row, how: str, source: PlainSource, policy: Policy) -> Row:
    found = [source.parts[name].how for name in row.sources if name in source.parts]
    was = found[0] if found else ""
    if was == how:
        return row
    note = f"{_codec(was) or row.leaf.dtype} -> {_codec(how) or row.leaf.dtype}"
    kinds = row.kinds
    if row.leaf.kind == "params":
        plain = [name for name in row.sources if name not in source.parts]
        if how in ("remainder", "kahan") and plain and "cast" in row.kinds:
            note = f"saved without its {how}, which is reset"
        is_cast = how == "kahan" and was != "kahan"
    else:
        is_cast = True
    is_admitted = row.is_admitted
    if is_cast and "cast" not in kinds:
        kinds = (*kinds, "cast")
        rule = policy.rule(row.leaf.name)
        is_admitted &= "cast" in policy.allow or (rule is not None and rule[1] == "cast")
    notes = ", ".join(filter(None, (row.note, note)))
    return dataclasses.replace(
        row, kinds=kinds, action="converted", note=notes, is_admitted=is_admitted
    )


def _codec(way: str) -> str:
    """The name of a codec, or the word for what is kept besides a parameter."""
    return way.partition("-v")[0]


def plain_sides(
    source: Source, view: View, policy: Policy
) -> tuple[PlainSource, PlainTarget] | None:
    """Returns both sides as they would be in float32; `None` where they store leaves alike."""
    given = ways(source.schema)
    if not given and not any(stored_as(view.optimizer.state.param_states)):
        return None
    if given == ways(named_view(view).schema) and not policy.rules:
        return None
    return PlainSource(source), PlainTarget(view)
