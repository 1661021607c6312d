"""What values of a compiled program depend on, against what the traced program says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from opt_partition._verify.hlo import parse
from opt_partition._verify.hlo_flow import Deps, trace

X = jnp.ones((4, 4))


def flow(function: Callable[..., Any], *arguments: Any) -> list[tuple[set[int], set[int]]]:
    """For each result the numbers of the arguments that it depends on, and directly."""
    compiled = jax.jit(function, keep_unused=True).lower(*arguments).compile()
    inputs = [Deps.of(n) for n in range(len(arguments))]
    outputs = trace(parse(compiled.as_text() or ""), inputs, {}).outputs

    def numbers(bits: int) -> set[int]:
        return {n for n in range(len(arguments)) if bits >> n & 1}

    return [(numbers(deps.any), numbers(deps.direct)) for deps in outputs]


@pytest.mark.parametrize(
    ("function", "depends", "direct"),
    [
        (lambda x, y, z: jnp.sin(x).T * y + 1, {0, 1}, {0, 1}),
        (lambda x, y, z: jnp.sin(x) @ y, {0, 1}, set()),
        (lambda x, y, z: x * jnp.sum(y), {0, 1}, {0}),
        (lambda x, y, z: jax.lax.dynamic_slice(x, (z[0, 0].astype(int), 0), (2, 4)), {0, 2}, {0}),
        (lambda x, y, z: jnp.where(x > 0, y, z), {0, 1, 2}, {1, 2}),
        (lambda x, y, z: jax.lax.cond(x[0, 0] > 0, lambda: jnp.sin(y), lambda: z), {1, 2}, {1, 2}),
    ],
)
def test_results(function: Callable[..., Any], depends: set[int], direct: set[int]) -> None:
    [(any_, directly)] = flow(function, X, X, X)
    assert any_ >= depends
    assert any_ - depends <= {0}  # XLA may turn a `cond` into a `where`
    assert directly == direct


def test_each_result_has_its_own() -> None:
    results = flow(lambda x, y: (x + 1, y + 1, x + y, jnp.zeros(3)), X, X)
    assert [depends for depends, _ in results] == [{0}, {1}, {0, 1}, set()]


def test_loops_run_until_nothing_new_comes() -> None:
    """What is added in one iteration reaches another element of the carry in the next."""

    def step(_: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        first, second, third = carry
        return first + 1, jnp.sin(first) + second, jnp.cos(second) * third

    def loop(x: jax.Array, n: jax.Array) -> Any:
        zeros = jnp.zeros_like(x)
        return jax.lax.fori_loop(0, n, step, (x, zeros, zeros + 1))

    results = flow(loop, X, 3)
    assert [depends - {1} for depends, _ in results] == [{0}, {0}, {0}]


def test_an_input_that_a_loop_carries_stays_that_input_inside() -> None:
    """The all-reduce of the text sees the parameter, not what the last step made of it."""
    module = parse(
        """HloModule jit_f

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %a = f32[] parameter(0)
}

%body (c: (f32[8], f32[8], f32[8])) -> (f32[8], f32[8], f32[8]) {
  %c = (f32[8], f32[8], f32[8]) parameter(0)
  %param = f32[8] get-tuple-element(%c), index=0
  %state = f32[8] get-tuple-element(%c), index=1
  %total = f32[8] get-tuple-element(%c), index=2
  %r = f32[8] all-reduce(%param), to_apply=%add
  %q = f32[8] all-reduce(%total), to_apply=%add
  %new = f32[8] add(%param, %state)
  ROOT %t = (f32[8], f32[8], f32[8]) tuple(%new, %state, %new)
}

%cond (c: (f32[8], f32[8], f32[8])) -> pred[] {
  %c.1 = (f32[8], f32[8], f32[8]) parameter(0)
  ROOT %p = pred[] constant(true)
}

ENTRY %main (x: f32[8], y: f32[8]) -> (f32[8], f32[8], f32[8]) {
  %x = f32[8] parameter(0)
  %y = f32[8] parameter(1)
  %zero = f32[8] constant({...})
  %start = (f32[8], f32[8], f32[8]) tuple(%x, %y, %zero)
  ROOT %w = (f32[8], f32[8], f32[8]) while(%start), condition=%cond, body=%body
}"""
    )
    found = trace(module, [Deps.of(0), Deps.of(1)], {})
    assert found.moved["r", 0].any == 0b01
    assert found.moved["q", 0].any == 0b11
    assert [deps.any for deps in found.outputs] == [0b11, 0b10, 0b11]
