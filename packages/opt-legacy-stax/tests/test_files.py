"""What is saved comes back, in an exact and old-fashioned file."""

import functools
import io
import os
import stat
from collections import OrderedDict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import opt_legacy_stax as ours
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.example_libraries import optimizers as theirs
from opt_legacy_stax import errors
from stax_testing import NAMES, same_structure, triple_of

PARAMS: Any = {
    "w": jnp.arange(6.0).reshape(2, 3),
    "low": [jnp.ones((3,), jnp.bfloat16), (), None],
    "s": jnp.float32(2.0),
}


save = functools.partial(ours.save, optimizer="test")
load = functools.partial(ours.load, optimizer="test")

# untyped in safetensors
deserialize: Any = safetensors.deserialize


def trained(triple: Any, params: Any = PARAMS, steps: int = 2) -> Any:
    state = triple.init_fn(params)
    for i in range(steps):
        state = jax.jit(triple.update_fn)(i, jax.tree.map(jnp.ones_like, params), state)
    return state


def round_trip(state: Any, **reference: Any) -> Any:
    expected = {"like": state, **reference} if "params" not in reference else reference
    file = io.BytesIO()
    ours.save(file, state, optimizer=expected.setdefault("optimizer", "test"))
    file.seek(0)
    return ours.load(file, **expected)


def check_same(found: Any, expected: Any) -> None:
    assert same_structure(ours.OptimizerState(*found), ours.OptimizerState(*expected))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert isinstance(a, jax.Array) == isinstance(b, jax.Array)
        assert isinstance(a, jax.Array) or type(a) is type(b)
        assert same_bits(a, b)
        if isinstance(a, jax.Array):
            assert jax.typeof(a) == jax.typeof(b)  # weak types too


def same_bits(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return (a.shape, a.dtype) == (b.shape, b.dtype) and a.tobytes() == b.tobytes()


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("module", [ours, theirs], ids=["ours", "jax"])
def test_states_come_back(name: str, module: Any) -> None:
    triple = triple_of(name, module)
    for state in (triple.init_fn(PARAMS), trained(triple)):
        found = round_trip(state)
        assert type(found) is type(state)
        jax.tree.map(lambda a, b: None, found, state)  # raises for another structure
        check_same(found, state)
        for params in (PARAMS, jax.eval_shape(lambda p: p, PARAMS)):
            check_same(round_trip(state, optimizer=triple_of(name), params=params), state)


def as_state(leaf: Any) -> ours.OptimizerState:
    """A state of one parameter, for which one leaf is kept."""
    return ours.pack_optimizer_state({"x": ours.JoinPoint((leaf,))})


def leaf_after(leaf: Any) -> Any:
    return round_trip(as_state(leaf)).packed_state[0][0]


DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bfloat16"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "int4", "uint4"),
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_keeps_its_bits(dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    if kind == np.bool_:
        array = np.array([[True, False, True]])
    elif "int4" in dtype:
        array = np.array([[1, 2, 7]]).astype(kind)
    else:
        raw = np.random.default_rng(0).integers(0, 256, 12 * kind.itemsize, dtype=np.uint8)
        array = raw.view(kind).reshape(3, 4)  # NaNs with payloads, -0.0 and subnormals among them
    for leaf in (array, array[:0], array[0, 0], array.reshape(-1)[:1].reshape(())):
        after = leaf_after(leaf)
        assert type(after) is type(leaf)
        assert same_bits(after, leaf)
    if kind.itemsize < 8 and dtype != "complex64":
        assert same_bits(leaf_after(jnp.asarray(array)), jnp.asarray(array))


@pytest.mark.parametrize(
    "leaf", [-(2**63), 2**63, True, -0.0, float("inf"), 1e-320, 2j, np.int64(2**40)]
)
def test_numbers_are_what_they_were(leaf: Any) -> None:
    after = leaf_after(leaf)
    assert type(after) is type(leaf)
    assert repr(after) == repr(leaf)


def test_keys_come_back() -> None:
    for key in (jax.random.key(3), jax.random.split(jax.random.key(1, impl="rbg"), 2)):
        after = leaf_after(key)
        assert after.dtype == key.dtype
        assert same_bits(jax.random.key_data(after), jax.random.key_data(key))
    with pytest.raises(errors.StateMismatchError, match=r"expected key<rbg>\[\], found key<"):
        round_trip(as_state(jax.random.key(3)), like=as_state(jax.random.key(3, impl="rbg")))


leaves = st.sampled_from([np.float32(1), np.ones((2, 3)), np.zeros(0, np.int8), 5, 2.5])
texts = st.text(max_size=6)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.dictionaries(texts, inner, max_size=3),
        st.dictionaries(st.integers(-9, 9), inner, max_size=3),
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.none(),
    ),
    max_leaves=6,
)


