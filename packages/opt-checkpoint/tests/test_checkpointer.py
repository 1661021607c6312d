import dataclasses
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import orbax.checkpoint as ocp
import pytest
from checkpoint_testing import WIDE, bits, everything, files, random_bits, same, small_state, state
from opt_checkpoint import (
    Checkpointer,
    NamedState,
    OptimizerSave,
    _writer,
    named_state,
    open_step,
)
from opt_checkpoint._handler import OptimizerHandler, Saving
from opt_checkpoint._manifest import DTYPES
from opt_checkpoint.errors import LeafError, LockError, MissingError, SaveError
from orbax.checkpoint.path import atomicity_types


def dtypes() -> dict[str, Any]:
    """NaN payloads, -0, subnormals and 0-d."""
    leaves: dict[str, Any] = {}
    for dtype in sorted(DTYPES):
        array = random_bits(dtype, (3, 64))
        if jnp.issubdtype(array.dtype, jnp.floating) and array.itemsize >= 2:
            array[0, :3] = [-0.0, np.inf, float(jnp.finfo(array.dtype).smallest_subnormal)]
        leaves[f"state/{dtype}/2d"] = array if dtype in WIDE else jnp.asarray(array)
    for dtype in ("bool", "int4", "float32", "float64"):
        leaves[f"state/{dtype}/0d"] = leaves[f"state/{dtype}/2d"][1, 5]
    return leaves


def without_a_plain_array() -> dict[str, Any]:
    return {
        "state/empty": jnp.zeros((3, 0), jnp.bfloat16),
        "state/wide": np.zeros((0, 3), np.int64),
        "state/no_keys": jax.random.split(jax.random.key(0), 0),
        "state/key": jax.random.key(7),
        "state/keys": jax.random.split(jax.random.key(1, impl="rbg"), (2, 3)),
        "state/raw": jax.random.PRNGKey(3),
    }


def names_that_would_collide() -> dict[str, Any]:
    """`a.b` and `a/b`, and keys that read alike as integer and string."""
    params = {
        "a": {"b": jnp.ones(2)},
        "a.b": jnp.zeros(2),
        "a%2Eb": jnp.full(2, 3.0),
        "": jnp.ones(1),
    }
    named = named_state(opt.sgd(0.1).create(params))
    more = ("params/0", "params/00", "params/~1")
    return {**named, **{name: jnp.full(3, i) for i, name in enumerate(more)}}


def hostile_names() -> dict[str, Any]:
    """`../x`, absolute, NUL, newline, 5,000 characters."""
    parts = ["..~1..~1x", "~1etc~1passwd", "a\0b", "new\nline", "x" * 5000, "..", "\ud800", "é"]
    return {f"params/{part}": jnp.full(3, i) for i, part in enumerate(parts)}


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(dtypes, id="a8"),
        pytest.param(without_a_plain_array, id="a9"),
        pytest.param(lambda: {"state/empty": jnp.zeros((3, 0))}, id="no array at all"),
        pytest.param(names_that_would_collide, id="b8"),
        pytest.param(hostile_names, id="e6"),
    ],
)
def test_leaves_come_back_bit_for_bit(make: Any, tmp_path: Path) -> None:
    leaves, root = make(), tmp_path / "inner/root"
    with Checkpointer(root) as checkpointer:
        checkpointer.save(0, state(leaves))
    saved = open_step(root / "0")
    assert same(saved.read(everything(saved.schema)), leaves)
    saved.validate()
    assert [path.name for path in tmp_path.iterdir()] == ["inner"]
    assert [path.name for path in (tmp_path / "inner").iterdir()] == ["root"]


