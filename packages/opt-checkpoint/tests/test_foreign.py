"""Checkpoints that other programs wrote with Orbax: read by who wrote them, never overlooked."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import optax
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from checkpoint_testing import Model, adamw, files, of_flax, of_nnx, of_optax, params, same
from flax import nnx
from opt_checkpoint import (
    Checkpointer,
    TrainingState,
    errors,
    named_state,
    open_foreign,
    open_step,
    plan_restore,
)
from opt_core import MultiOptimizer
from orbax.checkpoint.experimental import v1

pytestmark = pytest.mark.usefixtures("optax_promotion")


def standard(folder: Path, tree: Any) -> Path:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "saved", tree)
    return folder / "saved"


def pytree(folder: Path, tree: Any) -> Path:
    ocp.PyTreeCheckpointer(use_ocdbt=False).save(folder / "saved", tree)
    return folder / "saved"


def manager(folder: Path, tree: Any) -> Path:
    with ocp.CheckpointManager(folder / "run") as writer:
        writer.save(5, args=ocp.args.StandardSave(tree))
    return folder / "run/5"


def state_item(folder: Path, tree: Any) -> Path:
    with ocp.CheckpointManager(folder / "run") as writer:
        items = {"state": ocp.args.PyTreeSave(tree), "about": ocp.args.JsonSave({"a": 1})}
        writer.save(5, args=ocp.args.Composite(**items))
    return folder / "run/5"


def orbax_v1(folder: Path, tree: Any) -> Path:
    v1.save(folder / "saved", tree)
    return folder / "saved"


def lists(node: Any) -> Any:
    """Records as lists, which have keys of indices."""
    return [lists(child) for child in node] if isinstance(node, tuple) else node


TREES: dict[str, tuple[Any, Callable[[], Any]]] = {
    "in a dict": (standard, lambda: {"train": of_flax(), "epoch": 9}),
    "TrainState": (state_item, of_flax),
    "tuple without step": (orbax_v1, lambda: (of_optax().params, of_optax().opt_state)),
    "lists": (
        manager,
        lambda: {"params": of_optax().params, "state": lists(of_optax().opt_state), "step": 2},
    ),
    "with a copy": (
        pytree,
        lambda: {
            "ema_params": jax.tree.map(jnp.zeros_like, params()),
            "opt_state": of_optax().opt_state,
            "params": of_optax().params,
        },
    ),
    "nearest": (standard, lambda: {"a": {"params": params(), "o": 1}, "b": of_flax()}),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", TREES)
def test_trees_of_optax_and_linen(name: str, tmp_path: Path) -> None:
    write, tree = TREES[name]
    source = open_foreign(write(tmp_path, tree()), written_by=jax.eval_shape(of_optax))
    plan = plan_restore(source, jax.eval_shape(of_optax))
    assert plan.is_exact, str(plan)
    assert same(named_state(plan.apply()), named_state(of_optax()))


NNX_TREES: dict[str, Callable[[Any, Any], Any]] = {
    "pair": lambda model, optimizer: nnx.state((model, optimizer)),
    "dict": lambda model, optimizer: {"model": nnx.state(model), "optimizer": nnx.state(optimizer)},
    "objects": lambda model, optimizer: {"o": nnx.split(optimizer)[1], "m": nnx.split(model)[1]},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("tree", NNX_TREES)
def test_trees_of_nnx(tree: str, tmp_path: Path) -> None:
    path = standard(tmp_path, NNX_TREES[tree](*of_nnx()))
    abstract = nnx.eval_shape(of_nnx)
    plan = plan_restore(open_foreign(path, written_by=abstract), abstract)
    assert plan.is_exact, str(plan)
    model, optimizer = plan.apply()
    assert same(named_state((model, optimizer)), named_state(of_nnx()))
    optimizer.update(model, nnx.state(Model(), nnx.Param))


def test_several_items(tmp_path: Path) -> None:
    state = of_optax()
    with ocp.CheckpointManager(tmp_path) as writer:
        writer.save(
            5,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(state.params),
                opt_state=ocp.args.PyTreeSave(state.opt_state),
                other=ocp.args.JsonSave({"a": 1}),
            ),
        )
    source = open_foreign(tmp_path / "5", written_by=state)
    assert same(named_state(plan_restore(source, state).apply()), named_state(state))


# T5X's own layout


def t5x(folder: Path, state_dict: Any, *, placeholders: bool = False) -> Path:
    """Writes what T5X's `Checkpointer` writes: arrays beside a msgpack file that names them."""
    step = folder / "checkpoint_100"
    step.mkdir()

    def write(node: Any, name: str) -> Any:
        if isinstance(node, dict):
            return {key: write(child, f"{name}.{key}".strip(".")) for key, child in node.items()}
        if node is None or name == "state.step":
            return node
        array = np.asarray(node)
        kvstore = {"driver": "file", "path": str(step / name)}
        spec = {"driver": "zarr", "kvstore": kvstore, "dtype": array.dtype.name}
        spec["metadata"] = {"shape": array.shape, "compressor": {"id": "gzip"}}
        ts.open(spec, create=True).result().write(array).result()
        if placeholders:
            return f"PLACEHOLDER://{name}"
        relative = {"driver": "gfile", "path": f"{name}/"}
        return {**spec, "kvstore": relative, "metadata": {"shape": list(array.shape)}}

    written = write(state_dict, "")
    index = written if placeholders else {"version": 3, "optimizer": written}
    (step / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(index))
    return step


