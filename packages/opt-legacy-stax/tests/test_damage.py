"""Damaged and hostile files: the right state or one error; never a crash, a hang or much memory."""

import hashlib
import io
import json
import random
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_legacy_stax as ours
import pytest
from opt_legacy_stax import errors
from stax_testing import same_structure

PARAMS = {"w": jnp.arange(6.0).reshape(2, 3), "low": [jnp.ones(3, jnp.bfloat16)], "s": np.ones(())}
STATE = ours.sm3(0.1).init_fn(PARAMS)


def saved(state: Any = STATE, optimizer: str = "sm3") -> bytes:
    file = io.BytesIO()
    ours.save(file, state, optimizer=optimizer)
    return file.getvalue()


DATA = saved()


def load(data: bytes) -> Any:
    return ours.load(io.BytesIO(data), like=STATE, optimizer="sm3")


def is_right(state: Any) -> bool:
    same = zip(jax.tree.leaves(state), jax.tree.leaves(STATE), strict=True)
    return same_structure(state, STATE) and all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in same
    )


def signed(body: bytes) -> bytes:
    """A file with a checksum that fits, as somebody who knows the format would write it."""
    return body + hashlib.sha256(body).digest()


def parts(data: bytes = DATA) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Header, what its metadata say, and the leaves."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    about = json.loads(header["__metadata__"]["opt_legacy_stax"])
    return header, about, data[8 + length : -32]


def built(header: Any, about: Any, leaves: bytes) -> bytes:
    if about is not None:
        header["__metadata__"] = {"opt_legacy_stax": json.dumps(about, separators=(",", ":"))}
    text = header if isinstance(header, bytes) else compact(header)
    return signed(len(text).to_bytes(8, "little") + text + leaves)


def compact(header: Any) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def refused(data: bytes, error: type[Exception] = errors.DamagedFileError) -> str:
    with pytest.raises(error) as caught:
        load(data)
    return str(caught.value)


def test_the_parts_make_the_whole() -> None:
    assert is_right(load(DATA))
    assert is_right(load(built(*parts())))


def test_every_truncation_is_refused() -> None:
    for length in range(len(DATA)):
        refused(DATA[:length])
    for more in (b"\0", DATA, bytes(32)):
        refused(DATA + more)


def test_every_flipped_bit_is_refused() -> None:
    for position in range(len(DATA)):
        bit = 1 << random.Random(position).randrange(8)
        # In the version it is another version.
        refused(DATA[:position] + bytes([DATA[position] ^ bit]) + DATA[position + 1 :], ValueError)


