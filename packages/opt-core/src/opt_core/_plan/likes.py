"""Matching transformations of the same name by their settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import jax.numpy as jnp

from opt_core._description.values import TransformationDescription
from opt_core._paths import Names
from opt_core._plan.sides import Side

UPDATE: Final = "update"
"""The setting that names the factory of the update function if another one made the state."""


def like_numbers(
    old: Side, new: Side, name: str, was: Names, now: Names
) -> tuple[Mapping[int, int], bool]:
    """Returns, for each number of a transformation in `new`, the matching number in `old`.

    Equal settings are matched first, then the rest in order. Of several the first that acts on a
    common parameter is taken: a chain around groups has one `adam` for each.

    Args:
      old: a state.
      new: the state to make.
      name: of the transformations.
      was: their group in `old`.
      now: their group in `new`.

    Returns:
      The numbers, and whether the matching is unambiguous.
    """
    before, after = old.alike(was, name), new.alike(now, name)

    def best(like: Sequence[TransformationDescription], made: TransformationDescription) -> Any:
        params = _params(new, made)
        return next((one for one in like if params & _params(old, one)), like[0])

    free = list(before)
    found: dict[int, int] = {}
    for is_like in (_is_same, _is_alike, _is_alike_but_for_code):
        for made in after:
            like = [old for old in free if _has_one_update(old, made) and is_like(old, made)]
            if made.number not in found and like:
                found[made.number] = (one := best(like, made)).number
                free.remove(one)
    left = [made for made in after if made.number not in found]
    is_clear = not (left and free) or len(left) == len(free)
    is_one = len(before) == len(after) == 1
    for made in left:
        like = [old for old in free if is_one or _has_one_update(old, made)]
        if like:
            found[made.number] = (one := best(like, made)).number
            free.remove(one)
    return found, is_clear


def _params(side: Side, made: TransformationDescription) -> set[Names]:
    return {*side.followed((made.group, made.name, made.number)), *(made.parameters or ())}


def shared_settings(
    old: TransformationDescription, new: TransformationDescription
) -> Sequence[str]:
    """Returns the settings that both have; the writer of a checkpoint may have known fewer."""
    return sorted(old.settings.keys() & new.settings.keys())


def switched(old: TransformationDescription, new: TransformationDescription) -> Iterator[str]:
    """Yields changed words, and changed switches in records, of user-defined transformations.

    Numbers may change: it is not known which of them give the state its meaning.
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
    """Whether a string stands for a dtype (which leaves show), an array or an opaque object."""
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


def setting_text(value: Any) -> str:
    """Returns a setting as a short text."""
    value = without_code(value)
    if isinstance(value, Mapping) and "function" in value:
        held = ", ".join(f"{k}={setting_text(x)}" for k, x in value.items() if k != "function")
        value = f"{value['function']}({held})" if held else value["function"]
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _has_one_update(old: TransformationDescription, new: TransformationDescription) -> bool:
    """Different functions may update states made by the same one."""
    return bool(old.settings.get(UPDATE) == new.settings.get(UPDATE))


def _is_same(old: TransformationDescription, new: TransformationDescription) -> bool:
    return dict(old.settings) == dict(new.settings)


def _is_alike(old: TransformationDescription, new: TransformationDescription) -> bool:
    return all(old.settings[name] == new.settings[name] for name in shared_settings(old, new))


def _is_alike_but_for_code(old: TransformationDescription, new: TransformationDescription) -> bool:
    """Another release of Python may compile the same function differently."""
    return all(
        without_code(old.settings[name]) == without_code(new.settings[name])
        for name in shared_settings(old, new)
    )