def in_groups() -> Any:
    groups = [("layers/.*", opt.adam(0.1)), ("b", opt.sgd(0.1, momentum=0.9))]
    optimizer = MultiOptimizer(groups).create(params())
    return optimizer.apply_gradient(params())


@pytest.mark.parametrize("placeholders", [False, True])
def test_the_layout_of_t5x(placeholders: bool, tmp_path: Path) -> None:
    optimizer = in_groups()
    step = t5x(tmp_path, jax.device_get(optimizer.state_dict()), placeholders=placeholders)
    source = open_foreign(step, written_by=jax.eval_shape(in_groups))
    plan = plan_restore(source, jax.eval_shape(in_groups))
    assert plan.is_exact, str(plan)
    assert same(named_state(plan.apply()), named_state(optimizer))
    with pytest.raises(errors.ForeignError, match="open_foreign"):
        Checkpointer(tmp_path, read_only=True).steps()


def test_t5x_reads_nothing_outside_of_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint_1"
    folder.mkdir()
    for outside in ("secret", "."):
        secret = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{tmp_path / outside}/"}}
        secret |= {"dtype": "float32", "metadata": {"shape": [2]}}
        ts.open(secret, create=True).result()
    for path, error in (("../secret", errors.DamagedError), ("..", errors.LoadError)):
        for entry in (
            f"PLACEHOLDER://{path}",
            {"driver": "zarr", "kvstore": {"driver": "file", "path": path}, "metadata": {}},
        ):
            index = {"target": {"w": entry}, "state": {"step": 1}}
            data = flax.serialization.msgpack_serialize(index)
            (folder / "checkpoint").write_bytes(data)
            with pytest.raises(error):
                open_foreign(folder, written_by=of_optax())


# What cannot be read


SGD = optax.sgd(0.1, momentum=0.9)
ADAM = optax.adam(0.1)
OTHER: dict[str, tuple[Any, Any, str]] = {
    "other state": (SGD, params(), r"does not hold the state of `written_by`: (?s:.*)0/trace/b"),
    "less state": (ADAM, params(), r"at `.*opt_state/1` .*found .* too"),
    "a wider one": (
        adamw(),
        {**params(), "b": jnp.arange(4.0)},
        r"`./params/b` is `params/b` of `written_by`: expected \[4\], found \[3\]",
    ),
    "other names": (
        optax.sgd(0.1),
        {"c": jnp.ones(2)},
        r"the parameters .* expected `c`",
    ),
}


