"""Which of several transformations of one name each of other ones is, by their settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from opt_core._description.values import TransformationDescription

UPDATE: Final = "update"
"""The setting that names what updates a state, where that is not what made it."""


def like_numbers(
    before: Sequence[TransformationDescription], after: Sequence[TransformationDescription]
) -> tuple[Mapping[int, int], bool]:
    """Returns for the numbers of `after` those of `before` that they go on with.

    First those of the same settings, then the others in their order.

    Returns:
      The numbers, and whether that is certain.
    """
    free = list(before)
    found: dict[int, int] = {}
    for is_like in (_is_same, _is_alike, _is_alike_but_for_code):
        for made in after:
            like = [old for old in free if _has_one_update(old, made) and is_like(old, made)]
            if made.number not in found and like:
                found[made.number] = like[0].number
                free.remove(like[0])
    left = [made for made in after if made.number not in found]
    is_clear = not (left and free) or len(left) == len(free)
    is_one = len(before) == len(after) == 1
    for made in left:
        like = [old for old in free if is_one or _has_one_update(old, made)]
        if like:
            found[made.number] = like[0].number
            free.remove(like[0])
    return found, is_clear


def shared_settings(
    old: TransformationDescription, new: TransformationDescription
) -> Sequence[str]:
    """Returns the settings that both tell: what wrote a checkpoint may have known fewer."""
    return sorted(old.settings.keys() & new.settings.keys())


def without_code(value: Any) -> Any:
    """Returns a setting without the digests of the code of functions."""
    if isinstance(value, Mapping):
        is_function = "function" in value
        return {
            name: without_code(child)
            for name, child in value.items()
            if not (is_function and name == "code")
        }
    return tuple(map(without_code, value)) if isinstance(value, tuple) else value


def _has_one_update(old: TransformationDescription, new: TransformationDescription) -> bool:
    """States that one function makes may be updated by different ones."""
    return bool(old.settings.get(UPDATE) == new.settings.get(UPDATE))


def _is_same(old: TransformationDescription, new: TransformationDescription) -> bool:
    return dict(old.settings) == dict(new.settings)


def _is_alike(old: TransformationDescription, new: TransformationDescription) -> bool:
    return all(old.settings[name] == new.settings[name] for name in shared_settings(old, new))


def _is_alike_but_for_code(old: TransformationDescription, new: TransformationDescription) -> bool:
    """Another release of Python may compile the same function otherwise."""
    return all(
        without_code(old.settings[name]) == without_code(new.settings[name])
        for name in shared_settings(old, new)
    )
