"""Generation of text with a trained model."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from lm.model import Transformer, predict

TEMPERATURE = 0.7


def generate(
    model: Transformer, params: Any, prompt: str, *, length: int, context: int, seed: int
) -> str:
    """Returns `prompt` and `length` more bytes.

    Args:
      model: the model.
      params: its parameters.
      prompt: what to begin with.
      length: the number of bytes to add.
      context: how many bytes the model sees at most; as in training.
      seed: decides the bytes.
    """
    known = prompt.encode()[-context:] or b"\n"
    window = np.zeros(context, np.uint8)
    window[: len(known)] = list(known)
    new = _continue(model, length, seed, params, window, len(known))
    return prompt + _printable(process_allgather(new, tiled=True).tobytes())


@partial(jax.jit, static_argnums=(0, 1, 2))
def _continue(
    model: Transformer, length: int, seed: int, params: Any, window: jax.Array, known: jax.Array
) -> jax.Array:
    """Adds `length` bytes; the window has a fixed size, and slides once it is full."""

    def add_byte(carry: tuple[jax.Array, jax.Array], key: jax.Array) -> Any:
        window, known = carry
        logits = predict(model, params, window[None])[0, known - 1]
        byte = jax.random.categorical(key, logits / TEMPERATURE).astype(jnp.uint8)
        is_full = known == window.size
        window = jnp.where(is_full, jnp.roll(window, -1), window)
        known = jnp.where(is_full, known, known + 1)
        return (window.at[known - 1].set(byte), known), byte

    keys = jax.random.split(jax.random.key(seed), length)
    new: jax.Array = jax.lax.scan(add_byte, (window, jnp.asarray(known)), keys)[1]
    return new


def _printable(text: bytes) -> str:
    return "".join(chr(b) if 32 <= b < 127 or b in b"\n\t" else f"\\x{b:02x}" for b in text)