@pytest.mark.parametrize("name", OTHER)
def test_another_optimizer_did_not_write_it(name: str, tmp_path: Path) -> None:
    tx, tree, words = OTHER[name]
    path = standard(tmp_path, of_flax())
    with pytest.raises(errors.ForeignError, match=words):
        open_foreign(path, written_by=TrainingState(tx, tree, tx.init(tree)))


def test_what_is_there_twice_or_in_other_numbers(tmp_path: Path) -> None:
    sgd = optax.sgd(0.1)
    path = standard(tmp_path, {"x": params(), "y": params()})
    with pytest.raises(errors.ForeignError, match=r"may be any of `./x`, `./y`"):
        open_foreign(path, written_by=TrainingState(sgd, params(), sgd.init(params())))
    # T5X before its version 3 saved bfloat16 as uint16.
    saved = {"state": {"step": 3, "param_states": {}}, "target": {"w": np.ones(2, np.uint16)}}
    tree = {"w": jnp.ones(2, jnp.bfloat16)}
    with pytest.raises(errors.LoadError, match="target/w` is uint16"):
        open_foreign(t5x(tmp_path, saved), written_by=TrainingState(sgd, tree, sgd.init(tree)))


def with_count(count: Any, step: Any) -> tuple[Any, TrainingState]:
    """A tree with a count and a step that are Python numbers or arrays, and who wrote it."""
    opt_state: Any = ADAM.init(params())
    saved = (opt_state[0]._replace(count=count), *opt_state[1:])
    return {"p": params(), "o": saved, "step": step}, TrainingState(ADAM, params(), opt_state)


@pytest.mark.parametrize("step", [3.7, True, jnp.float32(3.0), np.bool_(True)])
def test_only_an_integer_is_the_step(step: Any, tmp_path: Path) -> None:
    tree, state = with_count(2, step)
    for name, saved in (("dict", tree), ("tuple", tuple(tree.values()))):
        (tmp_path / name).mkdir()
        source = open_foreign(standard(tmp_path / name, saved), written_by=state)
        assert plan_restore(source, state).apply().step == 2
        extra = [leaf.dtype for leaf in source.schema.leaves if leaf.kind == "extra"]
        assert extra == [str(np.asarray(step).dtype)]


@pytest.mark.parametrize(
    ("count", "step", "words"),
    [
        (2, 2**40, r"`./step` is `state/step` of .* expected int32, found 1099511627776"),
        (2, np.int64(2**40), r"`./step` is `state/step` of .* expected int32, found 1099511627776"),
        (2**40, 2, r"`./o/0/count` is `state/adam/count` .* int32, found 1099511627776"),
        (2.0, 2, r"`./o/0/count` is `state/adam/count` .* int32, found 2.0"),
        (True, 2, r"`./o/0/count` is `state/adam/count` .* int32, found True"),
        (jnp.float32(3.9), 2, r"state/adam/count: float32 -> int32"),
    ],
)
def test_counts_are_not_rounded(count: Any, step: Any, words: str, tmp_path: Path) -> None:
    tree, state = with_count(count, step)
    path = standard(tmp_path, tree)
    with pytest.raises((errors.ForeignError, errors.PlanError), match=words):
        plan_restore(open_foreign(path, written_by=state), state).apply()


