"""What an optimizer is made of: the transformations in their order, and how they were set.

Twelve of Optax's optimizers keep states of the same names, shapes and types. What tells them apart
is in the closures of their update functions.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from opt_core import Optimizer, leaf_groups
from opt_optax_bridge import OptaxWrapper

from opt_checkpoint._naming.captured import digest_of, filled_cells, package_of
from opt_checkpoint._naming.dimensions import dimensions
from opt_checkpoint._naming.makers import factory_name, transformation_name
from opt_checkpoint._naming.numbers import Found, beside, numbered
from opt_checkpoint._naming.schema import (
    DIGEST,
    INJECTED,
    MADE_BY,
    Names,
    Transformation,
)
from opt_checkpoint._naming.window_code import window_code

_PARTITIONS = frozenset({"partition", "multi_transform"})  # their groups are in the names
_CONTAINERS = frozenset({"chain", "named_chain", "with_extra_args_support", "identity"})
_INJECTING = frozenset({"inject_hyperparams", "inject_stateful_hyperparams"})
_Setting = bool | int | float | str | None
_DEPTH = 2
_MANY = 16
_PER_PARAMETER = ("mask", "labels")  # which parameters are meant is no setting


def transformations(optimizer: Optimizer) -> tuple[Transformation, ...]:
    """Returns the transformations of an optimizer, group by group, in the order of their updates.

    Args:
      optimizer: of any definition; its leaves may be abstract.

    Returns:
      One for each factory whose update function takes part: `'scale_by_adam'`,
      `'clip_by_global_norm'`, ... Of a definition that is no Optax wrapper, one with its class's
      name. What a factory cannot be seen through (compiled functions) is left out.

    Examples:
      >>> import optax
      >>> made = OptaxWrapper(optax.adamw(1e-3)).create({'w': 1.0})
      >>> [found.name for found in transformations(made)]
      ['scale_by_adam', 'add_decayed_weights', 'scale']
    """
    return tuple(found for group, part in leaf_groups(optimizer) for found in _of_part(part, group))


def _of_part(part: Optimizer, group: Names) -> Sequence[Transformation]:
    definition = part.optimizer_def
    if isinstance(definition, OptaxWrapper):
        return numbered(list(_walk(definition.optax_optimizer, group, set())))
    settings = {**dict(_settings(_fields(definition.hyper_params))), **dict(dimensions(part))}
    name = transformation_name(type(definition).__name__)
    return (Transformation(name, group, settings, number=1),)


def _walk(node: Any, group: Names, seen: set[int]) -> Iterator[Found]:
    """The transformations in a transformation, an update function, or a container of such."""
    if id(node) in seen:
        return
    seen = seen | {id(node)}
    match node:
        case types.MethodType():
            owner = node.__self__
            if _update(owner) is not None or node.__name__.startswith("update"):
                yield from _emit(type(owner).__name__, _fields(owner), group, seen)
        case types.FunctionType():
            yield from _emit(_factory_of(node), _cells(node), group, seen)
        case functools.partial():
            held = [node.func, *node.args, *node.keywords.values()]
            acting = [child for i, child in enumerate(held) if i == 0 or _acts(child)]
            yield from beside([list(_walk(child, group, seen)) for child in acting])
        case Mapping():
            yield from beside([list(_walk(child, group, seen)) for child in node.values()])
        case _ if (members := _members(node)) is not None:
            for member in members:
                yield from _walk(member, group, seen)
        case _ if (update := _update(node)) is not None:
            walked = _with_maker(list(_walk(update, group, seen)), node)
            if (given := _given(node)) is not None:
                below = list(_walk(_injected(given), group, seen))
                # The one that injects has nothing below it but these.
                walked[0] = walked[0]._replace(below=len(below))
                walked = [_with_given(found, given) for found in (*walked, *below)]
            yield from walked
        case tuple() | list():
            for child in node:
                yield from _walk(child, group, seen)
        case _ if isinstance(inner := getattr(node, "__wrapped__", None), types.FunctionType):
            yield from _walk(inner, group, seen)  # of a compiled function
        case _:
            held = [child for child in _held(node).values() if _acts(child)]
            yield from beside([list(_walk(child, group, seen)) for child in held])


def _emit(
    factory: str, captured: Mapping[str, Any], group: Names, seen: set[int]
) -> Iterator[Found]:
    below: list[list[Found]] = []
    if factory not in _INJECTING:  # what it has captured are schedules; see `_injected`
        for name, child in captured.items():
            if factory in _PARTITIONS and name == "transforms" and isinstance(child, Mapping):
                for label, part in child.items():
                    below.append(list(_walk(part, (*group, str(label)), seen)))
            elif _acts(child) and not _is_helper(child, factory):
                below.append(list(_walk(child, group, seen)))
    inner = list(beside(below))
    if factory not in _CONTAINERS | _PARTITIONS and "lambda" not in factory:
        settings = dict(_settings(captured))
        if transformation_name(factory) == "multi_steps":
            settings = {name: value for name, value in settings.items() if _is_of_window(name)}
            settings |= window_code(captured)
        yield Found(Transformation(factory, group, settings), len(inner))
    yield from inner


def _factory_of(function: types.FunctionType) -> str:
    return factory_name(function.__code__.co_qualname, function.__module__ or "")


def _is_helper(value: Any, factory: str) -> bool:
    """Whether it is a function of a factory's own that its update function calls."""
    return isinstance(value, types.FunctionType) and _factory_of(value) == factory


