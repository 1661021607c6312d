"""What a transformation is made of: the transformations that its functions have captured."""

from __future__ import annotations

import dataclasses
import dis
import functools
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from opt_core.extend import (
    closure_vars,
    code_of,
    definer_of,
    factory_of,
    opened,
    origin_of,
    own_name,
    package_of,
    qualified,
    snake_case,
    unwrapped,
)
from opt_core.protocols import DescribesFields

Names = tuple[str, ...]

OWN: Final = frozenset({"optax"})
"""The packages whose transformations are known by name."""

CONTAINERS: Final = frozenset(
    {"chain", "named_chain", "identity", "masked", "partition", "multi_transform", "process"}
)
"""Transformations without state or effect of their own; leaves show what they select."""

_PARTITIONS: Final = frozenset({"partition", "multi_transform"})
_INJECTING: Final = frozenset({"inject_hyperparams", "inject_stateful_hyperparams"})
_DEPTH: Final = 3


class _Half(NamedTuple):
    """The `init` or `update` of a transformation, or both: `optax.chain` keeps them apart."""

    init: Any
    update: Any


@dataclasses.dataclass(eq=False)
class Node:
    """A transformation with the transformations nested in it.

    Attributes:
      tx: the transformation, or a pair of functions.
      group: the labels of `optax.partition` around it.
      factory: the name of the function or class that made its update function.
      package: the package that defines the factory.
      maker: the name of the factory of its `init`; empty if that is not known.
      children: the transformations that it calls.
      injected: the hyper-parameters that an enclosing `inject_hyperparams` injects.
      shares_init: whether its `init` is that of its only child.
      shares_update: whether its update function is that of a child.
      declared: its own description, if it has one: see `opt_core.protocols.DescribesFields`.
      is_stateless: whether `init` returned a state without leaves.
    """

    tx: Any
    group: Names
    factory: str
    package: str
    maker: str
    children: list[Node]
    injected: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shares_init: bool = False
    shares_update: bool = False
    declared: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_stateless: bool = False

    @functools.cached_property
    def held(self) -> dict[str, Any]:
        """The variables captured by its functions and their helpers, by name."""
        found = _captured_with_helpers(self.tx.init)
        if self.tx.update is not None:
            found |= _captured_with_helpers(self.tx.update)
        if self.maker != self.factory:
            for value in list(found.values()):
                # The update function that matches `init`; a wrapper calls it.
                if own_name(value).startswith("update") and factory_of(value, OWN) == self.maker:
                    found |= _captured_with_helpers(value)
        return found

    @property
    def is_own(self) -> bool:
        """Whether its package is one whose transformations are known by name."""
        return self.package in OWN

    @property
    def is_container(self) -> bool:
        """Whether it has no meaning of its own."""
        return self.shares_update or (self.is_own and self.factory in CONTAINERS)

    @property
    def injects(self) -> bool:
        """Whether it builds the nested transformation anew in every step."""
        return self.is_own and self.factory in _INJECTING and "inner_factory" in self.held

    @property
    def name(self) -> str:
        """Its name, with its package; empty if only the type of its state can tell."""
        if "name" in self.declared:
            return str(self.declared["name"])
        if not self.shares_init and self.maker:
            return qualified(transformation_name(self.maker), origin_of(self.tx.init))
        is_stateful = not (self.shares_init or self.is_stateless or _is_empty(self.tx.init))
        return "" if is_stateful else self.updated_by

    @property
    def updated_by(self) -> str:
        """The name that its update function alone would give it."""
        function = self.tx.init if self.tx.update is None else self.tx.update
        return qualified(transformation_name(self.factory), origin_of(function))

    def walk(self) -> Iterator[Node]:
        """Yields itself and everything nested in it, outermost first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def made_in_order(self) -> Iterator[Node]:
        """Yields the same in the order in which states are made, innermost first."""
        for child in self.children:
            yield from child.made_in_order()
        yield self


def _is_empty(init: Any) -> bool:
    return package_of(init) == "optax" and own_name(init) == "init_empty_state"


def transformation_name(factory: str) -> str:
    """Returns the name for the transformations of a factory.

    Examples:
      >>> transformation_name('scale_by_adam'), transformation_name('MultiSteps')
      ('adam', 'multi_steps')
    """
    return snake_case(factory).removeprefix("scale_by_") or factory


def open_transformation(tx: Any, group: Names = (), above: frozenset[int] = frozenset()) -> Node:
    """Returns a transformation with everything nested in it that can be found.

    Args:
      tx: anything with Optax's `init` and `update`.
      group: the labels around it.
      above: the identities of the enclosing functions.

    Examples:
      >>> import optax
      >>> tx = optax.chain(optax.clip(1.0), optax.MultiSteps(optax.adam(0.1), 2))
      >>> [node.name for node in open_transformation(tx).walk() if not node.is_container]
      ['clip', 'multi_steps', 'adam', 'scale']
    """
    init, update = tx.init, tx.update
    made_by = update if update is not None else init
    factory, package = factory_of(made_by, OWN), package_of(made_by)
    says = own_name(init).startswith("init") and not _is_empty(init)
    node = Node(tx, group, factory, package, definer_of(init, OWN) if says else "", [])
    if isinstance(owner := getattr(unwrapped(init), "__self__", None), DescribesFields):
        node.declared = owner.describe_fields()
    above = above | {id(unwrapped(init)), id(unwrapped(made_by))}
    held = node.held
    if node.injects:
        if (inner := _injected(held)) is not None:
            node.children = [open_transformation(inner, group, above)]
            for child in node.children[0].walk():
                child.injected = injected_by(held)
        return node
    for member, *label in _members(node, held, above):
        child = open_transformation(member, (*group, *label), above)
        if is_same(child.tx.init, init):
            if node.is_own and factory == "with_extra_args_support":
                return child
            node.children, node.shares_init = [child], True
            return node
        node.shares_update |= is_same(child.tx.update, update)
        node.children.append(child)
    return node


def _members(node: Node, held: Mapping[str, Any], above: frozenset[int]) -> Iterator[Sequence[Any]]:
    """The captured transformations, with their labels in a partition."""
    inits = closure_vars(node.tx.init).get("init_fns")
    updates = closure_vars(node.tx.update).get("update_fns")
    if node.is_own and node.factory == "chain" and inits is not None and updates is not None:
        yield from ((_Half(*halves),) for halves in zip(inits, updates, strict=True))
        return
    if node.is_own and node.factory in _PARTITIONS and isinstance(held.get("transforms"), Mapping):
        yield from ((tx, str(label)) for label, tx in held["transforms"].items())
        return
    seen: set[int] = set()
    functions: list[Any] = []
    for value in held.values():
        found = list(occurrences(value, node.factory, functions))
        # Two variables may hold one transformation; a list that holds it twice applies it twice.
        yield from ((tx,) for tx in found if id(tx) not in seen)
        seen |= {id(tx) for tx in found}
    if not node.is_own:
        yield from ((half,) for half in _halves(functions, above))


def occurrences(value: Any, factory: str, functions: list[Any], depth: int = 0) -> Iterator[Any]:
    """The transformations in a captured value; separate halves are appended to `functions`."""
    if is_transformation(value):
        yield value
        return
    plain = unwrapped(value)
    if isinstance(plain, types.FunctionType | types.MethodType):
        is_helper, is_wrapped = factory_of(plain, OWN) == factory, plain is not value
        if own_name(plain).startswith(("init", "update")):
            if is_wrapped or not is_helper:
                functions.append(value)
            return
        if not is_wrapped and not (is_helper and isinstance(plain, types.FunctionType)):
            return
    parts = opened(value)
    if parts is not None and depth < _DEPTH:
        for _, child in parts.children:
            yield from occurrences(child, factory, functions, depth + 1)


def _halves(functions: Iterable[Any], above: frozenset[int]) -> Iterator[_Half]:
    """Pairs functions that were captured separately: `init` and `update` of one factory."""
    distinct = {id(f): f for f in functions if id(unwrapped(f)) not in above}.values()
    inits = [f for f in distinct if own_name(f).startswith("init")]
    for update in (f for f in distinct if own_name(f).startswith("update")):
        own = next((f for f in inits if factory_of(f, OWN) == factory_of(update, OWN)), None)
        if own is not None:
            inits.remove(own)
            yield _Half(own, update)
    yield from (_Half(init, None) for init in inits)


def is_transformation(value: Any) -> bool:
    """Whether a value has Optax's `init` and `update` and is not a stateful schedule."""
    if isinstance(value, type | types.ModuleType) or hasattr(value, "schedule_fn"):
        return False
    return callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))


