"""What the functions of a transformation take: extra arguments such as `value`, and overrides.

A chain accepts any keyword: what its parts take is read off what `update` has captured.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from opt_core import MultiOptimizer, OptimizerDef
from opt_core.errors import HyperParamError
from opt_core.extend import listed, reached


def taken_keywords(update: Callable[..., Any], names: Collection[str]) -> frozenset[str]:
    """Returns those of `names` that an update takes, or one that it has captured."""
    taken = {parameter.name for parameter in _extra_parameters(update)}
    for value in reached(update, _drops_keywords):
        owner: Any = value.__self__ if isinstance(value, types.MethodType) else value
        if hasattr(type(owner), "extra_arg_names"):  # a definition, or a transformation
            taken.update(owner.extra_arg_names(names))
        if isinstance(owner, OptimizerDef):  # that of an `as_transformation`
            taken.update(name for name in names if owner.has_hyper_param(name))
        if isinstance(owner, MultiOptimizer):
            taken.add("group_overrides")
        if isinstance(value, types.FunctionType) and takes_any_keyword(value):
            taken.update(_constants(value.__code__) & {*names})  # `extra_args['value']`
    return frozenset(taken.intersection(names))


def _drops_keywords(value: Any) -> bool:
    """Whether it is what Optax puts around an update that may not take keywords."""
    return isinstance(value, types.FunctionType) and value.__qualname__.startswith(
        "with_extra_args_support."
    )


def _constants(code: types.CodeType) -> set[str]:
    nested = (_constants(value) for value in code.co_consts if isinstance(value, types.CodeType))
    return {value for value in code.co_consts if isinstance(value, str)}.union(*nested)


def accepted_keywords(update: Callable[..., Any], extra_args: Mapping[str, Any]) -> frozenset[str]:
    """Returns those of `extra_args` that an update takes or passes on to another of them."""
    # A line search passes what it does not take itself on to its function, `value_fn`.
    functions = [value for value in extra_args.values() if callable(value)]
    if any(takes_any_keyword(function) for function in functions):
        return frozenset(extra_args)
    passed_on = {name for function in functions for name in _parameters(function)}
    return taken_keywords(update, extra_args) | (extra_args.keys() & passed_on)


def missing_keywords(update: Callable[..., Any], error: TypeError) -> HyperParamError | None:
    """Returns an error that names the extra arguments which a call of an update lacked, if any."""
    words = str(error)
    missing = {
        parameter.name
        for parameter in _extra_parameters(update)
        if parameter.kind is parameter.KEYWORD_ONLY
        and parameter.default is parameter.empty
        and repr(parameter.name) in words
    }
    if not missing or "missing" not in words:
        return None
    example = ", ".join(f"{name}=..." for name in sorted(missing))
    return HyperParamError(
        f"{listed(sorted(missing))}: the update of this transformation needs it; call "
        f"`apply_gradient(grads, {example})`"
    )


def takes_any_keyword(function: Callable[..., Any]) -> bool:
    """Whether the function itself has `**kwargs`."""
    return any(p.kind is p.VAR_KEYWORD for p in _parameters(function).values())


def _extra_parameters(update: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    """The parameters after `updates, state, params` of all update functions."""
    # A captured function is an update if it can be called like one in a chain, where Optax requires
    # `(updates, state, params=None, **extra_args)`. Others are constructors, masks and schedules.
    for value in reached(update, _drops_keywords):
        if not callable(value) or isinstance(value, type):
            continue
        parameters = [*_parameters(value).values()]
        positional = [
            p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        if value is update or (len(positional) >= 2 and takes_any_keyword(value)):
            yield from positional[3:]
            yield from (p for p in parameters if p.kind is p.KEYWORD_ONLY)


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    # Of a Python function its own, not those of what it says to wrap, which it has captured.
    follow_wrapped = not inspect.isfunction(function)
    try:
        return inspect.signature(function, follow_wrapped=follow_wrapped).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return {}


def how_to_override(tx: Any, names: Collection[str]) -> str:
    """Returns the line with which arguments called `names` could be overridden, for messages."""
    constructor = _constructor_of(tx, names)
    example = f" for `{constructor}(...)`" if constructor else ""
    return (
        "What is already built has no hyper-parameters. Wrap its constructor: "
        f"`wrap_optax_optimizer({constructor or 'constructor'})(...)`{example}. Those of Optax, "
        "among its arguments too, are wrapped in opt_optax_bridge: `opt_optax_bridge.adamw(...)` "
        "for `optax.adamw(...)`, `opt_optax_bridge.chain(...)` for `optax.chain(...)`"
    )


def _constructor_of(tx: Any, names: Collection[str]) -> str | None:
    """The class of `tx`, or a function that defines a part of it and takes one of `names`."""
    # Of Optax's own constructors a transformation does not tell: all return chains.
    if not isinstance(tx, tuple):  # `MultiSteps` is an object
        return _public_name(type(tx).__module__, type(tx).__qualname__)
    for value in reached(tx):
        if not isinstance(value, types.FunctionType) or value.__module__.startswith("optax."):
            continue
        scope, is_nested, _ = value.__qualname__.partition(".<locals>.")
        constructor = getattr(sys.modules.get(value.__module__), scope, None)
        with contextlib.suppress(TypeError, ValueError):  # no function, or without a signature
            if is_nested and {*inspect.signature(constructor).parameters} & {*names}:  # type: ignore[arg-type]
                return _public_name(value.__module__, scope)
    return None


def _public_name(module: str, name: str) -> str:
    package = module.partition(".")[0]
    return f"{package if hasattr(sys.modules.get(package), name) else module}.{name}"