def _with_maker(walked: list[Found], node: Any) -> list[Found]:
    """With what makes the state of the first, where its `init` is that of something else."""
    init = getattr(node.init, "__func__", node.init)
    update = getattr(node.update, "__func__", node.update)
    if not isinstance(init, types.FunctionType) or not isinstance(update, types.FunctionType):
        return walked
    is_known = init.__name__.startswith("init") and package_of(init) != "optax"
    owner = getattr(node.update, "__self__", None)
    own = _factory_of(update) if owner is None else type(owner).__name__
    if not walked or walked[0].made.name != own or not is_known:
        return walked
    made, maker = walked[0].made, _factory_of(init)
    names = {transformation_name(found.made.name) for found in walked}
    if transformation_name(maker) in names:
        return walked
    settings = {**made.settings, MADE_BY: maker}
    return [walked[0]._replace(made=dataclasses.replace(made, settings=settings)), *walked[1:]]


class _Member(NamedTuple):
    init: Any
    update: Any


def _members(node: Any) -> list[_Member] | None:
    """The transformations in `optax.chain`, which keeps halves of them; `None` of anything else."""
    update, init = _update(node), getattr(node, "init", None)
    if not isinstance(init, types.FunctionType) or not isinstance(update, types.FunctionType):
        return None
    inits, updates = _cells(init).get("init_fns"), _cells(update).get("update_fns")
    if _factory_of(update) != "chain" or not isinstance(inits, tuple | list) or updates is None:
        return None
    return [_Member(*halves) for halves in zip(inits, updates, strict=True)]


def _given(node: Any) -> dict[str, Any] | None:
    """What `optax.inject_hyperparams` has captured, `None` of anything else."""
    update, init = _update(node), node.init
    if not isinstance(init, types.FunctionType) or not isinstance(update, types.FunctionType):
        return None
    captured = _cells(init) | _cells(update)
    is_injecting = _factory_of(update) in _INJECTING and "inner_factory" in captured
    return captured if is_injecting else None


def _injected(captured: Mapping[str, Any]) -> Any:
    """What `optax.inject_hyperparams` builds in each step."""
    scheduled = dict.fromkeys(captured.get("sched_hps", {}), 1.0)
    given = {**captured.get("other_hps", {}), **captured.get("numeric_hps", {}), **scheduled}
    try:
        return captured["inner_factory"](**given)
    except Exception:  # one of a user's, that does not take every rate
        return None


