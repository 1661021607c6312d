"""Tunix's trainer on a mesh of 4 x 2, with Flax's optimizer and with ours in its place."""

import functools
import shutil
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import opt_accumulate
import opt_matrix
import opt_nnx
import opt_optax_bridge as opt
import opt_precision
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh
from killed import run_killed
from opt_checkpoint import Checkpointer
from opt_checkpoint.errors import PlanError

pytest.importorskip("tunix")
pytestmark = pytest.mark.filterwarnings("default")
STEPS = 6
ADAMW = functools.partial(optax.adamw, 1e-2)


class Run(NamedTuple):
    """The losses, the bytes of the state on the first device, and the rates that Tunix logged."""

    losses: list[float]
    size: int
    rates: list[float]


class Checkpoints:
    """`opt_checkpoint` in the place of Tunix's `CheckpointManager`."""

    def __init__(
        self, root_directory: str | None = None, options: Any = None, allow: Iterable[str] = ()
    ) -> None:
        self.checkpointer = Checkpointer(root_directory) if root_directory else None
        self.allow = allow

    def latest_step(self) -> int | None:
        if self.checkpointer is None:
            return None
        self.checkpointer.wait()  # Tunix counts a step as saved that is being written
        return self.checkpointer.latest_step()

    def save(self, step: int, model: Any, optimizer: Any = None, **options: Any) -> bool:
        if self.checkpointer:
            self.checkpointer.save(step, (model, optimizer))
        return self.checkpointer is not None

    def maybe_restore(self, model: Any, optimizer: Any = None, **options: Any) -> tuple[int, Any]:
        step = self.latest_step()
        if self.checkpointer is None or step is None:
            return 0, {}
        pair = (model, optimizer)
        restored = self.checkpointer.restore_latest(pair, allow=self.allow)
        for node, new in zip(pair, restored, strict=True):
            nnx.update(node, nnx.state(new))
        return step, {}

    def close(self) -> None:
        if self.checkpointer:
            self.checkpointer.close()


def create(mesh: Mesh) -> Any:
    from tunix.tests import test_common

    @nnx.jit
    def sharded() -> Any:
        model = test_common.ToyTransformer(config=test_common.ModelConfig(), rngs=nnx.Rngs(0))
        state = nnx.state(model)
        shardings = nnx.get_named_sharding(state, mesh)
        nnx.update(model, jax.lax.with_sharding_constraint(state, shardings))
        return model

    return sharded()


def train(
    tx: Any,
    optimizer: Any = opt_nnx.Optimizer,
    folder: Path | None = None,
    *,
    steps: int = STEPS,
    shape: tuple[int, int] = (4, 2),
    allow: Iterable[str] = (),
    rates: dict[int, float] | None = None,
) -> Run:
    """Trains; `rates` are learning rates to set after so many steps."""
    from tunix.sft import checkpoint_manager, peft_trainer

    class Trainer(peft_trainer.PeftTrainer):  # type: ignore[misc]
        def _post_process_train_step(self, aux: Any) -> None:
            losses.append(float(aux))
            if (rate := (rates or {}).get(len(losses))) is not None:
                self.optimizer.opt_state.hyperparams["learning_rate"][...] = jnp.float32(rate)

    def loss_fn(model: Any, tokens: Any, mask: Any) -> Any:
        logits, _ = model(tokens, jnp.arange(tokens.shape[1]), None, jnp.ones_like(tokens))
        each = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        return each.mean(), each.mean()

    def as_input(batch: Any) -> Any:
        return {"tokens": batch.input_tokens, "mask": batch.input_mask}

    losses: list[float] = []
    tokens = np.arange(64).reshape(4, 16) % 32
    batch = peft_trainer.TrainingInput(input_tokens=tokens, input_mask=np.ones_like(tokens))
    mesh = Mesh(np.array(jax.devices()).reshape(shape), ("fsdp", "tp"))
    config = peft_trainer.TrainingConfig(
        eval_every_n_steps=100, max_steps=steps, checkpoint_root_directory=folder and str(folder)
    )
    with mesh, pytest.MonkeyPatch.context() as patch:
        patch.setattr(nnx, "Optimizer", optimizer)
        if folder:
            ours = functools.partial(Checkpoints, allow=allow)
            patch.setattr(checkpoint_manager, "CheckpointManager", ours)
        trainer = Trainer(create(mesh), tx, config).with_loss_fn(loss_fn, has_aux=True)
        trainer = trainer.with_gen_model_input_fn(as_input)
        trainer.train([batch] * steps)
    state = jax.tree.leaves(nnx.state(trainer.optimizer, nnx.optimizer.OptState))
    first = jax.devices()[0]
    shards = (shard for leaf in state for shard in leaf.addressable_shards)
    size = sum(shard.data.nbytes for shard in shards if shard.device == first)
    logger, of_rates = trainer.metrics_logger, (trainer.metrics_prefix, "learning_rate", "train")
    logged = logger.get_metric_history(*of_rates) if logger.metric_exists(*of_rates) else []
    return Run(losses, size, [float(rate) for rate in logged])