def test_a_sharding_that_does_not_divide_is_no_damage(tmp_path: Path) -> None:
    source = open_foreign(standard(tmp_path, of_flax()), written_by=of_flax())
    mesh = jax.sharding.AbstractMesh((2,), ("x",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    wanted = {"params/b": jax.ShapeDtypeStruct((3,), jnp.float32, sharding=place)}
    with pytest.raises(errors.LeafError, match=r"`params/b`: \[3\] does not divide as"):
        source.read(wanted)


def test_folders_that_are_no_step(tmp_path: Path) -> None:
    step = manager(tmp_path, of_flax())
    with pytest.raises(errors.ForeignError, match=r"is a folder of steps: give one .*run/5`"):
        open_foreign(step.parent, written_by=of_flax())
    with pytest.raises(errors.MissingError):
        open_foreign(tmp_path / "none", written_by=of_flax())
    (tmp_path / "empty").mkdir()
    with pytest.raises(errors.LoadError, match="is not a checkpoint of Orbax or T5X"):
        open_foreign(tmp_path / "empty", written_by=of_flax())
    with pytest.raises(TypeError, match=r"`written_by`: expected an `opt_core.Optimizer`"):
        open_foreign(step, written_by=params())
    with Checkpointer(tmp_path / "own") as checkpointer:
        checkpointer.save(1, of_flax())
    assert open_foreign(tmp_path / "own/1") == open_step(tmp_path / "own/1")
    with pytest.raises(errors.ForeignError, match="does not say which optimizer wrote it"):
        open_foreign(step)
    with pytest.raises(errors.ForeignError, match=r"` is a checkpoint that no .*open_foreign"):
        open_step(step)


def test_a_damaged_one(tmp_path: Path) -> None:
    path = standard(tmp_path, of_flax())
    source = open_foreign(path, written_by=of_flax())
    shutil.rmtree(path / "d")
    for data in path.glob("ocdbt.process_*"):
        shutil.rmtree(data)
    with pytest.raises(errors.DamagedError, match="cannot be read"):
        plan_restore(source, of_flax()).apply()


# A folder of them is never no checkpoint


def msgpack(folder: Path, tree: Any) -> Path:
    (folder / "run").mkdir()
    (folder / "run/checkpoint_5").write_bytes(b"\x80")
    return folder / "run/checkpoint_5"


def standard_alone(folder: Path, tree: Any) -> Path:
    """One checkpoint in place of a run."""
    return standard(folder, tree) / "d"


def named_steps(folder: Path, tree: Any) -> Path:
    options = ocp.CheckpointManagerOptions(step_prefix="model", step_format_fixed_length=8)
    with ocp.CheckpointManager(folder / "run", options=options) as writer:
        writer.save(5, args=ocp.args.StandardSave(tree))
    return folder / "run/model_00000005"


@pytest.mark.sample(1)
@pytest.mark.parametrize("is_reader", [False, True])
@pytest.mark.parametrize("write", [manager, named_steps, msgpack, standard_alone])
def test_a_run_of_another_program(write: Any, is_reader: bool, tmp_path: Path) -> None:
    root = write(tmp_path, of_flax()).parent
    (root / "6.orbax-checkpoint-tmp-1").mkdir()  # a save of the other program, under way
    before = files(root), sorted(root.iterdir())
    with Checkpointer(root, read_only=is_reader, max_to_keep=1) as checkpointer:
        calls: list[Callable[[], object]] = [
            checkpointer.latest_valid,
            lambda: checkpointer.restore_latest(of_flax()),
            checkpointer.steps,
            lambda: checkpointer.at(5),
        ]
        if not is_reader:
            calls += [
                lambda: checkpointer.save(7, of_flax()),
                lambda: checkpointer.delete(5),
                lambda: checkpointer.discard_after(0),
            ]
        for call in calls:
            with pytest.raises(errors.ForeignError, match="open_foreign") as caught:
                call()
            assert not isinstance(caught.value, errors.MissingError)
    assert (files(root), sorted(root.iterdir())) == before


def test_a_foreign_step_beside_our_own(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, of_flax())
        checkpointer.wait()
        standard(tmp_path, of_flax()).rename(tmp_path / "9")
        for call in (checkpointer.latest_valid, lambda: checkpointer.save(10, of_flax())):
            with pytest.raises(errors.ForeignError, match="no `Checkpointer` wrote: `9`"):
                call()