def _with_given(found: Found, captured: Mapping[str, Any]) -> Found:
    """With what is injected, schedules among it: two of one factory differ in nothing else."""
    hyper_params = [captured.get(kind, {}) for kind in ("sched_hps", "numeric_hps")]
    if (digest := digest_of(hyper_params)) is None:
        return found
    settings = {**found.made.settings, INJECTED: digest}
    return found._replace(made=dataclasses.replace(found.made, settings=settings))


def _acts(value: Any) -> bool:
    """Whether a captured value is a transformation, an update function, or a container of such."""
    match value:
        case types.FunctionType() | types.MethodType():
            return value.__name__.startswith("update")
        case functools.partial():
            return any(map(_acts, (value.func, *value.args, *value.keywords.values())))
        case _ if _update(value) is not None:
            return True
        case tuple() | list():
            return any(_acts(child) for child in value)
        case Mapping():
            return any(_acts(child) for child in value.values())
    return any(_update(child) is not None for child in _held(value).values())


def _held(value: Any) -> Mapping[str, Any]:
    """The attributes of an object that is neither a class nor a module."""
    if isinstance(value, type | types.ModuleType):
        return {}
    found = getattr(value, "__dict__", {})
    return found if isinstance(found, dict) else {}


def _update(node: Any) -> Any:
    """The update function of a transformation, `None` of anything else."""
    if isinstance(node, type | types.ModuleType | np.ndarray):
        return None
    found = getattr(node, "update", None) if getattr(node, "init", None) is not None else None
    return found if callable(found) else None


def _cells(function: types.FunctionType) -> dict[str, Any]:
    return dict(filled_cells(function))


def _fields(obj: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return {field.name: getattr(obj, field.name) for field in dataclasses.fields(obj)}
    return dict(getattr(obj, "__dict__", {}))


def _is_of_window(name: str) -> bool:
    """Whether windows are compared by it; what their function has captured its digest tells."""
    return "[" not in name and not name.endswith(DIGEST)


def _settings(captured: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[str, _Setting]]:
    """What can be written down, by name; of a function (a schedule) what it has captured.

    Of what is no number and no string a digest, under its name with `DIGEST` after it.
    """
    for name, value in sorted(captured.items()):
        if name.endswith(_PER_PARAMETER):
            continue
        inner = _parts(value) if depth < _DEPTH else None
        match value:
            case bool() | int() | float() | str() | None:
                yield name, value
                continue
            case np.bool_() | np.integer() | np.floating():
                yield name, value.item()
                continue
            case np.dtype() | np.generic():
                yield name, str(value)
                continue
            case type() if issubclass(value, np.generic):
                yield name, np.dtype(value).name
                continue
            case np.ndarray() | jax.Array() if (number := _number(value)) is not None:
                yield name, number
                continue
            case types.FunctionType() if "<" not in value.__qualname__ and not _acts(value):
                yield name, value.__qualname__
        if inner is not None and not _acts(value):
            separator = "" if isinstance(value, tuple | list) else "."
            parts = {f"{name}{separator}{part}": child for part, child in inner.items()}
            yield from _settings(parts, depth + 1)
            if not isinstance(value, types.FunctionType):
                continue
        if not _acts(value) and (digest := digest_of(value)) is not None:
            yield name + DIGEST, digest


def _number(value: Any) -> bool | int | float | None:
    """The value of an array of one number, `None` of any other."""
    if isinstance(value, jax.core.Tracer) or value.shape:
        return None
    if not any(
        jnp.issubdtype(value.dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating)
    ):
        return None
    return None if digest_of(value) is None else np.asarray(value).item()


def _parts(value: Any) -> dict[str, Any] | None:
    """What a small container holds, or a local function has captured; `None` of anything else."""
    match value:
        case types.FunctionType():
            return _cells(value) if "<" in value.__qualname__ else None
        case Mapping():
            found = {str(key): child for key, child in value.items()}
        case tuple() | list():
            found = {f"[{i}]": child for i, child in enumerate(value)}
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            found = _fields(value)
        case _:
            return None
    return found if len(found) <= _MANY else None
