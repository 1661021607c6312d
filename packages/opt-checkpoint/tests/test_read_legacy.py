"""Reading legacy checkpoints: what Flax writes comes back; what strangers write does no harm."""

import contextlib
import io
import pickle
import random
import struct
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax.serialization
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opt_checkpoint import read_legacy
from opt_checkpoint.errors import LoadError

DTYPES = [
    *("bool", "int8", "uint8", "int16", "int32", "int64", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    *("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4"),
]


def dtype_named(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


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


@st.composite
def arrays(draw: Any) -> np.ndarray:
    shape = draw(st.sampled_from([(), (0,), (3,), (2, 3), (2, 0, 3), (1, 2, 1, 2)]))
    dtype = dtype_named(draw(st.sampled_from(DTYPES)))
    numbers = draw(st.integers(0, 3)) + np.arange(np.prod(shape, dtype=int)) % 5
    array: np.ndarray = numbers.reshape(shape).astype(dtype)
    return array


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(width=64),
    st.complex_numbers(),
    st.text(),
    st.binary(),
    arrays(),
    arrays().map(lambda array: array.ravel()[:1].sum().astype(array.dtype)),
)
TREES = st.dictionaries(
    st.text(max_size=3),
    st.recursive(
        LEAVES,
        lambda child: st.lists(child, max_size=3) | st.dictionaries(st.text(), child, max_size=3),
        max_leaves=6,
    ),
    max_size=3,
)


@settings(max_examples=30, deadline=None)
@given(TREES)
def test_what_flax_writes_comes_back(tree: dict[str, Any]) -> None:
    data = packed(tree)
    assert_same(read_legacy(data), flax.serialization.msgpack_restore(data))


def test_arrays_in_chunks_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 64)
    whole = {"a": {"b": np.arange(100.0).reshape(4, 25)}, "small": np.ones(2)}
    data = packed(whole)
    assert b"__msgpack_chunked_array__" in data
    assert_same(read_legacy(data), whole)


def test_arrays_are_views_of_the_bytes() -> None:
    """Arrays are copied one at a time, and no copy is kept."""
    data = packed({str(i): np.zeros(100_000, np.float32) for i in range(40)})
    tracemalloc.start()
    found = read_legacy(data)
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after < 200_000
    assert peak < 8_000_000
    assert not any(array.flags.writeable for array in found.values())


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_a_changed_buffer_changes_nothing(kind: Callable[[bytearray], Any]) -> None:
    data = bytearray(packed({"w": np.ones(3)}))
    found = read_legacy(kind(data))
    data[:] = bytes(len(data))
    assert found["w"].tolist() == [1.0, 1.0, 1.0]


