"""Reading legacy checkpoints: what Flax writes comes back; what strangers write does no harm."""

import contextlib
import io
import pickle
import random
import struct
import tracemalloc
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax.serialization
import jax.numpy as jnp
import numpy as np
import pytest
from opt_checkpoint import read_legacy
from opt_checkpoint.errors import LoadError

DTYPES = [
    *("bool", "int8", "uint64", "float16", "float32", "float64", "complex64"),
    *("bfloat16", "float8_e4m3fn", "int4"),
]


def packed(tree: Any) -> bytes:
    return flax.serialization.msgpack_serialize(tree)


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_same(a, b)
    elif isinstance(expected, np.ndarray | np.generic):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert found.tobytes() == expected.tobytes()
    else:
        assert found == expected or (found != found and expected != expected)


SHAPES = [(), (0,), (3,), (2, 3), (2, 0, 3)]
NUMBERS = [True, 0, -(2**63), 2**64 - 1, 2.5, float("nan"), -0.0, float("inf"), 1 - 2j]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_flax_writes_comes_back(dtype: str) -> None:
    arrays = {
        str(shape): (np.arange(np.prod(shape, dtype=int)) % 5)
        .reshape(shape)
        .astype(jnp.dtype(dtype))
        for shape in SHAPES
    }
    scalar = arrays["(3,)"][2]
    tree = {"arrays": arrays, "scalar": scalar, "": [None, *NUMBERS, "\0é", b"\xff", [], {"": {}}]}
    data = packed(tree)
    assert_same(read_legacy(data), flax.serialization.msgpack_restore(data))


def test_arrays_in_chunks_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 64)
    whole = {"a": {"b": np.arange(100.0).reshape(4, 25)}, "small": np.ones(2)}
    data = packed(whole)
    assert b"__msgpack_chunked_array__" in data
    assert_same(read_legacy(data), whole)


def test_arrays_are_read_only_and_nobody_elses() -> None:
    for kind in (bytes, bytearray, memoryview):
        data = bytearray(packed({"w": np.ones(3)}))
        found = read_legacy(kind(data))
        data[:] = bytes(len(data))
        assert found["w"].tolist() == [1.0, 1.0, 1.0]
        assert not found["w"].flags.writeable


def test_paths(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_bytes(packed({"a": 1}))
    assert read_legacy(tmp_path / "checkpoint") == read_legacy(str(tmp_path / "checkpoint"))
    with pytest.raises(LoadError, match="this is a folder"):
        read_legacy(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_legacy(tmp_path / "nothing")
    (tmp_path / "cut").write_bytes(packed({"a": np.ones(3)})[:-1])
    with pytest.raises(LoadError, match=r"cut`: not msgpack, or damaged: .*incomplete"):
        read_legacy(tmp_path / "cut")


# E7


class _Canary:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


def test_e7_pickles_are_refused_and_not_run(tmp_path: Path) -> None:
    """A pickle is refused, alone and in an archive; its code does not run."""
    canary = _Canary(str(tmp_path / "canary"))
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(LoadError, match="this is a pickle" if protocol > 1 else "extra data"):
            read_legacy(pickle.dumps({"w": canary}, protocol))
    with io.BytesIO() as file:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(canary))
        with pytest.raises(LoadError, match="this is an archive"):
            read_legacy(file.getvalue())
    inside = read_legacy(packed({"w": pickle.dumps(canary)}))
    assert type(inside["w"]) is bytes
    assert not (tmp_path / "canary").exists()
    pickle.loads(pickle.dumps(canary))  # it would have
    assert (tmp_path / "canary").exists()


# E8, E9, E10


@contextlib.contextmanager
def bounded(match: str) -> Iterator[None]:
    """What is done inside raises a `LoadError`, in little memory, so in little time."""
    tracemalloc.start()
    with pytest.raises(LoadError, match=match):
        yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100e6


def array_of(shape: bytes, dtype: bytes = b"\xa7float32", content: bytes = b"\xc4\x00") -> bytes:
    """One entry `w`: an array as Flax packs it, of whatever is given."""
    payload = b"\x93" + shape + dtype + content
    return b"\x81\xa1w\xc9" + struct.pack(">I", len(payload)) + b"\x01" + payload


BOMBS = {
    "array32": (b"\x81\xa1w\xdd\xff\xff\xff\xff", "4294967295 exceeds max_array_len"),
    "ext32": (b"\x81\xa1w\xc9\xff\xff\xff\xff\x01", "damaged: .*exceeds max_ext_len"),
    "deep lists": (b"\x81\xa1w" + b"\x91" * 100_000 + b"\xc0", "damaged: StackError"),
    "keys in keys": (b"\x81" + b"\xdd\x00\x01\x00\x00" * 60_000, "65536 exceeds max_array_len"),
    "shape": (
        array_of(b"\x92\xce\xff\xff\xff\xff\x01"),
        "cannot reshape",
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_e8_bombs_of_headers_lengths_and_nesting(name: str) -> None:
    """What is announced is checked before memory is taken for it."""
    data, match = BOMBS[name]
    with bounded(match):
        read_legacy(data)


def test_e9_declared_sizes_beyond_the_limit() -> None:
    data = b"\x81\xa1w\xdd" + struct.pack(">I", 20_000_000) + b"\xc0" * 20_000_000
    with bounded("20000000 exceeds max_array_len"):
        read_legacy(data)


GOOD = array_of(b"\x91\x02", content=b"\xc4\x08" + bytes(8))
MALFORMED = {
    "object dtype": (array_of(b"\x91\x01", b"\xa6object"), "the dtype 'object' is not"),
    "negative shape": (array_of(b"\x91\xff"), r"\[-1\] is not a shape"),
    "duplicate keys": (b"\x82\xa1w\x01\xa1w\x02", "is there twice"),
    "trailing bytes": (GOOD + b"\x00", "extra data"),
    "no UTF-8": (b"\x81\xa1\xff\x01", "utf-8"),
    "unknown extension": (b"\x81\xa1w\xd4\x05\x00", "the extension 5 is not an array"),
    "chunks that are none": (
        packed({"a": {"__msgpack_chunked_array__": True}}),
        "is not an array in chunks",
    ),
    "no dict": (packed([1, 2]), "a single list"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_e10_what_no_optimizer_has(name: str) -> None:
    """Dtypes that are no numbers, impossible shapes, duplicate keys, trailing bytes: errors."""
    data, match = MALFORMED[name]
    with bounded(match), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        read_legacy(data)
    assert not warned


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(10))
def test_damaged_bytes_raise_typed_errors_only(seed: int) -> None:
    rng = random.Random(seed)
    tree = {"target": {"w": np.ones((2, 3)), "b": jnp.ones(2, jnp.bfloat16)}, "step": np.int32(3)}
    whole = packed({**tree, "c": 1j, "d": [None, True, "x", 2.5]})
    for _ in range(400):
        content = bytearray(whole)
        for _ in range(rng.choice([1, 2, 4])):
            content[rng.randrange(len(content))] = rng.randrange(256)
        del content[rng.choice([len(content), rng.randrange(len(content))]) :]
        with contextlib.suppress(LoadError):
            read_legacy(bytes(content))
