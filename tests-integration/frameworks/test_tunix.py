"""Tunix's trainer on a mesh of 4 x 2, with Flax's optimizer and with ours in its place."""

import functools
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

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
from opt_checkpoint import Checkpointer

pytest.importorskip("tunix")
pytestmark = pytest.mark.filterwarnings("default")
STEPS = 6
ADAMW = functools.partial(optax.adamw, 1e-2)


class Checkpoints:
    """`opt_checkpoint` in the place of Tunix's `CheckpointManager`."""

    def __init__(self, root_directory: str | None = None, options: Any = None) -> None:
        self.checkpointer = Checkpointer(root_directory) if root_directory else None

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
        for node, restored in zip(
            (model, optimizer), self.checkpointer.restore_latest((model, optimizer)), strict=True
        ):
            nnx.update(node, nnx.state(restored))
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
    tx: Any, optimizer: Any = opt_nnx.Optimizer, folder: Path | None = None, steps: int = STEPS
) -> tuple[list[float], int]:
    """Returns the losses, and the bytes of the state on the first device."""
    from tunix.sft import checkpoint_manager, peft_trainer

    class Trainer(peft_trainer.PeftTrainer):  # type: ignore[misc]
        def _post_process_train_step(self, aux: Any) -> None:
            losses.append(float(aux))

    def loss_fn(model: Any, tokens: Any, mask: Any) -> Any:
        logits, _ = model(tokens, jnp.arange(tokens.shape[1]), None, jnp.ones_like(tokens))
        each = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        return each.mean(), each.mean()

    def as_input(batch: Any) -> Any:
        return {"tokens": batch.input_tokens, "mask": batch.input_mask}

    losses: list[float] = []
    tokens = np.arange(64).reshape(4, 16) % 32
    batch = peft_trainer.TrainingInput(input_tokens=tokens, input_mask=np.ones_like(tokens))
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tp"))
    config = peft_trainer.TrainingConfig(
        eval_every_n_steps=100,
        max_steps=steps,
        checkpoint_root_directory=folder and str(folder),
    )
    with mesh, pytest.MonkeyPatch.context() as patch:
        patch.setattr(nnx, "Optimizer", optimizer)
        if folder:
            patch.setattr(checkpoint_manager, "CheckpointManager", Checkpoints)
        trainer = Trainer(create(mesh), tx, config).with_loss_fn(loss_fn, has_aux=True)
        trainer = trainer.with_gen_model_input_fn(as_input)
        trainer.train([batch] * steps)
    state = jax.tree.leaves(nnx.state(trainer.optimizer, nnx.optimizer.OptState))
    first = jax.devices()[0]
    shards = (shard for leaf in state for shard in leaf.addressable_shards)
    return losses, sum(shard.data.nbytes for shard in shards if shard.device == first)


@pytest.fixture(scope="module")
def theirs() -> tuple[list[float], int]:
    return train(ADAMW(), nnx.Optimizer)


def test_adamw_has_the_same_losses(theirs: tuple[list[float], int]) -> None:
    losses, size = train(ADAMW())
    print("Flax", *theirs, "opt_nnx", losses, size)
    assert losses[-1] < 0.9 * losses[0]
    np.testing.assert_allclose(losses, theirs[0], rtol=1e-6)


def test_zero_takes_a_share_of_the_state(theirs: tuple[list[float], int]) -> None:
    losses, size = train(ADAMW(), functools.partial(opt_nnx.Optimizer, zero="fsdp"))
    print("zero", losses, size)
    np.testing.assert_allclose(losses, theirs[0], rtol=1e-5)
    assert size * 3 < theirs[1]


def test_a_learning_rate_at_run_time_is_logged(theirs: tuple[list[float], int]) -> None:
    tx = optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2)
    np.testing.assert_allclose(train(tx)[0], theirs[0], rtol=1e-5)


def test_adafactor_is_factored_and_trains() -> None:
    losses, size = train(opt.adafactor(1e-2, min_dim_size_to_factor=8))
    print("adafactor", losses, size)
    assert losses[-1] < losses[0]


@pytest.mark.xfail(reason="Tunix maps over `MaskedNode` and finds `None`", raises=ValueError)
def test_muon_trains() -> None:
    matrices = opt_matrix.Matrices.by_path({r".*(kernel|embedding).*": (-2, -1), r".*bias.*": None})
    losses, size = train(opt_matrix.muon(1e-2, matrices=matrices))
    contrib: Any = optax.contrib
    print("muon", losses, size, "Optax", *train(contrib.muon(1e-2)))
    assert losses[-1] < losses[0]


def wrapped(name: str) -> Any:
    return {
        "guard": opt_accumulate.guard(ADAMW(), loss=None),
        "average": opt_accumulate.with_average(ADAMW(), 0.9),
        "eight_bits": opt_precision.quantize_state(ADAMW(), opt_precision.dynamic8()),
    }[name]


@pytest.mark.parametrize("optimizer", [nnx.Optimizer, opt_nnx.Optimizer], ids=["flax", "ours"])
@pytest.mark.parametrize(
    "name",
    [
        "guard",
        "average",
        pytest.param(
            "eight_bits",
            marks=pytest.mark.xfail(
                reason="Tunix maps one spec to a leaf of two arrays", raises=ValueError
            ),
        ),
    ],
)
def test_the_outermost_transformation_is_ours(name: str, optimizer: Any) -> None:
    losses, _ = train(wrapped(name), optimizer)
    assert losses[-1] < 0.9 * losses[0]


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


def test_killed_in_the_middle_and_resumed(theirs: tuple[list[float], int], tmp_path: Path) -> None:
    code = "import jax; jax.config.update('jax_num_cpu_devices', 8); import test_tunix as t; "
    command = [sys.executable, "-c", code + f"t.killed({str(tmp_path)!r})"]
    died = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    losses, _ = train(ADAMW(), folder=tmp_path)
    np.testing.assert_allclose(losses, theirs[0][3:], rtol=1e-6)