def test_paths(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_bytes(packed({"a": 1}))
    assert read_legacy(tmp_path / "checkpoint") == read_legacy(str(tmp_path / "checkpoint"))
    with pytest.raises(LoadError, match="this is a folder"):
        read_legacy(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_legacy(tmp_path / "nothing")
    (tmp_path / "cut").write_bytes(packed({"a": np.ones(3)})[:-1])
    with pytest.raises(LoadError, match=r"cut`: `a`: "):
        read_legacy(tmp_path / "cut")


def test_archives_come_back() -> None:
    weights = np.arange(6, dtype=np.float32).reshape(2, 3)
    file = io.BytesIO()
    arrays: dict[str, Any] = {"opt/w": np.asfortranarray(weights), "step": np.int64(3)}
    np.savez_compressed(file, **arrays)
    found = read_legacy(file.getvalue())
    np.testing.assert_array_equal(found["opt"]["w"], weights)
    assert found["step"] == 3


# E7


class _Canary:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


def test_e7_pickles_are_refused_and_not_run(tmp_path: Path) -> None:
    """A pickle is refused, alone, in an archive, and in an object array; its code does not run."""
    canary = _Canary(str(tmp_path / "canary"))
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(LoadError, match="this is a pickle"):
            read_legacy(pickle.dumps({"w": canary}, protocol))
        with pytest.raises(LoadError, match="this is a pickle"):
            read_legacy(pickle.dumps(np.ones(3), protocol))
    with io.BytesIO() as file:
        np.savez(file, allow_pickle=True, w=np.array([canary], object))
        with pytest.raises(LoadError, match=r"the dtype '\|O' is not that of numbers"):
            read_legacy(file.getvalue())
    with io.BytesIO() as file:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(canary))
        with pytest.raises(LoadError, match="PyTorch: this is a pickle"):
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


def nested_complex(times: int) -> bytes:
    """One entry `w`: complex numbers in each other."""
    payload = b"\xc0"
    for _ in range(times):
        payload = b"\xc9" + struct.pack(">I", len(payload)) + b"\x02" + payload
    return b"\x81\xa1w" + payload


BOMBS = {
    "array32": (b"\x81\xa1w\xdd\xff\xff\xff\xff", "4294967295 e"),
    "ext32": (b"\x81\xa1w\xc9\xff\xff\xff\xff\x01", "`w`: .*damaged"),
    "deep lists": (b"\x81\xa1w" + b"\x91" * 100_000 + b"\xc0", "nested more than 100 deep"),
    "deep extensions": (nested_complex(2000), "`w`: .*exceeds max_ext_len"),
    "keys in keys": (b"\x81" + b"\xdd\x00\x01\x00\x00" * 60_000, "a key is not a string"),
    "shape": (array_of(b"\x92\xce\xff\xff\xff\xff\x01"), "takes 17179869180 bytes, not the 0"),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", BOMBS)
def test_e8_bombs_of_headers_lengths_and_nesting(name: str) -> None:
    """What is announced is checked before memory is taken for it."""
    data, match = BOMBS[name]
    with bounded(match):
        read_legacy(data)


def zipped(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def npy(descr: str, shape: str, content: bytes = b"", extra: str = "") -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}{extra}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content


def archive_of_one() -> bytearray:
    """An archive as NumPy writes it, of one array with a name that is not ASCII."""
    file = io.BytesIO()
    np.savez(file, größe=np.ones(3))
    return bytearray(file.getvalue())


def bad_name() -> bytes:
    """A name in the table of contents that is not UTF-8."""
    content = archive_of_one()
    content[content.rindex("größe".encode()) + 2] = 0xFF
    return bytes(content)


def many_names() -> bytes:
    """A table of contents far larger than any checkpoint's."""
    content = zipped({"w.npy": b""})
    at, end = content.index(b"PK\x01\x02"), content.index(b"PK\x05\x06")
    names = content[at:end] * 60_000
    record = bytearray(content[end:])
    struct.pack_into("<I", record, 12, len(names))
    return content[:at] + names + bytes(record)


SIZES: dict[str, Callable[[], tuple[bytes, str]]] = {
    "zip bomb": lambda: (
        zipped({"w.npy": npy("'<f4'", "(25165824,)", bytes(96 << 20))}),
        "declares 1006633.* bytes of arrays; at most 67108864",
    ),
    "npz of 4 TB": lambda: (
        zipped({"w.npy": npy("'<f4'", "(1099511627776,)")}),
        "takes 4398046511104 bytes, not the 0",
    ),
    "nil list of 20 MB": lambda: (
        b"\x81\xa1w\xdd" + struct.pack(">I", 20_000_000) + b"\xc0" * 20_000_000,
        "at most 250000 are read",
    ),
    "table of contents": lambda: (many_names(), "60000 entries; at most 50000"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", SIZES)
def test_e9_declared_sizes_beyond_the_limit(name: str) -> None:
    """A zip bomb, an array of 4 TB, a list of 20 million: refused by what they declare."""
    data, match = SIZES[name]()
    with bounded(match):
        read_legacy(data)


def test_limits_can_be_raised_and_lowered() -> None:
    data = zipped({"w.npy": npy("'<f4'", "(25000000,)", bytes(100_000_000))})
    with pytest.raises(LoadError, match="`max_bytes`"):
        read_legacy(data)
    assert read_legacy(data, max_bytes=2 * 10**8)["w"].shape == (25_000_000,)
    many = packed({str(i): i for i in range(300)})
    with pytest.raises(LoadError, match="`max_entries`"):
        read_legacy(many, max_entries=299)
    assert len(read_legacy(many, max_entries=300)) == 300
    with pytest.raises(LoadError, match=r"`a/b`.*`max_depth`"):
        read_legacy(packed({"a": {"b": {"c": {}}}}), max_depth=2)
    with pytest.raises(LoadError, match="nested too deeply for Python"):
        read_legacy(b"\x81\xa1w" * 50_000 + b"\xc0", max_depth=10**6)


GOOD = array_of(b"\x91\x02", content=b"\xc4\x08" + bytes(8))
MALFORMED = {
    "object dtype": (array_of(b"\x91\x01", b"\xa6object"), "`w`: the dtype 'object'"),
    "negative shape": (array_of(b"\x91\xff"), "`w`: expected a shape of at most 32"),
    "shape overflows": (array_of(b"\x92\xcf\x7f" + b"\xff" * 7 + b"\x02"), "that fits in memory"),
    "duplicate keys": (b"\x82\xa1w\x01\xa1w\x02", "the key 'w' is there twice"),
    "trailing bytes": (GOOD + b"\x00", "1 bytes follow after the end"),
    "cut short": (GOOD[:-1], "`w`: "),
    "no UTF-8": (b"\x81\xa1\xff\x01", "utf-8"),
    "unknown extension": (b"\x81\xa1w\xd4\x05\x00", "the extension 5 is not an array"),
    "a byte of no meaning": (b"\x81\xa1w\xc1", "FormatError"),
    "chunks that are none": (packed({"a": {"__msgpack_chunked_array__": True}}), "`a`: "),
    "no dict": (packed([1, 2]), "a single list"),
    "nothing": (b"", "the file is empty"),
    "npz: object": (zipped({"w.npy": npy("'|O'", "(1,)")}), "`w.npy`: the dtype '|O'"),
    "npz: code": (zipped({"w.npy": npy("__import__('os')", "()")}), "did not write its header"),
    "npz: what Python warns of": (zipped({"w.npy": npy("'<f4'", "(1or 2,)")}), "did not write"),
    "npz: trailing": (zipped({"w.npy": npy("'<f4'", "()", bytes(5))}), "takes 4 bytes, not the 5"),
    "npz: both array and folder": (
        zipped({"a.npy": npy("'<f4'", "()", bytes(4)), "a/b.npy": npy("'<f4'", "()", bytes(4))}),
        "`a/b`",
    ),
    "npz: name": (bad_name(), "the archive is damaged.*'utf-8' codec"),
    "npz: damaged": (zipped({"w.npy": npy("'<f4'", "()", bytes(4))})[:-30], "no end|damaged"),
}


@pytest.mark.sample(12)
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
    whole = [packed({**tree, "c": 1j, "d": [None, True, "x", 2.5]}), bytes(archive_of_one())]
    file = io.BytesIO()
    arrays: dict[str, Any] = {"a/b": np.arange(6.0), "größe": np.ones((2, 3), np.int32)}
    np.savez_compressed(file, **arrays)
    whole.append(file.getvalue())
    for i in range(600):
        content = bytearray(whole[i % 3])
        for _ in range(rng.choice([1, 1, 2, 4])):
            content[rng.randrange(len(content))] = rng.randrange(256)
        if rng.random() < 0.3:
            del content[rng.randrange(len(content) // 2, len(content)) :]
        with contextlib.suppress(LoadError):
            read_legacy(bytes(content))
