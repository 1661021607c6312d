"""What a transformation is made of: the transformations that its functions have captured."""

from __future__ import annotations

import dataclasses
import dis
import functools
import inspect
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from opt_core import OptimizerDef
from opt_core.extend import (
    Names,
    closure_vars,
    code_of,
    definer_of,
    factory_of,
    json_settings,
    opened,
    origin_of,
    own_name,
    package_of,
    qualified,
    snake_case,
    unwrapped,
)
from opt_core.protocols import DescribesFields

UPDATED_BY: Final = "update"
"""The setting that names the factory of the update function if another one made the state."""

# Without state or effect of their own; leaves show what they select.
_CONTAINERS: Final = frozenset(
    {"chain", "named_chain", "identity", "masked", "partition", "multi_transform", "process"}
)
_PARTITIONS: Final = frozenset({"partition", "multi_transform"})
_INJECTING: Final = frozenset({"inject_hyperparams", "inject_stateful_hyperparams"})
_PER_PARAMETER: Final = ("mask", "labels")  # leaves and `parameters` show the selection
_DEPTH: Final = 3


class _Half(NamedTuple):
    """The `init` or `update` of a transformation, or both: `optax.chain` keeps them apart."""

    init: Any
    update: Any


@dataclasses.dataclass(eq=False)
class Node:
    """A transformation with the transformations nested in it."""

    tx: Any  # the transformation, or a pair of functions
    group: Names = ()  # the labels of `optax.partition` around it.
    # the transformations that it calls
    children: list[Node] = dataclasses.field(default_factory=list)
    # the hyper-parameters that an enclosing `inject_hyperparams` injects
    injected: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shares_init: bool = False  # whether its `init` is that of its only child
    shares_update: bool = False  # whether its update function is that of a child
    # its own description, if it has one: see `opt_core.protocols.DescribesFields`.
    declared: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_stateless: bool = False  # whether it keeps no leaves itself

    @property
    def updates(self) -> Any:
        """Its update function; of half a transformation, `init`."""
        return self.tx.init if self.tx.update is None else self.tx.update

    @functools.cached_property
    def factory(self) -> str:
        """The name of the function or class that made its update function."""
        return factory_of(self.updates)

    @functools.cached_property
    def package(self) -> str:
        """The package that defines the factory."""
        return package_of(self.updates)

    @property
    def is_optax(self) -> bool:
        """Whether it is one of Optax's, which are known by name."""
        return self.package == "optax"

    @functools.cached_property
    def maker(self) -> str:
        """The name of the factory of its `init`; empty if that does not say what it makes."""
        init = self.tx.init
        says = own_name(init).startswith("init") and not _is_empty(init)
        return definer_of(init) if says else ""

    @functools.cached_property
    def held(self) -> dict[str, Any]:
        """The variables captured by its functions and their helpers, by name."""
        held = _captured_with_helpers(self.tx.init)
        if self.tx.update is not None:
            held |= _captured_with_helpers(self.tx.update)
        if self.maker != self.factory:
            for value in list(held.values()):
                # The update function that matches `init`; a wrapper calls it.
                if own_name(value).startswith("update") and factory_of(value) == self.maker:
                    held |= _captured_with_helpers(value)
        return held

    @property
    def is_container(self) -> bool:
        """Whether it has no meaning of its own."""
        return self.shares_update or (self.is_optax and self.factory in _CONTAINERS)

    @property
    def injects(self) -> bool:
        """Whether it rebuilds the nested transformation in every step."""
        return self.is_optax and self.factory in _INJECTING and "inner_factory" in self.held

    @property
    def name(self) -> str:
        """Its name, with its package; empty if only the type of its state can tell."""
        if "name" in self.declared:
            return str(self.declared["name"])
        if not self.shares_init and self.maker:
            return self.initialised_by
        is_stateful = not (self.shares_init or self.is_stateless or _is_empty(self.tx.init))
        return "" if is_stateful else self.updated_by

    @functools.cached_property
    def initialised_by(self) -> str:
        """The name that its init function gives it."""
        return qualified(transformation_name(self.maker), origin_of(self.tx.init))

    @functools.cached_property
    def updated_by(self) -> str:
        """The name that its update function alone would give it."""
        return qualified(transformation_name(self.factory), origin_of(self.updates))

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
    """Returns the name for the transformations of a factory."""
    return snake_case(factory).removeprefix("scale_by_") or factory


