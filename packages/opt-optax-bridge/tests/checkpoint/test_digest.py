from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opt_optax_bridge.checkpoint._disk.digest import digest, to_hex
from opt_optax_bridge.checkpoint._disk.storage import DTYPES

WIDE = {"int64", "uint64", "float64", "complex128"}


def enable_x64() -> Any:
    """Enables 64 bits inside a block: JAX 0.8 has it in `jax.experimental`."""
    modules: list[Any] = [jax, jax.experimental]
    (context,) = [module.enable_x64 for module in modules if hasattr(module, "enable_x64")][:1]
    return context(True)


def random_bits(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    kind = jnp.dtype(dtype)
    if dtype == "bool" or dtype in ("int2", "int4", "float4_e2m1fn"):
        return rng.integers(0, 2, shape).astype(kind)
    words = rng.integers(0, 256, (*shape, kind.itemsize), dtype=np.uint8)
    return words.reshape(*shape[:-1], -1).view(kind)


def by_definition(array: np.ndarray) -> str:
    """The two sums in Python's integers."""
    flat = np.ascontiguousarray(array).reshape(-1)
    width = min(flat.dtype.itemsize, 4)
    words = [int(word) for word in flat.view(f"uint{8 * width}")]
    spread = [i * 0x9E3779B1 % 2**32 for i in range(len(words))]
    first = sum(word * (2 * i + 1) for i, word in enumerate(words)) % 2**32
    second = sum(w * ((s ^ (s >> 15)) | 1) for w, s in zip(words, spread, strict=True)) % 2**32
    return f"{first:08x}{second:08x}"


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_on_device_as_on_the_host(dtype: str) -> None:
    array = random_bits(dtype, (5, 7))
    expected = to_hex(digest(array))
    if dtype not in ("int2", "int4", "float4_e2m1fn"):
        assert expected == by_definition(array)
    if dtype in WIDE:
        with enable_x64():
            assert to_hex(digest(jnp.asarray(array))) == expected
    else:
        assert to_hex(digest(jnp.asarray(array))) == expected


@pytest.mark.parametrize("shape", [(), (1,), (3, 1, 5), (2, 3, 4, 5)])
def test_of_every_rank(shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    assert to_hex(digest(jnp.asarray(array))) == to_hex(digest(array)) == by_definition(array)


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=4, max_size=400), st.data())
def test_every_flipped_bit_is_seen_in_both_sums(data: bytes, draw: st.DataObject) -> None:
    words = np.frombuffer(data[: len(data) // 4 * 4], np.uint32)
    bit = draw.draw(st.integers(0, words.size * 32 - 1))
    flipped = words.copy()
    flipped[bit // 32] ^= np.uint32(1 << bit % 32)
    before, after = to_hex(digest(words)), to_hex(digest(flipped))
    assert before[:8] != after[:8]
    assert before[8:] != after[8:]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=50, unique=True), st.data())
def test_swapped_words_are_seen(values: list[int], draw: st.DataObject) -> None:
    i, j = draw.draw(st.sampled_from([(i, j) for i in range(len(values)) for j in range(i)]))
    words = np.array(values, np.uint32)
    swapped = words.copy()
    swapped[[i, j]] = swapped[[j, i]]
    assert to_hex(digest(words)) != to_hex(digest(swapped))


def test_of_an_array_in_any_memory_order() -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    assert to_hex(digest(np.asfortranarray(array))) == to_hex(digest(array))
    assert to_hex(digest(array.astype(">f4"))) == to_hex(digest(array))


def test_reads_an_array_once_and_writes_nothing() -> None:
    from opt_optax_bridge.checkpoint._disk.digest import _sums

    large = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    compiled = _sums.lower(large).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 4096
