"""JAX's own module is the oracle: what is compiled is the same, and no more of it."""

import re
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import opt_legacy_stax as ours
import pytest
from jax.example_libraries import optimizers as theirs
from stax_testing import NAMES, assert_same, same_structure, triple_of

PARAMS = {"w": jnp.full((4, 3), 0.5), "b": [jnp.zeros(3), jnp.asarray(1.0, jnp.float32)]}
LOW = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
SCHEDULES: dict[str, tuple[Any, ...]] = {
    "number": (),
    "constant": (0.05,),
    "exponential_decay": (0.05, 4, 0.5),
    "inverse_time_decay": (0.05, 3, 0.7),
    "staircase": (0.05, 3, 0.7, True),
    "polynomial_decay": (0.05, 9, 0.01, 2.5),
}
DTYPES = {"float32": PARAMS, "bfloat16": LOW}
# Every optimizer with every schedule, dtypes in turn; by default every optimizer with one of them.
TABLE = [
    pytest.param(
        name,
        schedule,
        list(DTYPES)[(m + n) % 2],
        marks=[] if n == m % len(SCHEDULES) else pytest.mark.slow,
    )
    for m, name in enumerate(NAMES)
    for n, schedule in enumerate(SCHEDULES)
]


def rate_of(module: Any, schedule: str, **options: Any) -> Any:
    if schedule == "number":
        return 0.05
    maker = getattr(module, "inverse_time_decay" if schedule == "staircase" else schedule)
    return maker(*SCHEDULES[schedule], **options)


def lowered(module: Any, name: str, params: Any = PARAMS, rate: Any = 0.05, **options: Any) -> Any:
    triple = triple_of(name, module, rate, **options)
    return jax.jit(triple.update_fn).lower(jnp.int32(0), params, triple.init_fn(params))


def program(low: Any) -> str:
    """The optimized program, its names in the order of their appearance, without source lines."""
    text = re.sub(r", metadata=\{[^}]*\}", "", low.compile().as_text())
    text = re.sub(r"\n(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*", "\n", text)
    text = re.sub(r"^(ENTRY )?(%[\w.-]+) \(.*$", r"\1\2", text, flags=re.MULTILINE)
    names: dict[str, str] = {}
    return re.sub(r"%[\w.-]+", lambda m: names.setdefault(m[0], f"%{len(names)}"), text)


@pytest.mark.parametrize(("name", "schedule", "dtype"), TABLE)
def test_a_compiled_update_is_that_of_jax(name: str, schedule: str, dtype: str) -> None:
    exact: dict[str, Any] = {"upstream_numerics": True}
    params = DTYPES[dtype]
    rate = rate_of(ours, schedule, **(exact if schedule == "polynomial_decay" else {}))
    found = lowered(ours, name, params, rate, **exact)
    expected = lowered(theirs, name, params, rate_of(theirs, schedule))
    assert program(found) == program(expected)


class Pair(NamedTuple):
    left: Any
    right: Any


@pytest.mark.parametrize("name", ["momentum", "adam", "sm3"])
def test_states_move_between_the_modules(name: str) -> None:
    mine, other = (triple_of(name, module) for module in (ours, theirs))
    params = [
        np.linspace(-1.0, 1.0, 6).reshape(2, 3),
        (jnp.ones(3), None, Pair(jnp.float32(2.0), {})),
    ]
    grads = [jax.tree.map(lambda p, t=t: jnp.cos(jnp.asarray(p) + t), params) for t in range(3)]
    whole = mixed = other.init_fn(params)
    for i, g in enumerate(grads):
        whole = other.update_fn(i, g, whole)
        mixed = (mine if i % 2 else other).update_fn(i, g, mixed)
        assert type(mixed) is theirs.OptimizerState  # it stays what it was
    chex.assert_trees_all_close(mixed, whole, rtol=1e-5)
    assert_same(mine.params_fn(mixed), other.params_fn(mixed))
    start = mine.init_fn(params)
    assert same_structure(list(other.update_fn(0, grads[0], start)), list(start))
    packed = ours.pack_optimizer_state(theirs.unpack_optimizer_state(start))
    assert same_structure(packed, start)


@pytest.mark.parametrize("step", [0, jnp.int32(0)], ids=["number", "array"])
def test_arrays_that_are_alike_are_traced_once(step: Any) -> None:
    seen = []
    rate = {"now": 0.5}

    @ours.optimizer
    def signs() -> Any:
        def update(i: Any, g: Any, x: Any) -> Any:
            seen.append(g.shape)
            return x - rate["now"] * jnp.sign(g)

        return lambda x: x, update, lambda x: x

    triple = signs()
    params = [jnp.ones(2 + n % 3) for n in range(12)]
    state = triple.init_fn(params)
    for now in 0.5, 0.25:
        rate["now"] = now
        seen.clear()
        new = jax.jit(lambda *args: triple.update_fn(*args))(step, params, state)
        assert sorted(seen) == [(2,), (3,), (4,)]
        chex.assert_trees_all_equal(triple.params_fn(new), [x - now for x in params])
    seen.clear()
    triple.update_fn(step, params, state)
    assert len(seen) == len(params)  # outside of a trace it runs as it is
