"""Settings that give a saved state its meaning, and work that is half done.

Gradients wait in an accumulator, parameters are on an excursion: a window is open. What a change of
a setting does then, `opt_core.Bearing` says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from opt_core import TransformationDescription

from opt_checkpoint._naming.schema import (
    LeafInfo,
    Names,
    Schema,
    leaf_name,
)
from opt_checkpoint._planning.compare import INJECTING, UPDATE, bearing_of, without_code

_IN_UNITS: Final = frozenset({"moment", "second_moment", "factored"})
_HELD: Final = frozenset({"accumulator", "params_copy"})
_ADVICE = "save at the end of a window"
_COMPARED: Final = {
    "at_or_below_count": "that is passed, and would not be reached again. "
    "Make it larger than the count",
    "above_count": "that is not reached yet, and the steps since would be fewer than none. "
    "Make it no larger than the count",
}
_Pairs = Iterable[tuple[LeafInfo, LeafInfo]]


def begun(leaf: LeafInfo, schema: Schema) -> int:
    """Returns how far the window is that a leaf of a checkpoint counts; 0 if it counts none."""
    made = schema.transformation_of(leaf)
    if made is None or not leaf.value:
        return 0
    field = leaf.field
    for bearing in made.bearing.values():
        if bearing.effect == "window" and bearing.count == field:
            length = made.settings.get(bearing.modulo) if bearing.modulo else None
            return leaf.value % length if isinstance(length, int) and length else leaf.value
    return 0


def loss(leaf: LeafInfo, schema: Schema) -> str:
    """Returns what would be lost without a leaf of a checkpoint; empty if nothing half done."""
    if not (done := begun(leaf, schema)):
        return ""
    where = leaf.group, leaf.transformation
    roles = {x.role for x in schema.leaves if (x.group, x.transformation) == where}
    if "accumulator" in roles:
        return f"{done} mini-steps of a window have been accumulated and would be lost"
    return f"{done} steps of a cycle have been made, from which the parameters would not come back"


class Running:
    """The windows that have begun in a checkpoint and go on in a target.

    Args:
      pairs: leaves of the checkpoint with those of the target that they become.
      saved: of the checkpoint.
    """

    def __init__(self, pairs: _Pairs, saved: Schema) -> None:
        self._left: dict[tuple[Names, str], str] = {}
        self._joined: dict[tuple[Names, str], str] = {}
        for source, leaf in pairs:
            if done := begun(source, saved):
                told = f"`{leaf.name}` goes on from {done}"
                self._left.setdefault((source.group, source.transformation), told)
                self._joined[leaf.group, leaf.transformation] = told

    def left(self, leaf: LeafInfo) -> str:
        """Returns why a leaf of the checkpoint cannot be dropped; empty if it can."""
        told = _told(leaf, self._left)
        what = "what is half done for this parameter would be lost"
        return told and f"{told}, and {what}: {_ADVICE}, or drop it by a rule"

    def joined(self, leaf: LeafInfo) -> str:
        """Returns why a leaf of the target cannot be made anew; empty if it can."""
        told = _told(leaf, self._joined)
        what = "this parameter would have a part of the window only"
        return told and f"{told}, and {what}: {_ADVICE}, or initialise it by a rule"


def _told(leaf: LeafInfo, windows: Mapping[tuple[Names, str], str]) -> str:
    told = windows.get((leaf.group, leaf.transformation), "")
    return told if leaf.parameter is not None and leaf.role in _HELD else ""


def bearing_problems(
    pairs: _Pairs, saved: Schema, target: Schema, ruled: Collection[str]
) -> Iterator[str]:
    """Yields the settings that changed although saved state is what they made it.

    Args:
      pairs: leaves of the checkpoint with those of the target that they become.
      saved: of the checkpoint; of a transformation that it does not tell nothing is compared.
      target: of the target.
      ruled: the names of leaves of the target that a rule names.
    """
    together: dict[tuple[int, int], list[tuple[LeafInfo, LeafInfo]]] = {}
    made: dict[tuple[int, int], tuple[TransformationDescription, TransformationDescription]] = {}
    for source, leaf in pairs:
        old, new = saved.transformation_of(source), target.transformation_of(leaf)
        if old is not None and new is not None:
            key = id(old), id(new)
            made[key] = old, new
            together.setdefault(key, []).append((source, leaf))
    for key, (old, new) in made.items():
        for name in sorted({**old.bearing, **new.bearing}):
            yield from _problems(name, old, new, together[key], saved, ruled)
    factors: dict[str, None] = {}
    for key, (old, new) in made.items():
        held = [(a, b) for a, b in together[key] if b.role in _IN_UNITS and b.name not in ruled]
        for one, other in _factors(old, new, saved, target) if held else ():
            factors |= dict.fromkeys(_refusal_of_factor(one, other, held))
    yield from factors


def _factors(
    old: TransformationDescription, new: TransformationDescription, saved: Schema, target: Schema
) -> Iterator[tuple[TransformationDescription, TransformationDescription]]:
    """What keeps nothing and acts before two that go on in one another, in pairs.

    Others in their number, or in another order, are changes of the optimizer.
    """
    ones, others = (
        [
            made
            for made in schema.transformations[: schema.transformations.index(keeper)]
            if made.bearing
            and made.group == keeper.group[: len(made.group)]
            and not any(schema.transformation_of(leaf) == made for leaf in schema.leaves)
        ]
        for schema, keeper in ((saved, old), (target, new))
    )
    if [made.name for made in ones] == [made.name for made in others]:
        yield from zip(ones, others, strict=True)


def _refusal_of_factor(
    old: TransformationDescription,
    new: TransformationDescription,
    pairs: Sequence[tuple[LeafInfo, LeafInfo]],
) -> Iterator[str]:
    for name in sorted({**old.bearing, **new.bearing}):
        one, other = old.settings.get(name), new.settings.get(name)
        if name in old.settings.keys() & new.settings.keys() and one != other:
            yield (
                f"`{name}` of `{new.name}` was {_shown(one)}, is {_shown(other)}: what comes after "
                f"it has been multiplied by it, such as `{pairs[0][1].name}`. Set it as it was, or "
                "say by rules what becomes of these leaves, such as a `Map` that multiplies them"
            )


def _problems(
    name: str,
    old: TransformationDescription,
    new: TransformationDescription,
    pairs: Sequence[tuple[LeafInfo, LeafInfo]],
    saved: Schema,
    ruled: Collection[str],
) -> Iterator[str]:
    """What is wrong with one setting."""
    bearing = bearing_of(name, old, new)
    one, other = old.settings.get(name), new.settings.get(name)
    # What a checkpoint does not tell may have been the same, but for a window that is open.
    is_told = (name in old.settings and name in new.settings) or name == UPDATE
    counts = [(a, b) for a, b in pairs if b.field == bearing.count]
    if bearing.effect == "refused" and is_told and one != other:
        yield from _refusal(name, old, new, pairs, ruled)
    for source, leaf in counts:
        if bearing.effect in _COMPARED and is_told and one != other and source.value is not None:
            is_above = _is_above(other, source.value)
            if is_above == (bearing.effect == "above_count"):
                yield (
                    f"`{leaf.name}` is {source.value}: `{name}` of `{new.name}` was {_shown(one)} "
                    f"and cannot become {_shown(other)}: {_COMPARED[bearing.effect]}"
                )
        elif bearing.effect == "window" and (done := begun(source, saved)):
            yield from _interrupted(leaf, name, done, one, other)


def _refusal(
    name: str,
    old: TransformationDescription,
    new: TransformationDescription,
    pairs: Sequence[tuple[LeafInfo, LeafInfo]],
    ruled: Collection[str],
) -> Iterator[str]:
    if new.name.startswith(INJECTING):
        return  # the row of the hyper-parameter says which value wins
    leaves = [leaf for _, leaf in pairs]
    own = leaf_name((*leaves[0].path[: 2 * len(new.group) + 2], name))
    if own in ruled or all(leaf.name in ruled for leaf in leaves):
        return
    one, other = _shown(old.settings.get(name)), _shown(new.settings.get(name))
    yield (
        f"`{name}` of `{new.name}` was {one}, is {other}: the saved state means something else "
        "under it. Set it as it was, or say by rules what becomes of the leaves"
    )


def _interrupted(leaf: LeafInfo, name: str, done: int, one: Any, other: Any) -> Iterator[str]:
    """Why a window that was begun cannot go on."""
    if isinstance(one, bool) or isinstance(other, bool):
        if one != other:
            yield (
                f"`{leaf.name}` is {done}: a window with `{name}` {one} was begun and cannot go on "
                f"with {other}; {_ADVICE}"
            )
    elif None in (one, other) or _is_opaque(one) or _is_opaque(other):
        yield (
            f"`{leaf.name}` is {done}: nothing says whether the window that was begun is as long "
            f"as those of the target; {_ADVICE}"
        )
    elif one != other:
        was, now = (f"of {x}" if isinstance(x, int) else "by a function" for x in (one, other))
        article = "another" if was == now else "one"
        yield (
            f"`{leaf.name}` is {done}: a window {was} was begun and cannot go on as {article} "
            f"{now}; {_ADVICE}"
        )


def _is_above(value: Any, count: int) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > count


def _is_opaque(value: Any) -> bool:
    """Whether a setting holds something that is told by its type alone."""
    if isinstance(value, Mapping):
        return any(_is_opaque(child) for name, child in value.items() if name != "function")
    if isinstance(value, tuple):
        return any(map(_is_opaque, value))
    return isinstance(value, str) and value.startswith("<")


def _shown(value: Any) -> str:
    """A setting in few characters."""
    value = without_code(value)
    if isinstance(value, Mapping) and "function" in value:
        value = value["function"]
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
