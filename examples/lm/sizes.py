"""The sizes of the model, known before JAX is imported."""

from __future__ import annotations

import dataclasses

VOCAB = 256  # bytes


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model.

    Attributes:
      layers: number of blocks.
      d_model: width of the residual stream.
      heads: attention heads; they divide `d_model` into an even number of features each.
      d_ff: width of the hidden layer of the MLPs.
    """

    layers: int
    d_model: int
    heads: int
    d_ff: int
