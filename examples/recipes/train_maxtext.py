"""MaxText's ZeRO-1 for any optimizer: `shard_optimizer_state` instead of a search for Adam's `mu`.

    python -m pip install opt-checkpoint opt-partition
    python examples/recipes/train_maxtext.py

MaxText's `maybe_update_params_sharding_with_opt` copies the shardings of Adam's first moment, and
raises for every other optimizer. Here the state is that of Adafactor. First a plan for the shapes
of Qwen3-0.6B, then a small decoder with the same names is trained, saved and resumed, on all
devices and on half of them.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import opt_partition as part
import optax
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
    return nn.with_logical_partitioning(nn.initializers.normal(0.1), names)


def norm(name: str) -> nn.RMSNorm:
    """Returns a norm with a named scale."""
    ones = nn.with_logical_partitioning(nn.initializers.ones, ("norm",))
    return nn.RMSNorm(scale_init=ones, name=name)


class Layer(nn.Module):
    """Attention and a gated MLP."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        """Returns the carry of a scan."""
        c = self.config

        def project(name: str, heads: int, *names: str) -> nn.DenseGeneral:
            shape = (heads, c.head_dim)
            return nn.DenseGeneral(shape, use_bias=False, kernel_init=named(*names), name=name)

        y = norm("pre_self_attention_layer_norm")(x)
        query = norm("query_norm")(project("query", c.heads, "embed", "q_heads", "kv")(y))
        kv = ("embed", "kv_heads", "kv_head_dim")
        key = norm("key_norm")(project("key", c.kv_heads, *kv)(y))
        value = project("value", c.kv_heads, *kv)(y)
        attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        out = named("heads", "kv", "embed")
        x += nn.DenseGeneral(c.embed, (-2, -1), use_bias=False, kernel_init=out, name="out")(
            attended
        )
        y = norm("post_self_attention_layer_norm")(x)
        wi, wo = named("embed", "mlp"), named("mlp", "embed")
        gate = nn.silu(nn.Dense(c.mlp, use_bias=False, kernel_init=wi, name="wi_0")(y))
        y = gate * nn.Dense(c.mlp, use_bias=False, kernel_init=wi, name="wi_1")(y)
        return x + nn.Dense(c.embed, use_bias=False, kernel_init=wo, name="wo")(y), None


class Decoder(nn.Module):
    """A decoder with scanned layers, stacked along dimension 1 as in MaxText."""

    config: Config

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits."""
        c = self.config
        table = named("vocab", "embed_vocab")
        embedder = nn.Embed(c.vocab, c.embed, embedding_init=table, name="token_embedder")
        scanned = nn.scan(
            Layer,
            variable_axes={"params": 1},
            split_rngs={"params": True},
            length=c.layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = scanned(c, name="layers")(embedder(tokens), None)
        return embedder.attend(norm("decoder_norm")(x))


def abstract_params(config: Config) -> Any:
    """Returns shapes in Flax boxes, which name their dimensions; nothing is allocated."""
    tokens = jax.ShapeDtypeStruct((8, 16), jnp.int32)
    return jax.eval_shape(Decoder(config).init, jax.random.key(0), tokens)


def show_plan(tx: optax.GradientTransformation) -> None:
    """Prints what ZeRO-1 saves for the large model on 64 devices."""
    mesh = AbstractMesh((16, 4, 1), AXES)
    layouts = part.shard_optimizer_state(tx, abstract_params(Config()), RULES, mesh, "data")
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
    model = Decoder(Config(vocab=64, embed=32, mlp=64, layers=2, heads=4, kv_heads=2, head_dim=8))
    tokens = np.arange(8 * 16, dtype=np.int32).reshape(8, 16) * 3 % 64

    # The state of the step, in the place of `maybe_update_params_sharding_with_opt`.
    boxed = abstract_params(model.config)

    def lay_out(mesh: Mesh) -> Any:
        return part.shard_optimizer_state(tx, boxed, RULES, mesh, zero_axes=("data",))

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        logits: Any = model.apply(params, tokens)
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
        return nn.unbox(model.init(jax.random.key(0), tokens))

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
        shapes = jax.eval_shape(init_params)
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
