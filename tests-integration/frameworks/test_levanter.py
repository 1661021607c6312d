"""Levanter's smallest GPT-2, its trainer's state and step, on a mesh of 4 x 2."""

import functools
import importlib
import runpy
from pathlib import Path
from typing import Any

import jax
import numpy as np
import opt_accumulate
import opt_matrix
import opt_optax_bridge as opt
import opt_precision
import optax
import pytest
from jax.sharding import AxisType
from opt_core import MultiOptimizer

pytest.importorskip("levanter")
pytestmark = pytest.mark.filterwarnings("default")
STEPS = 5
ADAMW = functools.partial(optax.adamw, 1e-2)
ADAPTER = Path(__file__).parents[2] / "examples/adapters/haliax_axes.py"
PARAMS = {"embed": "data", "mlp": "model", "heads": "model"}


def train(tx: Any) -> tuple[list[float], int]:
    """Returns the losses, and the bytes of the state on the first device."""
    import equinox
    import haliax
    from levanter.layers.attention import AttentionMask
    from levanter.models.gpt2 import Gpt2Config
    from levanter.trainer_state import TrainerState

    hax: Any = haliax
    eqx: Any = equinox
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    config = Gpt2Config(max_seq_len=16, hidden_dim=32, num_layers=2, num_heads=2)
    vocab, position, batch = hax.Axis("vocab", 64), hax.Axis("position", 16), hax.Axis("batch", 8)
    tokens = hax.named(np.arange(128).reshape(8, 16) % 32, (batch, position))

    def init() -> Any:
        key = jax.random.key(0)
        return TrainerState.init(tx, config.build(vocab, key=key), key=key)

    def update(state: Any) -> Any:
        def loss_fn(model: Any) -> Any:
            logits = model(tokens, AttentionMask.causal())
            targets = hax.nn.one_hot(hax.roll(tokens, -1, position), vocab)
            return hax.nn.cross_entropy_loss(logits, vocab, targets).mean().scalar()

        loss, grads = eqx.filter_value_and_grad(loss_fn)(state.trainable_model)
        return loss, state.take_step(grads, loss=loss, key=state.training_key)[0]

    create, step = (hax.named_jit(f, axis_resources=PARAMS) for f in (init, update))
    losses = []
    with jax.set_mesh(mesh):
        state = create()
        for _ in range(STEPS):
            loss, state = step(state)
            losses.append(float(loss))
    leaves = jax.tree.leaves(state.opt_state)
    shards = (shard for leaf in leaves for shard in leaf.addressable_shards)
    return losses, sum(s.data.nbytes for s in shards if s.device == jax.devices()[0])


@pytest.fixture(scope="module")
def theirs() -> tuple[list[float], int]:
    return train(ADAMW())


@pytest.mark.parametrize(
    "make",
    [
        lambda: opt.as_transformation(opt.adamw(1e-2)),
        lambda: opt.as_transformation(
            MultiOptimizer.from_rules(
                [("embeddings", ".*embeddings.*", opt.adamw(1e-2))], rest=opt.adamw(1e-2)
            )
        ),
        lambda: opt_accumulate.with_average(ADAMW(), 0.9),
        lambda: opt_accumulate.guard(ADAMW()),
    ],
    ids=["twin", "groups", "average", "guard"],
)
def test_the_losses_are_those_of_adamw(theirs: tuple[list[float], int], make: Any) -> None:
    losses, size = train(make())
    print("optax", *theirs, "ours", losses, size)
    assert losses[-1] < 0.9 * losses[0]
    np.testing.assert_allclose(losses, theirs[0], rtol=1e-5)


QUANTIZED = opt_precision.quantize_state(ADAMW(), opt_precision.dynamic8())


def test_eight_bits_lie_where_the_parameters_do(theirs: tuple[list[float], int]) -> None:
    losses, size = train(runpy.run_path(str(ADAPTER))["for_named_arrays"](QUANTIZED))
    print("eight bits", losses, size)
    assert size < 0.6 * theirs[1]  # leaves of fewer than 4,096 elements stay as they are
    np.testing.assert_allclose(losses, theirs[0], rtol=1e-4)


def test_scales_that_haliax_would_cut_are_an_error_of_init() -> None:
    message = r"`quantize_state`: .*weight is a `NamedArray`.* 8 devices.* `for_named_arrays"
    with pytest.raises(opt_precision.errors.PrecisionError, match=message):
        train(QUANTIZED)


def test_muon_beside_their_own() -> None:
    muon: Any = importlib.import_module("levanter.optim.muon")
    theirs = muon.MuonConfig(
        learning_rate=1e-2,
        adam_lr=1e-2,
        lr_schedule="constant",
        warmup=0.0,
        max_grad_norm=0.0,
        use_kimi_scaling=True,
    ).build(STEPS)
    weights = ".*/(c_attn|c_proj|c_fc)/weight"
    matrices = opt_matrix.Matrices.by_path({f"{weights}.*": (-2, -1), f"(?!{weights}).*": None})
    losses, size = train(opt_matrix.muon(1e-2, matrices=matrices, scale="rms"))
    print("muon", losses, size, "Levanter", *train(theirs))
    assert losses[-1] < 0.9 * losses[0]
