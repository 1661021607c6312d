"""Restores between ways of storing one state: both are planned as they would be in plain float32.

What both store alike is carried bit by bit.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from opt_core._optimizer import Optimizer
from opt_core._plan.leaves import (
    LeafInfo,
    NamedState,
    Schema,
    Source,
    View,
    abstract,
    is_params_store,
    stored_nodes,
)
from opt_core._plan.plan import Request, Row
from opt_core._trees import (
    committed_sharding,
    has_no_devices,
    is_abstract,
    named_leaves,
    on_devices_of,
    path_str,
    placed,
)
from opt_core.errors import LeafError
from opt_core.protocols import Storage


@dataclasses.dataclass(frozen=True)
class Parts:
    """The names of the arrays that a leaf is stored in, and what they mean."""

    how: Storage
    names: tuple[str, ...]


class _Leaf(NamedTuple):
    """A leaf of a plain optimizer on its way back."""

    row: Row
    how: Storage | None  # how it is stored; `None` of a parameter as it is
    places: Sequence[Any]  # of its arrays
    value: Any


class PlainSource:
    """A checkpoint with every leaf as it would be in float32; see `Source`."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._saved = source.schema.by_name
        self.parts: dict[str, Parts] = {}
        ways = read_storages(source.schema)
        extras = {
            leaf.parameter: leaf
            for leaf in source.schema.leaves
            if leaf.stored and not ways[leaf.stored].fields
        }
        leaves: list[LeafInfo] = []
        for leaf in source.schema.leaves:
            if leaf.kind == "params" and (extra := extras.get(leaf.path[1:])) is not None:
                how = ways[extra.stored]
                self.parts[leaf.name] = Parts(how, (leaf.name, extra.name))
                leaves.append(dataclasses.replace(leaf, dtype=how.dtype))
            elif not leaf.stored:
                leaves.append(leaf)
            elif () != leaf.field[-1:] == ways[leaf.stored].fields[:1]:
                leaves.append(self._of_arrays(leaf, ways[leaf.stored]))
        self.schema = dataclasses.replace(source.schema, leaves=tuple(leaves), storage={})

    def _of_arrays(self, leaf: LeafInfo, how: Storage) -> LeafInfo:
        """The leaf that arrays in one node stand for, by the first of them."""
        at = len(leaf.path) - len(leaf.parameter or ()) - 1
        before, after = leaf.path[:at], leaf.path[at + 1 :]
        same = tuple(range(len(leaf.shape)))
        plain = dataclasses.replace(
            leaf, path=(*before, *after), dtype=how.dtype, stored="", dimensions=same
        )
        names = (path_str((*before, field, *after)) for field in how.fields)
        self.parts[plain.name] = Parts(how, tuple(names))
        return plain

    def read(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        """Returns leaves where they are wanted; see `Source.read`."""
        raw: dict[str, jax.ShapeDtypeStruct] = {}
        for name, place in wanted.items():
            if name not in self.parts:
                raw[name] = place
                continue
            for part in self.parts[name].names:
                sharding = place.sharding
                if self._saved[part].shape != place.shape and isinstance(sharding, NamedSharding):
                    sharding = sharding.update(spec=PartitionSpec())
                raw[part] = abstract(self._saved[part], sharding)
        read = self._source.read(raw)
        return {
            name: self._decoded(self.parts[name], place, read) if name in self.parts else read[name]
            for name, place in wanted.items()
        }

    def same(self, names: Iterable[str]) -> bool | None:
        """Whether leaves are the same bit for bit; see `Source.same`."""
        return None if any(name in self.parts for name in names) else self._source.same(names)

    def shardings(self, names: Iterable[str]) -> Mapping[str, Sharding]:
        """Returns where the leaves were, by name: those of codes are where the codes were."""
        first = {name: self.parts[name].names[0] if name in self.parts else name for name in names}
        places = self._source.shardings(first.values())
        return {name: places[part] for name, part in first.items() if part in places}

    def _decoded(self, parts: Parts, place: jax.ShapeDtypeStruct, read: Mapping[str, Any]) -> Any:
        arrays = [jnp.asarray(read[name]) for name in parts.names]
        return placed(parts.how.decode(*arrays), place.sharding)

    def carried(self, leaves: Sequence[_Leaf]) -> list[list[Any] | None]:
        """Returns the arrays of leaves that are stored alike, and that nothing changes."""
        names = [self._unchanged(leaf.row, leaf.how) for leaf in leaves]
        wanted: dict[str, jax.ShapeDtypeStruct] = {}
        for own, leaf in zip(names, leaves, strict=True):
            for name, place in zip(own, leaf.places, strict=False):
                wanted[name] = abstract(self._saved[name], place)
        read = self._source.read(wanted) if wanted else {}
        return [[jnp.asarray(read[name]) for name in own] or None for own in names]

    def _unchanged(self, row: Row, how: Storage | None) -> tuple[str, ...]:
        """The names of arrays to take as they are; none if the leaf is another, or not stored."""
        if row.how is not None or len(row.sources) != 1 or "reshape" in row.kinds:
            return ()
        if (parts := self.parts.get(row.sources[0])) is None:
            return ()
        if how is None and self._saved[parts.names[0]].dtype == row.leaf.dtype:
            return parts.names[:1]  # as it is: its digits round to it, but ties may go elsewhere
        return parts.names if parts.how == how else ()


def read_storages(schema: Schema) -> dict[str, Storage]:
    """Returns how leaves are stored, by `LeafInfo.stored`, as the packages that wrote say it."""
    first: dict[str, str] = {}
    for leaf in schema.leaves:
        if leaf.stored:
            first.setdefault(leaf.stored, leaf.name)
    storages: dict[str, Storage] = {}
    for how, name in first.items():
        data, what = schema.storage[how], f"`{name}` is stored as {how!r}"
        package = data["package"]
        try:
            storages[how] = importlib.import_module(package).read_storage(data)
        except (ImportError, AttributeError) as error:
            raise LeafError(
                f"{what}, which only `{package}` can decode: install "
                f"`{package.replace('_', '-')}`, in a release that has `read_storage`"
            ) from error
        except ValueError as error:
            raise LeafError(f"{what}: {error}") from error
    return storages


def plain_sides(
    source: Source, view: View, named: NamedState, request: Request
) -> tuple[Source, View]:
    """Returns both sides as they would be in float32; as they are where they store leaves alike."""
    if _ways(source.schema) == _ways(named.schema) and not request.rules:
        return source, view
    stored = PlainOptimizer(view.optimizer)
    return PlainSource(source), dataclasses.replace(view, optimizer=stored.optimizer, stored=stored)


def _ways(schema: Schema) -> set[tuple[str, str]]:
    """Which leaves stand for others, and how."""
    return {(leaf.name, leaf.stored) for leaf in schema.leaves if leaf.stored}


def with_ways(
    rows: Sequence[Row], source: Source, stored: PlainOptimizer, request: Request
) -> list[Row]:
    """Says of each leaf how it was stored and is now; what loses digits has to be admitted."""
    if not isinstance(source, PlainSource):
        return [*rows]
    pairs = zip(rows, stored.ways(len(rows)), strict=True)
    return [_with_way(row, how, source, request) if row.sources else row for row, how in pairs]


def _with_way(row: Row, how: Storage | None, source: PlainSource, request: Request) -> Row:
    known = [source.parts[name].how for name in row.sources if name in source.parts]
    was = known[0] if known else None
    if was == how:
        return row
    before, after = (x.name if x else row.leaf.dtype for x in (was, how))
    note, is_cast = f"{before} -> {after}", True
    if row.leaf.kind == "params":
        is_cast = how is not None and not how.is_exact
        if how is not None and "cast" in row.kinds and len(known) < len(row.sources):
            note = f"saved without its {how.name}, which is reset"
    kinds, is_admitted = row.kinds, row.is_admitted
    if is_cast and "cast" not in kinds:
        kinds = (*kinds, "cast")
        rule = request.rule(row.leaf.name)
        is_admitted &= "cast" in request.allow or (rule is not None and rule[1] == "cast")
    notes = ", ".join(filter(None, (row.note, note)))
    return dataclasses.replace(
        row, kinds=kinds, action="converted", note=notes, is_admitted=is_admitted
    )


# The plain optimizer of a target, and the way back.


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
        self._nodes, self._ways, self._tree = stored_nodes(states)
        places = _extras_of_params(optimizer)
        self._extras = {i: (how, at) for i, at in places if (how := self._ways[at]) is not None}
        plain = list(self._params)
        for i, (how, at) in self._extras.items():
            arrays = [plain[i], self._nodes[at]]
            plain[i] = _plain(how, arrays, has_value=not any(map(is_abstract, arrays)))
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
        nodes, ways, tree = stored_nodes(states)
        return tree.unflatten(map(_plain_node, nodes, ways))

    def stored_again(self, plain: Optimizer, rows: Sequence[Row], source: PlainSource) -> Optimizer:
        """Returns an optimizer that stores its leaves, and places them, as the original does."""
        target, tree = jax.tree.flatten(plain.target)
        nodes, states = list(self._nodes), jax.tree.leaves(plain.state.param_states)
        kept = [at for at, way in enumerate(self._ways) if not _is_of_params(way)]
        leaves = []
        for i, value in enumerate(target):
            extra = self._extras.get(i)
            were = [self._params[i], *([] if extra is None else [nodes[extra[1]]])]
            leaves.append(_Leaf(rows[i], extra and extra[0], _places(were, value), value))
        for at, value, row in zip(kept, states, rows[len(rows) - len(states) :], strict=True):
            nodes[at] = value
            if (way := self._ways[at]) is not None:
                places = _places(jax.tree.leaves(self._nodes[at]), value)
                leaves.append(_Leaf(row, way, places, value))
        stored = _stored(leaves, source)
        for i in range(len(target)):
            target[i], *digits = next(stored)
            if digits:
                nodes[self._extras[i][1]] = digits[0]
        for at in kept:
            if self._ways[at] is not None:
                nodes[at] = jax.tree.unflatten(jax.tree.structure(self._nodes[at]), next(stored))
        state = plain.state.replace(param_states=self._tree.unflatten(nodes))
        again: Optimizer = plain.replace(target=jax.tree.unflatten(tree, target), state=state)
        return again


def _is_of_params(how: Storage | None) -> bool:
    return how is not None and not how.fields


def _extras_of_params(optimizer: Optimizer) -> Iterator[tuple[int, int]]:
    """Positions of parameters, with those of what is kept besides them among the state's nodes."""
    nodes, _, tree = stored_nodes(optimizer.state.param_states)
    numbers: Any = jax.tree.structure(optimizer.target)
    tags = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jax.tree.leaves(optimizer.target)]
    number = {id(tag): i for i, tag in enumerate(tags)}
    states = tree.unflatten(range(len(nodes)))
    state = optimizer.state.replace(param_states=states)
    tagged = optimizer.replace(target=numbers.unflatten(tags), state=state)
    for _, part in tagged.optimizer_def.leaf_groups(tagged):
        params = {names: number[id(tag)] for names, tag in named_leaves(part.target)}
        for store in jax.tree.leaves(part.state.param_states, is_leaf=is_params_store):
            if is_params_store(store):
                kept = getattr(store, store.params_storage()[0])
                yield from ((params[names], at) for names, at in named_leaves(kept))


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


def _stored(leaves: Sequence[_Leaf], source: PlainSource) -> Iterator[list[Any]]:
    """Yields the arrays of each leaf: those in the source, or else of its value."""
    for leaf, carried in zip(leaves, source.carried(leaves), strict=True):
        made: Sequence[Any] = carried or ()
        if carried is None:
            made = [leaf.value] if leaf.how is None else leaf.how.encode(leaf.value)
        yield [placed(*pair) for pair in zip(made, leaf.places, strict=True)]


def _places(leaves: Sequence[Any], value: Any) -> list[Any]:
    """Where arrays are to lie: their own places, else those of the value that they stand for."""
    like: Any = committed_sharding(value)
    replicated = like.update(spec=PartitionSpec()) if isinstance(like, NamedSharding) else like
    places = []
    for leaf in leaves:
        own: Any = committed_sharding(leaf) or (like if leaf.shape == value.shape else replicated)
        places.append(on_devices_of(like, own.spec, leaf.shape) if has_no_devices(own) else own)
    return places
