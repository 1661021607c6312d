"""Which transformation made each part of a state: `adam` and `yogi` keep states of one type.

`init` runs once on shapes, as a copy in which each transformation that it has captured notes what
it returns. No interpreter hook is needed for that: see `opt_core.closures.Rebuilt`.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from opt_core import children
from opt_core.closures import Rebuilt

from opt_optax_bridge._description.nodes import Names, Node, with_init


class Made(NamedTuple):
    """What was made, in the order in which it was returned: inner states before outer ones.

    Attributes:
      nodes: the transformations that returned something; one that was called twice is two.
      places: the transformation by the path of the node of the state that it made.
    """

    nodes: Sequence[Node]
    places: Mapping[Names, Node]


class _Returned(NamedTuple):
    node: Node
    value: Any


class _Place(NamedTuple):
    names: Names
    value: Any


def make(root: Node, params: Any) -> Made:
    """Runs the `init` of a transformation, and says what made what.

    A record that was made anew since, by `jax.tree.map`, is found by its structure. Children of
    `root` are put in the order in which they were called.

    Args:
      root: the transformation with everything inside of it.
      params: `jax.ShapeDtypeStruct`s.
    """
    returned: list[_Returned] = []
    places: dict[Names, Node] = {}

    def run(params: Any) -> Any:
        state = _recorded(root, returned)(params)
        places.update(_match(list(_places(state)), returned))
        return state

    jax.eval_shape(run, params)
    nodes = [found.node for found in returned]
    _sort(root, {id(node): turn for turn, node in reversed(list(enumerate(nodes)))})
    return Made(nodes, places)


def _recorded(node: Node, returned: list[_Returned]) -> Callable[[Any], Any]:
    """The `init` of a transformation, which notes what it and those inside of it return."""
    if node.shares_init:
        return _recorded(node.children[0], returned)
    init = _rebuilt(node, returned)
    is_used = False

    def note(params: Any) -> Any:
        nonlocal is_used
        state = init(params)
        made = node
        if is_used:  # the same one once more
            made = dataclasses.replace(node, children=[])
            node.children.append(made)
        is_used = True
        returned.append(_Returned(made, state))
        return state

    return note


def _rebuilt(node: Node, returned: list[_Returned]) -> Any:
    """The `init` of a transformation with those inside of it recorded."""
    queues: dict[int, deque[Node]] = {}
    for child in node.children:
        queues.setdefault(child.key, deque()).append(child)
    factory = node.factory_argument
    if factory is not None and node.children:
        queues = {id(factory): deque(node.children)}

    def replace(value: Any) -> Any:
        queue = queues[id(value)]
        child = queue.popleft() if len(queue) > 1 else queue[0]
        init = _recorded(child, returned)
        if value is factory:
            return lambda *_, **__: with_init(child.tx, init)
        return with_init(value, init) if hasattr(value, "update") else init

    return Rebuilt(lambda value: id(value) in queues, replace)(node.tx.init)


def _match(places: Sequence[_Place], returned: Sequence[_Returned]) -> Iterator[tuple[Names, Node]]:
    """By identity, the innermost first; records that were made anew by their structure."""
    by_value: dict[int, _Returned] = {}
    for found in returned:
        if not found.node.is_container:
            by_value.setdefault(id(found.value), found)
    left = dict(by_value)
    anew: list[_Place] = []
    for place in places:
        if (known := by_value.get(id(place.value))) is not None:
            left.pop(id(place.value), None)
            yield place.names, known.node
        elif not isinstance(place.value, Mapping | list) and type(place.value) is not tuple:
            anew.append(place)
    free = [found for found in left.values() if children(found.value) is not None]
    for place in anew:
        like = next((found for found in free if _is_like(found.value, place.value)), None)
        if like is not None:
            free.remove(like)
            yield place.names, like.node


def _is_like(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    before: Any = jax.tree.structure(one)
    return bool(before == jax.tree.structure(other))


def _places(node: Any, names: Names = ()) -> Iterator[_Place]:
    yield _Place(names, node)
    opened = children(node)
    for name, child in opened.children if opened is not None else ():
        yield from _places(child, (*names, name))


def _sort(node: Node, turns: Mapping[int, int]) -> None:
    """Puts what is inside of a transformation in the order of its calls, which is that of acting.

    What was not called stays in its place, before the next that was.
    """
    for child in node.children:
        _sort(child, turns)
    keys: list[tuple[int, int]] = []
    last = -1
    for i, child in enumerate(node.children):
        found = [turns[id(inner)] for inner in child.walk() if id(inner) in turns]
        last = min(found, default=last)
        keys.append((last, i))
    order = sorted(range(len(keys)), key=lambda i: keys[i])
    node.children = [node.children[i] for i in order]
