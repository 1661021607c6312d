"""What the user sees while training: a progress bar, or plain lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from tqdm import tqdm


class Progress:
    """Shows the metrics of every step on stderr.

    Args:
      done: the number of steps made before, by the run that goes on.
      steps: the number of steps in all.
      tokens_per_step: what one step reads.
      is_shown: whether it is this process that shows anything.
    """

    def __init__(self, done: int, steps: int, tokens_per_step: int, *, is_shown: bool) -> None:
        self._bar = tqdm(
            initial=done,
            total=steps,
            unit="step",
            dynamic_ncols=True,
            disable=None if is_shown else True,
            smoothing=0.1,
        )
        self._is_shown = is_shown
        self._steps, self._tokens = steps, tokens_per_step
        self._line_every = max(1, steps // 20)
        self._done, self._start = done, time.perf_counter()
        self._last = self._start

    def speed(self) -> float:
        """Returns tokens per second since this was asked before, that is of the last step."""
        now, before = time.perf_counter(), self._last
        self._last = now
        return self._tokens / (now - before)

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the metrics of a step."""
        if not self._is_shown:
            return
        formats = {
            "loss": ("loss", ".3f"),
            "bits_per_byte": ("bits/byte", ".3f"),
            "learning_rate": ("lr", ".2e"),
            "grad_norm": ("|grad|", ".2f"),
            "skipped": ("skipped", ".0f"),
            "tokens_per_s": ("tokens/s", ".0f"),
        }
        shown = {
            name: format(metrics[key], spec)
            for key, (name, spec) in formats.items()
            if key in metrics
        }
        if not self._bar.disable:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update()
        elif step % self._line_every == 0 or step == self._steps:
            values = "  ".join(f"{name} {value}" for name, value in shown.items())
            print(
                f"step {step}/{self._steps}  {values}  ETA {self._eta(step)}",
                file=sys.stderr,
            )

    def _eta(self, step: int) -> str:
        per_step = (time.perf_counter() - self._start) / (step - self._done)
        seconds = per_step * (self._steps - step)
        return str(tqdm.format_interval(seconds))

    def close(self) -> None:
        """Leaves the bar as it is."""
        self._bar.close()