def open_transformation(tx: Any, group: Names = (), above: frozenset[int] = frozenset()) -> Node:
    """Returns a transformation with everything nested in it; `above` are enclosing functions."""
    tx = _of_definition(tx)
    node = Node(tx, group)
    if isinstance(owner := getattr(unwrapped(tx.init), "__self__", None), DescribesFields):
        node.declared = owner.describe_fields()
    above = above | {id(unwrapped(tx.init)), id(unwrapped(node.updates))}
    if node.injects:
        if (inner := _injected(node.held)) is not None:
            node.children = [open_transformation(inner, group, above)]
            for child in node.children[0].walk():
                child.injected = _injected_by(node.held)
        return node
    for member, *label in _members(node, above):
        child = open_transformation(member, (*group, *label), above)
        if _is_same(child.tx.init, tx.init):
            if node.is_optax and node.factory == "with_extra_args_support":
                return child
            node.children, node.shares_init = [child], True
            return node
        node.shares_update |= _is_same(child.tx.update, tx.update)
        node.children.append(child)
    return node


def _of_definition(tx: Any) -> Any:
    """What a definition wraps, if `tx` is one or has its `init`."""
    definition = getattr(tx.init, "__self__", None)
    inner: Any = getattr(definition, "optax_optimizer", None)
    if not isinstance(definition, OptimizerDef) or inner is None:
        return tx
    is_whole = getattr(tx.update, "__self__", None) is definition
    return inner if is_whole else _Half(inner.init, tx.update)


def _members(node: Node, above: frozenset[int]) -> Iterator[Sequence[Any]]:
    """The captured transformations, with their labels in a partition."""
    inits = closure_vars(node.tx.init).get("init_fns")
    updates = closure_vars(node.tx.update).get("update_fns")
    if node.is_optax and node.factory == "chain" and inits is not None and updates is not None:
        yield from ((_Half(*halves),) for halves in zip(inits, updates, strict=True))
        return
    transforms = node.held.get("transforms")
    if node.is_optax and node.factory in _PARTITIONS and isinstance(transforms, Mapping):
        yield from ((tx, str(label)) for label, tx in transforms.items())
        return
    seen: set[int] = set()
    functions: list[Any] = []
    for value in node.held.values():
        parts = list(_parts(value, node.factory))
        members = [part for part in parts if _is_transformation(part)]
        functions += [part for part in parts if not _is_transformation(part)]
        # Two variables may hold one transformation; a list that holds it twice applies it twice.
        yield from ((tx,) for tx in members if id(tx) not in seen)
        seen |= {id(tx) for tx in members}
    if not node.is_optax:
        yield from ((half,) for half in _halves(functions, above))


def _parts(value: Any, factory: str, depth: int = 0) -> Iterator[Any]:
    """The transformations in what `factory` has captured, and `init`s and `update`s of others."""
    if _is_transformation(value):
        yield value
        return
    plain = unwrapped(value)
    if isinstance(plain, types.FunctionType | types.MethodType):
        is_helper, is_wrapped = factory_of(plain) == factory, plain is not value
        if own_name(plain).startswith(("init", "update")):
            if is_wrapped or not is_helper:
                yield value
            return
        if not is_wrapped and not (is_helper and isinstance(plain, types.FunctionType)):
            return
    inner = opened(value)
    if inner is not None and depth < _DEPTH:
        for _, child in inner.children:
            yield from _parts(child, factory, depth + 1)


def _halves(functions: Iterable[Any], above: frozenset[int]) -> Iterator[_Half]:
    """Pairs functions that were captured separately: `init` and `update` of one factory."""
    distinct = {id(f): f for f in functions if id(unwrapped(f)) not in above}.values()
    inits = [f for f in distinct if own_name(f).startswith("init")]
    for update in (f for f in distinct if own_name(f).startswith("update")):
        init = next((f for f in inits if factory_of(f) == factory_of(update)), None)
        if init is not None:
            inits.remove(init)
            yield _Half(init, update)
    yield from (_Half(init, None) for init in inits)


def _is_transformation(value: Any) -> bool:
    """Whether a value has Optax's `init` and `update` and is not a stateful schedule."""
    if isinstance(value, type | types.ModuleType) or hasattr(value, "schedule_fn"):
        return False
    return callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))


