"""The folder of a run: configuration, metrics, checkpoints, plot, results."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from opt_checkpoint import Checkpointer, SavedStep
from opt_checkpoint.errors import MissingError
from opt_core import Optimizer

from lm.config import UsageError
from lm.processes import is_first, say


class RunFolder:
    """Where a run keeps its files, which the first process writes.

    Files that replace one another do so in one step: a crash leaves the old or the new one, never
    half of it.

    Attributes:
      path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self, config: Mapping[str, Any]) -> None:
        """Makes the folder and writes `config.json`.

        Raises:
          UsageError: it is there and not empty, or cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if any(self.path.iterdir()):
                raise UsageError(f"{self.path} is not empty; --resume continues the run in it")
            self._write("config.json", json.dumps(config, indent=2).encode())
        except OSError as error:
            raise UsageError(f"cannot write {error.filename}: {error.strerror}") from error

    def read_config(self) -> dict[str, Any]:
        """Returns what `config.json` holds.

        Raises:
          UsageError: there is no run in the folder.
        """
        try:
            config = json.loads((self.path / "config.json").read_bytes())
        except (OSError, ValueError) as error:
            raise UsageError(f"{self.path} is not the folder of a run: {error}") from error
        return config if isinstance(config, dict) else {}

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Appends a line to `metrics.jsonl`."""
        if not is_first():
            return
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(_finite(metrics), allow_nan=False) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """Returns the lines of `metrics.jsonl`; one that a crash cut off is left out."""
        file = self.path / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def forget_after(self, step: int) -> None:
        """Drops the metrics of steps after the checkpoint, which will be repeated."""
        kept = [json.dumps(line) + "\n" for line in self.read_metrics() if line["step"] <= step]
        self._write("metrics.jsonl", "".join(kept).encode())

    @property
    def checkpoints(self) -> Path:
        """The folder of a `Checkpointer`."""
        return self.path / "checkpoints"

    def latest_checkpoint(self) -> SavedStep | None:
        """Returns the latest checkpoint with a whole manifest; `None` if there is none yet.

        Its arrays are checked when they are read: see `restore`.

        Raises:
          UsageError: there are checkpoints, and none of them is.
        """
        checkpoints = Checkpointer(self.checkpoints, read_only=True)
        try:
            saved = checkpoints.latest_valid()
        except MissingError as error:
            raise UsageError(f"every checkpoint of {self.path} is damaged: {error}") from error
        if saved and saved.step != checkpoints.latest_step():
            self._say_goes_on(saved.step)
        return saved

    def restore(self, target: Optimizer, planned: int) -> tuple[Optimizer, Mapping[str, Any]]:
        """Restores the latest checkpoint that is whole.

        Args:
          target: shapes, and the sharding of each leaf.
          planned: the step that `latest_checkpoint` has found.

        Returns:
          The optimizer, and what was saved with it.

        Raises:
          UsageError: every checkpoint is damaged.
        """
        checkpoints = Checkpointer(self.checkpoints, read_only=True)
        try:
            optimizer = checkpoints.restore_latest(target)
        except MissingError as error:
            raise UsageError(f"every checkpoint of {self.path} is damaged: {error}") from error
        step = checkpoints.restored_step
        assert step is not None
        if step != planned:
            self._say_goes_on(step)
        return optimizer, checkpoints.at(step).read_extras()

    def _say_goes_on(self, step: int) -> None:
        say(f"{self.path} goes on from step {step}: what was saved later is damaged")

    def save_placement(self, tables: str) -> None:
        """Replaces `placement.txt`."""
        self._write("placement.txt", tables.encode())

    def save_results(self, results: Mapping[str, Any]) -> None:
        """Writes `results.json`."""
        text = json.dumps(_finite(results), indent=2, allow_nan=False)
        self._write("results.json", text.encode())

    def plot(self, levels: Mapping[str, float]) -> None:
        """Draws loss and learning rate over the steps into `plot.png`.

        Args:
          levels: bits per byte to draw as horizontal lines, by name.
        """
        metrics = [line for line in self.read_metrics() if "loss" in line]  # others made no update
        steps = [line["step"] for line in metrics]
        figure = Figure(figsize=(4.7, 4.6), layout="constrained")  # as wide as a phone
        loss, rate = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        bits = np.array([line["bits_per_byte"] for line in metrics])
        loss.plot(steps, bits, color="C0", alpha=0.3, linewidth=0.8)
        loss.plot(steps, _smooth(bits), color="C0", label="training")
        measured = [line for line in metrics if "held_out" in line]
        for style, name in zip(("^-", "o-"), ("trained", "average"), strict=True):
            if measured:
                bits = np.array([line["held_out"][name] for line in measured])
                at = [line["step"] for line in measured]
                loss.plot(at, bits, f"k{style}", markersize=4, label=f"held-out, {name}")
        for i, (name, level) in enumerate(levels.items(), start=1):
            loss.axhline(level, color=f"C{i}", linestyle="--", label=f"{name} {level:.2f}")
        loss.set(ylabel="bits per byte", title=self.path.name)
        loss.legend(title="dashed: held-out text" if levels else None, fontsize="small", loc=1)
        loss.grid(alpha=0.3)
        rate.plot(steps, [line["learning_rate"] for line in metrics], color="C0")
        rate.set(xlabel="step", ylabel="rate", ylim=(0, None))
        rate.grid(alpha=0.3)
        image = io.BytesIO()
        figure.savefig(image, dpi=200)
        self._write("plot.png", image.getvalue())

    def _write(self, name: str, data: bytes) -> None:
        if not is_first():
            return
        temporary = self.path / f".{name}.tmp"
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path / name)


def numbers(metrics: Any) -> Any:
    """Returns metrics as JSON has them: numbers in dictionaries."""
    if dataclasses.is_dataclass(metrics):
        metrics = {f.name: getattr(metrics, f.name) for f in dataclasses.fields(metrics)}
    if isinstance(metrics, Mapping):
        return {name: numbers(value) for name, value in metrics.items()}
    return float(metrics)


def _finite(value: Any) -> Any:
    """Returns the data with `None` (`null`) for numbers that JSON cannot represent."""
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _smooth(values: Any, window: int = 20) -> Any:
    """Mean over the last `window` values, or over as many as there are."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return (sums[ends] - sums[starts]) / (ends - starts)