def mutate(data: bytes, source: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(source.choice((1, 1, 2, 5))):
        at = source.randrange(len(changed) + 1)
        match source.randrange(7):
            case 0:
                changed[at : at + source.randrange(1, 20)] = b""
            case 1:
                changed[at:at] = source.randbytes(source.randrange(1, 20))
            case 2:
                other = source.randrange(len(changed) + 1)
                changed[at : at + 8] = changed[other : other + 8]
            case 3:
                changed[at : at + 1] = bytes([source.randrange(256)])
            case 4:
                changed[at : at + 1] = source.choice(b'"{}[]:,0123456789-.eE\\/*').to_bytes(
                    1, "big"
                )
            case 5:
                number = source.choice(
                    (b"9" * 30, b"-1", b"1e999", b"NaN", b"null", b"[]", b"true")
                )
                changed[at : at + 1] = number
            case 6:
                changed[:8] = source.choice((0, 2, 2**31, 2**63, 2**64 - 1)).to_bytes(8, "little")
        if not changed:
            return b""
    return bytes(changed)


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("has_checksum", [False, True], ids=["as it is", "signed again"])
def test_fuzz(has_checksum: bool, seed: int) -> None:
    source = random.Random(f"{has_checksum} {seed}")
    loaded = 0
    tracemalloc.start()
    for _ in range(250):
        data = mutate(DATA[:-32] if has_checksum else DATA, source)
        if has_checksum:
            length = int.from_bytes(data[:8], "little")
            if length > len(data) and source.random() < 0.8:  # most mutants get past the length
                text = len(data) - 8 - (len(DATA) - 40 - int.from_bytes(DATA[:8], "little"))
                data = max(text, 0).to_bytes(8, "little") + data[8:]
            data = signed(data)
        start = time.perf_counter()
        try:
            state = load(data)
        except errors.LoadError:
            pass
        else:
            loaded += 1
            assert has_checksum or is_right(state)  # a mutation may change nothing
            assert same_structure(state, STATE)
            assert jax.tree.map(np.shape, state) == jax.tree.map(np.shape, STATE)
        assert time.perf_counter() - start < 5
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 * 2**20
    assert loaded > 0 or not has_checksum  # values may be changed by who can sign


def test_every_value_of_the_metadata_replaced() -> None:
    """Structure by structure, with a checksum that fits."""
    strange: list[Any] = [None, True, -1, 0, 2**70, 1.5, "", "x", "../x", [], {}, [[]], ["*"], "*"]
    _, about, leaves = parts()
    count = 0
    for path in paths_of(about):
        for value in strange:
            header, changed, _ = parts()
            node: Any = changed
            for key in path[:-1]:
                node = node[key]
            if node[path[-1]] == value and type(node[path[-1]]) is type(value):
                continue
            node[path[-1]] = value
            count += 1
            try:
                state = load(built(header, changed, leaves))
            except errors.LoadError:
                continue
            # What a leaf is outside the file may be another thing of the same shape and dtype.
            assert same_structure(state, STATE)
            assert jax.tree.map(np.shape, state) == jax.tree.map(np.shape, STATE)
    assert count > 1000


def paths_of(node: Any) -> list[tuple[Any, ...]]:
    keys: Any = ()
    if isinstance(node, dict):
        keys = node.keys()
    elif isinstance(node, list):
        keys = range(len(node))
    return [p for key in keys for p in [(key,), *((key, *q) for q in paths_of(node[key]))]]


def replaced(change: Callable[[Any, Any], None]) -> bytes:
    header, about, leaves = parts()
    change(header, about)
    return built(header, about, leaves)


def test_absurd_sizes_allocate_nothing() -> None:
    def huge(header: Any, about: Any) -> None:
        about["leaves"][0][2] = [2**40, 2**20]
        header["low/0:0"]["shape"] = [2**40, 2**20]
        header["low/0:0"]["data_offsets"] = [0, 2**61]

    files = [
        replaced(huge),
        (2**63 - 1).to_bytes(8, "little") + DATA[8:],
        (len(DATA) - 39).to_bytes(8, "little") + DATA[8:],
        b"\xff" * 8 + bytes(100),
        bytes(50),
        b"",
        built(b"[" * 100_000 + b"]" * 100_000, None, b""),
        built(b'{"a":' * 50_000 + b"1" + b"}" * 50_000, None, b""),
        built(b'{"a":' + b"1" * 100_000 + b"}", None, b""),
    ]
    tracemalloc.start()
    for data in files:
        refused(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * 2**20


def test_a_large_header_is_not_read() -> None:
    """Megabytes of JSON would take a hundred times as much memory."""
    many = b'{"a":[' + b"[]," * 2**20 + b"[]]}"
    deep = b'{"a":' + b"[" * 2**20 + b"]" * 2**20 + b"}"
    keys = ours.sgd(0.1).init_fn({"k" * 2**14 + str(n): np.float32(n) for n in range(100)})
    bodies = [len(text).to_bytes(8, "little") + text for text in (many, deep)]
    tracemalloc.start()
    messages = [refused(signed(body), errors.StateMismatchError) for body in bodies]
    for body in bodies:
        assert "its checksum does not match its contents" in refused(body + bytes(32))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    messages.append(refused(saved(keys, "sgd"), errors.StateMismatchError))  # a sound file
    for message in messages:
        assert "a different state than expected: its header has " in message
    assert peak < 48 * 2**20  # what is hashed at a time, and the files' own bytes
    assert ours.load(io.BytesIO(saved(keys, "sgd")), like=keys, optimizer="sgd") is not None


def test_long_keys_are_not_repeated() -> None:
    """The name of a leaf has the key of every node above it: a small header may declare much."""
    header, about, leaves = parts()
    about["tree"] = ["dict", [["k" * 50_000, ["list", [[n, "*"] for n in range(3000)]]]]]
    about["subtrees"] = ["*"] * 3000
    about["leaves"] = [["jax", "int8", [0], ""]] * 3000
    tracemalloc.start()
    assert "contradicts its own metadata" in refused(built(header, about, leaves))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * 2**20


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.decode().encode("utf-16"),
        lambda text: b"\xef\xbb\xbf" + text,
        lambda text: text + b" " * 8,
        lambda text: text.replace(b",", b", ", 1),
        lambda text: text.replace(b'"}', b'","x":"y"}', 1),
        lambda text: text.replace(b'{\\"version', b'{\\"evil\\":1,\\"version'),
        lambda text: text.replace(b"[2,3]", b"[2.0,3]"),
    ],
    ids=["utf-16", "bom", "padding", "spaces", "metadata", "about", "float"],
)
def test_headers_are_as_save_writes_them(change: Callable[[bytes], bytes]) -> None:
    length = int.from_bytes(DATA[:8], "little")
    text = change(DATA[8 : 8 + length])
    assert text != DATA[8 : 8 + length]
    refused(signed(len(text).to_bytes(8, "little") + text + DATA[8 + length : -32]))


def test_keys_of_a_node_are_different() -> None:
    header, about, leaves = parts()
    about["tree"][1].insert(0, ["w", ["None", []]])
    assert refused(built(header, about, leaves)) == (
        "the metadata does not describe a state: two children of a node have the same key."
    )