def _is_same(function: Any, other: Any) -> bool:
    """Whether two functions are the same object, or the same method of the same object."""
    if isinstance(function, types.MethodType) and isinstance(other, types.MethodType):
        return function.__func__ is other.__func__ and function.__self__ is other.__self__
    return function is other


def _captured_with_helpers(function: Any, seen: frozenset[int] = frozenset()) -> dict[str, Any]:
    """The variables captured by a function and the helpers of its factory, by name."""
    factory, held = factory_of(function), _in_order_read(function)
    for value in list(held.values()):
        is_new = isinstance(value, types.FunctionType) and id(value) not in seen
        if is_new and factory_of(value) == factory:
            held = _captured_with_helpers(value, seen | {id(value)}) | held
    return held


def _in_order_read(function: Any) -> dict[str, Any]:
    """The variables that a function has captured, in the order in which its code names them."""
    held, code = closure_vars(function), code_of(function)
    if code is None or len(held) < 2:
        return held
    steps = (step for step in dis.get_instructions(code) if step.opname != "LOAD_CONST")
    names = [step.argval for step in steps if isinstance(step.argval, str)]
    return {name: held[name] for name in dict.fromkeys([*names, *held]) if name in held}


def _injected_by(held: Mapping[str, Any]) -> dict[str, Any]:
    """What `optax.inject_hyperparams` injects: numbers kept in the state, and schedules."""
    schedules = held.get("sched_hps", {}).items()
    return {
        **held.get("numeric_hps", {}),
        **{name: getattr(schedule, "schedule_fn", schedule) for name, schedule in schedules},
    }


def _injected(held: Mapping[str, Any]) -> Any:
    """The transformation that `optax.inject_hyperparams` builds in each step."""
    scheduled = dict.fromkeys(held.get("sched_hps", {}), 1.0)
    arguments = {**held.get("other_hps", {}), **held.get("numeric_hps", {}), **scheduled}
    try:
        return held["inner_factory"](**arguments)
    except Exception:  # a user's factory may reject the rate that stands in for a schedule
        return None


def settings_of(node: Node) -> dict[str, Any]:
    """Returns the settings of a transformation as JSON, by the names of its arguments."""
    if (named := node.declared.get("settings")) is None:
        held = _injected_by(node.held) if node.injects else node.held
        arguments = _arguments(node) if node.is_optax else None
        # Attributes are named after arguments, up to underscores.
        bare = {name.strip("_"): value for name, value in held.items()}
        named = {k: _number(v) for k, v in bare.items() if _is_setting(k, v, node, arguments)}
    injected = {"injected": node.injected} if node.injected else {}
    settings = json_settings({**dict(sorted(named.items())), **injected}, functions=True)
    if _is_updated_by_another(node):
        settings[UPDATED_BY] = node.updated_by
    return settings


def _number(value: Any) -> Any:
    """Unwraps a number that `optax.MultiSteps` has turned into a function."""
    is_optax = isinstance(value, types.FunctionType) and package_of(value) == "optax"
    held = closure_vars(value) if is_optax else {}
    return held["every_k_schedule"] if held.keys() == {"every_k_schedule"} else value


def _is_updated_by_another(node: Node) -> bool:
    """Whether one factory's function updates a state that another's, or nobody known, has made."""
    if node.shares_init or node.tx.update is None:
        return False
    is_optax = node.is_optax and package_of(node.tx.init) == "optax"
    if not node.maker:
        return not is_optax and not node.is_stateless
    makes, updates = (origin_of(f) for f in (node.tx.init, node.tx.update))
    return (node.maker, makes) != (node.factory, updates) and not is_optax


def _arguments(node: Node) -> frozenset[str] | None:
    """The argument names of the constructor in which its functions are defined."""
    plain = unwrapped(node.updates)
    plain = getattr(plain, "__func__", plain)
    constructor = getattr(plain, "__globals__", {}).get(node.factory)
    return frozenset(inspect.signature(constructor).parameters) if callable(constructor) else None


def _is_setting(name: str, value: Any, node: Node, arguments: frozenset[str] | None) -> bool:
    if name.endswith(_PER_PARAMETER) or next(_parts(value, node.factory), None) is not None:
        return False
    if not node.injects and arguments is not None and name not in arguments:
        return False
    plain = unwrapped(value)
    is_helper = isinstance(plain, types.FunctionType) and factory_of(plain) == node.factory
    return not is_helper or name in (arguments or ())