@given(trees, trees)
@settings(max_examples=15, deadline=None)
def test_any_tree_comes_back(tree: Any, kept: Any) -> None:
    state = ours.pack_optimizer_state(jax.tree.map(lambda _: ours.JoinPoint(kept), tree))
    check_same(round_trip(state), state)


@ours.optimizer
def keep() -> Any:
    return lambda x: (x,), lambda i, g, s: s, lambda s: s[0]


@pytest.mark.parametrize(
    ("saved", "expected", "line"),
    [
        ({"a": 1.0}, {"a": 1.0, "b/c": 1.0}, "b~1c: expected an array, found nothing"),
        ({"a": [1.0]}, {"a": (1.0,)}, "a: expected a tuple, found a list"),
        ({"0": 1.0}, {0: 1.0}, ".: expected a dict with int keys, found a dict\n"),
        (
            OrderedDict(a=1.0, b=2.0),
            OrderedDict(b=2.0, a=1.0),
            "keys in a different order, expected",
        ),
        (np.ones(3), jnp.ones(3), ".:0: expected float32[3], found float64[3]"),
        (1.5, 1, ".:0: expected an integer, found float32[]"),
    ],
)
def test_a_state_of_another_tree_is_refused(saved: Any, expected: Any, line: str) -> None:
    make = keep().init_fn
    with pytest.raises(errors.StateMismatchError) as caught:
        round_trip(make(saved), like=make(expected))
    assert str(caught.value).startswith(
        f"the file holds a different state than expected:\n  {line}"
    )


def test_an_integer_of_another_width_must_fit() -> None:
    make = keep().init_fn
    like = make(jax.ShapeDtypeStruct((), np.int8))
    found = round_trip(make(-128), like=like)
    assert type(jax.tree.leaves(found)[0]) is int
    words = r"holds 128 in `\.:0`, which is out of the range of the expected int8"
    with pytest.raises(errors.StateMismatchError, match=words):
        round_trip(make(128), like=like)


def test_numbers_become_what_init_makes_of_them_and_weak_types_give_way_to_bits() -> None:
    triple = keep()
    for params in (7, np.uint64(7), True):
        (found,) = jax.tree.leaves(
            round_trip(triple.init_fn(params), optimizer=triple, params=params)
        )
        assert (jnp.result_type(found), found) == (jnp.result_type(params), params)
    weak = jnp.asarray(float("nan"))
    assert jax.typeof(leaf_after(weak)) == jax.typeof(weak)
    signalling = jax.lax.bitcast_convert_type(jnp.uint32(0x7F800001), jnp.float32)
    assert same_bits(leaf_after(signalling), signalling)


