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


def test_sums_on_a_device_are_known_apart_from_products_and_statistics() -> None:
    compiled = jax.jit(
        lambda x, y: (jnp.sum(x, 0), x @ y, x / jnp.sum(y, 0), jnp.sum(x * jnp.sum(y), 0))
    )
    text = compiled.lower(jnp.ones((4, 4)), jnp.ones((4, 4))).compile().as_text() or ""
    outputs = trace(parse(text), [Deps.of(0), Deps.of(1)], {}).outputs
    assert [(bin(deps.direct), bin(deps.reduced)) for deps in outputs] == [
        ("0b0", "0b1"),
        ("0b0", "0b0"),
        ("0b1", "0b0"),
        ("0b0", "0b1"),
    ]


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


@pytest.mark.parametrize(
    ("function", "placed"),
    [
        (lambda x, y: jax.lax.dynamic_update_slice(jnp.zeros((8, 4)), x, (4, 0)), {0}),
        (lambda x, y: jax.lax.dynamic_update_slice(jnp.concatenate([y, y]), x, (4, 0)), {0}),
        (lambda x, y: jnp.pad(x, ((0, 4), (0, 0))), {0}),
        (lambda x, y: jnp.where(y > 0, x, 0), {0}),
        (lambda x, y: jnp.zeros((8, 4)).at[y[0].astype(int)].set(x), {0}),
        (lambda x, y: x[y[0].astype(int)], {0}),
        (lambda x, y: x + y, set()),
        (lambda x, y: x @ y, set()),
    ],
)
def test_what_is_put_in_place(function: Callable[..., Any], placed: set[int]) -> None:
    compiled = jax.jit(function, keep_unused=True).lower(X, X).compile()
    inputs = [Deps.of(0), Deps.of(1)]
    [deps] = trace(parse(compiled.as_text() or ""), inputs, {}).outputs
    assert {n for n in range(2) if deps.placed >> n & 1} == placed


@pytest.mark.parametrize(
    ("opcode", "shape", "direct"),
    [("reduce", "f32[8]", 1), ("reduce", "f32[1]", 0), ("broadcast", "f32[1,8,1]", 1)],
)
def test_sums_of_one_element_are_reshapes(opcode: str, shape: str, direct: int) -> None:
    """TPUs write them so."""
    module = parse(
        f"""HloModule jit_f

ENTRY %main (x: f32[1,8]) -> {shape} {{
  %x = f32[1,8] parameter(0)
  ROOT %r = {shape} {opcode}(%x), dimensions={{0}}
}}"""
    )
    [deps] = trace(module, [Deps.of(0)], {}).outputs
    assert (deps.any, deps.direct) == (1, direct)


ASYNCHRONOUS = """HloModule jit_f

%put (m: f32[64], part: f32[8], n: s32[]) -> f32[64] {
  %m = f32[64] parameter(0)
  %part = f32[8] parameter(1)
  %n = s32[] parameter(2)
  ROOT %new = f32[64] dynamic-update-slice(%m, %part, %n)
}

%body (c: (s32[], f32[64], f32[8])) -> (s32[], f32[64], f32[8]) {
  %c = (s32[], f32[64], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %state = f32[64] get-tuple-element(%c), index=1
  %x = f32[8] get-tuple-element(%c), index=2
  %start = ((f32[64], f32[8], s32[]), f32[64], u32[]) fusion-start(%state, %x, %i), calls=%put
  %done = f32[64] fusion-done(%start)
  ROOT %t = (s32[], f32[64], f32[8]) tuple(%i, %done, %x)
}

%cond (c: (s32[], f32[64], f32[8])) -> pred[] {
  %c.1 = (s32[], f32[64], f32[8]) parameter(0)
  ROOT %p = pred[] constant(true)
}

ENTRY %main (a: s32[], b: f32[64], c: f32[8]) -> f32[64] {
  %a = s32[] parameter(0)
  %b = f32[64] parameter(1)
  %x.1 = f32[8] parameter(2)
  %first = (s32[], f32[64], f32[8]) tuple(%a, %b, %x.1)
  %w = (s32[], f32[64], f32[8]) while(%first), condition=%cond, body=%body
  ROOT %out = f32[64] get-tuple-element(%w), index=1
}"""


def test_an_asynchronous_kernel_does_what_it_does_inside() -> None:
    """So GPUs write pieces of state that lies on the host: a loop over them is not one of steps."""
    module, inputs = parse(ASYNCHRONOUS), [Deps.of(n) for n in range(3)]
    found = trace(module, inputs, {}, (0b010, 0b100))
    [out] = found.outputs
    assert (out.any, out.direct, out.placed) == (0b111, 0b110, 0b100)
    assert not found.step_loops
    whole = ASYNCHRONOUS.replace("tuple(%i, %done, %x)", "tuple(%i, %y, %z)").replace(
        "  ROOT %t", "  %y = f32[64] negate(%done)\n  %z = f32[8] negate(%x)\n  ROOT %t"
    )
    assert trace(parse(whole), inputs, {}, (0b010, 0b100)).step_loops == {"w"}


class TestLoopsOfSteps:
    """State that a loop makes new as a whole, in each iteration, against other loops."""

    def loops(self, function: Callable[..., Any], stepped: tuple[int, ...] = (1,)) -> int:
        state, batches = jnp.ones((6, 8)), jnp.ones((5, 6, 8))
        compiled = jax.jit(function).lower(state, batches).compile()
        inputs = [Deps.of(0), Deps.of(1)]
        return len(trace(parse(compiled.as_text() or ""), inputs, {}, stepped).step_loops)

    def test_steps(self) -> None:
        def steps(state: jax.Array, batches: jax.Array) -> jax.Array:
            return jax.lax.scan(lambda s, b: (0.9 * s + jnp.sin(b), None), state, batches)[0]

        assert self.loops(steps) == 1
        assert self.loops(steps, (1, 2)) == 0, "the parameters stay what they are"

    def test_layers(self) -> None:
        def layers(state: jax.Array, batches: jax.Array) -> jax.Array:
            def layer(total: jax.Array, x: tuple[jax.Array, jax.Array]) -> Any:
                new = 0.9 * x[0] + jnp.sin(x[1] + total)
                return jnp.sum(new), new

            new: jax.Array = jax.lax.scan(layer, jnp.float32(0), (state, batches[0]))[1]
            return new

        assert self.loops(layers) == 0

    def test_layers_in_place(self) -> None:
        def layers(state: jax.Array, batches: jax.Array) -> jax.Array:
            def layer(n: jax.Array, s: jax.Array) -> jax.Array:
                return s.at[n].set(0.9 * s[n] + jnp.sin(batches[0, n]))

            new: jax.Array = jax.lax.fori_loop(0, 6, layer, state)
            return new

        assert self.loops(layers) == 0

    def test_layers_in_steps(self) -> None:
        def steps(state: jax.Array, batches: jax.Array) -> jax.Array:
            def step(s: jax.Array, batch: jax.Array) -> tuple[jax.Array, None]:
                def layer(total: jax.Array, x: tuple[jax.Array, jax.Array]) -> Any:
                    new = 0.9 * x[0] + jnp.sin(x[1] + total)
                    return jnp.sum(new), new

                return jax.lax.scan(layer, jnp.float32(0), (s, batch))[1], None

            return jax.lax.scan(step, state, batches)[0]

        assert self.loops(steps) == 1
