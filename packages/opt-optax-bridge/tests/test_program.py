"""Traced programs: what depends on what, and parts that run alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from opt_optax_bridge._program import Program, named


def test_a_program_runs_like_the_function() -> None:
    def function(a: Any, b: Any) -> Any:
        return {"sum": a["x"] + b, "twice": 2 * b}

    program = Program.trace(function, {"x": jnp.ones(2)}, 1.0)
    result = program.run({"x": jnp.full(2, 3.0)}, 4.0)
    assert result["sum"].tolist() == [7.0, 7.0]
    assert result["twice"].item() == 8.0


@pytest.mark.parametrize("number", [2, np.float64(2), jnp.bfloat16(2), np.int8(2)])
def test_scalars_are_cast(number: Any) -> None:
    program = Program.trace(lambda x, a: x * a, jnp.ones(2), 1.0)
    assert program.run(jnp.ones(2), number).dtype == jnp.float32
    assert program.run(jnp.ones(2), number).tolist() == [2.0, 2.0]


def test_what_the_output_depends_on() -> None:
    def function(a: Any, b: Any, c: Any) -> Any:
        del c
        unused = b["y"] * 2
        del unused
        return jax.lax.cond(a > 0, lambda: b["x"], lambda: 0.0)

    program = Program.trace(function, 1.0, {"x": 1.0, "y": 1.0}, [1.0])
    assert program.reached(3) == {("0",), ("1", "x")}
    assert program.reached(1) == {("0",)}


def run(function: Any, *operands: Any) -> Any:
    [value] = Program.trace(function, *operands).values("it", *operands)
    return value


def note(value: Any) -> Any:
    return named("it", value)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: note(x * 2) + 1,
        lambda x: jax.jit(lambda y: note(y * 2))(x) + 1,
        lambda x: jax.lax.cond(x > 100, lambda y: note(y * 2), lambda y: y, x),
        lambda x: jax.lax.cond(x > 100, lambda: 0.0, lambda: note(x * 2)),
        lambda x: jax.lax.cond(
            x > 100, lambda z: jax.lax.cond(z > 0, lambda: note(z), lambda: z), lambda z: z, x * 2
        ),
        lambda x: jax.lax.while_loop(lambda y: y < 50, lambda y: note(y * 2), x),
        lambda x: jax.lax.fori_loop(0, jnp.int32(x), lambda i, y: note(y * 2), x),
        lambda x: jax.lax.scan(lambda y, _: (note(y * 2), None), x, None, length=3)[0],
        lambda x: jax.checkpoint(lambda y: note(y * 2))(x),
        lambda x: jax.grad(lambda y: note(y * 2) ** 2)(x),
    ],
    ids=[
        "plain",
        "jit",
        "branch",
        "captured",
        "nested",
        "while",
        "fori",
        "scan",
        "remat",
        "grad",
    ],
)
def test_a_named_value_is_found_wherever_it_is(function: Any) -> None:
    assert run(function, 3.0).item() == 6.0
    traced = jax.jit(lambda x: Program.trace(function, 1.0).values("it", x))
    assert [value.item() for value in traced(3.0)] == [6.0]


def test_a_constant_has_its_value() -> None:
    assert run(lambda x: note(0.25) + x, 1.0).item() == 0.25
    assert not run(lambda x: note(0.25) + x, 1.0).weak_type


def test_there_may_be_none() -> None:
    assert Program.trace(lambda x: named("other", x), 1.0).values("it", 1.0) == []


def test_there_may_be_several() -> None:
    def function(x: Any) -> Any:
        return note(x * 2), jax.lax.cond(x > 100, lambda: note(x * 3), lambda: x)

    values = Program.trace(function, 1.0).values("it", 2.0)
    assert [value.item() for value in values] == [4.0, 6.0]


def test_only_what_it_needs_is_computed() -> None:
    def fails(x: Any) -> Any:
        raise AssertionError

    def function(x: Any) -> Any:
        jax.debug.callback(fails, x)
        slow = jax.pure_callback(fails, jax.ShapeDtypeStruct((), jnp.float32), x)
        return jax.lax.cond(x > 0, lambda y, z: note(y) + z, lambda y, z: y + z, x, slow)

    assert run(function, 2.0).item() == 2.0


def test_a_value_per_element_is_none_at_all() -> None:
    with pytest.raises(LookupError, match="scan"):
        run(lambda x: jax.lax.scan(lambda c, y: (c, note(y * 2)), 0.0, x), jnp.ones(3))
