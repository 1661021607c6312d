"""MaxText's ZeRO-1 for any optimizer: `shard_optimizer_state` instead of a search for `mu`.

    python -m pip install opt-checkpoint opt-partition
    python examples/recipes/train_maxtext.py

MaxText's `maybe_update_params_sharding_with_opt` copies the shardings of every `mu` in the state,
and raises where there is none. Here the state is that of Adafactor. First a plan for the shapes
of Qwen3-0.6B, then a small decoder with the same names is trained, saved and resumed, on all
devices and on half of them.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from typing import Any

import jax
import numpy as np
import opt_partition as part
import optax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh
from opt_checkpoint import Checkpointer, TrainingState

AXES = ("data", "fsdp", "tensor")
RULES: list[tuple[str, list[str]]] = [  # those of MaxText's base.yml, as far as this model goes
    ("vocab", ["tensor"]),
    ("embed_vocab", ["fsdp"]),
    ("heads", ["tensor"]),
    ("q_heads", ["tensor"]),
    ("kv_heads", ["tensor"]),
    ("kv", []),
    ("kv_head_dim", []),
    ("mlp", ["tensor"]),
    ("embed", ["fsdp"]),
    ("norm", ["tensor"]),
    ("layers", []),
]


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a decoder; by default those of Qwen3-0.6B."""

    vocab: int = 151_936
    embed: int = 1024
    mlp: int = 3072
    layers: int = 28
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128


def named(*names: str) -> Any:
    """Returns an initializer of a parameter with named dimensions."""
    return nnx.with_partitioning(nnx.initializers.normal(0.1), names)


