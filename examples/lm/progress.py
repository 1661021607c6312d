"""Progress output: frequent enough, and folded to the width of the terminal."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TextIO

from tqdm import tqdm

BAR_CELLS = 10  # at least
REPEAT_SECONDS = 60.0  # without a terminal; on one, every second

FORMATS = {
    "loss": ("loss", ".3f"),
    "skipped": ("skipped", ".0f"),
    "bits_per_byte": ("bits/byte", ".3f"),
    "learning_rate": ("lr", ".1e"),
    "grad_norm": ("|grad|", ".2f"),
    "tokens_per_s": ("tokens/s", ".0f"),
}


class Progress:
    """Shows the metrics of every step on stderr.

    On a terminal, a bar that takes its width, with as many of the metrics as there is room for;
    without one, plain lines.

    Args:
      done: the number of steps before this process, in a resumed run.
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
            bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {remaining}{postfix}",
            disable=None if is_shown else True,
            mininterval=1,
            smoothing=0.1,
        )
        self._is_shown = is_shown
        self._steps, self._tokens = steps, tokens_per_step
        self._done, self._start = done, time.perf_counter()
        self._last = self._printed = self._start

    def speed(self) -> float:
        """Returns tokens per second since this was asked before, that is of the last step."""
        now, before = time.perf_counter(), self._last
        self._last = now
        return self._tokens / (now - before)

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the metrics of a step."""
        if not self._is_shown:
            return
        shown = [
            f"{name} {format(metrics[key], spec)}"
            for key, (name, spec) in FORMATS.items()
            if key in metrics
        ]
        if not self._bar.disable:
            self._bar.set_postfix_str(fitting(shown, self._room()), refresh=False)
            self._bar.update()
        elif self._is_due(step):
            self._printed = time.perf_counter()
            print(
                f"step {step}/{self._steps}  {'  '.join(shown)}  ETA {self._eta(step)}",
                file=sys.stderr,
            )

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Shows an activity other than a step; without a terminal, only if it takes long."""
        if not self._is_shown:
            yield
            return

        def show(seconds: int) -> None:
            if not self._bar.disable:
                self._bar.set_postfix_str(f"{what} {seconds} s")
            elif time.perf_counter() - self._printed > REPEAT_SECONDS - 1:
                self._printed = time.perf_counter()
                _write(f"{what.capitalize()} ... {seconds} s\n")

        before = "" if self._bar.disable else str(self._bar.postfix or "")
        with _every(1, show):
            yield
        if not self._bar.disable:
            self._bar.set_postfix_str(before)

    def note(self, text: str) -> None:
        """Shows a line that stays."""
        if self._is_shown:
            tqdm.write(text, file=sys.stderr)

    def _is_due(self, step: int) -> bool:
        """Whether a line is: of the first step, of the last, and one a minute."""
        silence = time.perf_counter() - self._printed
        return step in (self._done + 1, self._steps) or silence > REPEAT_SECONDS

    def _room(self) -> int:
        """How many columns are left for metrics."""
        taken = len(f"100%|{'':{BAR_CELLS}}| {self._steps}/{self._steps} 00:00:00, ")
        return _columns(sys.stderr) - taken - 1

    def _eta(self, step: int) -> str:
        per_step = (time.perf_counter() - self._start) / (step - self._done)
        seconds = per_step * (self._steps - step)
        return str(tqdm.format_interval(seconds))

    def close(self) -> None:
        """Leaves the bar on the screen."""
        self._bar.close()


@contextlib.contextmanager
def announced(what: str, *, is_shown: bool) -> Iterator[Callable[[float], None]]:
    """Shows on stderr what the program is doing, with regular updates.

    On a terminal this is one line, which disappears at the end.

    Args:
      what: it does, in a few words.
      is_shown: whether it is this process that shows anything.

    Yields:
      To be called with the share that is done, from 0 to 1, where that is known.
    """
    if not is_shown:
        yield lambda share: None
        return
    is_terminal = sys.stderr.isatty()
    shares: list[float] = []

    def show(seconds: int) -> None:
        done = f" {shares[-1]:.0%}" if shares else ""
        passed = f" {seconds} s" if seconds else ""
        text = f"{what} ...{done}{passed}"
        _write(f"\r{text}\033[K" if is_terminal else f"{text}\n")

    try:
        with _every(1 if is_terminal else REPEAT_SECONDS, show):
            yield shares.append
    finally:
        if is_terminal:
            _write("\r\033[K")


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


@contextlib.contextmanager
def _every(interval: float, act: Callable[[int], None]) -> Iterator[None]:
    """Acts now and once an interval, with the seconds that have passed, beside the block."""
    ended = threading.Event()
    start = time.perf_counter()

    def repeat() -> None:
        while not ended.wait(interval):
            act(round(time.perf_counter() - start))

    act(0)
    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def fitting(parts: list[str], room: int) -> str:
    """Joins the first parts, as many as fit.

    Examples:
      >>> fitting(["loss 1.234", "lr 4.0e-03", "tokens/s 5000"], 24)
      'loss 1.234, lr 4.0e-03'
    """
    while len(parts) > 1 and len(", ".join(parts)) > room:
        parts = parts[:-1]
    return ", ".join(parts)


def folded(text: object, *, table_until: str = "") -> str:
    """Returns lines that fit the terminal; what does not fit continues below, indented.

    Args:
      text: any lines.
      table_until: the heading of a column of a table; where a row is too long, the columns before
        it stay together.
    """
    width = _columns(sys.stdout)
    lines = str(text).splitlines()
    cut = lines[0].find(table_until) if table_until and lines else 0
    is_cut = cut > 0 and max(map(len, lines)) > width
    return "\n".join(
        part
        for i, line in enumerate(lines)
        for part in (_cut(line, cut, width, i == 0) if is_cut else _folded(line, width))
    )


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):  # Not a terminal: what COLUMNS says, or 80.
        return shutil.get_terminal_size().columns


def _cut(row: str, cut: int, width: int, is_heading: bool) -> list[str]:
    head, rest = row[:cut].rstrip(), row[cut:].strip()
    return [head, *([] if is_heading else _folded(f"    {rest}" if rest else "", width))]


def _folded(line: str, width: int) -> list[str]:
    indent = line[: len(line) - len(line.lstrip())]
    # A number and its unit stay together.
    parts = textwrap.wrap(
        re.sub(r"(?<=\d) (?=[KMGT]?i?B\b)", "\N{NO-BREAK SPACE}", line.strip()),
        width,
        initial_indent=indent,
        subsequent_indent=indent + "    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [part.replace("\N{NO-BREAK SPACE}", " ") for part in parts]
