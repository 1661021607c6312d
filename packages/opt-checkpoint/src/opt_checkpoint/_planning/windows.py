"""Work that is half done: gradients that wait in an accumulator, parameters on an excursion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from opt_checkpoint._naming.schema import LeafInfo, Names, Schema, Transformation
from opt_checkpoint._planning.compare import (
    base_of,
    plain_settings,
    transformation_of,
)
from opt_checkpoint._planning.homes import key_of


class _Window(NamedTuple):
    """How a transformation counts.

    Attributes:
      field: of its state; not 0 in the middle.
      length: the setting that says how many make a window, or the function that does.
      held: the field that holds what is half done, for every parameter.
      meaning: settings that must not change in the middle.
      told: what is lost without it.
    """

    field: str
    length: tuple[str, ...]
    held: str
    meaning: tuple[str, ...] = ()
    told: str = "mini-steps of a window have been accumulated and would be lost"


_WINDOWS: Final = {
    "multi_steps": _Window(
        "mini_step", ("every_k_code", "every_k"), "acc_grads", ("use_grad_mean", "mean")
    ),
    "apply_every": _Window("count", ("k",), "grad_acc"),
    "sam": _Window(
        "steps_since_sync",
        ("sync_period",),
        "cache",
        ("reset_state",),
        "steps of a cycle have been made, from which the parameters would not come back",
    ),
}


def begun(leaf: LeafInfo, schema: Schema) -> int:
    """Returns how far the window is that a leaf of a checkpoint counts; 0 if it counts none."""
    window = _WINDOWS.get(base_of(leaf)) if leaf.transformation else None
    if window is None or leaf.path[-1] != window.field or not leaf.value:
        return 0
    if window.field != "count":
        return leaf.value
    length = _length(window, _settings(transformation_of(leaf, schema)))
    return leaf.value % length if isinstance(length, int) and length else leaf.value


def loss(leaf: LeafInfo, schema: Schema) -> str:
    """Returns what would be lost without a leaf of a checkpoint; empty if nothing half done."""
    done = begun(leaf, schema)
    return f"{done} {_WINDOWS[base_of(leaf)].told}" if done else ""


class Running:
    """The windows that have begun in a checkpoint and go on in a target.

    Args:
      pairs: leaves of the checkpoint with those of the target that they become.
      saved: of the checkpoint.
    """

    def __init__(self, pairs: Iterable[tuple[LeafInfo, LeafInfo]], saved: Schema) -> None:
        self._left: dict[tuple[Names, str], str] = {}
        self._joined: dict[tuple[Names, str], str] = {}
        for source, leaf in pairs:
            if done := begun(source, saved):
                told = f"`{leaf.name}` goes on from {done}"
                self._left.setdefault((source.group, source.transformation), told)
                self._joined[leaf.group, leaf.transformation] = told

    def left(self, leaf: LeafInfo) -> str:
        """Returns why a leaf of the checkpoint cannot be dropped; empty if it can."""
        told = self._told(leaf, self._left)
        what = "what is half done for this parameter would be lost"
        return told and f"{told}, and {what}: save at the end of a window, or drop it by a rule"

    def joined(self, leaf: LeafInfo) -> str:
        """Returns why a leaf of the target cannot be made anew; empty if it can."""
        told = self._told(leaf, self._joined)
        what = "this parameter would have a part of the window only"
        return told and (
            f"{told}, and {what}: save at the end of a window, or initialise it by a rule"
        )

    def _told(self, leaf: LeafInfo, windows: Mapping[tuple[Names, str], str]) -> str:
        told = windows.get((leaf.group, leaf.transformation), "")
        if not told or leaf.parameter is None:
            return ""
        return told if key_of(leaf)[1][:1] == (_WINDOWS[base_of(leaf)].held,) else ""


def windows(
    pairs: Iterable[tuple[LeafInfo, LeafInfo]], saved: Schema, target: Schema
) -> Iterator[str]:
    """Yields what is wrong with windows that cannot be finished as they were begun.

    Args:
      pairs: leaves of the checkpoint with those of the target that they become.
      saved: of the checkpoint; if it says nothing of its optimizer, nothing is compared.
      target: of the target.
    """
    if not saved.optimizer or not target.optimizer:
        return
    for source, leaf in pairs:
        done = begun(source, saved)
        if not done:
            continue
        window = _WINDOWS[base_of(source)]
        old = _settings(transformation_of(source, saved))
        new = _settings(transformation_of(leaf, target))
        lengths = _length(window, old), _length(window, new)
        advice = "save at the end of a window"
        if None in lengths:
            yield (
                f"`{leaf.name}` is {done}: nothing says whether the window that was begun is as "
                f"long as those of the target; {advice}"
            )
        elif lengths[0] != lengths[1]:
            was, now = (f"of {x}" if isinstance(x, int) else "by a function" for x in lengths)
            other = "another" if was == now else "one"
            yield (
                f"`{leaf.name}` is {done}: a window {was} was begun and cannot go on as {other} "
                f"{now}; {advice}"
            )
        for name in window.meaning:
            if old.get(name) != new.get(name):
                yield (
                    f"`{leaf.name}` is {done}: a window with `{name}` {old.get(name)} was begun "
                    f"and cannot go on with {new.get(name)}; {advice}"
                )


def _settings(made: Transformation | None) -> Mapping[str, Any]:
    return {} if made is None else plain_settings(made.settings)


def _length(window: _Window, settings: Mapping[str, Any]) -> int | str | None:
    for name in window.length:
        value = settings.get(name)
        if isinstance(value, int) or (isinstance(value, str) and name.endswith("_code")):
            return value
    return None
