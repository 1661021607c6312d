"""The expected sharding of a compiled step, per leaf."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding

from opt_partition._mesh.layout import Layout
from opt_partition._trees import children, escaped, key_name
from opt_partition.errors import AxesError


@dataclasses.dataclass(frozen=True)
class Expected:
    """The expected sharding of a compiled step.

    `inputs` and `outputs` have the structure of the step's arguments and result, or are prefixes of
    it. In place of a tree they contain a `Layout`, a tree of shardings, a tree of (abstract)
    arrays, a single sharding for all leaves, or `None` for any sharding. Layouts and arrays also
    specify dtypes. Trailing arguments and results can be omitted. Static arguments are not part of
    a compiled step and are not counted.

    Attributes:
      inputs: expected positional arguments, e.g. `(params_layout, state_layout)`.
      outputs: expected result, e.g. `(params_layout, state_layout)`.
      params: path of the parameters in the arguments, e.g. `'0/target'` for `f(optimizer, batch)`,
        or `'params'` for `f(*, params, state)`.
      state: path of the optimizer state in the arguments, e.g. `'0/state'`.
      keywords: expected keyword arguments by name, e.g. `{'state': state_layout}`; omitted ones are
        not checked, which is noted in the report.
    """

    inputs: Any
    outputs: Any
    params: str = "0"
    state: str = "1"
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Asked:
    """The expectation for one leaf; `None` means any sharding or dtype."""

    sharding: Sharding | None = None
    dtype: Any = None


def broadcast(prefix: Any, tree: Any, where: str) -> list[Asked]:
    """Returns the expectation of `prefix` for each leaf of `tree`."""
    if isinstance(prefix, Layout):
        prefix = prefix.shapes
    if prefix is None or isinstance(prefix, Sharding):
        return [Asked(prefix)] * len(jax.tree.leaves(tree))
    asked, given = children(prefix), children(tree)
    if asked is None and hasattr(prefix, "shape") and hasattr(prefix, "dtype"):
        return [_like(prefix, tree, where)]
    if asked is None:
        raise AxesError(
            f"`{where}`: expected a `Layout`, a sharding, an array or `None`; got "
            f"{type(prefix).__name__} ({prefix!r})"
        )
    if given is None:
        raise AxesError(
            f"`{where}`: the step has a single leaf there; got a {type(prefix).__name__}"
        )
    wanted = {key_name(key): child for key, child in asked}
    names = [key_name(key) for key, _ in given]
    may_be_short = where in ("inputs", "outputs") and isinstance(tree, tuple)
    missing = [name for name in names if name not in wanted and not may_be_short]
    extra = [name for name in wanted if name not in names]
    if missing or extra:
        raise AxesError(
            f"`{where}`: not a prefix of the step's tree with keys {names}: missing {missing}, "
            f"unknown {extra}; use `None` for keys that are not checked"
        )
    return [
        leaf
        for name, (_, child) in zip(names, given, strict=True)
        for leaf in broadcast(wanted.get(name), child, f"{where}/{escaped(name)}")
    ]


def keywords(asked: Mapping[str, Any], kwargs: Mapping[str, Any]) -> list[Asked]:
    """Returns the expectation for each leaf of the keyword arguments, in JAX's order."""
    if not isinstance(asked, Mapping):
        raise AxesError(
            "`keywords`: expected a mapping from names of keyword arguments to expectations; got "
            f"{type(asked).__name__}"
        )
    return broadcast({name: asked.get(name) for name in kwargs} | dict(asked), kwargs, "keywords")


def _like(array: Any, tree: Any, where: str) -> Asked:
    """Returns the expectation given by an array: its dtype, and its sharding if it has a mesh."""
    shape, found = tuple(array.shape), getattr(tree, "shape", None)
    if children(tree) is not None or found is None or shape != tuple(found):
        raise AxesError(
            f"`{where}`: expected {_described(tree)}, as in the step; got "
            f"{array.dtype}{list(shape)}"
        )
    sharding = getattr(array, "sharding", None)
    return Asked(sharding if isinstance(sharding, NamedSharding) else None, array.dtype)


def _described(tree: Any) -> str:
    if children(tree) is None:
        return f"{tree.dtype}{list(tree.shape)}"
    return f"a tree of {len(jax.tree.leaves(tree))} arrays"
