import copy
import json
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


def test_e12_mutated_manifests() -> None:
    """Each entry gone or something else, with a hash that fits, and single bytes: typed errors."""
    saving = Saving.prepare(7, small_state(), None, {"tokens": 1})
    data = saving.encode(saving.sums())
    body = json.loads(data)["manifest"]
    mutated = [data[:i] + bytes([data[i] ^ 4]) + data[i + 1 :] for i in range(len(data))]
    mutated += [data[:i] for i in range(0, len(data), 50)]
    for *path, last in _places(body)[1:]:
        for junk in (*_JUNK, Ellipsis):
            changed = node = copy.deepcopy(body)
            for key in path:
                node = node[key]
            node[last] = junk
            if junk is Ellipsis:
                del node[last]
            mutated.append(sealed(changed))
    refused = 0
    for each in mutated:
        try:
            decode(each)
        except CheckpointError:
            refused += 1
    assert refused > 0.8 * len(mutated)  # names and notes may be anything
