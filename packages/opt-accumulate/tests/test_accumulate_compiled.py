"""What XLA makes of a mini-step: counted in the compiled program, not timed.

XLA counts the body of a loop once, whether it runs or not. So the work of a mini-step that does not
emit is what the entry computation does outside its two loops, beside which stands what it does for
the bare accumulation.
"""

import re
from collections.abc import Iterator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from opt_accumulate import MultiSteps, skip_not_finite, with_average

SIDE = 256
PARAMS = {f"w{i}": jnp.full((SIDE, SIDE), 0.5, jnp.float32) for i in range(3)}
BYTES = 4 * 3 * SIDE**2
ADAMW = optax.adamw(1e-3)
INNER = {"adamw": ADAMW, "clipped": optax.chain(optax.clip_by_global_norm(1.0), ADAMW)}

_MOVES_NOTHING = {"parameter", "tuple", "get-tuple-element", "bitcast", "while"}


def compiled(step: Any, *operands: Any, donate: tuple[int, ...] = (0, 1)) -> Any:
    return jax.jit(step, donate_argnums=donate).lower(*operands).compile()


def bare_step(inner: Any) -> Any:
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = inner.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return compiled(step, PARAMS, inner.init(PARAMS), PARAMS)


def bare_accumulation() -> Any:
    def step(acc: Any, count: jax.Array, grads: Any) -> Any:
        return jax.tree.map(lambda a, g: a + (g - a) / (count + 1), acc, grads), count + 1

    return compiled(step, PARAMS, jnp.int32(0), PARAMS)


def ours(inner: Any, **options: Any) -> Any:
    steps = MultiSteps(inner, 4, **options)
    return compiled(steps.apply, PARAMS, steps.init(PARAMS), PARAMS)


def optax_step(inner: Any, k: int = 4) -> Any:
    steps = optax.MultiSteps(inner, k)

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = steps.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return compiled(step, PARAMS, steps.init(PARAMS), PARAMS)


def entry(program: Any) -> list[tuple[str, str]]:
    """Returns opcode and result type of what the entry computation does to large arrays."""
    return list(_large(program.as_text(), "ENTRY "))


def _large(text: str, head: str) -> Iterator[tuple[str, str]]:
    """Yields what one computation does, and those that it calls: not its loops."""
    body = text[text.index("\n" + head) + 1 :]
    body = body[: body.index("\n}")]
    instruction = r"^\s+(?:ROOT )?%?[\w.-]+ = (\(?.*?\)?) ([\w-]+)\((.*)$"
    for kind, opcode, rest in re.findall(instruction, body, re.MULTILINE):
        if opcode == "call":
            (called,) = re.findall(r"to_apply=(%?[\w.-]+)", rest)
            yield from _large(text, called + " ")
        elif f"[{SIDE},{SIDE}]" in kind and opcode not in _MOVES_NOTHING:
            yield opcode, kind


def temporaries(program: Any) -> float:
    """Returns the temporary memory, in sizes of the parameters."""
    return float(program.memory_analysis().temp_size_in_bytes) / BYTES


@pytest.mark.sample(1)
@pytest.mark.parametrize("inner", INNER)
def test_a_mini_step_that_does_not_emit_does_the_bare_accumulation(inner: str) -> None:
    expected = entry(bare_accumulation())
    assert len(expected) in (1, len(PARAMS))  # fusions, or calls of them
    assert entry(ours(INNER[inner])) == expected
    assert len(entry(optax_step(INNER[inner]))) > 3 * len(expected)


def test_skipping_adds_no_pass_that_writes() -> None:
    def guarded(acc: Any, count: jax.Array, grads: Any) -> Any:
        keep = jnp.isfinite(optax.tree.norm(grads, squared=True))
        new = jax.tree.map(lambda a, g: a + (g - a) / (count + 1), acc, grads)
        return jax.tree.map(lambda a, b: jnp.where(keep, b, a), acc, new), count + 1

    least = entry(compiled(guarded, PARAMS, jnp.int32(0), PARAMS))  # jax 0.8 fuses no reduction
    assert entry(ours(ADAMW, should_skip_update_fn=skip_not_finite)) == least


def test_the_inner_update_is_traced_once() -> None:
    adam, traces = optax.adam(1e-3), []

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        traces.append(1)
        return adam.update(updates, state, params)

    steps = MultiSteps(optax.GradientTransformation(adam.init, update), 2)
    jax.jit(steps.update).lower(PARAMS, steps.init(PARAMS))
    assert len(traces) == 1


def test_windows_of_one_take_the_memory_of_the_bare_step() -> None:
    steps = MultiSteps(ADAMW, 1)
    program = compiled(steps.apply, PARAMS, steps.init(PARAMS), PARAMS)
    assert temporaries(program) < temporaries(bare_step(ADAMW)) + 0.05
    assert temporaries(optax_step(ADAMW, 1)) > 2.0


@pytest.mark.sample(1)
@pytest.mark.parametrize("inner", INNER)
def test_an_emission_takes_the_memory_of_the_bare_step(inner: str) -> None:
    assert temporaries(ours(INNER[inner])) < temporaries(bare_step(INNER[inner])) + 0.05
    assert temporaries(optax_step(INNER[inner])) > 2.0


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options", [{}, {"should_skip_update_fn": skip_not_finite}], ids=["plain", "skipping"]
)
def test_everything_is_updated_in_place(options: Any) -> None:
    program = ours(ADAMW, **options)
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= 4 * BYTES
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 1024  # no array


def test_one_program_for_every_mini_step() -> None:
    steps = MultiSteps(
        INNER["clipped"], lambda step: step + 1, should_skip_update_fn=skip_not_finite
    )
    step = jax.jit(chex.assert_max_traces(steps.apply, 1))
    carried: Any = PARAMS, steps.init(PARAMS)
    for scale in (1.0, jnp.nan, 2.0, 3.0):
        carried = step(*carried, jax.tree.map(lambda p, scale=scale: p * scale, PARAMS))
    assert int(carried[1].gradient_step) == 2


MANY = {f"layer_{i}": {"w": jnp.ones((4, 4)), "b": jnp.ones(4)} for i in range(10)}
STEPS = {
    "apply": MultiSteps(optax.sgd(0.1), 4),
    "update": MultiSteps(optax.sgd(0.1), 4).gradient_transformation(),
    "skip": MultiSteps(optax.sgd(0.1), 4, should_skip_update_fn=skip_not_finite),
    "average": with_average(optax.sgd(0.1), 0.9),
    "decays": with_average(optax.sgd(0.1), lambda t: 0.9, every=2),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", STEPS)
def test_leaves_that_are_alike_are_traced_once(name: str) -> None:
    """Ten layers are calls of what one layer is traced to."""
    tx: Any = STEPS[name]

    def functions(params: Any) -> int:
        def step(params: Any, state: Any, grads: Any) -> Any:
            if hasattr(tx, "apply"):
                return tx.apply(params, state, grads)
            return tx.update(grads, state, params)

        text = jax.jit(step).lower(params, tx.init(params), params).as_text()
        return text.count("func.func private")

    assert functions(MANY) == functions({"layer_0": MANY["layer_0"]}) >= 2
