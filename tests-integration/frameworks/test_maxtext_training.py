"""MaxText's `train_loop` on a mesh of 4 x 2, with its optimizers and with ours in their place."""

import functools
import importlib
import shutil
import signal
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import opt_matrix
import opt_nnx
import opt_optax_bridge as opt
import opt_partition
import opt_precision
import optax
import pytest
from flax import nnx
from killed import run_killed
from opt_checkpoint import Checkpointer
from opt_checkpoint.errors import PlanError

pytest.importorskip("maxtext")
pytestmark = pytest.mark.filterwarnings("default")
STEPS = 6
SMALL = {
    "run_name": "small",
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "dataset_type": "synthetic",
    "steps": STEPS,
    "learning_rate": 1e-2,
    "warmup_steps_fraction": 0.0,
    "dtype": "float32",
    "attention": "dot_product",
    "base_emb_dim": 32,
    "base_mlp_dim": 64,
    "base_num_decoder_layers": 2,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 4,
    "head_dim": 8,
    "vocab_size": 64,
    "max_target_length": 16,
    "per_device_batch_size": 1,
    "ici_fsdp_parallelism": 1,
    "sharding_tolerance": 1.0,
    "async_checkpointing": False,
    "checkpoint_period": 1,
    "log_config": False,
}
Make = Callable[[Any, Any, Any], Any]  # from the configuration, a schedule and the model


class Run(NamedTuple):
    """The losses, and the bytes of the state on the first device."""

    losses: list[float]
    size: int


def module(name: str) -> Any:
    return importlib.import_module(f"maxtext.{name}")


class Checkpoints:
    """`opt_checkpoint` in the place of MaxText's manager of Orbax."""

    def __init__(self, folder: str, create: Callable[[], Any], allow: Iterable[str] = ()) -> None:
        self.checkpointer = Checkpointer(folder)
        self.graph = nnx.graphdef(nnx.eval_shape(create))
        self.allow = allow

    @property
    def latest(self) -> Any:
        step = self.checkpointer.latest_step()
        return None if step is None else types.SimpleNamespace(step=step)

    def wait(self) -> None:
        self.checkpointer.wait()

    def save(self, state: Any, config: Any, iterator: Any, step: int | None = None) -> None:
        if step is not None:
            whole = nnx.merge(self.graph, state)
            self.checkpointer.save(step, (whole.model, whole.optimizer))

    def restore(self, abstract: Any) -> Any:
        whole = nnx.merge(self.graph, abstract)
        pair = self.checkpointer.restore_latest((whole.model, whole.optimizer), allow=self.allow)
        return {"items": nnx.state(module("common.train_state_nnx").TrainStateNNX(*pair))}


def use_checkpoints(patch: pytest.MonkeyPatch, allow: Iterable[str]) -> None:
    """Puts `Checkpoints` where `train_loop` creates, saves and restores."""

    def create(config: Any, mesh: Any, init: Any) -> Checkpoints:
        return Checkpoints(config.checkpoint_dir, init, allow)

    def restore(manager: Checkpoints, *arguments: Any, **options: Any) -> tuple[Any, None]:
        return (manager.restore(arguments[4]) if manager.latest else None), None

    patch.setattr(module("utils.train_utils"), "create_checkpoint_manager", create)
    patch.setattr(module("common.checkpointing"), "load_state_if_possible", restore)
    patch.setattr(module("common.checkpointing"), "maybe_save_checkpoint", Checkpoints.save)


def use_layouts(patch: pytest.MonkeyPatch) -> None:
    """Puts `shard_optimizer_state` where `train_loop` searches the state for `mu`."""
    sharding, train_utils = module("utils.sharding"), module("utils.train_utils")
    theirs = sharding.maybe_update_params_sharding_with_opt

    def ours(config: Any, state: Any) -> tuple[Any, Any]:
        mesh = jax.tree.leaves(state)[0].mesh
        creation = module("utils.model_creation_utils")
        _, model = creation.create_nnx_abstract_model(config, mesh)
        _, tx = train_utils.create_training_optimizer(config, model, mesh)
        layouts = opt_partition.shard_optimizer_state(
            tx, nnx.split(model, nnx.Param, ...)[1], config.logical_axis_rules, mesh, "data"
        )
        compute, state = theirs(types.SimpleNamespace(shard_optimizer_over_data=False), state)
        state = jax.tree.map(lambda leaf: leaf, state)
        state.model = placed(state.model, layouts.params)
        state.optimizer["opt_state"] = placed(state.optimizer["opt_state"], layouts.opt_state)
        return placed(compute, layouts.compute), state

    patch.setattr(sharding, "maybe_update_params_sharding_with_opt", ours)
    # What they add to the first shardings, `ours` replaces.
    patch.setattr(sharding, "add_data_to_sharding", lambda mesh, path, shape, placed: placed)


