"""The arguments of a constructor: which of them are hyper-parameters, and the definitions in them.

A hyper-parameter is an argument that is a float or a schedule. `adam(0.1)` has `learning_rate`,
`b1`, `b2`, `eps` and `eps_root`; its `nesterov` is structural, as is an argument that is an integer
by design.
"""

from __future__ import annotations

import inspect
import itertools
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from opt_core import OptimizerDef


def is_number(value: Any) -> bool:
    """Whether a value is a real number or a scalar array of one, not a bool."""
    if isinstance(value, int | float):
        return not isinstance(value, bool)
    if not isinstance(value, np.ndarray | np.generic | jax.Array):
        return False
    is_real = jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)
    return value.shape == () and is_real


def is_hyper_param(value: Any, parameter: inspect.Parameter | None) -> bool:
    """Whether an argument can be overridden at run time; `parameter` is its declaration."""
    if callable(value):
        return _is_schedule(value, parameter)
    if not is_number(value):
        return False
    if isinstance(value, float) or (not isinstance(value, int) and _is_floating(value)):
        return True
    # `weight_decay=0` is meant as a float; an argument that is an integer by design is structural.
    return parameter is not None and not (
        parameter.annotation is int or isinstance(parameter.default, int)
    )


def _is_schedule(value: Any, parameter: inspect.Parameter | None) -> bool:
    """Whether a callable argument is a schedule: a map from a step count to a float.

    The value alone does not show it: `jnp.float32` maps a count to a float too.
    """
    annotation = parameter.annotation if parameter else Any
    if annotation in (inspect.Parameter.empty, Any, "Any"):  # no information
        if isinstance(value, type) or hasattr(value, "dtype"):
            return False
    elif not _admits_schedule(annotation):
        return False
    try:
        rate = jax.eval_shape(value, jax.ShapeDtypeStruct((), jnp.int32))
    except Exception:
        return False
    leaves = jax.tree.leaves(rate)
    return len(leaves) == 1 and leaves[0].shape == () and _is_floating(leaves[0])


def _is_floating(value: Any) -> bool:
    return bool(jnp.issubdtype(value.dtype, jnp.floating))


def _admits_schedule(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return "Schedule" in annotation
    if annotation == optax.Schedule:
        return True
    members = typing.get_args(annotation)
    return float in members and any(typing.get_origin(m) is Callable for m in members)


def snapshot(value: Any) -> Any:
    """Returns copies of containers and NumPy arrays."""
    if isinstance(value, Iterator):
        raise TypeError("an argument is an iterator, which can be used only once; pass a list")
    if type(value) is dict:
        return {key: snapshot(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(snapshot, value))
    return value.copy() if type(value) in (set, np.ndarray) else value


def definitions_in(value: Any, keyword: str | None) -> Iterator[tuple[str | None, OptimizerDef]]:
    """Yields the definitions in an argument, each with its keyword."""
    if isinstance(value, OptimizerDef):
        yield keyword, value
    elif type(value) is dict:
        for key, item in value.items():
            yield from definitions_in(item, str(key))
    elif type(value) in (list, tuple):
        for item in value:
            yield from definitions_in(item, None)


def replace_definitions(value: Any, replacements: Iterator[Any]) -> Any:
    """Returns an argument with the next of `replacements` for each of `definitions_in` it."""
    if isinstance(value, OptimizerDef):
        return next(replacements)
    if type(value) is dict:
        return {key: replace_definitions(item, replacements) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(replace_definitions(item, replacements) for item in value)
    return value


def part_names(definitions: Iterable[tuple[str | None, OptimizerDef]]) -> list[str]:
    """Returns unique names: the keyword, or else the constructor's name (`adam`, `adam_1`)."""
    pairs = list(definitions)
    used = {keyword for keyword, _ in pairs if keyword is not None}
    names = []
    for keyword, definition in pairs:
        name = keyword
        if name is None:
            recipe = getattr(definition, "recipe", None)
            base = recipe.name if recipe else type(definition).__name__
            numbered = (f"{base}_{n}" for n in itertools.count(1))
            name = next(name for name in itertools.chain([base], numbered) if name not in used)
            used.add(name)
        names.append(name)
    return names
