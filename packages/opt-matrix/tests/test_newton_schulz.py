"""Iterations agree with Optax, and named coefficients do what their papers say."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from opt_matrix import newton_schulz
from opt_matrix.errors import OptionError
from optax.contrib import _muon


def matrix(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["keller", "dion"])
@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (9, 9)])
def test_equals_optax(name: str, shape: tuple[int, int]) -> None:
    ours = newton_schulz(5, name, None)
    x = matrix(*shape)
    theirs = _muon.orthogonalize_via_newton_schulz(x, ours.state_coefficients(), 5)
    np.testing.assert_allclose(ours(x), theirs, atol=2e-5)


def test_polar_express_orthogonalizes_what_keller_leaves_between_half_and_more() -> None:
    u, _, vt = np.linalg.svd(matrix(16, 16))
    x = jnp.asarray(u * np.geomspace(1, 2e-3, 16) @ vt, jnp.float32)
    found = np.linalg.svd(newton_schulz(8, "polar_express", None)(x), compute_uv=False)
    assert np.abs(found - 1).max() < 0.01
    assert np.abs(np.linalg.svd(newton_schulz(8, dtype=None)(x))[1] - 1).max() > 0.1


@pytest.mark.parametrize("gram", [False, True])
def test_more_polar_express_steps_repeat_the_last_in_a_loop(gram: bool) -> None:
    long, short = (newton_schulz(n, "polar_express", None, gram=gram) for n in (11, 8))
    assert long.coefficients == short.coefficients + ((1.875, -1.25, 0.375),) * 3
    x = matrix(2, 6, 9)
    np.testing.assert_allclose(long(x), short(x), atol=1e-4)
    assert str(jax.make_jaxpr(long)(x)).count("dot_general") < 3 * 8


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", [(8, 40), (40, 8), (12, 12)])
def test_the_gram_form_is_the_same_function(shape: tuple[int, int]) -> None:
    x = matrix(3, *shape)
    plain, gram = (newton_schulz(5, "dion", None, gram=flag)(x) for flag in (False, True))
    np.testing.assert_allclose(gram, plain, atol=2e-4)


@pytest.mark.parametrize("gram", [False, True])
def test_matrices_of_a_stack_do_not_meet_and_zeros_stay_zeros(gram: bool) -> None:
    x = matrix(3, 6, 9).at[1].set(0.0)
    iteration = newton_schulz(dtype=jnp.float32, gram=gram)
    found = iteration(x)
    np.testing.assert_array_equal(found[1], jnp.zeros((6, 9)))
    np.testing.assert_array_equal(found[2], iteration(x.at[0].mul(-3.0))[2])


@pytest.mark.sample(2)
@pytest.mark.parametrize("gram", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_size_of_a_matrix_does_not_matter(gram: bool, dtype: Any) -> None:
    iteration = jax.jit(newton_schulz(5, "dion", dtype, gram=gram, eps=0.0))
    x = matrix(2, 6, 9).astype(dtype)
    found = iteration(x)
    # All powers of two at which no element under- or overflows: nothing is rounded otherwise.
    sizes = (-8, 11) if dtype == jnp.float16 else (-110, -70, 66, 124)
    for size in sizes:
        np.testing.assert_array_equal(iteration(x * jnp.asarray(2.0**size, dtype)), found)
    np.testing.assert_array_equal(iteration(jnp.zeros_like(x)), jnp.zeros_like(x))


def test_bfloat16_is_within_three_percent_and_closer_than_optax() -> None:
    x = matrix(256, 512)
    # Compiled: products that jaxlib 0.8.0 runs one by one on CPUs are wrong now and then.
    narrow = jax.jit(newton_schulz())(x)
    assert narrow.dtype == jnp.bfloat16
    coefficients = newton_schulz().state_coefficients()
    orthogonalize = jax.jit(_muon.orthogonalize_via_newton_schulz, static_argnums=2)
    theirs = orthogonalize(x.astype(jnp.bfloat16), coefficients, 5)
    exact = jax.jit(newton_schulz(dtype=None))(x)

    def error(found: jax.Array) -> float:
        return float(jnp.linalg.norm(found.astype(jnp.float32) - exact) / jnp.linalg.norm(exact))

    assert error(narrow) < min(3e-2, error(theirs))


def test_an_array_gives_its_last_steps() -> None:
    table = np.asarray(matrix(4, 3))
    found = newton_schulz(3, table)
    np.testing.assert_allclose(found.coefficients, table[1:])
    assert found.state_coefficients().shape == (3, 3)
    assert newton_schulz(3).state_coefficients().shape == (3,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "`steps` must be a positive integer"),
        ((True,), "`steps` must be a positive integer"),
        ((5, "muon"), "`coefficients` must be one of"),
        ((6, "dion"), "5 steps are given, and `steps` asks for 6"),
        ((5, [[1.0, 2.0]]), "must be an array \\[n, 3\\]"),
    ],
)
def test_bad_arguments(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        newton_schulz(*arguments)  # type: ignore[arg-type]
