"""Where the state of each transformation is, and which parameters its leaves follow.

Optax's containers say where they keep what. Elsewhere a nested transformation is found by what its
own `init` makes of the parameters, or of placeholders for them: the first part of the state around
it that has this structure is its state. Those of one structure are found in the order in which the
function around them reads them. Leaves that no placeholder comes through to are traced.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import optax
from opt_core.extend import (
    Names,
    StateLeaf,
    around,
    children,
    is_placeholder,
    is_plain,
    named_leaves,
    on_placeholders,
    path_str,
    placeholders,
    places,
)

from opt_optax_bridge._nodes import Node

if TYPE_CHECKING:
    from opt_partition import Row  # the import takes 0.1 s


class _Inputs(NamedTuple):
    """What is passed to `init`: the parameters, and a tree of placeholders for them."""

    params: Any
    placed: Any

    def selected(self, mask: Any) -> _Inputs:
        """What `optax.masked` passes on."""
        mask = mask(self.params) if callable(mask) else mask
        return _Inputs(*(_masked(mask, tree) for tree in self))

    def labelled(self, labels: Any, label: str) -> _Inputs:
        """What `optax.partition` passes on to one of its transformations."""
        labels = labels(self.params) if callable(labels) else labels
        return self.selected(jax.tree.map(lambda x: str(x) == label, labels))


def _masked(mask: Any, tree: Any) -> Any:
    return jax.tree.map(lambda is_kept, part: part if is_kept else optax.MaskedNode(), mask, tree)


class _Part(NamedTuple):
    """A part of a state: what is there, and what `init` made of placeholders, if it did."""

    at: Names
    state: Any
    placed: Any | None

    @property
    def is_record(self) -> bool:
        """Whether it is of a class of its own."""
        return not is_plain(type(self.state)) and children(self.state) is not None

    def inside(self, *names: str) -> _Part:
        """The part below; raises a `KeyError` if there is none."""
        placed = None if self.placed is None else _below(self.placed, names)
        return _Part((*self.at, *names), _below(self.state, names), placed)

    def walk(self) -> Iterator[_Part]:
        """Yields itself and everything inside, outermost first, down to the parameters."""
        yield self
        if is_placeholder(self.placed):
            return
        below = {} if self.placed is None else _children(self.placed)
        for name, child in _children(self.state).items():
            yield from _Part((*self.at, name), child, below.get(name)).walk()


def _children(tree: Any) -> dict[str, Any]:
    node = children(tree)
    return {} if node is None else dict(node.children)


def _below(tree: Any, names: Sequence[str]) -> Any:
    return functools.reduce(lambda node, name: _children(node)[name], names, tree)


class States:
    """Where the states of a transformation and of those nested in it are.

    Args:
      root: the transformation with everything nested in it; `is_stateless` of all of them is set.
      params: the parameters, as shapes.
      state: what its `init` made of them, as shapes.

    Attributes:
      nodes: by path the transformations that made what is there; the innermost of several.
      followed: see `opt_core.extend.places`.
      opaque: the paths of what no placeholder can be passed through.
      shown: by identity of a transformation the paths of the parameters that its `init` is given.
    """

    def __init__(self, root: Node, params: Any, state: Any) -> None:
        self.nodes: dict[Names, Node] = {}
        self.followed: dict[Names, tuple[Names, Names]] = {}
        self.opaque: list[Names] = []
        self.shown: dict[int, list[Names]] = {}
        self._names = [path for path, _ in named_leaves(params)]
        self._put(root, _Part((), state, None), _Inputs(params, placeholders(params)))

    def _put(self, node: Node, part: _Part, inputs: _Inputs) -> None:
        """Notes that a part of the state is that of a transformation, and looks into it."""
        if part.placed is None:
            part = part._replace(placed=on_placeholders(node.tx.init, inputs.placed))
            if part.placed is None:
                self.opaque.append(part.at)
            else:
                self.followed.update(places(part.placed, self._names, part.at))
        node.is_stateless = not jax.tree.leaves(part.state)
        numbers = jax.tree.leaves(inputs.placed, is_leaf=is_placeholder)
        self.shown[id(node)] = [self._names[x.number] for x in numbers if is_placeholder(x)]
        if not node.is_container:
            self.nodes[part.at] = node
        if node.shares_init:
            self._put(node.children[0], part, inputs)
            return
        try:
            contained = _contained(node, inputs)
            stated = [(child, part.inside(*names), kept) for child, names, kept in contained]
        except Exception:  # a mask or labels that do not fit, or a state of another release
            stated = []
        for child, below, kept in stated:
            self._put(child, below, kept)
        if node.children and not stated:
            node.children += self._look_for(node, part, inputs)

    def _look_for(self, node: Node, part: _Part, inputs: _Inputs) -> list[Node]:
        """Finds the states of nested transformations; returns those that have further ones."""
        free = [inner for inner in part.walk() if jax.tree.leaves(inner.state)]
        examples = [_Example(child, inputs) for child in node.children]
        unclear = _unclear(examples, free) if _is_users(node) else set[int]()
        left, placed = [x.node for x in examples if id(x.node) not in unclear], []
        while left:
            example = _Example(left.pop(0), inputs)
            place = next(itertools.chain(example.places(free), example.records(free)), None)
            if place is None:  # its `init` may be given other parameters, or not called at all
                example.node.is_stateless = example.is_empty
                left[:0] = example.node.children
                continue
            self._put(example.node, place, inputs)
            free = [inner for inner in free if not _is_inside(inner, place)]
            if not example.node.is_container:
                placed.append(example)
        copies = []
        for example in placed:  # what is called twice keeps two states
            while place := next((x for x in example.places(free) if x.is_record), None):
                copies.append(dataclasses.replace(example.node, children=[]))
                self._put(copies[-1], place, inputs)
                free = [inner for inner in free if not _is_inside(inner, place)]
        return copies


class _Example:
    """What the `init` of a transformation makes of placeholders and of the parameters."""

    def __init__(self, node: Node, inputs: _Inputs) -> None:
        self.node, self._inputs = node, inputs
        self._placed = on_placeholders(node.tx.init, inputs.placed)

    @functools.cached_property
    def _shapes(self) -> Any:
        try:
            return jax.eval_shape(self.node.tx.init, self._inputs.params)
        except Exception:  # it is made of other parameters than these
            return None

    @property
    def is_empty(self) -> bool:
        """Whether it is known to make a state without leaves."""
        return self._shapes is not None and not jax.tree.leaves(self._shapes)

    def places(self, parts: Sequence[_Part]) -> Iterator[_Part]:
        """Yields the parts of a state that are like it, by the most exact comparison first."""
        if jax.tree.leaves(self._placed, is_leaf=is_placeholder):
            placed = (x for x in parts if x.placed is not None)
            yield from (x for x in placed if _is_like(self._placed, x.placed))
            yield from (x for x in parts if _is_like(self._placed, x.state))
        if jax.tree.leaves(self._shapes):
            yield from (x for x in parts if _is_like(self._shapes, x.state))

    def records(self, parts: Sequence[_Part]) -> Iterator[_Part]:
        """Yields those of its class: what is inside may have been made of other parameters."""
        kinds = {type(self._placed), type(self._shapes)}
        yield from (x for x in parts if x.is_record and type(x.state) in kinds)


def _is_users(node: Node) -> bool:
    """Whether nobody knows in which order a transformation keeps the states of others."""
    return not node.is_optax and not node.package.startswith("opt_")


def _unclear(examples: Sequence[_Example], parts: Sequence[_Part]) -> set[int]:
    """The transformations whose states nothing tells apart: under keys, not in an order."""
    # These leaves stay with the transformation around them.
    unclear: set[int] = set()
    for example in examples:
        alike = list({place.at: place for place in example.places(parts)}.values())
        rivals = [x for x in examples if x is not example and next(x.places(alike), None)]
        if rivals and len(alike) > 1 and not all(place.at[-1].isdigit() for place in alike):
            unclear |= {id(x.node) for x in (example, *rivals)}
    return unclear


def _contained(node: Node, inputs: _Inputs) -> Iterator[tuple[Node, Names, _Inputs]]:
    """The paths at which Optax's containers keep the states of what they contain."""
    if node.injects:
        yield from ((child, ("inner_state",), inputs) for child in node.children)
    if not node.is_optax:
        return
    if node.factory == "chain":
        yield from ((child, (str(i),), inputs) for i, child in enumerate(node.children))
    elif node.factory == "named_chain":
        names = [name for name, _ in node.held["transforms"]]
        yield from ((x, (name,), inputs) for name, x in zip(names, node.children, strict=True))
    elif node.factory == "masked":
        mask = node.held["mask"]
        yield from ((x, ("inner_state",), inputs.selected(mask)) for x in node.children)
    elif node.factory in ("partition", "multi_transform"):
        for child in node.children:
            label = child.group[-1]
            kept = inputs.labelled(node.held["param_labels"], label)
            yield child, ("inner_states", label, "inner_state"), kept


