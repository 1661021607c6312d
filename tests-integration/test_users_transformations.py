"""Transformations as users write them: named, attributed to parameters, restored."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import struct
from flax.core import FrozenDict
from opt_checkpoint import named_state, plan_restore
from opt_core import Optimizer, describe_state
from opt_core.extend import path_str
from opt_optax_bridge import OptaxWrapper

optax: Any = importlib.import_module("optax")  # much of it is not exported explicitly

MINE = __name__.partition(".")[0]
PARAMS: dict[str, Any] = {
    "dense": {"bias": jnp.ones(6), "kernel": jnp.ones((4, 6))},
    "layers": [{"w": jnp.ones((3, 3))}, {"w": jnp.ones((3, 3))}],
    "scale": jnp.ones(6),
}
NAMES = ["dense/bias", "dense/kernel", "layers/0/w", "layers/1/w", "scale"]
DIMS = {"dense/bias": 1, "dense/kernel": 2, "layers/0/w": 2, "layers/1/w": 2, "scale": 1}


class Case(NamedTuple):
    build: Callable[[], Any]
    names: set[str]  # the transformations that keep its leaves, without the package of users' own
    follows: dict[str, str]  # the parameters of leaves whose paths do not have those of theirs


CASES: dict[str, Case] = {}


def case(*names: str, **follows: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Registers a transformation; it is the only one that keeps leaves if `names` are not given."""

    def register(build: Callable[[], Any]) -> Callable[[], Any]:
        CASES[build.__name__] = Case(build, set(names) or {build.__name__}, follows)
        return build

    return register


def transformation(init_fn: Any) -> Any:
    def update_fn(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        del params, extra
        return updates, state

    return optax.GradientTransformation(init_fn, update_fn)


def zeros(tree: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, tree)


class LeafState(NamedTuple):
    momentum: Any
    per_row: Any
    step: Any


@case("optax_wrapper")
def row_normalized() -> Any:
    def one(p: Any) -> Any:
        rows = p.reshape(p.shape[0], -1)
        return LeafState(jnp.zeros_like(p), jnp.mean(rows**2, axis=1), jnp.int32(0))

    return transformation(lambda params: jax.tree.map(one, params))


@struct.dataclass
class Quantized:
    codes: Any
    diagonal: Any
    shape: Any = struct.field(pytree_node=False)


@struct.dataclass
class Block:
    """The state of one parameter."""

    statistics: list[Any]
    momentum: Quantized


@case()
def distributed_shampoo() -> Any:
    def block(p: Any) -> Any:
        codes = jnp.zeros(p.shape, jnp.int8)
        quantized = Quantized(codes, jnp.zeros(p.shape[:1]), p.shape)
        return Block([jnp.eye(size) for size in p.shape], quantized)

    def init_fn(params: Any) -> Any:
        return {"count": jnp.int32(0), "stats": jax.tree.map(block, params)}

    return transformation(init_fn)


@case(**{f"Qs/{i}/{k}": n for i, n in enumerate(NAMES) for k in range(DIMS[n])})
def kron() -> Any:
    def init_fn(params: Any) -> Any:
        factors = [[jnp.eye(size) for size in p.shape] for p in jax.tree.leaves(params)]
        return {"mu": zeros(params), "Qs": factors}

    return transformation(init_fn)


class Continual:
    """Methods, and a state of frozen dicts."""

    def init(self, params: Any) -> Any:
        logs: Any = FrozenDict({"mean": jnp.zeros([]), "resets": jnp.int32(0)})
        return {"utilities": zeros(params), "logs": logs, "rng": jax.random.PRNGKey(0)}

    def update(self, updates: Any, state: Any, params: Any = None) -> Any:
        del params
        return updates, state


case("continual")(Continual)


@case("looks_ahead", "trace", "adam")
def sharpness() -> Any:
    def looks_ahead(optimizer: Any, adv_optimizer: Any) -> Any:
        def init_fn(params: Any) -> Any:
            state = {"opt": optimizer.init(params), "adv": adv_optimizer.init(params)}
            return {**state, "average": zeros(params)}

        return transformation(init_fn)

    return looks_ahead(optax.adam(0.1), optax.sgd(0.1, 0.9))


# What is said of them


@functools.cache
def built(name: str) -> Optimizer:
    return OptaxWrapper(CASES[name].build()).create(PARAMS)


@pytest.mark.parametrize("name", CASES)
def test_leaves_follow_their_parameters_and_are_named_after_what_made_them(name: str) -> None:
    leaves = describe_state(built(name)).leaves
    parameters = {path_str(x.path): x.parameter and path_str(x.parameter) for x in leaves}
    in_path = {path: [n for n in NAMES if f"/{n}/" in f"/{path}/"] for path in parameters}
    expected = {path: names[0] if names else None for path, names in in_path.items()}
    assert parameters == expected | CASES[name].follows
    names = {leaf.transformation.removeprefix(f"{MINE}.") for leaf in leaves}
    assert names == CASES[name].names


def test_likes_are_found_in_the_order_in_which_they_are_called() -> None:
    """Variables that a function has captured are sorted by name."""
    second, first = optax.scale_by_adam(b1=0.5), optax.scale_by_adam(b1=0.9)

    def init_fn(params: Any) -> Any:
        return second.init(params), first.init(params)

    described = describe_state(OptaxWrapper(transformation(init_fn)).create(PARAMS))
    settings = {leaf.path[0]: described.of(leaf).settings["b1"] for leaf in described.leaves}
    assert settings == {"0": 0.5, "1": 0.9}


@pytest.mark.parametrize("name", CASES)
def test_they_are_restored(name: str) -> None:
    new = built(name)

    numbers = itertools.count(1)

    def trained(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        return (jnp.arange(leaf.size).reshape(leaf.shape) + next(numbers)).astype(leaf.dtype)

    old = new.replace(state=jax.tree.map(trained, new.state))
    plan = plan_restore(named_state(old), new)
    assert plan.is_exact
    chex.assert_trees_all_equal(plan.apply().state, old.state, strict=True)
