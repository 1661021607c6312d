"""What XLA makes of a mini-step that does not emit: the entry computation, outside its loops."""

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from opt_accumulate import MultiSteps, guard, skip_not_finite, with_average

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
    assert len(entry(bare_step(optax.MultiSteps(INNER[inner], 4)))) > 3 * len(expected)


@pytest.mark.sample(1)
@pytest.mark.parametrize("inner", INNER)
def test_an_emission_takes_the_memory_of_the_bare_step(inner: str) -> None:
    assert temporaries(ours(INNER[inner])) < temporaries(bare_step(INNER[inner])) + 0.05
    assert temporaries(bare_step(optax.MultiSteps(INNER[inner], 4))) > 2.0


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options", [{}, {"should_skip_update_fn": skip_not_finite}], ids=["plain", "skipping"]
)
def test_everything_is_updated_in_place(options: Any) -> None:
    program = ours(ADAMW, **options)
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= 4 * BYTES
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 1024  # no array


@pytest.mark.parametrize("options", [{}, {"grad_norm": None}])
def test_a_step_that_a_guard_skips_reads_the_gradients_and_nothing_else(options: Any) -> None:
    """All that is large in the entry computation is what a bare norm of the gradients has."""
    tx = guard(with_average(INNER["clipped"], 0.99), **options)

    def step(params: Any, state: Any, grads: Any, loss: Any) -> Any:
        return tx.apply(params, state, grads, loss=loss)

    guarded = compiled(step, PARAMS, tx.init(PARAMS), PARAMS, jnp.float32(1))
    bare = compiled(optax.tree.norm, PARAMS, donate=())
    found, expected = ([opcode for opcode, _ in entry(program)] for program in (guarded, bare))
    assert found == expected
