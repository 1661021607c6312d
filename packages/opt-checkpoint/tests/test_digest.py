from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_testing import WIDE, random_bits
from opt_checkpoint import _digest
from opt_checkpoint._digest import digests
from opt_checkpoint._manifest import DTYPES

pytestmark = pytest.mark.internals


def digest(array: Any) -> str:
    (found,) = digests([array])
    return found


def enable_x64() -> Any:
    """Enables 64 bits inside a block: JAX 0.8 has it in `jax.experimental`."""
    modules: list[Any] = [jax, jax.experimental]
    (context,) = [module.enable_x64 for module in modules if hasattr(module, "enable_x64")][:1]
    return context(True)


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (2, 3, 4, 5)])
def test_on_device_as_on_the_host(dtype: str, shape: tuple[int, ...]) -> None:
    array = random_bits(dtype, shape)
    expected = digest(array)
    if dtype in WIDE:
        with enable_x64():
            assert digest(jnp.asarray(array)) == expected
    else:
        assert digest(jnp.asarray(array)) == expected


@pytest.mark.parametrize("dtype", ["int2", "int4", "float4_e2m1fn"])
def test_of_less_than_a_byte_only_its_bits_count(dtype: str) -> None:
    """NumPy keeps each in a byte of its own, and negative ones with their sign extended."""
    width = int(dtype.strip("intfloa")[0])
    low = np.arange(2**width, dtype=np.uint8)
    high = low | np.uint8(0xFF << width & 0xFF)
    kind = jnp.dtype(dtype)
    assert digest(low.view(kind)) == digest(high.view(kind)) == digest(jnp.asarray(low.view(kind)))


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "complex128"])
@pytest.mark.parametrize("way", ["large", "large without XLA", "on device"])
def test_of_every_size_by_every_way(dtype: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small parts of one shape are summed together, large ones by a program, or in blocks."""
    arrays = [random_bits(dtype, shape, seed) for seed, shape in enumerate([(3, 5), (257, 33)])]
    expected = digests(arrays)
    monkeypatch.setattr(_digest, "_LARGE", 1)
    if way != "large":
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(_digest, "_BLOCK", 1000)
    if way == "large" and dtype not in WIDE:  # as parts of arrays on a mesh
        mesh = jax.sharding.Mesh(jax.devices()[:1], ("x",))
        place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        assert digests([jax.device_put(array, place) for array in arrays]) == expected
    if way == "on device" and dtype not in WIDE:
        assert digests([jnp.asarray(array) for array in arrays]) == expected
    else:
        assert digests(arrays) == expected
