import copy
import json
import random
from typing import Any

import pytest
from checkpoint_testing import sealed, small_state
from opt_checkpoint._handler import Saving
from opt_checkpoint._manifest import Manifest
from opt_checkpoint._manifest import decode as _decode
from opt_checkpoint.errors import CheckpointError, DamagedError, LoadError, VersionError

pytestmark = pytest.mark.internals


def decode(data: bytes, **options: Any) -> Manifest:
    return _decode(data, where="manifest.json", **options)


def test_b9_newer_format() -> None:
    """A newer format version than the reader: an error that says which version reads it."""
    body = {"anything": "may have changed"}
    with pytest.raises(VersionError, match=r"format 2, which needs opt-checkpoint >= 0\.7\.0"):
        decode(sealed(body, format_version=2, needs="0.7.0"))


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (b"", DamagedError, "is not JSON"),
        (b"{}", LoadError, "expected `format_version`"),
        (b'{"format_version":1,"sha256":"0","manifest":{}}', DamagedError, "SHA-256"),
    ],
)
def test_no_manifest(data: bytes, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        decode(data)


_JUNK: list[Any] = [None, -1, 2**63, 1e308, "key<fry>", "\ud800", [[]], {"a": 1}]


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
    if rng.randrange(2):
        node[last] = rng.choice(_JUNK)
    else:
        del node[last]
    return body


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(10))
def test_e12_mutated_manifests(seed: int) -> None:
    """10,000 mutated manifests, half of them with a hash that fits: typed errors only."""
    rng = random.Random(seed)
    saving = Saving.prepare(7, small_state(), None, {"tokens": 1})
    data = saving.encode(saving.sums())
    body = json.loads(data)["manifest"]
    places = _places(body)
    accepted = refused = 0
    for i in range(1000):
        if i % 2:
            mutated = sealed(_mutated(body, places, rng))
        else:
            raw = bytearray(data)
            raw[rng.randrange(len(raw))] = rng.randrange(256)
            mutated = bytes(raw[: rng.choice([len(raw), rng.randrange(len(raw))])])
        try:
            decode(mutated)
            accepted += 1
        except CheckpointError:
            refused += 1
    assert accepted > 10  # Names and notes may be anything.
    assert refused > 700