def is_same(one: Any, other: Any) -> bool:
    """Whether two functions are the same object, or the same method of the same object."""
    if isinstance(one, types.MethodType) and isinstance(other, types.MethodType):
        return one.__func__ is other.__func__ and one.__self__ is other.__self__
    return one is other


def _captured_with_helpers(function: Any, seen: frozenset[int] = frozenset()) -> dict[str, Any]:
    """The variables captured by a function and the helpers of its factory, by name."""
    factory, found = factory_of(function, OWN), _in_order_read(function)
    for value in list(found.values()):
        is_new = isinstance(value, types.FunctionType) and id(value) not in seen
        if is_new and factory_of(value, OWN) == factory:
            found = _captured_with_helpers(value, seen | {id(value)}) | found
    return found


def _in_order_read(function: Any) -> dict[str, Any]:
    """The variables that a function has captured, in the order in which its code names them."""
    held, code = closure_vars(function), code_of(function)
    if code is None or len(held) < 2:
        return held
    steps = (step for step in dis.get_instructions(code) if step.opname != "LOAD_CONST")
    names = [step.argval for step in steps if isinstance(step.argval, str)]
    return {name: held[name] for name in dict.fromkeys([*names, *held]) if name in held}


def injected_by(held: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what `optax.inject_hyperparams` injects: numbers kept in the state, and schedules."""
    schedules = held.get("sched_hps", {}).items()
    return {
        **held.get("numeric_hps", {}),
        **{name: getattr(schedule, "schedule_fn", schedule) for name, schedule in schedules},
    }


def _injected(held: Mapping[str, Any]) -> Any:
    """The transformation that `optax.inject_hyperparams` builds in each step."""
    scheduled = dict.fromkeys(held.get("sched_hps", {}), 1.0)
    given = {**held.get("other_hps", {}), **held.get("numeric_hps", {}), **scheduled}
    try:
        return held["inner_factory"](**given)
    except Exception:  # a user's factory may reject the rate that stands in for a schedule
        return None
