"""Whether two optimizers are the same, and what changed."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from opt_core import Bearing, TransformationDescription

from opt_checkpoint._naming.schema import LeafInfo, Names, Schema, leaf_name

Like = tuple[Names, str]
"""What transformations of one group have in common whose states have the same names."""

INJECTED: Final = "injected"
"""The setting of what `optax.inject_hyperparams` injects: it is in the state, or a schedule."""

INJECTING: Final = "inject_"
"""Begins the names of those that inject."""

UPDATE: Final = "update"
"""The setting that names what updates a state, where that is not what made it."""


def changes(old: Schema, new: Schema) -> list[str]:
    """Returns what is different between two optimizers, for people to read.

    Other groups, other transformations, another order, and settings that change what an update
    does with its state: booleans (`nesterov`), lengths of windows, and the numbers of
    transformations that keep a state and occur twice. Learning rates and the like may change.

    Args:
      old: of the checkpoint; if it says nothing of its optimizer, nothing is compared.
      new: of the target.
    """
    if old.optimizer is None or new.optimizer is None:
        return []
    before, after = _by_group(old.optimizer), _by_group(new.optimizer)
    found = list(_groups(before, after))
    for group in before.keys() & after.keys():
        found += _order(before[group], after[group], group)
    keepers = {leaf.base for leaf in (*old.leaves, *new.leaves)}
    ones, others = _likes(old.optimizer), _likes(new.optimizer)
    for like in sorted(ones.keys() & others.keys()):
        group, name = like
        pairs = _pairs(ones[like], others[like])
        is_many = name in keepers and len(pairs) > 1
        if is_many and any(i is not None and i != j for j, i in enumerate(pairs)):
            found.append(_moved(group, name, pairs))
        for j, i in enumerate(pairs):
            if i is not None:
                found += settings_changes(ones[like][i], others[like][j], by_number=is_many)
    return [*found, *_other_dimensions(old, new)]


def _other_dimensions(old: Schema, new: Schema) -> Iterator[str]:
    before, after = old.by_name, new.by_name
    for leaf in new.leaves:
        source = before.get(leaf.name)
        if source is not None and have_other_dimensions(source, leaf):
            param = leaf_name(("params", *(leaf.parameter or ())))
            if param in before and param in after and before[param].shape != after[param].shape:
                continue  # the parameter is another one, not the optimizer
            name = leaf_name((*leaf.field, *(leaf.parameter or ())))
            one, other = (
                ",".join("-" if dim is None else str(dim) for dim in found.dimensions or ())
                for found in (source, leaf)
            )
            yield (
                f"`{name}` of `{leaf.base}`{_in(leaf.group)} had the dimensions {one} of its "
                f"parameter, has {other}"
            )


def have_other_dimensions(source: LeafInfo, leaf: LeafInfo) -> bool:
    """Returns whether two leaves of one shape keep other dimensions of their parameter."""
    if source.dimensions is None or leaf.dimensions is None:
        return False
    return source.shape == leaf.shape and source.dimensions != leaf.dimensions


def regrouped_changes(
    old: Schema, new: Schema, pairs: Iterable[tuple[LeafInfo, LeafInfo]]
) -> list[str]:
    """Returns how transformations are set otherwise than those of other groups they come from.

    Args:
      old: of the checkpoint.
      new: of the target.
      pairs: leaves of the checkpoint with those of the target that they become.
    """
    found: dict[str, None] = {}
    seen: set[tuple[Names, str, Names, str]] = set()
    ones, others = _likes(old.transformations), _likes(new.transformations)
    for one, other in pairs:
        key = one.group, one.transformation, other.group, other.transformation
        if one.group == other.group or key in seen:
            continue
        seen.add(key)
        before, after = old.transformation_of(one), new.transformation_of(other)
        if before is not None and after is not None:
            is_many = "#" in one.transformation + other.transformation
            is_many |= len(ones[one.group, before.name]) > 1
            is_many |= len(others[other.group, after.name]) > 1
            found |= dict.fromkeys(settings_changes(before, after, by_number=is_many))
    return list(found)


def occurrences(
    old: Sequence[TransformationDescription], new: Sequence[TransformationDescription]
) -> dict[Like, str | None]:
    """Returns which of the like transformations of the checkpoint each of the target's is.

    Two `ema` of different decay keep their states when they change places, or when one is gone.

    Returns:
      For the group and name (`'ema#2'`) in the target the name in the checkpoint, `None` for one
      that is new; only where these differ.
    """
    before, after = _likes(old), _likes(new)
    found: dict[Like, str | None] = {}
    for group, base in before.keys() & after.keys():
        for j, i in enumerate(_pairs(before[group, base], after[group, base])):
            if i is None and j < len(before[group, base]):
                found[group, _nth(base, j)] = None
            elif i is not None and i != j:
                found[group, _nth(base, j)] = _nth(base, i)
    return found


def home_of(
    transformation: str,
    old: Sequence[TransformationDescription],
    home: Names,
    new: Sequence[TransformationDescription],
    group: Names,
) -> str:
    """Returns the name in a group of the checkpoint of a transformation in one of the target."""
    base, _, number = transformation.partition("#")
    before = _likes(old).get((home, base), [])
    after = _likes(new).get((group, base), [])
    j = int(number or 1) - 1
    i = _pairs(before, after)[j] if j < len(after) else None
    return transformation if i is None else _nth(base, i)


def _pairs(
    old: Sequence[TransformationDescription], new: Sequence[TransformationDescription]
) -> list[int | None]:
    """For each of `new` the position in `old` of the one that it goes on with.

    First those of the same settings, then the others in their order.
    """
    free = list(range(len(old)))
    found: list[int | None] = [None] * len(new)
    for is_like in (_is_same, _is_alike, _is_alike_but_for_code):
        for j, t in enumerate(new):
            like = [i for i in free if _has_one_update(old[i], t) and is_like(old[i], t)]
            if found[j] is None and like:
                found[j] = like[0]
                free.remove(like[0])
    for j, i in enumerate(found):
        like = [k for k in free if len(old) == len(new) == 1 or _has_one_update(old[k], new[j])]
        if i is None and like:
            found[j] = like[0]
            free.remove(like[0])
    return found


def _has_one_update(old: TransformationDescription, new: TransformationDescription) -> bool:
    """States that one function makes may be updated by different ones."""
    return bool(old.settings.get(UPDATE) == new.settings.get(UPDATE))


def _is_same(old: TransformationDescription, new: TransformationDescription) -> bool:
    return dict(old.settings) == dict(new.settings)


def _is_alike(old: TransformationDescription, new: TransformationDescription) -> bool:
    """By the settings of both: what wrote a checkpoint may have known fewer."""
    return all(old.settings[name] == new.settings[name] for name in _shared(old, new))


def _is_alike_but_for_code(old: TransformationDescription, new: TransformationDescription) -> bool:
    """Another release of Python may compile the same function otherwise."""
    return all(
        without_code(old.settings[name]) == without_code(new.settings[name])
        for name in _shared(old, new)
    )


def _shared(old: TransformationDescription, new: TransformationDescription) -> Collection[str]:
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


def _by_group(given: Sequence[TransformationDescription]) -> dict[Names, list[str]]:
    found: dict[Names, list[str]] = {}
    for t in given:
        found.setdefault(t.group, []).append(f"`{t.name}`")
    return found


def _likes(
    given: Sequence[TransformationDescription],
) -> dict[Like, list[TransformationDescription]]:
    """By what they have in common, in the order of their numbers."""
    found: dict[Like, list[TransformationDescription]] = {}
    for t in given:
        found.setdefault((t.group, t.name), []).append(t)
    return {like: sorted(ts, key=lambda t: t.number) for like, ts in found.items()}


def _nth(base: str, i: int) -> str:
    return base if i == 0 else f"{base}#{i + 1}"


def _in(group: Names) -> str:
    return f" in group `{leaf_name(group)}`" if group else ""


def _groups(
    before: Mapping[Names, Sequence[str]], after: Mapping[Names, Sequence[str]]
) -> Iterator[str]:
    """Groups that are gone or new; of their transformations only those that were nowhere."""
    gone = [group for group in before if group not in after]
    new = [group for group in after if group not in before]
    if named := [group for group in gone if group]:
        yield f"{_listed(named)} {'is' if len(named) == 1 else 'are'} gone"
    if named := [group for group in new if group]:
        yield f"{_listed(named)} {'is' if len(named) == 1 else 'are'} new"
    for group in gone:
        if not _is_among(before[group], after.values()):
            yield f"{', '.join(before[group])} is gone{_in(group)}"
    for group in new:
        if not _is_among(after[group], before.values()):
            yield f"{', '.join(after[group])} is new{_in(group)}"


def _is_among(names: Sequence[str], others: Collection[Sequence[str]]) -> bool:
    return any(list(names) == list(other) for other in others)


def _listed(groups: Sequence[Names]) -> str:
    names = ", ".join(f"`{leaf_name(group)}`" for group in groups)
    return f"group{'' if len(groups) == 1 else 's'} {names}"


def _order(old: Sequence[str], new: Sequence[str], group: Names) -> Iterator[str]:
    if old == new:
        return
    if Counter(old) == Counter(new):
        yield f"the order {', '.join(old)} is now {', '.join(new)}{_in(group)}"
        return
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "equal":
            continue
        if i2 > i1:
            yield f"{', '.join(old[i1:i2])} {'is' if i2 == i1 + 1 else 'are'} gone{_in(group)}"
        if j2 > j1:
            yield f"{', '.join(new[j1:j2])} {'is' if j2 == j1 + 1 else 'are'} new{_in(group)}"


def _moved(group: Names, base: str, pairs: Sequence[int | None]) -> str:
    told = ", ".join(
        f"`{_nth(base, j)}` was `{_nth(base, i)}`"
        for j, i in enumerate(pairs)
        if i is not None and i != j
    )
    return f"by their settings, {told}{_in(group)}"


def bearing_of(
    name: str, old: TransformationDescription, new: TransformationDescription
) -> Bearing:
    """Returns what a change of a setting does to the state; the target's definition knows best."""
    return new.bearing.get(name) or old.bearing.get(name) or Bearing("nothing")


