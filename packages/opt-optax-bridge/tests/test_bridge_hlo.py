"""The compiled step is that of Optax, once XLA has dropped the counter of steps."""

import functools
import hashlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import opt_optax_bridge
import optax
import pytest
from opt_core import Optimizer, OptimizerState
from opt_optax_bridge import OptaxWrapper

pytestmark = pytest.mark.usefixtures("optax_promotion")

SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)
TRANSFORMATIONS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optax.adamw(1e-3),
    "lamb": lambda: optax.lamb(1e-3),
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=4),
    "chain with a schedule": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE)
    ),
}


def make_params() -> dict[str, jax.Array]:
    return {"b": jnp.ones(8), "w": jnp.ones((4, 8))}


def program(function: Callable[..., Any], *args: Any) -> str:
    """The text of the optimized program, without source lines; `@` is before computations."""
    text = str(jax.jit(function, keep_unused=True).lower(*args).compile().as_text())
    text = re.sub(r",? ?(metadata|frontend_attributes|backend_config)=\{[^}]*\}", "", text)
    return re.sub(r", control-predecessors=\{[^}]*\}", "", text).replace("=%", "=@")


def graph(text: str) -> str:
    """A hash of what the program computes, whatever the names and the order of its lines."""
    defined: dict[str, str] = {}
    computation = ""
    for line in text.splitlines():
        if opened := re.match(r"(ENTRY )?%([\w.-]+) \(.*\{$", line):
            computation = "@ENTRY" if opened[1] else f"@{opened[2]}"
        elif found := re.match(r"\s+(ROOT )?(%[\w.-]+) = (.*)$", line):
            defined[found[2]] = found[3]
            if found[1]:
                defined[computation] = found[3]

    @functools.cache
    def hash_of(name: str) -> str:
        inside = re.sub(r"[%@][\w.-]+", lambda m: hash_of(m[0]), defined[name])
        return hashlib.sha256(inside.encode()).hexdigest()

    return hash_of("@ENTRY")


def program_of(wrapper: OptaxWrapper, *rates: float) -> str:
    """A step of ours."""

    def step(params: Any, state: Any, grads: Any, *rates: Any) -> Any:
        overrides = {"learning_rate": rates[0]} if rates else {}
        optimizer = Optimizer(wrapper, OptimizerState(jnp.int32(0), state), params)
        stepped = optimizer.apply_gradient(grads, **overrides)
        return stepped.target, stepped.state.param_states

    state = wrapper.create(make_params()).state.param_states
    return graph(program(step, make_params(), state, make_params(), *rates))


def program_of_optax(rebuild: Callable[..., Any], *rates: float) -> str:
    """As if Optax were called inside of the compiled function with the arguments."""

    def step(params: Any, state: Any, grads: Any, *rates: Any) -> Any:
        updates, state = rebuild(*rates).update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = rebuild(*rates).init(make_params())
    return graph(program(step, make_params(), state, make_params(), *rates))


@pytest.mark.sample(1)
@pytest.mark.parametrize("build", TRANSFORMATIONS.values(), ids=list(TRANSFORMATIONS))
def test_the_program_is_that_of_optax(build: Callable[[], Any]) -> None:
    tx = build()
    assert program_of(OptaxWrapper(tx)) == program_of_optax(lambda: tx)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["adamw", "lamb", "adafactor"])
def test_with_a_run_time_learning_rate_too(name: str) -> None:
    arguments = {"min_dim_size_to_factor": 4} if name == "adafactor" else {}
    wrapped, constructor = getattr(opt_optax_bridge, name), getattr(optax, name)
    found = program_of(wrapped(0.5, **arguments), 1e-3)
    assert found == program_of_optax(lambda rate: constructor(rate, **arguments), 1e-3)


def test_a_chain_of_definitions_is_the_chain_of_optax() -> None:
    chained = opt_optax_bridge.chain(
        opt_optax_bridge.clip_by_global_norm(1.0), opt_optax_bridge.adamw(0.5)
    )

    def rebuild(rate: Any = 0.5) -> Any:
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))

    assert program_of(chained, 1e-3) == program_of_optax(rebuild, 1e-3)
    assert program_of(chained) != program_of_optax(lambda: rebuild(0.25))  # it sees numbers