def test_64_bits_need_the_mode() -> None:
    with jax.enable_x64(True):
        state = ours.sgd(0.1).init_fn(jnp.ones(2))
    assert state.packed_state[0][0].dtype == np.float64
    with pytest.raises(errors.StateMismatchError, match="JAX's 64-bit mode is off"):
        round_trip(state)
    with jax.enable_x64(True):
        check_same(round_trip(state), state)


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        (object(), "`x:0` is a object of dtype object, which the format cannot hold exactly."),
        (np.ma.MaskedArray([1.0], [True]), "`x:0` is a MaskedArray of dtype float64, which the"),
        (2**64, "`x:0` is a int of dtype object, which the format cannot hold exactly."),
        (np.array(["a"]), "`x:0` is a ndarray of dtype <U1, which the format cannot hold exactly."),
        (jax.ShapeDtypeStruct((2,), jnp.float32), "`x:0` is a ShapeDtypeStruct of dtype object"),
    ],
    ids=["object", "masked", "integer", "text", "abstract"],
)
def test_what_cannot_be_saved_is_said_and_nothing_is_written(
    leaf: Any, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "state.safetensors"
    path.write_text("old")
    with pytest.raises(errors.SaveError) as caught:
        save(path, as_state(leaf))
    assert str(caught.value).startswith(words)
    assert os.listdir(tmp_path) == ["state.safetensors"]
    assert path.read_text() == "old"


def test_states_that_cannot_be_saved() -> None:
    donated = jnp.ones(2)
    donated.delete()
    with pytest.raises(errors.SaveError, match=r"`x:0` has no values .* been deleted"):
        save(io.BytesIO(), as_state(donated))
    with pytest.raises(errors.SaveError, match=r"`x:0` has no values .* on traced array"):
        jax.jit(lambda s: save(io.BytesIO(), s))(as_state(jnp.ones(2)))
    marked = OrderedDict({key: ours.JoinPoint(1) for key in ("0", 0)})
    with pytest.raises(errors.SaveError, match="the name `0`"):
        save(io.BytesIO(), ours.pack_optimizer_state(marked))


def test_a_path_is_written_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    triple = ours.momentum(0.1, 0.9)
    first, second = trained(triple, steps=1), trained(triple, steps=2)
    path = tmp_path / "run" / "state.safetensors"
    with pytest.raises(FileNotFoundError):
        save(path, first)
    path.parent.mkdir()
    save(path, first)
    path.chmod(0o640)
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(descriptor: int) -> None:
        kind = os.fstat(descriptor).st_mode
        events.append("sync folder" if stat.S_ISDIR(kind) else "sync file")
        fsync(descriptor)

    def watched_replace(source: Any, target: Any) -> None:
        events.append("rename")
        replace(source, target)

    def full(*_: Any) -> None:
        raise OSError("disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="disk is full"):
            save(str(path), second)
    assert os.listdir(path.parent) == [path.name]
    check_same(load(path, like=first), first)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", watched_fsync)
        patch.setattr(os, "replace", watched_replace)
        link = tmp_path / "latest"
        link.symlink_to(path)
        save(link, second)
    assert events == ["sync file", "rename", "sync folder"]
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    check_same(load(path, like=first), second)


class Unbuffered(io.BytesIO):
    """Takes and gives a few bytes at a time, as raw files and sockets may."""

    def write(self, data: Any) -> int:
        return super().write(bytes(data)[:7])

    def read(self, size: int | None = -1) -> bytes:
        return super().read(min(size or 0, 7))


def test_unbuffered_file_objects_are_read_from_where_they_stand() -> None:
    state = trained(ours.adam(0.1))
    file = Unbuffered(b"header")
    file.seek(6)
    save(file, state)
    file.seek(6)
    check_same(load(file, like=state), state)


def test_loaded_arrays_go_where_the_expected_ones_are() -> None:
    device = jax.devices()[0]
    state = trained(ours.sgd(0.1))
    placed = jax.device_put(state, device)
    assert all(leaf.committed for leaf in jax.tree.leaves(round_trip(state, like=placed)))
    assert not any(leaf.committed for leaf in jax.tree.leaves(round_trip(state)))
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), placed
    )
    assert all(leaf.committed for leaf in jax.tree.leaves(round_trip(state, like=shapes)))


def test_safetensors_reads_the_file() -> None:
    state = trained(ours.momentum(0.1, 0.9))
    file = io.BytesIO()
    save(file, state)
    tensors = dict(deserialize(file.getvalue()))
    assert {"w:0", "w:1", "low/0:1", "s:0"} < {*tensors}
    assert (tensors["w:0"]["dtype"], tensors["w:0"]["shape"]) == ("F32", [2, 3])
    assert tensors["low/0:1"]["dtype"] == "BF16"
