"""Without `jax_enable_x64`, 64 bits of NumPy are 32 to JAX; what does not survive that is said."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core_testing import Momentum, advanced, assert_same
from flax_optim import Adam
from opt_core import MultiOptimizer, Optimizer, restore_state_dict
from opt_core.errors import RestoreError

WIDE = {"float32": np.float64, "int32": np.int64, "uint32": np.uint64, "complex64": np.complex128}


def restore(reference: Any, value: Any) -> Any:
    return restore_state_dict({"x": reference}, {"x": value})["x"]


def deviation(reference: Any, value: Any) -> tuple[str, str]:
    with pytest.raises(RestoreError) as caught:
        restore(reference, value)
    [mismatch] = caught.value.mismatches
    return mismatch.kind, mismatch.found


def references(shape: tuple[int, ...], dtype: Any) -> list[Any]:
    return [jnp.ones(shape, dtype), np.ones(shape, dtype), jax.ShapeDtypeStruct(shape, dtype)]


@pytest.mark.parametrize("dtype", WIDE)
def test_wide_arrays_fit_and_become_what_jax_holds(dtype: str) -> None:
    value: np.ndarray = np.array([0, 1, 7], WIDE[dtype])
    for reference in references((3,), dtype):
        found = restore(reference, value)
        assert found.dtype == dtype
        assert isinstance(found, np.ndarray) == isinstance(reference, np.ndarray)
        np.testing.assert_array_equal(found, value)


@pytest.mark.parametrize(
    ("dtype", "value", "words"),
    [
        ("float32", [1.0, 1e300], "float64[2] with 1e+300, which does not fit float32"),
        ("float32", [1.0, 1e-60], "float64[2] with 1e-60, which does not fit float32"),
        ("int32", [2**31, 0], "int64[2] with 2147483648, which does not fit int32"),
        ("complex64", [1j, 1e300], "complex128[2] with (1e+300+0j), which does not fit complex64"),
    ],
)
def test_values_that_do_not_survive_deviate(dtype: str, value: Any, words: str) -> None:
    for reference in references((2,), dtype):
        assert deviation(reference, np.array(value, WIDE[dtype])) == ("value", words)


def test_with_64_bits_the_dtypes_are_two() -> None:
    with jax.enable_x64(True):
        for own, other in ((jnp.float32, np.float64), (jnp.float64, np.float32)):
            found = deviation(jnp.ones(2, own), np.ones(2, other))
            assert found == ("dtype", f"{np.dtype(other)}[2]")
        value = np.array([0.1, 1e300])
        restored = restore(jnp.ones(2), value)
        assert restored.dtype == jnp.float64
        np.testing.assert_array_equal(restored, value)
        wide = jnp.ones(2)
    words = "float64[2], which JAX makes float32 without `jax_enable_x64`"
    assert deviation(wide, np.ones(2)) == ("dtype", words)


def widened(optimizer: Optimizer) -> Any:
    return jax.tree.map(
        lambda x: np.asarray(x, WIDE.get(str(x.dtype), x.dtype)), optimizer.state_dict()
    )


def test_a_whole_optimizer_written_in_64_bits() -> None:
    params = {"w": jnp.arange(4.0), "b": [jnp.ones(2)]}
    groups = MultiOptimizer(("w", Momentum()), (r"b/0", Adam(0.1)))
    optimizer, fresh = advanced(groups.create(params)), groups.create(params)
    assert_same(fresh.restore_state(widened(optimizer)), optimizer)
    with jax.enable_x64(True), pytest.raises(RestoreError, match="w: dtype: expected float32"):
        fresh.restore_state(widened(optimizer))