def test_e5_what_is_no_step(tmp_path: Path) -> None:
    """Empty folders, links and files in the root are ignored and never followed."""
    outside = tmp_path / "outside"
    (outside / "leaves").mkdir(parents=True)
    (outside / "precious").write_text("precious")
    root = tmp_path / "root"
    (root / "9").mkdir(parents=True)
    (root / "10").symlink_to(outside)
    (root / "11").write_text("no step")
    for name in ("abc", "007", "-1", "1_000", "²"):
        (root / name / "leaves").mkdir(parents=True)
    (root / "8.orbax-checkpoint-tmp").symlink_to(outside)
    with Checkpointer(root, max_to_keep=2) as checkpointer:
        assert checkpointer.steps() == []
        assert checkpointer.latest_valid() is None
        for step in (1, 2, 3):
            checkpointer.save(step, small_state(step))
        for step in (9, 10):
            with pytest.raises(SaveError, match="exists and is not a checkpoint"):
                checkpointer.save(step, small_state())
        with pytest.raises(MissingError, match="has no step 9"):
            checkpointer.at(9)
        with pytest.raises(MissingError, match="has no step 10"):
            checkpointer.delete(10)
        checkpointer.save(12, small_state(12))
        checkpointer.wait()
        assert checkpointer.steps() == [3, 12]
    assert (outside / "precious").read_text() == "precious"
    assert (root / "9").is_dir()
    assert (root / "10").is_symlink()


def test_d12_the_next_writer_removes_what_killed_saves_have_left(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, small_state(1))
    leftovers = [tmp_path / f"{step}{atomicity_types.TMP_DIR_SUFFIX}" for step in range(2, 7)]
    for leftover in leftovers:
        shutil.copytree(tmp_path / "1", leftover)
    export = tmp_path / f"best{atomicity_types.TMP_DIR_SUFFIX}"  # of another program, in flight
    export.mkdir()
    assert Checkpointer(tmp_path, read_only=True).steps() == [1]
    assert leftovers[0].is_dir()
    with Checkpointer(tmp_path) as checkpointer:
        assert not any(leftover.exists() for leftover in leftovers)
        leftovers[-1].mkdir()
        checkpointer.save(2, small_state(2))
    assert export.is_dir()
    assert leftovers[-1].is_dir()
    assert checkpointer.steps() == [1, 2]


def test_d11_no_save_is_left_out_in_silence(tmp_path: Path) -> None:
    """An existing or lower step, or a closed or reading checkpointer: an error, nothing changed."""
    with Checkpointer(tmp_path, save_interval_steps=10) as checkpointer:
        # Not due, and saved: policy is asked, not guessed.
        integers: list[Any] = [np.int64(3), jnp.int32(20)]  # not `int`, but they say which
        for integer in integers:
            checkpointer.save(integer, small_state(int(integer)))
        for step in (20, 3, 4):
            with pytest.raises(SaveError, match=f"step {step} is not saved: .* has step 20"):
                checkpointer.save(step, small_state())
        wrong: list[Any] = [-1, 2.0, np.bool_(True), np.float32(60.0), "60"]
        for step in wrong:
            with pytest.raises(SaveError, match="`step`: expected a non-negative integer"):
                checkpointer.save(step, small_state())
        assert [s for s in range(31) if checkpointer.should_save(s)] == [0, 10, 20, 30]
        saved = checkpointer.at(20)
        assert same(saved.read(everything(saved.schema)), small_state(20))
    reader = Checkpointer(tmp_path, read_only=True)
    for closed, words in ((checkpointer, "is closed"), (reader, "is open for reading: make a")):
        with pytest.raises(SaveError, match=words):
            closed.save(30, small_state())
    assert reader.steps() == [3, 20]


def test_an_optimizer_and_its_metadata(tmp_path: Path) -> None:
    optimizer = opt.adamw(1e-3).create({"w": jnp.ones((2, 3))})
    metadata: dict[str, Any] = {"tokens": [1, None, "é"], "loss": 0.5}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(5, optimizer, metadata=metadata)
        metadata["tokens"].append("later")
    saved, named = open_step(tmp_path / "5"), named_state(optimizer)
    assert saved.metadata == {"tokens": [1, None, "é"], "loss": 0.5}
    assert saved.schema.versions["jax"] == jax.__version__
    assert dataclasses.replace(saved.schema, versions={}) == named.schema
    assert same(saved.read(everything(saved.schema)), named)
    place = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    assert same(saved.read({"params/w": place}), {"params/w": named["params/w"]})
    with pytest.raises(MissingError, match="has no leaf `params/x`"):
        saved.read({"params/x": place})