def placed(tree: Any, layout: Any) -> Any:
    """The shardings of a layout in a tree of variables."""

    def name(path: Any) -> str:
        return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")

    found = jax.tree_util.tree_leaves_with_path(layout.shardings)
    shardings = {name(path): sharding for path, sharding in found}

    def put(path: Any, variable: Any) -> Any:
        return variable.replace(shardings[name(path)]) if name(path) in shardings else variable

    return jax.tree_util.tree_map_with_path(put, tree, is_leaf=is_variable)


def is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def train(
    folder: Path,
    make: Make | None = None,
    optimizer: Any = opt_nnx.Optimizer,
    *,
    shape: tuple[int, int] = (4, 2),
    layouts: bool = False,
    allow: Iterable[str] = (),
    **settings: Any,
) -> Run:
    """Trains; without `make`, with the optimizer that MaxText makes of its settings."""
    pre_train = module("trainers.pre_train.train")
    losses = []

    def record(self: Any, metrics: Any, step: int, *args: Any, **options: Any) -> None:
        losses.append(float(metrics["scalar"]["learning/loss"]))

    axes = ("ici_data_parallelism", "ici_tensor_parallelism")
    options = {**SMALL, "base_output_directory": str(folder), "enable_checkpointing": False}
    options |= dict(zip(axes, shape, strict=True)) | settings
    base = Path(module("configs").__file__).parent / "base.yml"
    argv = ["train.py", str(base), *(f"{key}={value}" for key, value in options.items())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nnx, "Optimizer", optimizer)
        patch.setattr(
            module("common.metric_logger").MetricLogger, "buffer_and_write_metrics", record
        )
        if make:
            patch.setattr(
                module("optimizers.optimizers"),
                "get_optimizer",
                lambda config, schedule, model=None, mesh=None: make(config, schedule, model),
            )
        if options["enable_checkpointing"]:
            use_checkpoints(patch, allow)
        if layouts:
            use_layouts(patch)
        state = pre_train.train_loop(*pre_train.initialize(argv))
    shards = (
        shard
        for leaf in jax.tree.leaves(state.optimizer["opt_state"])
        for shard in leaf.addressable_shards
    )
    first = jax.devices()[0]
    return Run(losses, sum(shard.data.nbytes for shard in shards if shard.device == first))


def settings_of(config: Any) -> dict[str, Any]:
    """Those of AdamW."""
    names = ("b1", "b2", "eps", "weight_decay")
    return {name: getattr(config, f"adam_{name}") for name in names}


def adamw(config: Any, schedule: Any, model: Any) -> Any:
    return opt.as_transformation(opt.adamw(schedule, **settings_of(config)))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("theirs"), optimizer=nnx.Optimizer)


def test_adamw_has_the_same_losses(theirs: Run, tmp_path: Path) -> None:
    run = train(tmp_path, adamw)
    print("MaxText", *theirs, "ours", *run)
    assert run.losses[-1] < 0.9 * run.losses[0]
    np.testing.assert_allclose(run.losses, theirs.losses, rtol=1e-5)


def test_layouts_take_no_more_than_their_zero(theirs: Run, tmp_path: Path) -> None:
    zero = train(tmp_path, optimizer=nnx.Optimizer, shard_optimizer_over_data=True)
    run = train(tmp_path, optimizer=nnx.Optimizer, layouts=True, shard_optimizer_over_data=True)
    print("zero of MaxText", *zero, "ours", *run)
    for losses in (zero.losses, run.losses):
        np.testing.assert_allclose(losses, theirs.losses, rtol=1e-4)
    assert run.size <= zero.size


def sgd(config: Any, schedule: Any, model: Any) -> Any:
    return opt.as_transformation(opt.sgd(schedule, momentum=0.9))


def test_layouts_of_a_state_without_mu(tmp_path: Path) -> None:
    zero = functools.partial(train, tmp_path, sgd, nnx.Optimizer)
    with pytest.raises(NotImplementedError, match="Could not find Adam"):
        zero(shard_optimizer_over_data=True)
    whole, run = zero(), zero(layouts=True, shard_optimizer_over_data=True)
    print("momentum", *whole, "zero", *run)
    np.testing.assert_allclose(run.losses, whole.losses, rtol=1e-4)
    assert run.size < whole.size / 3


def eight_bits(config: Any, schedule: Any, model: Any = None, mesh: Any = None) -> Any:
    adamw = optax.adamw(schedule, **settings_of(config))
    return opt_precision.quantize_state(adamw, opt_precision.dynamic8())


