"""Which transformation made each part of a state; the type cannot tell `adam` from `yogi`.

A copy of `init` runs once on shapes, in which every captured transformation records what it
returns. This needs no interpreter hook: see `opt_core.closures.Rebuilt`.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from opt_core import children
from opt_core.closures import Rebuilt
from opt_core.protocols import StoresLeaf

from opt_optax_bridge._description.nodes import Names, Node, with_init


class Made(NamedTuple):
    """The recorded states in the order of return: inner states before outer ones.

    Attributes:
      nodes: the transformations that returned a state; one called twice appears twice.
      places: the transformation by the path of the state that it made.
    """

    nodes: Sequence[Node]
    places: Mapping[Names, Node]


class _Returned(NamedTuple):
    node: Node
    value: Any


def make(root: Node, params: Any) -> Made:
    """Runs the `init` of a transformation on shapes and records what each part returns.

    Sorts the children of `root` by the order of their calls.
    """
    returned: list[_Returned] = []
    places: dict[Names, Node] = {}

    def run(params: Any) -> Any:
        state = _recorded(root, returned)(params)
        places.update(_match(state, returned))
        return state

    jax.eval_shape(run, params)
    for found in returned:
        found.node.is_stateless = not jax.tree.leaves(found.value)
    nodes = [found.node for found in returned]
    _sort(root, {id(node): turn for turn, node in reversed(list(enumerate(nodes)))})
    return Made(nodes, places)


def _recorded(node: Node, returned: list[_Returned]) -> Callable[[Any], Any]:
    """A copy of `init` that records what it and the nested transformations return."""
    if node.shares_init:
        return _recorded(node.children[0], returned)
    factory = node.factory_argument
    queues: dict[int, deque[Node]] = {}
    for child in node.children:
        key = child.key if factory is None else id(factory)
        queues.setdefault(key, deque()).append(child)

    def replace(value: Any) -> Any:
        queue = queues[id(value)]
        child = queue.popleft() if len(queue) > 1 else queue[0]
        init = _recorded(child, returned)
        if value is factory:
            return lambda *_, **__: with_init(child.tx, init)
        return with_init(value, init) if hasattr(value, "update") else init

    init = Rebuilt(lambda value: id(value) in queues, replace)(node.tx.init)
    unused = [node]

    def note(params: Any) -> Any:
        state = init(params)
        if unused:
            made = unused.pop()
        else:  # a second call of the same `init`
            made = dataclasses.replace(node, children=[])
            node.children.append(made)
        made.given = jax.tree.structure(params)
        returned.append(_Returned(made, state))
        return state

    return note


def _match(state: Any, returned: Sequence[_Returned]) -> Iterator[tuple[Names, Node]]:
    """Matches by identity, innermost first; copied records are matched by structure.

    `jax.tree.map`, for instance, copies records.
    """
    by_value: dict[int, _Returned] = {}
    for found in returned:
        if not found.node.is_container:
            by_value.setdefault(id(found.value), found)
    left = dict(by_value)
    rerun: list[tuple[Names, Any]] = []
    for names, value in _places(state):
        if (known := by_value.get(id(value))) is not None:
            left.pop(id(value), None)
            yield names, known.node
        elif not isinstance(value, Mapping | list) and type(value) is not tuple:
            rerun.append((names, value))
    free = [found for found in left.values() if children(found.value) is not None]
    for names, value in rerun:
        like = next((found for found in free if _is_like(found.value, value)), None)
        if like is not None:
            free.remove(like)
            yield names, like.node


def _is_like(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    # What stands for a leaf was one when it was made.
    structures: Any = [
        jax.tree.structure(tree, is_leaf=lambda node: isinstance(node, StoresLeaf))
        for tree in (one, other)
    ]
    return bool(structures[0] == structures[1])


def _places(node: Any, names: Names = ()) -> Iterator[tuple[Names, Any]]:
    yield names, node
    opened = children(node)
    for name, child in opened.children if opened is not None else ():
        yield from _places(child, (*names, name))


def _sort(node: Node, turns: Mapping[int, int]) -> None:
    """Sorts nested transformations by the order of their calls, in which they also act.

    Those that were not called stay before the next one that was.
    """
    last, keys = -1, {}
    for child in node.children:
        _sort(child, turns)
        last = min((turns[id(x)] for x in child.walk() if id(x) in turns), default=last)
        keys[id(child)] = last
    node.children.sort(key=lambda child: keys[id(child)])
