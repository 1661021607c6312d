"""Which function made each part of a state: `adam` and `yogi` keep states of one type."""

from __future__ import annotations

import cProfile
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

import jax
from opt_core import children

from opt_checkpoint._naming.schema import MADE_BY, Transformation

Names = tuple[str, ...]


class Maker(NamedTuple):
    """What made a node of a state.

    Attributes:
      factory: the name of the function or class.
      turn: its place in the order in which nodes were made, which in chains is that of updates.
      types: those of the nodes above, outermost first.
    """

    factory: str
    turn: int
    types: tuple[type, ...]


def makers(init: Callable[[Any], Any], params: Any) -> dict[Names, Maker]:
    """Returns what made each node of a state.

    `init` is traced, nothing is computed. Whatever a function returns whose own name begins with
    `init` (`init`, `init_fn`, `init_state`, ...) is what it made: its name is that of the factory
    around it, or of its class.

    Args:
      init: of an Optax transformation or an optimizer definition.
      params: parameters; arrays or `jax.ShapeDtypeStruct`s.

    Returns:
      The makers by the path of the node, in their turns. A node that no such function returned, as
      it is or as a record like it, has none.

    Examples:
      >>> import optax
      >>> tx = optax.chain(optax.scale_by_yogi(), optax.trace(0.9))
      >>> {path: made.factory for path, made in makers(tx.init, {'w': 1.0}).items()}
      {('0',): 'scale_by_yogi', ('1',): 'trace', (): 'chain'}
    """
    returned: dict[int, _Returned] = {}

    def note(frame: FrameType, event: str, value: Any) -> None:
        if event == "return" and value is not None and _makes_states(frame.f_code):
            module = frame.f_globals.get("__name__", "")
            factory = factory_name(frame.f_code.co_qualname, module)
            returned.setdefault(id(value), _Returned(factory, len(returned), value))

    found: dict[Names, Maker] = {}

    def run(params: Any) -> Any:
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            # A compiled function runs again, and does not come out of a cache.
            with jax.disable_jit():
                state = init(params)
        finally:
            _restore_profile(before)
        found.update(_match(list(_nodes(state)), returned))
        return state

    jax.eval_shape(run, params)
    return dict(sorted(found.items(), key=lambda item: item[1].turn))


def _restore_profile(before: Any) -> None:
    if isinstance(before, cProfile.Profile):  # until Python 3.11; no function
        before.enable()
    else:
        sys.setprofile(before)


class _Returned(NamedTuple):
    factory: str
    turn: int
    value: Any  # kept, so that its id is not used again


class _Node(NamedTuple):
    names: Names
    types: tuple[type, ...]
    value: Any


def _match(
    nodes: Sequence[_Node], returned: Mapping[int, _Returned]
) -> Iterator[tuple[Names, Maker]]:
    """By identity; records that were rebuilt since, by `jax.tree.map`, by their structure."""
    rebuilt: list[_Node] = []
    left = dict(returned)
    for node in nodes:
        made = returned.get(id(node.value))
        if made is not None:
            left.pop(id(node.value), None)
            yield node.names, Maker(made.factory, made.turn, node.types)
        elif not isinstance(node.value, Mapping | list) and type(node.value) is not tuple:
            rebuilt.append(node)
    free = [made for made in left.values() if children(made.value) is not None]
    for node in rebuilt:
        for made in free:
            if type(made.value) is type(node.value) and _is_like(made.value, node.value):
                free.remove(made)
                yield node.names, Maker(made.factory, made.turn, node.types)
                break


def _is_like(one: Any, other: Any) -> bool:
    before: Any = jax.tree.structure(one)
    return bool(before == jax.tree.structure(other))


def transformation_name(factory: str) -> str:
    """Returns what a factory is called in names of leaves.

    Examples:
      >>> transformation_name('scale_by_adam'), transformation_name('trace')
      ('adam', 'trace')
      >>> transformation_name('ScaleByAdamState'), transformation_name('MultiSteps')
      ('adam', 'multi_steps')
    """
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", factory).lower()
    return snake.removeprefix("scale_by_").removesuffix("_state").strip("_") or factory


def state_name(made: Transformation) -> str:
    """Returns what a transformation is called in names of leaves: after what makes its state.

    Examples:
      >>> state_name(Transformation('scale_by_adam'))
      'adam'
      >>> state_name(Transformation('Squares', settings={'init:': 'Momentum'}))
      'momentum'
    """
    return transformation_name(str(made.settings.get(MADE_BY, made.name)))


def _makes_states(code: CodeType) -> bool:
    """Whether it is an `init` of something, for parameters: that of a schedule takes none."""
    arguments = code.co_varnames[: code.co_argcount]
    return code.co_name.startswith("init") and any(name != "self" for name in arguments)


def factory_name(qualified: str, module: str) -> str:
    """Returns the name of the function that a function was defined in, or of the class.

    Examples:
      >>> factory_name('scale_by_adam.<locals>.init_fn', 'optax')
      'scale_by_adam'
      >>> factory_name('main.<locals>.momentum.<locals>.init_fn', 'train')
      'momentum'
      >>> factory_name('main.<locals>.MultiSteps.init', 'train')
      'MultiSteps'
    """
    scopes = qualified.split(".<locals>.")
    if "." in scopes[-1]:
        return scopes[-1].split(".")[-2]
    if len(scopes) == 1:
        return qualified
    # A factory of Optax's is no local function, but may have some.
    scope = scopes[0] if module.partition(".")[0] == "optax" else scopes[-2]
    return scope.rpartition(".")[2]


def _nodes(node: Any, names: Names = (), types: tuple[type, ...] = ()) -> Iterator[_Node]:
    yield _Node(names, types, node)
    opened = children(node)
    for name, child in opened.children if opened is not None else ():
        yield from _nodes(child, (*names, name), (*types, type(node)))
