"""A decoder-only transformer over bytes; knows nothing of optimizers, meshes or files.

Every parameter names its dimensions (its *logical axes*), and `AXIS_RULES` says which axis of the
mesh each name is split over: attention heads, the hidden layer of the MLP and the output bytes
over `model`, everything else nowhere.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from lm.sizes import VOCAB, ModelConfig

AXIS_RULES: tuple[tuple[str, str | None], ...] = (
    ("heads", "model"),
    ("mlp", "model"),
    ("vocab", "model"),
    ("embed", None),
    ("head_dim", None),
    ("qkv", None),
)


def parameter(module: nn.Module, name: str, fan_in: int, **axes: int) -> jax.Array:
    """Returns a parameter with one dimension per keyword: its logical name and its size."""
    init = nn.initializers.normal(fan_in**-0.5)
    boxed_init = nn.with_logical_partitioning(init, tuple(axes))
    return jnp.asarray(module.param(name, boxed_init, tuple(axes.values()), jnp.float32))


class RMSNorm(nn.Module):
    """Scales features to unit root mean square, then by a learned factor."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes the last axis."""
        init = nn.with_logical_partitioning(nn.initializers.ones, ("embed",))
        scale = jnp.asarray(self.param("scale", init, (x.shape[-1],), jnp.float32))
        return x * scale * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding of `x: [batch, position, head, feature]`."""
    half = x.shape[-1] // 2
    frequency = 1e4 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * frequency
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Attention(nn.Module):
    """Causal self-attention."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, position, embed]` to the same shape."""
        d, heads = self.config.d_model, self.config.heads
        size = d // heads
        w_in = parameter(self, "qkv", d, qkv=3, embed=d, heads=heads, head_dim=size)
        w_out = parameter(self, "out", d, heads=heads, head_dim=size, embed=d)
        q, k, v = jnp.einsum("bpe,sehf->sbphf", x, w_in)
        scores = jnp.einsum("bqhf,bkhf->bhqk", rotate(q), rotate(k)) * size**-0.5
        is_past = jnp.tri(x.shape[1], dtype=bool)
        weights = jax.nn.softmax(jnp.where(is_past, scores, -1e9), axis=-1)
        return jnp.einsum("bhqk,bkhf,hfe->bqe", weights, v, w_out)


class Mlp(nn.Module):
    """One hidden layer of GELU units."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[batch, position, embed]` to the same shape."""
        d, d_ff = self.config.d_model, self.config.d_ff
        w_in = parameter(self, "in", d, embed=d, mlp=d_ff)
        w_out = parameter(self, "out", d_ff, mlp=d_ff, embed=d)
        return jax.nn.gelu(x @ w_in) @ w_out


class Transformer(nn.Module):
    """Predicts every byte from those before it."""

    config: ModelConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits `[batch, position, VOCAB]` for the byte after each of `tokens`."""
        d = self.config.d_model
        table = parameter(self, "embedding", d, vocab=VOCAB, embed=d)
        x = table[tokens.astype(jnp.int32)]
        for i in range(self.config.layers):
            x += Attention(self.config, name=f"attention_{i}")(RMSNorm(name=f"norm_a{i}")(x))
            x += Mlp(self.config, name=f"mlp_{i}")(RMSNorm(name=f"norm_m{i}")(x))
        x = RMSNorm(name="norm")(x)
        return x @ parameter(self, "head", d, embed=d, vocab=VOCAB)


def predict(model: Transformer, params: Any, tokens: jax.Array) -> jax.Array:
    """Returns the logarithms of the probabilities of the byte after each of `tokens`."""
    logits: Any = model.apply({"params": params}, tokens)
    return jax.nn.log_softmax(logits, axis=-1)


def next_byte_loss(model: Transformer, params: Any, windows: jax.Array) -> jax.Array:
    """Returns nats `[batch, n - 1]` for every byte of `windows: [batch, n]` but the first."""
    wanted = windows[:, 1:, None].astype(jnp.int32)
    predicted = predict(model, params, windows[:, :-1])
    return -jnp.take_along_axis(predicted, wanted, axis=-1)[..., 0]