class Pair(NamedTuple):
    first: Any
    second: Any


EXTRAS: dict[str, Any] = {
    "the README's": {"data": {"position": 1920}, "rng": jax.random.key(3)},
    "lists": {"seen": [1, [2, []], (3, (), None)], "names": ["a", ""], "empty": {}},
    "ints": {10: [0.5], 2: {"x": (1,)}},
    "floats": {0.5: 1},
    "b/a": {True: 1},
    "NumPy": [np.arange(3, dtype=np.int64), np.ones((2, 0), np.float16), np.int64(7), np.bool_(1)],
    "JAX": [jnp.arange(3), jnp.bfloat16(1.5), jax.random.split(jax.random.key(0), 2)],
    "Python": [True, 2**70, 1.5, float("inf"), "\u00e9"],
}


def assert_as_saved(found: Any, expected: Any) -> None:
    is_array = isinstance(expected, jax.Array)
    assert isinstance(found, jax.Array) if is_array else type(found) is type(expected)
    if isinstance(expected, dict):
        assert [*map(repr, found)] == [*map(repr, expected)]
        for key in expected:
            assert_as_saved(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_as_saved(one, other)
    elif hasattr(expected, "dtype"):
        assert bits(found) == bits(expected)
    else:
        assert found == expected


@pytest.mark.parametrize("extras", [None, 5, EXTRAS], ids=["nothing", "a number", "a tree"])
def test_extras_come_back_as_they_were_saved(extras: Any, tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, small_state(), extras=extras)
        checkpointer.wait()
        found = checkpointer.at(0).read_extras()
    assert_as_saved(found, extras)
    for leaf in jax.tree.leaves(found):
        assert not isinstance(leaf, np.ndarray) or leaf.flags.writeable


def test_extras_of_other_nodes_come_back_by_the_names_of_their_fields(tmp_path: Path) -> None:
    extras = {"pair": Pair(1, [2.5]), "rng": jax.random.key(3), "x": jnp.ones(2)}
    extras |= {"z": [np.arange(3.0, dtype=np.float32), np.float32(2), np.int64(3)]}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, small_state(), extras=extras)
    saved = open_step(tmp_path / "0")
    assert saved.read_extras()["pair"] == {"first": 1, "second": [2.5]}
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    zeros = [np.zeros(3, np.float32), np.float32(0), np.int64(0)]
    like = {"pair": Pair(0, [0.0]), "x": shape, "rng": jax.random.key(0), "z": zeros}
    assert_as_saved(saved.read_extras(like), extras)
    with pytest.raises(MissingError, match="no `extra/more` was saved"):
        saved.read_extras({"more": 0})
    with pytest.raises(LeafError, match=r"`extra/rng`: expected float32\[2\] as in `like`"):
        saved.read_extras({"rng": jnp.ones(2)})
    with pytest.raises(LeafError, match=r"`extra/x`: expected an array, .* found object"):
        saved.read_extras({"x": object()})
    with pytest.raises(LeafError, match=r"`like`: expected a pytree of named leaves"):
        saved.read_extras({1: 1, "1": 2})


def test_training_goes_on_while_it_is_saved(tmp_path: Path) -> None:
    """Steps donate every leaf whose bits the background has still to read."""
    step = jax.jit(lambda x: jax.tree.map(lambda leaf: jnp.roll(leaf, 1), x), donate_argnums=0)
    leaves = {
        f"state/{dtype}_{size}": jnp.asarray(np.arange(size) % 7, dtype)
        for dtype in ("float32", "bfloat16", "int4")
        for size in (3, 2**16)
    }
    host = np.arange(1e5, dtype=np.float32)  # NumPy's own may be changed, too
    expected = {name: np.array(leaf) for name, leaf in {**leaves, "state/host": host}.items()}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, state({**leaves, "state/host": host}))
        host += 1
        for _ in range(10):
            leaves = step(leaves)
        checkpointer.wait()
        saved = checkpointer.at(0)
        assert same(saved.read(everything(saved.schema)), expected)