def norm(size: int, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """Returns a norm with a named scale."""
    ones = nnx.with_partitioning(nnx.initializers.ones, ("norm",))
    return nnx.RMSNorm(size, scale_init=ones, rngs=rngs)


def dense(shape: Any, to: Any, names: tuple[str, ...], rngs: nnx.Rngs) -> nnx.LinearGeneral:
    """Returns a projection of the last dimensions, with a named kernel."""
    axis = tuple(range(-len(shape), 0))
    kernel = named(*names)
    return nnx.LinearGeneral(shape, to, axis=axis, use_bias=False, kernel_init=kernel, rngs=rngs)


class Layer(nnx.Module):
    """Attention and a gated MLP."""

    def __init__(self, c: Config, rngs: nnx.Rngs) -> None:
        kv = ("embed", "kv_heads", "kv_head_dim")
        self.pre_self_attention_layer_norm = norm(c.embed, rngs)
        self.query = dense((c.embed,), (c.heads, c.head_dim), ("embed", "q_heads", "kv"), rngs)
        self.key = dense((c.embed,), (c.kv_heads, c.head_dim), kv, rngs)
        self.value = dense((c.embed,), (c.kv_heads, c.head_dim), kv, rngs)
        self.query_norm, self.key_norm = norm(c.head_dim, rngs), norm(c.head_dim, rngs)
        self.out = dense((c.heads, c.head_dim), c.embed, ("heads", "kv", "embed"), rngs)
        self.post_self_attention_layer_norm = norm(c.embed, rngs)
        self.wi_0 = dense((c.embed,), c.mlp, ("embed", "mlp"), rngs)
        self.wi_1 = dense((c.embed,), c.mlp, ("embed", "mlp"), rngs)
        self.wo = dense((c.mlp,), c.embed, ("mlp", "embed"), rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the activations of the next layer."""
        y = self.pre_self_attention_layer_norm(x)
        query, key = self.query_norm(self.query(y)), self.key_norm(self.key(y))
        x += self.out(jax.nn.dot_product_attention(query, key, self.value(y), is_causal=True))
        y = self.post_self_attention_layer_norm(x)
        return x + self.wo(nnx.silu(self.wi_0(y)) * self.wi_1(y))


# MaxText stacks the parameters of its layers along dimension 1.
STACKED = nnx.StateAxes([(nnx.Param, 1), (..., None)])


class Decoder(nnx.Module):
    """A decoder with scanned layers."""

    def __init__(self, c: Config, rngs: nnx.Rngs) -> None:
        table = named("vocab", "embed_vocab")
        self.token_embedder = nnx.Embed(c.vocab, c.embed, embedding_init=table, rngs=rngs)
        self.decoder_norm = norm(c.embed, rngs)

        @nnx.split_rngs(splits=c.layers)
        @nnx.vmap(out_axes=STACKED, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def stack(rngs: nnx.Rngs) -> Layer:
            return Layer(c, rngs)

        self.layers = stack(rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits."""

        @nnx.scan(
            in_axes=(STACKED, nnx.Carry),
            out_axes=nnx.Carry,
            transform_metadata={nnx.PARTITION_NAME: "layers"},
        )
        def through(layer: Layer, x: jax.Array) -> jax.Array:
            return layer(x)

        x = through(self.layers, self.token_embedder(tokens))
        return self.token_embedder.attend(self.decoder_norm(x))


def create(config: Config) -> Decoder:
    """Returns the model; layouts say later how its parameters are sharded, and on which mesh."""
    with nnx.use_eager_sharding(False):
        return Decoder(config, nnx.Rngs(0))


def abstract_model(config: Config) -> tuple[Any, Any]:
    """Returns the graph and the shapes, which name their dimensions; nothing is allocated."""
    return nnx.split(nnx.eval_shape(lambda: create(config)), nnx.Param)


def show_plan(tx: optax.GradientTransformation) -> None:
    """Prints what ZeRO-1 saves for the large model on 64 devices."""
    mesh = AbstractMesh((16, 4, 1), AXES)
    layouts = part.shard_optimizer_state(tx, abstract_model(Config())[1], RULES, mesh, "data")
    compute, params, state = (layout.bytes_per_device / 2**20 for layout in layouts)
    print("Qwen3-0.6B, data=16, fsdp=4; MiB per device:")
    print(f"  parameters {compute:.1f} in the step, {params:.1f} between steps; state {state:.1f}")


def make_mesh(share: int = 1) -> Mesh:
    """Returns a mesh of all devices, or of a share of them."""
    devices = jax.devices()[: max(jax.device_count() // share, 1)]
    fsdp = 2 if len(devices) % 2 == 0 else 1
    shape, types = (len(devices) // fsdp, fsdp, 1), (AxisType.Auto,) * 3
    return jax.make_mesh(shape, AXES, axis_types=types, devices=devices)


def main() -> None:
    """Plans, trains, saves and resumes."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", 8)
    tx = optax.adafactor(2e-2, min_dim_size_to_factor=16, momentum=0.9)
    show_plan(tx)

    mesh = make_mesh()
    config = Config(vocab=64, embed=32, mlp=64, layers=2, heads=4, kv_heads=2, head_dim=8)
    tokens = np.arange(8 * 16, dtype=np.int32).reshape(8, 16) * 3 % 64

    # The state of the step, in the place of `maybe_update_params_sharding_with_opt`.
    graphdef, shapes = abstract_model(config)

    def lay_out(mesh: Mesh) -> Any:
        return part.shard_optimizer_state(tx, shapes, RULES, mesh, zero_axes=("data",))

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        logits: Any = nnx.merge(graphdef, params)(tokens)
        targets = tokens[:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], targets)
        return losses.mean()

    def compiled(layouts: Any) -> Any:
        def train_step(params: Any, opt_state: Any, tokens: Any) -> tuple[Any, Any, jax.Array]:
            # Parameters are gathered over `data` once a step; the update works on shards.
            compute = jax.lax.with_sharding_constraint(params, layouts.compute.shardings)
            loss, grads = jax.value_and_grad(loss_fn)(compute, tokens)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        shardings = (layouts.params.shardings, layouts.opt_state.shardings, None)
        return jax.jit(train_step, donate_argnums=(0, 1), out_shardings=shardings)

    def init_params() -> Any:
        return nnx.state(create(config), nnx.Param)

    layouts = lay_out(mesh)
    params = jax.jit(init_params, out_shardings=layouts.params.shardings)()
    opt_state = part.init_sharded(tx, params, layouts.opt_state)
    step = compiled(layouts)
    batch = jax.device_put(tokens, jax.NamedSharding(mesh, jax.P("data")))
    losses = []
    for _ in range(40):
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    print(f"small decoder: loss {losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps")

    with tempfile.TemporaryDirectory() as folder, Checkpointer(folder) as checkpointer:
        checkpointer.save(40, TrainingState(tx, params, opt_state, step=40))
        checkpointer.wait()
        target = TrainingState(tx, shapes, jax.eval_shape(tx.init, shapes))
        restored = checkpointer.restore_latest(target)
        params, opt_state, loss = step(restored.params, restored.opt_state, batch)
        assert loss < losses[0]
        assert step._cache_size() == 1  # restored arrays are sharded as before
        assert jax.tree.map(lambda leaf: leaf.sharding, opt_state) == layouts.opt_state.shardings
        print(f"resumed from step {int(restored.step)}: loss {loss:.4f}; compiled once")

        half = make_mesh(share=2)  # other devices: layouts on them say where everything goes
        layouts = lay_out(half)
        restored = checkpointer.restore_latest(target, placement=layouts)
    step, params, opt_state = compiled(layouts), restored.params, restored.opt_state
    batch = jax.device_put(tokens, jax.NamedSharding(half, jax.P("data")))
    for _ in range(3):
        params, opt_state, loss = step(params, opt_state, batch)
    assert loss < losses[0]
    assert step._cache_size() == 1
    print(f"resumed on {half.size} devices: loss {loss:.4f}; compiled once")


if __name__ == "__main__":
    main()
