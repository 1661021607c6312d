import copy
import hashlib
import json
import random
import tracemalloc
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from checkpoint_testing import small_state, state
from opt_checkpoint import LeafInfo, Schema
from opt_checkpoint._disk.manifest import Limits, Manifest, canonical_json
from opt_checkpoint._disk.saving import Saving, extra_leaves
from opt_checkpoint._disk.storage import decode as decode_leaf
from opt_checkpoint._disk.storage import encode, stored_shape
from opt_checkpoint.errors import (
    CheckpointError,
    DamagedError,
    LoadError,
    VersionError,
)
from opt_core import TransformationDescription


def written(metadata: Any = None) -> bytes:
    return Saving.prepare(7, small_state(), [], [], metadata).encode()


def sealed(body: Any, **changes: Any) -> bytes:
    """A manifest of any content with a hash that is right."""
    text = canonical_json(body)
    whole = {"format_version": 2, "needs": "0.1.0", "sha256": hashlib.sha256(text).hexdigest()}
    return canonical_json({**whole, "manifest": body, **changes})


def decode(data: bytes, **options: Any) -> Manifest:
    return Manifest.decode(data, where="manifest.json", **options)


def test_read_again() -> None:
    schema = Schema(
        leaves=(LeafInfo(("state", "x"), (2, 0), "float32", "state", ("x",), axes=("a", None)),),
        optimizer=(TransformationDescription("adam", 1, ("g",), {"b1": 0.9, "eps": float("inf")}),),
        groups={"g": (("x",),)},
        versions={"jax": "0.10.2"},
    )
    leaf = jnp.zeros((2, 0))
    named = state({"state/x": leaf})
    saving = Saving.prepare(
        3, type(named)(named.leaves, schema), [], [], {"a": [1, None, "é\ud800"]}
    )
    manifest = decode(saving.encode())
    assert manifest == saving.manifest


def test_the_same_bytes_every_time() -> None:
    assert written({"b": 1, "a": 2}) == written({"a": 2, "b": 1})


def test_b9_newer_format() -> None:
    """A newer format version than the reader: an error that says which version reads it."""
    body = {"anything": "may have changed"}
    with pytest.raises(VersionError, match=r"format 3, which needs opt-checkpoint >= 0\.7\.0"):
        decode(canonical_json({"format_version": 3, "needs": "0.7.0", "manifest": body}))


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (b"", DamagedError, "no JSON"),
        (b"[]", LoadError, "expected a mapping, found list"),
        (b"{}", LoadError, "expected `format_version`"),
        (b'{"format_version":true}', LoadError, "expected `format_version`"),
        (b'{"format_version":2,"format_version":2}', DamagedError, "a key stands twice"),
        (b'{"format_version":2,"sha256":"0","manifest":{}}', DamagedError, "SHA-256"),
        (b'{"format_version":' + b"9" * 5000 + b"}", DamagedError, "no JSON"),
        (b"[" * 100_000, LoadError, "nested too deeply"),
        (b'{"a":' * 100_000, LoadError, "nested too deeply"),
        (b"[" + b"[]," * 9_000_000, LoadError, "more than 16,000,000 values"),
        (b"\xff\xfe" * 8, DamagedError, "no JSON"),
    ],
)
def test_no_manifest(data: bytes, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        decode(data)


def test_limits_of_the_caller() -> None:
    with pytest.raises(LoadError, match="more than 10 values"):
        decode(written(), limits=Limits(items=10))
    with pytest.raises(LoadError, match="more than 10 bytes"):
        decode(written(), limits=Limits(bytes=10))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"storage": "elsewhere"}, "`elsewhere` is no way to store a leaf"),
        ({"digest": None}, "expected key and digest to fit"),
        ({"key": "abc"}, "its record is malformed"),
        ({"impl": "threefry2x32"}, "is not stored as array"),
        ({"extra": 1}, "its record is malformed"),
        ({"storage": "empty", "key": [], "digest": None}, r"\[64, 32\] is not stored as empty"),
    ],
)
def test_records_that_cannot_be(change: dict[str, Any], words: str) -> None:
    body = json.loads(written())["manifest"]
    body["records"][0] |= change
    with pytest.raises(LoadError, match=words):
        decode(sealed(body))


@pytest.mark.parametrize("dtype", ["object", "uint4", "<U3", "nothing", ""])
def test_dtypes_that_cannot_be(dtype: str) -> None:
    body = json.loads(written())["manifest"]
    body["schema"]["leaves"][0]["dtype"] = dtype
    with pytest.raises(LoadError, match=f"[`']{dtype}[`'] is no dtype"):
        decode(sealed(body))


