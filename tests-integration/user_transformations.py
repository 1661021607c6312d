"""What Optax does not have, but its users do: other kinds of states."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from optax_case import (
    AMBIGUOUS,
    Case,
    Params,
    Transformation,
    adafactor,
    always,
    multi_steps,
    optax,
)


class Momentum(NamedTuple):
    """State of a user's transformation, and its fields do not look like anything of Optax."""

    steps: Any
    velocity: Any
    row_scale: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class MomentumDataclass:
    """The same as a dataclass."""

    steps: Any
    velocity: Any
    row_scale: Any


class Preconditioners(NamedTuple):
    """A state like Shampoo's: for each parameter one `[n, n]` matrix per dimension."""

    statistics: Any
    momentum: Any


def momentum(make: Callable[..., Any], get: Callable[[Any, str], Any] = getattr) -> Transformation:
    """A user's transformation: a velocity, and a scale per row of a matrix."""

    def row(leaf: Any) -> Any:
        return jnp.sum(leaf, axis=-1) if leaf.ndim == 2 else jnp.zeros((), leaf.dtype)

    def init(params: Params) -> Any:
        velocity = jax.tree.map(jnp.zeros_like, params)
        return make(
            steps=jnp.zeros((), jnp.int32), velocity=velocity, row_scale=jax.tree.map(row, velocity)
        )

    def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        velocity = jax.tree.map(lambda v, u: 0.9 * v + u, get(state, "velocity"), updates)
        rows = jax.tree.map(lambda r, u: r + row(u), get(state, "row_scale"), updates)
        return velocity, make(steps=get(state, "steps") + 1, velocity=velocity, row_scale=rows)

    return optax.GradientTransformation(init, update)


def list_of_leaves() -> Transformation:
    """A user's transformation whose state is a list, one entry per parameter leaf."""

    def init(params: Params) -> Any:
        return [jnp.zeros_like(leaf) for leaf in jax.tree.leaves(params)]

    def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        return updates, [s + u for s, u in zip(state, jax.tree.leaves(updates), strict=True)]

    return optax.GradientTransformation(init, update)


def preconditioners() -> Transformation:
    """A user's transformation with a statistic `[n, n]` for each dimension of size n."""

    def statistics(leaf: Any) -> list[Any]:
        flat = [jnp.moveaxis(leaf, d, 0).reshape(leaf.shape[d], -1) for d in range(leaf.ndim)]
        return [x @ x.T for x in flat]

    def init(params: Params) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Preconditioners(jax.tree.map(statistics, zeros), zeros)

    def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        new = jax.tree.map(lambda u, old: _added(old, statistics(u)), updates, state.statistics)
        moved = jax.tree.map(lambda m, u: 0.9 * m + u, state.momentum, updates)
        return moved, Preconditioners(new, moved)

    return optax.GradientTransformation(init, update)


def _added(old: list[Any], new: list[Any]) -> list[Any]:
    return [a + b for a, b in zip(old, new, strict=True)]


def transformations() -> dict[str, Case]:
    """The cases."""
    return {
        "user: NamedTuple": always(lambda: momentum(Momentum)),
        "user: dataclass": always(lambda: momentum(MomentumDataclass)),
        "user: dict": always(lambda: momentum(dict, dict.__getitem__)),
        "user: OrderedDict": always(lambda: momentum(OrderedDict, OrderedDict.__getitem__)),
        "user: in a chain": always(
            lambda: multi_steps(optax.chain(adafactor(), momentum(MomentumDataclass)))
        ),
        "user: list of leaves": always(list_of_leaves),
        "user: preconditioners": always(preconditioners, without=("empty",), explicit=AMBIGUOUS),
    }