def test_keeps_what_it_is_told_to(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, max_to_keep=2, keep_period=4, async_save=False) as checkpointer:
        for step in range(10):
            checkpointer.save(step, small_state(step))
        assert checkpointer.steps() == [0, 4, 8, 9]
        for step in checkpointer.steps():
            checkpointer.validate(step)
    assert list((tmp_path / "trash").iterdir()) == []


def test_a_reader_beside_a_writer(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as writer:
        writer.save(1, small_state(1))
        writer.wait()
        with Checkpointer(tmp_path, read_only=True) as reader:
            before = files(tmp_path)
            saved = reader.latest_valid()
            assert saved is not None
            assert saved.step == 1
            assert files(tmp_path) == before
        with pytest.raises(LockError, match="has a writer already"):
            Checkpointer(tmp_path)
        writer.save(2, small_state(2))
    assert reader.steps() == [1, 2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"directory": "gs://bucket/x"}, "`directory` must be a local path"),
        ({"max_to_keep": 0}, "`max_to_keep`: expected a positive integer, found 0"),
        ({"save_interval_steps": True}, "`save_interval_steps`: expected a positive integer"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        Checkpointer(**{"directory": tmp_path / "x", **options})
    assert not (tmp_path / "x").exists()


def broken(saving: Saving, sums: Any) -> bytes:
    raise OSError("no space")


def test_an_error_in_the_block_is_the_one_to_be_seen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Saving, "encode", broken)

    def run() -> None:
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1, small_state())
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run()
    assert any("no space" in r.message for r in caplog.records if r.levelno == logging.ERROR)


ONE = jnp.ones(1)


def _deleted() -> Any:
    leaf = jnp.zeros(3)
    named = state({"state/x": leaf})
    leaf.delete()
    return named


def _of_another_shape() -> Any:
    return NamedState({"state/x": jnp.zeros(2)}, state({"state/x": jnp.zeros(3)}).schema)


def _alone(leaf: Any) -> Any:
    return lambda: state({"state/x": leaf})


@pytest.mark.parametrize(
    ("make", "more", "words"),
    [
        (_alone(jnp.zeros(3, jnp.uint4)), {}, "`state/x`: uint4 cannot be saved"),
        (_alone(jax.ShapeDtypeStruct((2,), jnp.float32)), {}, "`state/x`: .*has no value"),
        (_deleted, {}, "`state/x`: .*donated or deleted: save it before the step"),
        (_of_another_shape, {}, r"`state/x`: expected float32\[3\] as the schema says"),
        (
            lambda: state({"state/a": ONE, "state/a/b": ONE}),
            {},
            "its name is the beginning of this one",
        ),
        (small_state, {"metadata": {1: "a", "1": "b"}}, "expected strings as keys, found 1"),
        (small_state, {"metadata": {"x": jnp.ones(2)}}, "expected JSON data: .* not JSON seri"),
        (small_state, {"extras": {1: 1, "1": 2}}, "`extras`: expected a pytree of named leaves"),
        (small_state, {"extras": {"x": object()}}, "`extra/x`: expected an array, .* object"),
        (small_state, {"extras": [{(1, 2): 3}]}, r"`extras`: .* keys of dicts, found \(1, 2\)"),
        (small_state, {"extras": {b"k": 3}}, "`extras`: .* keys of dicts, found b'k'"),
        (small_state, {"extras": {np.int64(1): 3}}, "`extras`: .* keys of dicts, found .*1"),
    ],
)
def test_what_would_not_come_back_is_refused(
    make: Any, more: Any, words: str, tmp_path: Path
) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        before = files(tmp_path)
        with pytest.raises(LeafError, match=words):
            checkpointer.save(1, make(), **more)
        assert files(tmp_path) == before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failed_save_pins_no_old_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(tmp_path, max_to_keep=1) as checkpointer:
        for step in range(1, 8):
            if step % 3:
                checkpointer.save(step, small_state(step))
                checkpointer.wait()
                continue
            with monkeypatch.context() as patch:
                patch.setattr(Saving, "encode", broken)
                checkpointer.save(step, small_state(step))
                with pytest.raises(SaveError, match="no space"):
                    checkpointer.wait()
        assert checkpointer.steps() == [7]


