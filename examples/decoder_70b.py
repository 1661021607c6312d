"""A published 70B decoder as shapes and logical axes, for planning before you have a machine.

The weights are those of Llama 2 and Llama 3 70B, one entry per matrix, without their values:

    cd examples
    opt-partition plan decoder_70b:adamw \
        --mesh data=64,fsdp=8,model=8 --rules decoder_70b.toml --zero data

`adamw`, `adafactor` and `lion` return what the command line expects: the transformation, the
parameters and their logical axes.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

Job: TypeAlias = tuple[optax.GradientTransformation, Any, Any]

# In `decoder_70b.toml` for the command line.
RULES = (
    ("vocab", "model"),
    ("mlp", "model"),
    ("heads", "model"),
    ("kv_heads", "model"),
    ("embed", "fsdp"),
    ("head_dim", None),
    ("layers", None),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a decoder with grouped queries and a gated MLP."""

    vocab: int = 128_256
    layers: int = 80
    embed: int = 8_192
    heads: int = 64
    kv_heads: int = 8
    head_dim: int = 128
    mlp: int = 28_672


LLAMA_3_70B = Config()
LLAMA_2_70B = Config(vocab=32_000)

_BLOCK = {
    "attention_norm": {"scale": ("embed",)},
    "attention": {
        "query": ("embed", "heads", "head_dim"),
        "key": ("embed", "kv_heads", "head_dim"),
        "value": ("embed", "kv_heads", "head_dim"),
        "out": ("heads", "head_dim", "embed"),
    },
    "mlp_norm": {"scale": ("embed",)},
    "mlp": {"gate": ("embed", "mlp"), "up": ("embed", "mlp"), "down": ("mlp", "embed")},
}


def decoder(
    config: Config = LLAMA_3_70B, *, stacked: bool = False, dtype: Any = jnp.float32
) -> tuple[Any, Any]:
    """The parameters of a decoder and their logical axes.

    Args:
      config: its sizes.
      stacked: the layers as one leaf each with `layers` in front, as `scan` over layers wants
        them; otherwise a subtree per layer.
      dtype: the dtype of every parameter.

    Returns:
      A tree of `jax.ShapeDtypeStruct`s and a tree of `PartitionSpec`s of logical names.

    Examples:
      >>> params, axes = decoder()
      >>> params["layers_79"]["mlp"]["down"].shape, tuple(axes["layers_79"]["mlp"]["down"])
      ((28672, 8192), ('mlp', 'embed'))
      >>> sum(leaf.size for leaf in jax.tree.leaves(params))
      70553706496
    """
    ends = {
        "embedding": ("vocab", "embed"),
        "final_norm": {"scale": ("embed",)},
        "logits": ("embed", "vocab"),
    }
    if stacked:
        layers = {"layers": _map_names(lambda names: ("layers", *names), _BLOCK)}
    else:
        layers = {f"layers_{i}": _BLOCK for i in range(config.layers)}
    sizes = dataclasses.asdict(config)
    names = {**ends, **layers}
    params = _map_names(
        lambda leaf: jax.ShapeDtypeStruct(tuple(sizes[name] for name in leaf), dtype), names
    )
    return params, _map_names(lambda leaf: PartitionSpec(*leaf), names)


def adamw(**kwargs: Any) -> Job:
    """AdamW: two moments of every parameter; keyword arguments are those of `decoder`."""
    return optax.adamw(3e-4, weight_decay=0.1), *decoder(**kwargs)


def adafactor(**kwargs: Any) -> Job:
    """Adafactor: a row and a column where a matrix was."""
    return optax.adafactor(1e-2), *decoder(**kwargs)


def lion(**kwargs: Any) -> Job:
    """Lion: one moment of every parameter."""
    return optax.lion(1e-4, weight_decay=0.1), *decoder(**kwargs)


def adamw_stacked() -> Job:
    """AdamW over stacked layers."""
    return adamw(stacked=True)


def adafactor_stacked() -> Job:
    """Adafactor over stacked layers."""
    return adafactor(stacked=True)


def lion_stacked() -> Job:
    """Lion over stacked layers."""
    return lion(stacked=True)


def _map_names(function: Any, tree: Any) -> Any:
    return jax.tree.map(function, tree, is_leaf=lambda node: isinstance(node, tuple))
