"""Text as bytes: the files, the held-out split, and the batches."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from lm.config import UsageError

Bytes = npt.NDArray[np.uint8]

HELD_OUT_EVERY = 20
# `pydoc_data` is the manual: 800 kB of prose in one file since Python 3.13.
_NOT_OURS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}
)


@dataclasses.dataclass(frozen=True)
class Text:
    """The training and evaluation text.

    Attributes:
      train: bytes to train on.
      held_out: bytes to evaluate on.
      source: description of where they come from.
    """

    train: Bytes
    held_out: Bytes
    source: str

    @property
    def sha256(self) -> str:
        """A digest that identifies the text."""
        digest = hashlib.sha256(self.train.tobytes())
        digest.update(hashlib.sha256(self.held_out.tobytes()).digest())
        return digest.hexdigest()


def load_text(paths: Sequence[str], window: int) -> Text:
    """Reads all files, in an order that depends only on their names.

    Args:
      paths: files or directories; none for the source of Python's standard library.
      window: the number of bytes that a sequence of a batch needs.

    Raises:
      UsageError: something cannot be read, or there is too little of it.
    """
    source = " ".join(paths) or sysconfig.get_path("stdlib")
    try:
        if paths:
            files = [file for path in paths for file in _files(Path(path))]
        else:
            files = [f for f in _files(Path(source), skip=_NOT_OURS) if f.suffix == ".py"]
        train, held_out = split([file.read_bytes() for file in dict.fromkeys(files)])
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}: {error.strerror}") from error
    for what, text in ("to learn from", train), ("held out", held_out):
        if len(text) < window:
            raise UsageError(
                f"{source} is too small: {len(text)} bytes {what}, but a sequence takes {window}"
            )
    return Text(_as_array(train), _as_array(held_out), source)


def split(files: Sequence[bytes]) -> tuple[bytes, bytes]:
    r"""Returns what to learn from, and what to hold out: one file in twenty.

    Fewer files than that are read as one text, of which the last twentieth is held out.

    Examples:
      >>> split([b"0123456789" * 2])
      (b'0123456789012345678', b'9')
      >>> split([bytes([i]) for i in range(20)])[1]
      b'\x13'
    """
    if len(files) < HELD_OUT_EVERY:
        text = b"".join(files)
        cut = len(text) - len(text) // HELD_OUT_EVERY
        return text[:cut], text[cut:]
    is_held_out = [i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 for i in range(len(files))]
    train = b"".join(f for f, held in zip(files, is_held_out, strict=True) if not held)
    return train, b"".join(f for f, held in zip(files, is_held_out, strict=True) if held)


class Batches:
    """A resumable iterator over batches of random windows of a text.

    The next batch depends only on the text and on `state()`: an interrupted run continues with
    exactly the batches it would have had, regardless of the number of processes.

    Args:
      text: the bytes.
      key: of the random numbers.
      batch_size: pieces per batch.
      window: bytes per piece.
    """

    def __init__(self, text: Bytes, key: int, *, batch_size: int, window: int) -> None:
        self._text, self._shape = text, (batch_size, window)
        self._key, self._position = key, 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Bytes:
        """Returns `[batch_size, window]` bytes."""
        self._position += 1
        batch_size, window = self._shape
        random = np.random.default_rng((self._key, self._position))
        starts = random.integers(0, len(self._text) - window, size=batch_size, endpoint=True)
        windows: Bytes = self._text[starts[:, None] + np.arange(window)]
        return windows

    def state(self) -> dict[str, int]:
        """Returns the position, to be saved in a checkpoint."""
        return {"key": self._key, "position": self._position}

    def restore(self, state: Mapping[str, int]) -> None:
        """Restores the position of another iterator over the same text."""
        self._key, self._position = int(state["key"]), int(state["position"])


def batches_in_order(
    text: Bytes, *, batch_size: int, window: int, context: int = 1
) -> Iterator[tuple[Bytes, npt.NDArray[np.bool_]]]:
    """Cuts a text so that every byte but the first is predicted exactly once.

    Args:
      text: the bytes.
      batch_size: pieces per batch.
      window: bytes per piece.
      context: bytes that a prediction sees at least, but for those at the beginning of the text.

    Yields:
      `[batch_size, window]` pieces, each beginning with the last `context` bytes of the one before;
      and `[batch_size, window - 1]`, which of the predictions count: not those of the padding, nor
      those of the piece before.
    """
    ahead = window - context
    starts = np.arange(0, max(0, len(text) - window) + ahead, ahead)
    is_new = np.arange(1, window) >= context
    for i in range(0, len(starts), batch_size):
        rows = starts[i : i + batch_size]
        rows = np.pad(rows, (0, batch_size - len(rows)), constant_values=len(text))
        at = rows[:, None] + np.arange(window)
        counts = (at[:, 1:] < len(text)) & (is_new | (rows == 0)[:, None])
        yield text[np.minimum(at, len(text) - 1)], counts


def _files(path: Path, skip: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yields all files under `path`, sorted, without hidden ones."""
    if not path.is_dir():
        yield path
        return
    for folder, folders, names in os.walk(path, onerror=_raise):
        folders[:] = sorted(f for f in folders if f not in skip and not f.startswith("."))
        files = (Path(folder, name) for name in sorted(names) if not name.startswith("."))
        yield from (file for file in files if file.is_file())


def _raise(error: OSError) -> None:
    raise error


def _as_array(text: bytes) -> Bytes:
    return np.frombuffer(text, np.uint8)