def _is_inside(part: _Part, outer: _Part) -> bool:
    return part.at[: len(outer.at)] == outer.at


def _is_like(example: Any, part: Any) -> bool:
    """Whether a part of a state has the structure, the shapes and the parameters of another."""
    structure: Any = jax.tree.structure(example, is_leaf=is_placeholder)
    try:
        parts = structure.flatten_up_to(part)
    except (ValueError, TypeError, KeyError):
        return False
    leaves = jax.tree.leaves(example, is_leaf=is_placeholder)
    return all(map(_is_like_leaf, leaves, parts))


def _is_like_leaf(example: Any, part: Any) -> bool:
    if is_placeholder(example):
        return not is_placeholder(part) or example.number == part.number
    is_leaf = isinstance(part, type(example))
    return is_leaf and (part.shape, part.dtype) == (example.shape, example.dtype)


def traced_places(
    leaves: Sequence[tuple[StateLeaf, int]],
    unclear: Collection[int],
    rows: Sequence[Row],
    params: Sequence[Names],
) -> dict[Names, tuple[Names, Names]]:
    """Returns the places of parameters that tracing shows, of the leaves that are unclear."""
    by_name = {path_str(path): path for path in params}
    owners = [
        by_name.get(row.parameter or "") if i in unclear else leaf.parameter
        for i, ((leaf, _), row) in enumerate(zip(leaves, rows, strict=True))
    ]
    entries = _entries(leaves, owners)
    by_place = {}
    for i in unclear:
        path, owner = leaves[i][0].path, owners[i]
        if owner is None:
            continue
        named = [k for k in range(len(path)) if owner and path[k : k + len(owner)] == owner]
        entry = [k for k in range(len(path)) if path[:k] in entries]
        if named:
            by_place[path[: named[0] + len(owner)]] = owner, path[: named[0]]
        elif entry:
            by_place[path[: entry[0] + 1]] = owner, path[: entry[0]]
        elif rows[i].source in ("symbols", "provenance"):
            by_place[path] = owner, around(path, owner)
    return by_place


def _entries(leaves: Sequence[tuple[StateLeaf, int]], owners: Sequence[Names | None]) -> set[Names]:
    """The paths of lists and dicts that have one entry for each of some parameters."""
    inside: dict[Names, dict[str, set[Names]]] = {}
    lists: set[Names] = set()
    for (leaf, start), owner in zip(leaves, owners, strict=True):
        path, kinds = leaf.path, leaf.kinds
        for k in range(start, len(path)):
            if kinds[k] in (tuple, list, dict):
                entry = inside.setdefault(path[:k], {}).setdefault(path[k], set())
                entry |= set() if owner is None else {owner}
            if kinds[k] in (tuple, list):
                lists.add(path[:k])
    return {
        path
        for path, entries in inside.items()
        if all(len(each) == 1 for each in entries.values())
        and len(set().union(*entries.values())) == len(entries)
        and (len(entries) > 1 or path in lists)
    }