@pytest.fixture
def slow_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Saving.encode

    def slow(self: Any, sums: Any) -> bytes:
        time.sleep(0.5)
        return encode(self, sums)

    monkeypatch.setattr(Saving, "encode", slow)


@pytest.mark.usefixtures("slow_saves")
def test_a_step_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    optimizer = opt.adam(0.1).create({"w": jnp.ones(2)})
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, optimizer)
        checkpointer.restore_latest(optimizer)
        assert checkpointer.restored_step == 2
        checkpointer.save(3, optimizer)
        assert checkpointer.discard_after(1) == [2, 3]
        assert checkpointer.steps() == [1]


@pytest.mark.usefixtures("slow_saves")
@pytest.mark.parametrize("open_", ["at", "validate", "restore", "latest_valid"])
def test_the_step_that_was_just_saved_is_there(open_: str, tmp_path: Path) -> None:
    optimizer = opt.adam(0.1).create({"w": jnp.ones(2)})
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, optimizer)
        calls: dict[str, Any] = {
            "at": lambda: checkpointer.at(1).read({}),
            "validate": lambda: checkpointer.validate(1),
            "restore": lambda: checkpointer.restore(1, optimizer),
            "latest_valid": lambda: checkpointer.latest_valid().validate(),  # type: ignore[union-attr]
        }
        calls[open_]()


@pytest.mark.parametrize("name", ["run[lr=1]", "a*b", "a?b"])
def test_a_path_that_orbax_takes_for_a_pattern(name: str, tmp_path: Path) -> None:
    optimizer = opt.adam(0.1).create({"w": jnp.ones(2)})
    words = r"nothing can be saved there, .* in a path for a pattern.*: rename the folder"
    with pytest.raises(SaveError, match=words):
        Checkpointer(tmp_path / name / "below")
    assert not (tmp_path / name).exists()
    with ocp.CheckpointManager(tmp_path / name) as manager:
        with pytest.raises(SaveError, match=words):
            manager.save(1, args=ocp.args.Composite(o=OptimizerSave(optimizer)))
        assert manager.all_steps() == []
    # A folder that was renamed afterwards is read.
    with Checkpointer(tmp_path / "other") as checkpointer:
        checkpointer.save(1, optimizer)
    (tmp_path / "other").rename(tmp_path / name / "other")
    with Checkpointer(tmp_path / name / "other", read_only=True) as reader:
        reader.validate(1)
        assert same(named_state(reader.restore_latest(optimizer)), named_state(optimizer))


def test_a_folder_that_was_removed(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, small_state(1))
        checkpointer.wait()
        shutil.rmtree(root)
        with pytest.raises(LockError, match="was removed or replaced"):
            checkpointer.save(2, small_state(2))
        assert not root.exists()
        with Checkpointer(root) as other:
            with pytest.raises(LockError, match="was removed or replaced"):
                checkpointer.save(2, small_state(2))
            checkpointer.close()
            other.save(3, small_state(3))
    assert other.steps() == [3]


def test_threads_save_one_at_a_time(tmp_path: Path) -> None:
    refused = set[int]()

    def save(step: int) -> None:
        try:
            checkpointer.save(step, small_state(step))
        except SaveError:  # steps only rise
            refused.add(step)

    with Checkpointer(tmp_path) as checkpointer, ThreadPoolExecutor(8) as pool:
        list(pool.map(save, range(8)))
    assert sorted([*checkpointer.steps(), *refused]) == list(range(8))
    for step in checkpointer.steps():
        checkpointer.validate(step)