@pytest.fixture(scope="module")
def theirs() -> Run:
    return train(ADAMW(), nnx.Optimizer)


def test_adamw_has_the_same_losses(theirs: Run) -> None:
    run = train(ADAMW())
    print("Flax", *theirs, "opt_nnx", *run)
    assert run.losses[-1] < 0.9 * run.losses[0]
    np.testing.assert_allclose(run.losses, theirs.losses, rtol=1e-6)


def test_zero_takes_a_share_of_the_state(theirs: Run) -> None:
    run = train(ADAMW(), functools.partial(opt_nnx.Optimizer, zero="fsdp"))
    print("zero", *run)
    np.testing.assert_allclose(run.losses, theirs.losses, rtol=1e-5)
    assert run.size * 3 < theirs.size


def test_rates_at_run_time_are_logged(theirs: Run) -> None:
    def adamw(learning_rate: Any) -> Any:
        return opt.as_transformation(opt.adamw(learning_rate))

    tx = optax.inject_hyperparams(adamw)(learning_rate=1e-2)
    np.testing.assert_allclose(train(tx).losses, theirs.losses, rtol=1e-5)
    run = train(tx, rates={3: 0.0})
    print("rates", *run)
    assert len({*run.losses[3:]}) == 1
    assert {round(rate, 6) for rate in run.rates} == {0.01, 0.0}


def test_adafactor_is_factored_and_trains() -> None:
    run = train(opt.adafactor(1e-2, min_dim_size_to_factor=8))
    print("adafactor", *run)
    assert run.losses[-1] < run.losses[0]


MATRICES = opt_matrix.Matrices.by_path({r".*(kernel|embedding).*": (-2, -1), r".*bias.*": None})


@pytest.mark.parametrize("optimizer", [nnx.Optimizer, opt_nnx.Optimizer], ids=["flax", "ours"])
def test_muon_trains(optimizer: Any) -> None:
    run = train(opt_matrix.muon(1e-2, matrices=MATRICES), optimizer)
    print("muon", *run)
    assert run.losses[-1] < 0.9 * run.losses[0]


def wrapped(name: str) -> Any:
    return {
        "guard": opt_accumulate.guard(ADAMW(), loss=None),
        "average": opt_accumulate.with_average(ADAMW(), 0.9),
        "eight_bits": opt_precision.quantize_state(ADAMW(), opt_precision.dynamic8()),
    }[name]


@pytest.mark.parametrize("optimizer", [nnx.Optimizer, opt_nnx.Optimizer], ids=["flax", "ours"])
@pytest.mark.parametrize("name", ["guard", "average", "eight_bits"])
def test_the_outermost_transformation_is_ours(name: str, optimizer: Any) -> None:
    run = train(wrapped(name), optimizer)
    print(name, *run)
    assert run.losses[-1] < 0.9 * run.losses[0]


def killed(folder: str) -> None:
    """Trains, and dies after three of six steps."""
    save = Checkpoints.save

    def save_and_die(self: Any, step: int, *args: Any, **options: Any) -> bool:
        save(self, step, *args, **options)
        if step == 3:
            self.checkpointer.wait()
            signal.raise_signal(signal.SIGKILL)
        return True

    Checkpoints.save = save_and_die  # type: ignore[method-assign]
    train(ADAMW(), folder=Path(folder))


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a trainer leaves that was killed after three steps."""
    return run_killed(__file__, tmp_path_factory.mktemp("left"))


@pytest.mark.parametrize("shape", [(4, 2), (2, 4)])
def test_killed_and_resumed(
    theirs: Run, left: Path, tmp_path: Path, shape: tuple[int, int]
) -> None:
    run = train(ADAMW(), folder=shutil.copytree(left, tmp_path / "run"), shape=shape)
    np.testing.assert_allclose(run.losses, theirs.losses[3:], rtol=1e-5)


def test_resumed_with_another_optimizer(theirs: Run, left: Path, tmp_path: Path) -> None:
    names = ("refused", "lion", "average")
    refused, folder, second = (shutil.copytree(left, tmp_path / name) for name in names)
    with pytest.raises(PlanError, match="state/lion/mu"):
        train(opt.lion(1e-3), folder=refused)
    run = train(opt.lion(1e-3), folder=folder, allow={"initialise", "drop"})
    print("lion", *run)
    np.testing.assert_allclose(run.losses[0], theirs.losses[3], rtol=1e-5)
    assert run.losses[-1] < run.losses[0]
    # The moments of AdamW go on where it gets an average.
    averaged = opt_accumulate.with_average(ADAMW(), 0.9)
    run = train(averaged, folder=second, allow={"initialise"})
    np.testing.assert_allclose(run.losses, theirs.losses[3:], rtol=1e-5)
