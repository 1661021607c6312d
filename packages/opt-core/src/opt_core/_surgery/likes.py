"""Which of several transformations of one name each of other ones is, by their settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import jax.numpy as jnp

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


def switched(old: TransformationDescription, new: TransformationDescription) -> Iterator[str]:
    """Yields the words that are others in a user's own transformation, and switches in records.

    Numbers may change: nothing says which of them give its state a meaning.
    """
    if (old.source, new.source) != ("types", "types"):
        return
    before, after = (dict(_switches(made)) for made in (old, new))
    for name in sorted(before.keys() & after.keys()):
        if before[name] != after[name]:
            yield f"`{name}` of `{new.name}` was {before[name]}, is {after[name]}"


def _switches(made: TransformationDescription) -> Iterator[tuple[str, bool | str]]:
    left = [(name, value, False) for name, value in made.settings.items()]
    for name, value, is_inside in left:
        is_word = isinstance(value, str) and not _is_derived(value)
        if (is_word and name not in made.bearing) or (isinstance(value, bool) and is_inside):
            yield name, value
        elif isinstance(value, Mapping) and "function" not in value:
            left += [(f"{name}.{key}", child, True) for key, child in value.items()]


def _is_derived(text: str) -> bool:
    """Whether a word stands for a dtype, which leaves show, an array or something opaque."""
    if re.match(r"<|\w+\[", text):
        return True
    try:
        return bool(jnp.dtype(text).name == text)
    except Exception:  # NumPy parses the text
        return False


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