@pytest.fixture
def _sigint() -> Iterator[None]:
    """Python's own handler: a shell starts its background jobs without one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_sigint")
@pytest.mark.sample(2)
@pytest.mark.parametrize("when", ["save", "wait", "close"])
def test_ctrl_c_cuts_no_save_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Inside of `save`, or while `wait` or `close` waits for the background."""
    is_waiting = threading.Event()
    async_save, encode = OptimizerHandler.async_save, Saving.encode

    def ctrl_c() -> None:
        is_waiting.wait()
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)

    async def slow_save(self: OptimizerHandler, directory: Any, args: Any) -> Any:
        ctrl_c()
        return await async_save(self, directory, args)

    def slow_encode(self: Saving, sums: Any) -> bytes:
        ctrl_c()
        return encode(self, sums)

    checkpointer = Checkpointer(tmp_path)
    save = partial(checkpointer.save, 1, small_state(1))
    with monkeypatch.context() as patch:
        if when == "save":
            patch.setattr(OptimizerHandler, "async_save", slow_save)
        else:
            patch.setattr(Saving, "encode", slow_encode)
            save()
        is_waiting.set()
        with pytest.raises(KeyboardInterrupt):
            save() if when == "save" else getattr(checkpointer, when)()
    checkpointer.close()
    with Checkpointer(tmp_path) as other:
        other.save(2, small_state(2))
    assert other.steps() == [1, 2]
    assert not list(tmp_path.glob("*tmp*"))


def test_a_step_that_is_removed_while_it_is_saved_is_told(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, small_state(1))
    while not checkpointer.steps():
        time.sleep(0.01)
    shutil.rmtree(tmp_path / "1")
    with pytest.raises(SaveError, match=r"step 1 in `.*` is not there: was it removed\?"):
        checkpointer.close()


@pytest.mark.parametrize("async_save", [True, False])
def test_an_error_after_the_commit_says_that_the_step_is_there(
    async_save: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = _writer.sync

    def save_now(checkpointer: Checkpointer, step: int) -> None:
        checkpointer.save(step, small_state(step))
        checkpointer.wait()

    def fail_at_the_root(path: Path) -> None:
        if path == tmp_path:  # the rename to the step's own name has been made
            raise OSError(5, "Input/output error")
        sync(path)

    words = r"step 1 in `.*` is saved; what follows failed: "
    with Checkpointer(tmp_path, async_save=async_save) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(_writer, "sync", fail_at_the_root)
            with pytest.raises(SaveError, match=words):
                save_now(checkpointer, 1)
        checkpointer.validate(1)
        checkpointer.save(2, small_state(2))
    assert checkpointer.steps() == [1, 2]


ENDS_WITHOUT_CLOSING = """
import sys, time
import jax.numpy as jnp
import opt_optax_bridge as opt
from opt_checkpoint import Checkpointer
from opt_checkpoint._handler import Saving

encode, checkpointer = Saving.encode, Checkpointer(sys.argv[1])
Saving.encode = lambda self, sums: time.sleep(1) or encode(self, sums)
checkpointer.save(5, opt.adam(0.1).create({"w": jnp.ones(3)}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("last", ["", "checkpointer.wait()"], ids=["ends", "waits"])
def test_a_process_that_ends_while_it_saves_says_so(tmp_path: Path, last: str) -> None:
    """Orbax's thread pools end with the main thread, and with them the save."""
    code = [sys.executable, "-W", "ignore", "-c", ENDS_WITHOUT_CLOSING + last, str(tmp_path)]
    done = subprocess.run(code, capture_output=True, text=True, timeout=120, check=True)
    is_saved = Checkpointer(tmp_path, read_only=True).steps() == [5]
    assert is_saved == bool(last)
    assert is_saved != (f"step 5 in `{tmp_path}`: not saved" in done.stderr)


LAZY = "import sys, opt_checkpoint; assert 'orbax' not in sys.modules; opt_checkpoint.Checkpointer"


@pytest.mark.slow
def test_orbax_is_imported_where_it_is_needed() -> None:
    subprocess.run([sys.executable, "-c", LAZY], check=True)