def settings_changes(
    old: TransformationDescription, new: TransformationDescription, *, by_number: bool
) -> Iterator[str]:
    """Yields the settings by which updates do something else with the state.

    What must not change at all, or only at times, is a problem of the plan, not among these.

    Args:
      old: of the checkpoint.
      new: of the target.
      by_number: whether numbers are compared too.
    """
    # What is injected comes from the checkpoint.
    by_number = by_number and INJECTED not in old.settings.keys() & new.settings.keys()
    for name in _shared(old, new):
        one, other = old.settings[name], new.settings[name]
        effect = bearing_of(name, old, new).effect
        if one == other or effect in ("refused", "at_or_below_count", "above_count"):
            continue
        where = f"`{name}` of `{new.name}`{_in(new.group)}"
        are_numbers = all(isinstance(x, int | float) for x in (one, other))
        is_switch = any(isinstance(x, bool) for x in (one, other))
        if (is_switch or by_number) and are_numbers:
            yield f"{where} was {one}, is {other}"
        elif is_switch:
            was = one if isinstance(one, bool) else "no boolean"
            yield f"{where} was {was}, is {other if isinstance(other, bool) else 'no boolean'}"
        elif effect == "window":
            length, now = (str(x) if isinstance(x, int) else "a function" for x in (one, other))
            yield f"{where} was {length}, is {now if length != now else 'another'}"