IMPOSSIBLE: dict[str, tuple[list[int], str]] = {
    "a size of 31 digits": ([0, 10**30], "is larger than any memory"),
    "a size of 4000 digits": ([0, 10**3999], "is larger than any memory"),
    "a size that has too many bytes": ([0, 2**62], "is larger than any memory"),
    "sizes that are too many together": ([2**31, 0, 2**31], "is larger than any memory"),
    "100 dimensions": ([0] * 100, "dimensions, found 100"),
    "65 dimensions": ([0] * 65, "dimensions, found 65"),
    "elements of too many bytes": ([2**61], "is larger than any memory"),
}


def with_shape(name: str, shape: list[int]) -> bytes:
    """A manifest with an empty array, empty keys and others, of which one has another shape."""
    values = {
        "empty": jnp.zeros((0, 3)),
        "full": jnp.ones(2),
        "keys": jax.random.split(jax.random.key(0), 0),
        "some_keys": jax.random.split(jax.random.key(0), 2),
    }
    infos, leaves = extra_leaves(values)
    body = json.loads(Saving.prepare(1, small_state(), infos, leaves, None).encode())["manifest"]
    (leaf,) = (x for x in body["schema"]["leaves"] if x["path"] == ["extra", name])
    leaf["shape"] = shape
    return sealed(body)


@pytest.mark.parametrize("name", ["empty", "full", "keys", "some_keys"])
@pytest.mark.parametrize("which", IMPOSSIBLE)
def test_shapes_that_cannot_be(name: str, which: str) -> None:
    """NumPy counts the bytes of an empty array as if no size were 0, and refuses too many."""
    shape, words = IMPOSSIBLE[which]
    with pytest.raises(LoadError, match=f"`extra/{name}`: .*{words}"):
        decode(with_shape(name, shape))


@pytest.mark.parametrize("shape", [[0, 2**58], [0] * 63, [2**58, 0]])
@pytest.mark.parametrize("name", ["empty", "keys"])
def test_large_shapes_that_can_be(name: str, shape: list[int]) -> None:
    """The largest that are admitted can be made."""
    manifest = decode(with_shape(name, shape))
    info = manifest.schema.by_name[f"extra/{name}"]
    leaf = decode_leaf(info, manifest.records[info.name], None, None)
    assert leaf.shape == tuple(shape)
    assert encode(info, leaf)[0] == manifest.records[info.name]


def test_a_python_scalar_has_no_shape() -> None:
    infos, leaves = extra_leaves({"n": 3})
    body = json.loads(Saving.prepare(1, small_state(), infos, leaves, None).encode())["manifest"]
    body["schema"]["leaves"][-1]["shape"] = [0, 10**30]
    with pytest.raises(LoadError, match="`extra/n`: a Python scalar has no sizes, found 2"):
        decode(sealed(body))


_JUNK: list[Any] = [
    None,
    True,
    -1,
    0,
    2**63,
    1e308,
    "",
    "x",
    "key<fry>",
    [],
    [[]],
    {},
    {"a": 1},
    [-1],
    "\ud800",
]


def _places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    items: Any = ()
    if isinstance(data, dict | list):
        items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in items:
        found += _places(value, (*path, key))
    return found


def _mutated(body: Any, places: list[tuple[Any, ...]], rng: random.Random) -> Any:
    body = copy.deepcopy(body)
    *path, last = rng.choice(places[1:])
    node = body
    for key in path:
        node = node[key]
    action = rng.randrange(3)
    if action == 0:
        node[last] = rng.choice(_JUNK)
    elif action == 1:
        del node[last]
    elif isinstance(node, list):
        node.insert(last, copy.deepcopy(node[last]))
    else:
        node[str(last) + "x"] = node.pop(last)
    return body


def test_e12_mutated_manifests() -> None:
    """10,000 mutated manifests, half of them with a hash that fits: typed errors, no memory."""
    rng = random.Random(0)
    data = written({"tokens": 1})
    body = json.loads(data)["manifest"]
    places = _places(body)
    accepted = refused = 0
    peak = 0
    for i in range(10_000):
        if i % 2:
            mutated = sealed(_mutated(body, places, rng))
        else:
            raw = bytearray(data)
            for _ in range(rng.randint(1, 4)):
                raw[rng.randrange(len(raw))] = rng.randrange(256)
            cut = rng.choice([0, 0, 0, rng.randrange(len(raw))])
            mutated = bytes(raw[: len(raw) - cut])
        if i % 100 < 2:  # Slow: not every time.
            tracemalloc.start()
        try:
            manifest = decode(mutated)
            for info in manifest.schema.leaves:
                stored_shape(info, manifest.records[info.name])
            accepted += 1
        except CheckpointError:
            refused += 1
        if tracemalloc.is_tracing():
            peak = max(peak, tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert peak < 2**20
    assert accepted > 100  # Names and notes may be anything.
    assert refused > 8000
