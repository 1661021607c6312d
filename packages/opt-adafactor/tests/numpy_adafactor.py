"""Adafactor in float64 NumPy, from its description: an oracle that shares no code with ours."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


@dataclasses.dataclass
class Tensor:
    """One parameter with its state."""

    p: Array
    roles: str | None  # a letter per dimension (r, c, b, n); `None`: not factored
    row: Array | None = None
    col: Array | None = None
    v: Array | None = None
    m: Array | None = None

    def dims(self, letters: str) -> tuple[int, ...]:
        return tuple(i for i, role in enumerate(self.roles or "") if role in letters)

    @property
    def averaged(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.p.ndim) if i not in self.dims("b"))


def heuristic_roles(shape: tuple[int, ...], min_dim: int) -> str | None:
    """The largest dimension of a matrix is the column, the last one of equals."""
    if len(shape) != 2 or min(shape) < min_dim:
        return None
    return "cr" if shape[0] > shape[1] else "rc"


def step(t: Tensor, g: Array, k: int, o: dict[str, Any]) -> None:
    """One update in place; `o` are the hyper-parameters by T5X's names, a rate included."""
    beta = 1.0 - (max(k - o["step_offset"], 0) + 1.0) ** -o["decay_rate"]
    lr = o["learning_rate"]
    u: Any = lr
    if o["multiply_by_parameter_scale"]:
        r = np.maximum(_rms(t.p, t.averaged), o["epsilon2"])
        if o["max_parameter_scale"] is not None:
            r = np.minimum(r, o["max_parameter_scale"])
        u = lr * r
    q = g**2 + o["epsilon1"]
    rows, cols = t.dims("r"), t.dims("c")
    if rows or cols:
        # With the reduced dimensions kept: no index moves.
        row, col = _mean(q, cols), _mean(q, rows)
        t.row = row * (1 - beta) + (0.0 if t.row is None else beta * t.row)
        t.col = col * (1 - beta) + (0.0 if t.col is None else beta * t.col)
        y = g / np.sqrt(t.row / _mean(t.row, rows)) / np.sqrt(t.col)
    else:
        t.v = q * (1 - beta) + (0.0 if t.v is None else beta * t.v)
        y = g / np.sqrt(t.v)
    if o["clipping_threshold"] is not None:
        y = y / np.maximum(1.0, _rms(y, t.averaged) / o["clipping_threshold"])
    s = u * y
    if o["beta1"] is not None:
        s = (1 - o["beta1"]) * s + (0.0 if t.m is None else o["beta1"] * t.m)
        t.m = s
    w = o["weight_decay_rate"]
    if o["weight_decay_rate_lr_exponent"] is not None:
        w = (1.0 if w is None else w) * lr ** o["weight_decay_rate_lr_exponent"]
    t.p = t.p * (1.0 - (w or 0.0)) - s


def clip_global_norm(grads: list[Array], threshold: float | None) -> list[Array]:
    if not threshold:
        return grads
    norm = np.sqrt(sum(float(np.sum(g**2)) for g in grads))
    return [g * min(1.0, threshold / norm) for g in grads] if norm else grads


def _mean(x: Array, dims: tuple[int, ...]) -> Array:
    mean: Array = np.mean(x, axis=dims, keepdims=True) if dims else x
    return mean


def _rms(x: Array, dims: tuple[int, ...]) -> Array:
    rms: Array = np.sqrt(_mean(x**2, dims))
    return rms
