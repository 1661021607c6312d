"""Transformations whose constructor is not known: which line would make a definition of it."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pickle
import sys
import types
from collections.abc import Collection
from typing import Any

from opt_core.extend import reached


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


def dumps(content: Any) -> bytes:
    """Returns a pickle of what a definition consists of."""
    # Python's own stores functions by name. What has none, as in `sgd(lambda count: 0.1)`, needs
    # cloudpickle; it is used where it is installed.
    try:
        return pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        try:
            cloudpickle: Any = importlib.import_module("cloudpickle")
        except ImportError:
            raise pickle.PicklingError(
                f"{error}. This definition holds a function without a name, which a pickle cannot "
                "store. One that a constructor makes pickles as the constructor's name and its "
                "arguments, `wrap_optax_optimizer(constructor)(...)`, if schedules and masks are "
                "functions of a module too. Anything else needs cloudpickle to be installed."
            ) from error
    return bytes(cloudpickle.dumps(content))
