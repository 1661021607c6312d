"""JAX's own module is the oracle: optimizers, schedules, dtypes, containers, ways of running."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import opt_legacy_stax as ours
import pytest
from jax.example_libraries import optimizers as theirs
from stax_testing import same_structure

STEPS = 3


class Pair(NamedTuple):
    left: Any
    right: Any


def tree_of(container: str, leaves: list[Any]) -> Any:
    a, b, c = leaves
    return {
        "dict": {"w": a, "b": {"c": b, "a": c}},
        "list": [a, [b, []], None, c],
        "tuple": (a, (b,), {"x": c}),
        "named": Pair(a, Pair(b, c)),
    }[container]


LOW = ("bfloat16", "float16")


def make(container: str, dtype: str, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    shapes = [(4, 3), (3,), (3,)] if dtype in LOW else [(4, 3), (3,), ()]
    if dtype == "numpy64":  # as clients pass them; JAX makes float32 of them
        return tree_of(container, [rng.normal(size=s) for s in shapes])
    return tree_of(container, [jnp.asarray(rng.normal(size=s), dtype) for s in shapes])


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"mass": 0.9},
    "nesterov": {"mass": 0.8},
    "adagrad": {"momentum": 0.5},
    "rmsprop": {"gamma": 0.8},
    "rmsprop_momentum": {"momentum": 0.7},
    "adam": {"b2": 0.9},
    "adamax": {"b1": 0.8},
    "sm3": {"momentum": 0.6},
}
SCHEDULES: dict[str, tuple[Any, ...]] = {
    "number": (),
    "constant": (0.05,),
    "exponential_decay": (0.05, 4, 0.5),
    "inverse_time_decay": (0.05, 3, 0.7),
    "staircase": (0.05, 3, 0.7, True),
    "polynomial_decay": (0.05, 9, 0.01, 2.5),
    "piecewise_constant": ([1, 3], [0.1, 0.03, 0.01]),
}
# Every optimizer with every schedule; dtypes, containers and ways of running in turn beside them.
DTYPES = ("float32", "bfloat16", "float16", "numpy64")
CONTAINERS = ("dict", "list", "tuple", "named")
WAYS = ("jit", "scan", "vmap")  # the goldens go step by step
TABLE = [
    (
        optimizer,
        schedule,
        DTYPES[(3 * m + n) % len(DTYPES)],
        CONTAINERS[(m + n) % len(CONTAINERS)],
        WAYS[(m + 2 * n + n // 4) % len(WAYS)],
    )
    for m, optimizer in enumerate(OPTIMIZERS)
    for n, schedule in enumerate(SCHEDULES)
]


def triple_of(module: Any, optimizer: str, schedule: str, **options: Any) -> Any:
    rate: Any = 0.05
    if schedule != "number":
        maker = getattr(module, "inverse_time_decay" if schedule == "staircase" else schedule)
        rate = maker(*SCHEDULES[schedule])
    return getattr(module, optimizer)(rate, **OPTIMIZERS[optimizer], **options)


# What XLA makes of a program is tested; LLVM may be quick about it, for both modules alike.
compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def run(triple: Any, params: Any, grads: list[Any], way: str) -> Any:
    init, update, get_params = triple
    if way == "vmap":
        batched = [jax.tree.map(lambda x: np.stack([x, 2 * np.asarray(x)]), t) for t in grads]
        both = jax.tree.map(lambda x: np.stack([x, np.asarray(x)]), params)

        state = jax.vmap(init)(both)
        update = compiled(jax.vmap(update, in_axes=(None, 0, 0)))
        for i, g in enumerate(batched):
            state = update(jnp.int32(i), g, state)
        return state
    state = init(params)
    if way == "scan":

        def step(state: Any, xs: Any) -> Any:
            return update(*xs, state), get_params(state)

        stacked = jax.tree.map(lambda *g: jnp.stack(g), *grads)
        start = jax.tree.map(jnp.asarray, state)
        train = compiled(lambda start, xs: jax.lax.scan(step, start, xs)[0])
        return train(start, (jnp.arange(len(grads)), stacked))
    if way == "jit":
        update = compiled(update)
    for i, g in enumerate(grads):
        state = update(i if way == "eager" else jnp.int32(i), g, state)
    return state


@pytest.mark.sample(5)
@pytest.mark.parametrize(("optimizer", "schedule", "dtype", "container", "way"), TABLE)
def test_exact_numerics_are_those_of_jax(
    optimizer: str, schedule: str, dtype: str, container: str, way: str
) -> None:
    if way == "scan" and (optimizer == "sm3" or dtype in ("bfloat16", "float16")):
        way = "jit"  # sm3's `get_params` cannot be traced upstream, and what promotes is no carry
    params = make(container, dtype, 0)
    grads = [make(container, dtype, 1 + t) for t in range(STEPS)]
    found = run(triple_of(ours, optimizer, schedule, upstream_numerics=True), params, grads, way)
    expected = run(triple_of(theirs, optimizer, schedule), params, grads, way)
    assert found.tree_def == expected.tree_def
    assert found.subtree_defs == expected.subtree_defs
    # One program each, so bit for bit, but for the order of operations XLA may choose in a fusion.
    compare(found, expected, exact=way == "eager" or schedule != "polynomial_decay")


def compare(found: Any, expected: Any, *, exact: bool) -> None:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for mine, other in pairs:
        assert jnp.result_type(mine) == jnp.result_type(other)
        mine, other = (np.asarray(x) for x in (mine, other))
        if exact:
            np.testing.assert_array_equal(mine, other)
        else:
            np.testing.assert_allclose(
                mine.astype(np.float64), other.astype(np.float64), rtol=1e-2, atol=1e-3
            )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_default_is_the_same_in_float32(optimizer: str) -> None:
    params, *grads = (make("dict", "float32", t) for t in range(STEPS))
    found, expected = (
        run(triple_of(m, optimizer, "exponential_decay"), params, grads, "jit")
        for m in (ours, theirs)
    )
    compare(found, expected, exact=True)


MAKERS: list[Callable[[Any], Any]] = [
    lambda module: module.momentum(0.1, 0.9),
    lambda module: module.adam(0.1),
    lambda module: module.sm3(0.1),
]


@pytest.mark.parametrize("maker", MAKERS)
def test_live_states_move_between_the_modules(maker: Callable[[Any], Any]) -> None:
    params, *grads = (make("dict", "float32", t) for t in range(STEPS))
    whole = run(maker(theirs), params, grads, "eager")
    mixed: Any = maker(theirs).init_fn(params)
    for i, g in enumerate(grads):
        module = ours if i % 2 else theirs
        mixed = maker(module).update_fn(i, g, mixed)
        assert type(mixed) is theirs.OptimizerState  # it stays what it was
    compare(mixed, whole, exact=False)
    for x, y in zip(
        *(jax.tree.leaves(m.params_fn(mixed)) for m in map(maker, (ours, theirs))), strict=True
    ):
        np.testing.assert_array_equal(x, y)
    start: Any = maker(ours).init_fn(params)
    after = maker(theirs).update_fn(0, grads[0], start)
    assert same_structure(list(after), list(start))
    marked = theirs.unpack_optimizer_state(start)
    packed = ours.pack_optimizer_state(marked)
    assert same_structure(packed, start)


@pytest.mark.parametrize("key", ["[0][0]", "[1][2]"])
def test_leaves_have_key_paths(key: str) -> None:
    state = ours.adam(0.1).init_fn([jnp.ones(2), jnp.ones(3)])
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert f".packed_state{key}" in paths