@pytest.mark.parametrize("depth", [50, 300, 5000])
def test_deep_trees_are_refused(depth: int) -> None:
    header, about, leaves = parts()
    about["tree"] = "DEEP"
    deep = '["list",[[0,' * depth + '"*"' + "]]]" * depth
    text = json.dumps(about, separators=(",", ":")).replace('"DEEP"', deep)
    header["__metadata__"] = {"opt_legacy_stax": text}
    with pytest.raises(errors.LoadError):
        load(built(header, None, leaves))


END = ". Restore it from a backup."


def test_words() -> None:
    damaged = "the file is damaged, or was not written by `save`: "
    size = len(DATA)
    assert refused(b"") == f"{damaged}it has only 0 bytes{END}"
    assert refused(DATA[:60]).startswith(f"{damaged}it declares a header of ")
    declares = len(parts()[2]) + 32
    assert refused(DATA[:-1]) == (
        f"{damaged}it declares {declares} bytes of data, but has {declares - 1}{END}"
    )
    flipped = DATA[:-40] + bytes([DATA[-40] ^ 1]) + DATA[-39:]
    assert refused(flipped) == f"{damaged}its checksum does not match its contents{END}"
    assert refused(b"\x10" + bytes(7) + b" " * (size - 8)) == (
        "the header of the file cannot be read: it is not valid JSON."
    )
    assert refused(built(b'{"a":1,"a":2}', None, b"")) == (
        "the header of the file cannot be read: duplicate key 'a'."
    )
    assert refused(built(b'{"a":NaN}         ', None, b"")) == (
        "the header of the file cannot be read: NaN is not a JSON number."
    )
    assert refused(built(b"{}" + b" " * 40, None, b"")) == (
        "the metadata of the file has no entry `opt_legacy_stax`: it was not written by `save`."
    )


def other_version(header: Any, about: Any) -> None:
    about["version"] = 2


def path_like(name: str) -> Callable[[Any, Any], None]:
    def change(header: Any, about: Any) -> None:
        header[name] = header.pop("s:0")

    return change


def test_words_about_contents() -> None:
    assert refused(replaced(other_version), errors.FormatVersionError) == (
        "the file has format version 2; expected 1. Load it with the version of opt-legacy-stax "
        "that wrote it."
    )
    for name in ("../s", "/etc/passwd", "a//b", "a/./b", "a\\b", "a\0b"):
        assert refused(replaced(path_like(name))) == (
            f"the array name {name!r} looks like a file system path; `save` never writes such "
            "names."
        )
    assert refused(replaced(path_like("t:0"))) == (
        "the header contradicts its own metadata at `s:0`."
    )

    def swapped(header: Any, about: Any) -> None:
        a, b = header["w:2/0"], header["w:2/1"]
        a["data_offsets"], b["data_offsets"] = b["data_offsets"], a["data_offsets"]

    assert refused(replaced(swapped)) == ("the header contradicts its own metadata at `w:2/0`.")

    def number_as_float(header: Any, about: Any) -> None:
        about["leaves"][3] = ["int", "float32", [], ""]

    assert refused(replaced(number_as_float)) == (
        "the metadata does not describe a state: a leaf has a dtype or shape that its kind does "
        "not allow."
    )


@pytest.mark.parametrize(
    "entry",
    ["sm3", None, [], ["sm3"], ["", []], [3, []], ["sm3", "x"], ["sm3", [1]], ["sm3", [], 1], {}],
    ids=repr,
)
def test_an_optimizer_is_a_name_and_names(entry: Any) -> None:
    header, about, leaves = parts()
    about["optimizer"] = entry
    words = "not describe a state: `optimizer` must be a name and a list of the names of its"
    assert words in refused(built(header, about, leaves))


def test_a_name_that_was_changed_is_not_taken() -> None:
    header, about, leaves = parts()
    about["optimizer"][1].append("more")
    words = "expected `sm3`, which keeps (x, m, vs, shape), found `sm3`, which keeps (x, m, vs, sha"
    assert words in refused(built(header, about, leaves), errors.StateMismatchError)


def test_booleans_are_0_or_1() -> None:
    state = ours.pack_optimizer_state([ours.JoinPoint(np.array([True]))])
    data = saved(state, "flags")
    body = data[:-33] + b"\x02"
    with pytest.raises(errors.DamagedFileError, match="neither 0 nor 1"):
        ours.load(io.BytesIO(signed(body)), like=state, optimizer="flags")


def test_names_in_files_lead_nowhere() -> None:
    keys = ["../../x", "/abs", "..", ".", "", "a/b", "a:b", "@", "%2E", "...", "nul\0", "é\n"]
    state = ours.sgd(0.1).init_fn({key: np.float32(n) for n, key in enumerate(keys)})
    data = saved(state, "sgd")
    names = [name for name in parts(data)[0] if name not in ("__metadata__", "checksum:sha256")]
    assert len(set(names)) == len(keys)
    for name in names:
        assert all(part not in ("", ".", "..") for part in name.split("/"))
        assert name.isascii()
        assert "/" not in name
        assert name.isprintable()
    loaded = ours.load(io.BytesIO(data), like=state, optimizer="sgd")
    assert ours.sgd(0.1).params_fn(loaded) == ours.sgd(0.1).params_fn(state)
