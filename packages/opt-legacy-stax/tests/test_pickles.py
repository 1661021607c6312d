"""Old pickles: honest ones are read, others do nothing."""

import builtins
import collections
import io
import os
import pickle
from pathlib import Path
from typing import Any

import golden_stax as golden
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import opt_legacy_stax as ours
import pytest
from jax.example_libraries import optimizers as theirs
from opt_legacy_stax import errors

PARAMS: Any = {
    "a": jnp.arange(6.0).reshape(2, 3),
    "b": [jnp.ones(3, jnp.bfloat16), np.arange(3.0), (), None],
    "c": (jnp.float16(3), np.asfortranarray(np.ones((2, 2), np.float32))),
}


def load(data: bytes) -> Any:
    return ours.load_unpacked_pickle(io.BytesIO(data))


@pytest.mark.sample(1)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("module", [ours, theirs], ids=["ours", "jax"])
def test_what_the_recipe_wrote_is_read(module: Any, protocol: int, tmp_path: Path) -> None:
    triple = module.sm3(0.1)
    start = triple.init_fn(PARAMS)
    state = triple.update_fn(0, jax.tree.map(jnp.ones_like, PARAMS), start)
    for expected in (start, state):
        path = tmp_path / "state.pkl"
        path.write_bytes(pickle.dumps(module.unpack_optimizer_state(expected), protocol))
        found = ours.pack_optimizer_state(ours.load_unpacked_pickle(path))
        assert found.tree_def == expected.tree_def
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert isinstance(a, jax.Array) == isinstance(b, jax.Array)
            assert np.asarray(a).dtype == np.asarray(b).dtype
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "leaf",
    [
        np.arange(3, dtype=">i4"),
        np.ones(2, ml_dtypes.float8_e4m3fn),
        np.arange(12).reshape(3, 4)[:, ::2],
        -(2**40),
    ],
    ids=repr,
)
def test_leaves(leaf: Any) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        found = load(pickle.dumps(theirs.JoinPoint([leaf]), protocol)).subtree[0]
        assert np.asarray(found).dtype == np.asarray(leaf).dtype.newbyteorder("=")
        np.testing.assert_array_equal(found, leaf)


CANARY = "/tmp/opt_legacy_stax_canary"


class Runs:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


HOSTILE: list[Any] = [
    Runs(os.system, f"touch {CANARY}"),
    Runs(builtins.open, CANARY, "w"),
    collections.OrderedDict(a=1),
    np.array([Runs(os.system, f"touch {CANARY}")], object),
    np.zeros(2, [("a", "i4"), ("b", "O")]),
    "text",
    theirs.JoinPoint,
    {1.5: 1},
]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda v: type(v).__name__)
def test_anything_else_is_refused_and_not_run(value: Any) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        for wrapped in (value, theirs.JoinPoint(value), {"a": [theirs.JoinPoint((value,))]}):
            try:
                data = pickle.dumps(wrapped, protocol)
            except (pickle.PicklingError, TypeError):
                continue
            with pytest.raises(errors.UnsafePickleError):
                load(data)
    assert not Path(CANARY).exists()
    words = f"refers to `{os.getcwd.__module__}.getcwd`, which is not part of an array"
    with pytest.raises(errors.UnsafePickleError, match=words):
        load(pickle.dumps(Runs(os.getcwd)))


NAMED = f"c{theirs.JoinPoint.__module__}\nJoinPoint\n".encode()
BOMBS = {
    "bytes": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x0f.",
    "frame": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x0fN.",
    "persistent": b"\x80\x04Pname\n.",
    "extension": b"\x80\x04\x82\x01.",
    "instance": b"(ios\nsystem\n.",
    "itself": b"\x80\x04]\x94h\x00a.",
    "laughs": b"\x80\x04]\x94Na" + b"".join(b"]\x94(h%ch%ce" % (n, n) for n in range(60)) + b".",
    "empty": b"",
    "attributes of a class": b"\x80\x02" + NAMED + b"}X\x05\0\0\0_makeNsb0N.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name: str) -> None:
    before = dict(vars(ours.JoinPoint))
    with pytest.raises(errors.UnsafePickleError):
        load(BOMBS[name])
    assert dict(vars(ours.JoinPoint)) == before


def test_what_was_read_cannot_be_replaced() -> None:
    value = pickle.dumps(np.float32(1), 2)
    array = pickle.dumps(np.ones(2), 5)
    for data in (value, array):
        for name in (b"raw", b"dtype", b"value"):
            attributes = b"}X" + len(name).to_bytes(4, "little") + name + b"X\x01\0\0\0as"
            with pytest.raises(errors.UnsafePickleError):
                load(data[:-1] + attributes + b"b.")


def test_a_pickle_that_is_cut_or_changed_gives_one_error() -> None:
    data = pickle.dumps(theirs.unpack_optimizer_state(theirs.adam(0.1).init_fn({"w": jnp.ones(2)})))
    for length in range(len(data)):
        with pytest.raises(errors.UnsafePickleError):
            load(data[:length])
    source = np.random.default_rng(0)
    for _ in range(200):
        changed = bytearray(data)
        for position in source.integers(0, len(data), 2):
            changed[position] = source.integers(0, 256)
        try:
            found = load(bytes(changed))
        except errors.UnsafePickleError:
            continue
        kinds = (ours.JoinPoint, dict, list, tuple, np.ndarray, np.generic, jax.Array, int, float)
        assert found is None or isinstance(found, kinds)


# Older layouts.


def recorded(name: str, t: int) -> Any:
    case = golden.case_of(name)
    state = golden.replay(case, upstream_numerics=True)[0]
    leaves = golden.expected_leaves(case, t)
    arrays = tuple(tuple(map(jnp.asarray, kept)) for kept in leaves)
    return ours.OptimizerState(arrays, state.tree_def, state.subtree_defs)


def without_shapes(state: Any) -> Any:
    """What sm3 kept up to jax 0.2.19."""
    marked = ours.unpack_optimizer_state(state)
    return jax.tree.map(lambda j: theirs.JoinPoint(j.subtree[:3]), marked)


def test_sm3_of_jax_0_2_19_continues() -> None:
    case = golden.case_of("sm3_jax0_2_19")
    problem = golden.index()["problems"][case["problem"]]
    old = without_shapes(recorded("sm3_jax0_2_19", 4))
    triple = ours.sm3(**case["kwargs"])
    for layout in (ours.pack_optimizer_state(old), load(pickle.dumps(old))):
        state = ours.convert_old_layout(layout, is_sm3=True)
        for t in range(4, case["steps"]):
            state = triple.update_fn(t, golden.grads_of(problem, t), state)
        for found, leaves in zip(
            state.packed_state, golden.expected_leaves(case, case["steps"]), strict=True
        ):
            assert max(map(golden.worst, found, leaves)) <= 1e-6


def test_tuples_of_jax_0_1_become_lists() -> None:
    state = recorded("adam_jax0_2_6_bf16", 3)
    assert type(state.packed_state[0]) is tuple
    converted = ours.convert_old_layout(state)
    assert [type(leaves) for leaves in converted.packed_state] == [list] * 3
    case = golden.case_of("adam_jax0_2_6_bf16")
    problem = golden.index()["problems"][case["problem"]]
    triple = ours.adam(**case["kwargs"], upstream_numerics=True)
    after = triple.update_fn(3, golden.grads_of(problem, 3), converted)
    for found, leaves in zip(after.packed_state, golden.expected_leaves(case, 4), strict=True):
        assert max(map(golden.worst, found, leaves)) == 0
