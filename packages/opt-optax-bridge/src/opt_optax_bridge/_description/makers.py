"""Where the state of each transformation is, and which parameters its leaves follow.

Optax's containers say where they keep what. Elsewhere a nested transformation is found by what its
own `init` makes of the parameters, or of placeholders for them: the first part of the state around
it that has this structure is its state. Those of one structure are found in the order in which the
function around them reads them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
from opt_core.extend import (
    children,
    flatten_with_paths,
    is_placeholder,
    on_placeholders,
    placeholders,
    places,
)

from opt_optax_bridge._description.nodes import Names, Node

_PLAIN = (tuple, list, dict)


class States(NamedTuple):
    """What is known about the places in a state.

    Attributes:
      nodes: by path the transformations that made what is there; the innermost of several.
      followed: see `opt_core.extend.leaves_of`.
      opaque: the paths of what no placeholder can be passed through.
      shown: by identity of a transformation the paths of the parameters that its `init` is given.
    """

    nodes: dict[Names, Node]
    followed: dict[Names, tuple[Names, Names]]
    opaque: list[Names]
    shown: dict[int, list[Names]]


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
        mask = jax.tree.map(lambda x: str(x) == label, labels)
        return _Inputs(*(_masked(mask, tree) for tree in self))


def _masked(mask: Any, tree: Any) -> Any:
    return jax.tree.map(lambda is_kept, part: part if is_kept else optax.MaskedNode(), mask, tree)


class _Part(NamedTuple):
    """A part of a state: what is there, and what `init` made of placeholders, if it did."""

    at: Names
    state: Any
    placed: Any | None

    def inside(self, *names: str) -> _Part:
        """The part below; raises a `KeyError` if there is none."""
        placed = None if self.placed is None else _below(self.placed, names)
        return _Part((*self.at, *names), _below(self.state, names), placed)


def _below(tree: Any, names: Sequence[str]) -> Any:
    for name in names:
        opened = children(tree)
        tree = dict(opened.children if opened is not None else ())[name]
    return tree


def find_states(root: Node, params: Any, state: Any) -> States:
    """Returns where the states of a transformation and of those nested in it are.

    Sets `is_stateless` of all of them.

    Args:
      root: the transformation with everything nested in it.
      params: the parameters, as shapes.
      state: what its `init` made of them, as shapes.
    """
    names = [path for path, leaf in flatten_with_paths(params) if leaf is not None]
    search = _Search(names)
    search.put(root, _Part((), state, None), _Inputs(params, placeholders(params)))
    return search.states


class _Search:
    def __init__(self, names: Sequence[Names]) -> None:
        self.states = States({}, {}, [], {})
        self._names = names

    def put(self, node: Node, part: _Part, inputs: _Inputs) -> None:
        """Notes that a part of the state is that of a transformation, and looks into it."""
        if part.placed is None:
            part = part._replace(placed=on_placeholders(node.tx.init, inputs.placed))
            if part.placed is None:
                self.states.opaque.append(part.at)
            else:
                self.states.followed.update(places(part.placed, self._names, part.at))
        node.is_stateless = not jax.tree.leaves(part.state)
        numbers = jax.tree.leaves(inputs.placed, is_leaf=is_placeholder)
        self.states.shown[id(node)] = [self._names[x.number] for x in numbers if is_placeholder(x)]
        if not node.is_container:
            self.states.nodes[part.at] = node
        if node.shares_init:
            self.put(node.children[0], part, inputs)
            return
        try:
            known = list(_known_places(node, inputs))
            inner = [(child, part.inside(*names), kept) for child, names, kept in known]
        except Exception:  # a mask or labels that do not fit, or a state of another release
            inner = []
        for child, below, kept in inner:
            self.put(child, below, kept)
        if not inner:
            node.children += self._look_for(node, node.children, part, inputs)

    def _look_for(
        self, owner: Node, nested: Sequence[Node], part: _Part, inputs: _Inputs
    ) -> list[Node]:
        """Finds the states of nested transformations; returns those that have further ones."""
        free = [place for place in _parts(part) if jax.tree.leaves(place.state)]
        examples = [_Example(node, inputs) for node in nested]
        unclear = _unclear(examples, free) if _is_users(owner) else set[int]()
        left, again = [x.node for x in examples if id(x.node) not in unclear], []
        while left:
            node = left.pop(0)
            example = _Example(node, inputs)
            place = next(itertools.chain(example.places(free), example.records(free)), None)
            if place is None:  # its `init` may be given other parameters, or not called at all
                node.is_stateless = example.is_empty
                left[:0] = node.children
                continue
            self.put(node, place, inputs)
            free = [other for other in free if not _is_inside(other, place)]
            if not node.is_container:
                again.append(example)
        copies = []
        for example in again:  # what is called twice keeps two states
            while place := next(filter(_is_record, example.places(free)), None):
                copies.append(dataclasses.replace(example.node, children=[]))
                self.put(copies[-1], place, inputs)
                free = [other for other in free if not _is_inside(other, place)]
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
        yield from (x for x in parts if _is_record(x) and type(x.state) in kinds)


def _is_users(node: Node) -> bool:
    """Whether nobody knows in which order a transformation keeps the states of others."""
    return not node.is_own and not node.package.startswith("opt_")


def _unclear(examples: Sequence[_Example], parts: Sequence[_Part]) -> set[int]:
    """The transformations whose states nothing tells apart: under keys, not in an order.

    These leaves stay with the transformation around them.
    """
    unclear: set[int] = set()
    for example in examples:
        alike = list({place.at: place for place in example.places(parts)}.values())
        rivals = [x for x in examples if x is not example and next(x.places(alike), None)]
        if rivals and len(alike) > 1 and not all(place.at[-1].isdigit() for place in alike):
            unclear |= {id(x.node) for x in (example, *rivals)}
    return unclear


def _known_places(node: Node, inputs: _Inputs) -> Iterator[tuple[Node, Names, _Inputs]]:
    """The paths at which Optax's containers keep the states of what they contain."""
    if node.injects:
        yield from ((child, ("inner_state",), inputs) for child in node.children)
    if not node.is_own:
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


def _is_record(part: _Part) -> bool:
    """Whether a part of a state is of a class of its own."""
    is_plain = type(part.state) in _PLAIN or isinstance(part.state, Mapping)
    return not is_plain and children(part.state) is not None


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


def _parts(part: _Part) -> Iterator[_Part]:
    """A part and everything inside it, outermost first, down to the places of parameters."""
    yield part
    if is_placeholder(part.placed):
        return
    opened = children(part.state)
    below = None if part.placed is None else children(part.placed)
    placed = dict(below.children) if below is not None else {}
    for name, child in opened.children if opened is not None else ():
        yield from _parts(_Part((*part.at, name), child, placed.get(name)))
