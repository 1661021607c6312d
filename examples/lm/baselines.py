"""Baselines for the model: byte frequencies, byte pairs, and gzip.

All are in bits per byte of the same held-out text, whose first byte nothing is asked about.
"""

from __future__ import annotations

import gzip

import numpy as np
import numpy.typing as npt

from lm.data import Bytes

Probabilities = npt.NDArray[np.float64]


def fit_unigram(train: Bytes) -> Probabilities:
    """Returns the probability of each byte, `[256]`: its frequency, one added to every count."""
    counts = np.bincount(train, minlength=256) + 1.0
    probabilities: Probabilities = counts / counts.sum()
    return probabilities


def fit_bigram(train: Bytes) -> Probabilities:
    """Returns the probability of each byte after each byte, `[before, after]`.

    Every row starts from the unigram probabilities, which weigh as much as one observation.
    """
    pairs = train[:-1].astype(np.uint16) * 256 + train[1:]
    counts = np.bincount(pairs, minlength=256 * 256).reshape(256, 256) + fit_unigram(train)
    probabilities: Probabilities = counts / counts.sum(axis=1, keepdims=True)
    return probabilities


def unigram_bits(train: Bytes, held_out: Bytes) -> float:
    """Bits per held-out byte under the byte frequencies of `train`."""
    return _bits(fit_unigram(train)[held_out[1:]])


def bigram_bits(train: Bytes, held_out: Bytes) -> float:
    """Bits per held-out byte under the byte pairs of `train`."""
    return _bits(fit_bigram(train)[held_out[:-1], held_out[1:]])


def gzip_bits(held_out: Bytes) -> float:
    """Bits per held-out byte in a gzip file, for comparison: it adapts to the text itself."""
    return 8 * len(gzip.compress(held_out.tobytes(), mtime=0)) / len(held_out)


def _bits(probabilities: Probabilities) -> float:
    return float(-np.log2(probabilities).mean())