@pytest.mark.parametrize("axis", ["data", "fsdp"])
def test_eight_bits_are_sharded(axis: str, tmp_path: Path) -> None:
    settings: Any = {"base_emb_dim": 64, "base_mlp_dim": 256}  # smaller leaves stay in 32 bits
    if axis == "fsdp":
        settings |= {"ici_fsdp_parallelism": 4, "shape": (1, 2)}
    plain = train(tmp_path, adamw, nnx.Optimizer, **settings)
    if axis == "data":
        settings |= {"layouts": True, "shard_optimizer_over_data": True}
    run = train(tmp_path, eight_bits, nnx.Optimizer, **settings)
    print("8 bits", axis, *run, "float32", *plain)
    np.testing.assert_allclose(run.losses, plain.losses, rtol=1e-3)
    assert run.size < plain.size / 2.5


def adafactor(config: Any, schedule: Any, model: Any) -> Any:
    return optax.adafactor(schedule, min_dim_size_to_factor=8)


def test_adafactor_over_fsdp(tmp_path: Path) -> None:
    over_fsdp: Any = {"ici_fsdp_parallelism": 4, "shape": (1, 2)}
    size: Any = {"base_emb_dim": 64, "base_mlp_dim": 256}
    run = train(tmp_path, adafactor, **over_fsdp, **size)
    print("Adafactor over fsdp", *run)
    assert run.losses[-1] < 0.7 * run.losses[0]
    assert run.size < 7_000


def muon(config: Any, schedule: Any, model: Any, mesh: Any = None) -> Any:
    """Of the matrices that MaxText takes for such, as Optax computes it."""
    numbers = module("utils.muon_utils").get_muon_weight_dimension_numbers(model, config)
    dims = dict(nnx.to_flat_state(numbers))
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    table = {"/".join(map(str, path)): dims.get(path) for path in paths}
    return opt_matrix.muon(
        schedule,
        rest=optax.adamw(schedule, **settings_of(config), nesterov=True),
        matrices=opt_matrix.Matrices.by_path(table),
        orthogonalize=opt_matrix.newton_schulz(dtype=None),
        momentum=config.muon_beta,
        weight_decay=config.muon_weight_decay,
    )


@pytest.mark.parametrize("kind", ["optax_muon", "maxtext_muon"])
def test_muon_beside_their_own(kind: str, tmp_path: Path) -> None:
    settings: Any = {"opt_type": "muon", "muon_type": kind, "muon_weight_decay": 0.1}
    own = train(tmp_path, optimizer=nnx.Optimizer, **settings)
    run = train(tmp_path, muon, **settings)
    print(kind, *own, "ours", *run)
    np.testing.assert_allclose(run.losses, own.losses, rtol=1e-3)


RESUMED = functools.partial(train, make=adamw, enable_checkpointing=True)


def killed(folder: str) -> None:
    """Trains, and dies after three of six steps."""
    save = Checkpoints.save

    def save_and_die(self: Any, state: Any, config: Any, iterator: Any, step: int) -> None:
        save(self, state, config, iterator, step)
        if step == 2:
            self.wait()
            signal.raise_signal(signal.SIGKILL)

    Checkpoints.save = save_and_die  # type: ignore[assignment, method-assign]
    RESUMED(Path(folder))


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a trainer leaves that was killed after three steps."""
    return run_killed(__file__, tmp_path_factory.mktemp("left"))


@pytest.mark.parametrize("shape", [(4, 2), (2, 4)])
def test_killed_and_resumed(
    theirs: Run, left: Path, tmp_path: Path, shape: tuple[int, int]
) -> None:
    run = RESUMED(shutil.copytree(left, tmp_path / "run"), shape=shape)
    print("resumed", shape, *run)
    np.testing.assert_allclose(run.losses, theirs.losses[3:], rtol=1e-4)


def test_resumed_with_another_optimizer(theirs: Run, left: Path, tmp_path: Path) -> None:
    def lion(config: Any, schedule: Any, model: Any) -> Any:
        return opt.as_transformation(opt.lion(1e-3))

    refused, folder = (shutil.copytree(left, tmp_path / name) for name in ("refused", "run"))
    with pytest.raises(PlanError, match="state/lion/mu"):
        RESUMED(refused, make=lion)
    run = RESUMED(folder, make=lion, allow={"initialise", "drop"})
    print("lion", *run)
    np.testing.assert_allclose(run.losses[0], theirs.losses[3], rtol=1e-4)
    assert run.losses[-1] < run.losses[0]
