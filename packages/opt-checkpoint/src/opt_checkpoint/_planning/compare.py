"""Whether two optimizers are the same, and what changed."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from opt_checkpoint._naming.makers import state_name, transformation_name
from opt_checkpoint._naming.schema import (
    DIGEST,
    DIMENSIONS,
    INJECTED,
    LeafInfo,
    Names,
    Schema,
    Transformation,
    leaf_name,
)

Like = tuple[Names, str]
"""What transformations of one group have in common whose states have the same names."""


def changes(old: Schema, new: Schema) -> list[str]:
    """Returns what is different between two optimizers, for people to read.

    Other groups, other transformations, another order, and settings that change what a state means:
    booleans (`nesterov`), and the numbers of `MultiSteps` and of transformations that keep a state
    and occur twice. Learning rates and the like may change.

    Args:
      old: of the checkpoint; if it says nothing of its optimizer, nothing is compared.
      new: of the target.
    """
    if not old.optimizer or not new.optimizer:
        return []
    before = _by_group(old.optimizer)
    after = _by_group(_as_known(new.optimizer, old.optimizer))
    found = list(_groups(before, after))
    for group in before.keys() & after.keys():
        found += _order(before[group], after[group], group)
    keepers = {leaf.transformation.partition("#")[0] for leaf in (*old.leaves, *new.leaves)}
    ones, others = _likes(old.optimizer), _likes(new.optimizer)
    for like in sorted(ones.keys() & others.keys()):
        group, name = like
        pairs = _pairs(ones[like], others[like])
        is_many = name in keepers and len(pairs) > 1
        if name in keepers and _are_unclear(ones[like], others[like]):
            found.append(
                f"`{name}`: nothing says which of {len(ones[like])} the {len(others[like])} are; "
                f"they go on in their order{_in(group)}"
            )
        if is_many and any(i is not None and i != j for j, i in enumerate(pairs)):
            found.append(_moved(group, name, pairs))
        for j, i in enumerate(pairs):
            if i is not None:
                by_number = is_many or name == "multi_steps"
                found += settings_changes(ones[like][i], others[like][j], by_number=by_number)
    return found


def _as_known(
    new: Sequence[Transformation], old: Sequence[Transformation]
) -> Sequence[Transformation]:
    """Without what is injected into, where a checkpoint was written before that was told."""
    if any(INJECTED in t.settings for t in old):
        return new
    known = [t for t in new if INJECTED not in t.settings or t.name.startswith("inject_")]
    return known if [(t.group, t.name) for t in known] == [(t.group, t.name) for t in old] else new


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
    for one, other in pairs:
        key = one.group, one.transformation, other.group, other.transformation
        if one.group == other.group or key in seen:
            continue
        seen.add(key)
        before, after = transformation_of(one, old), transformation_of(other, new)
        if before is not None and after is not None:
            is_many = "#" in one.transformation + other.transformation
            is_many |= any(
                len(_likes(schema.optimizer)[leaf.group, base_of(leaf)]) > 1
                for leaf, schema in ((one, old), (other, new))
            )
            by_number = is_many or base_of(other) == "multi_steps"
            found |= dict.fromkeys(settings_changes(before, after, by_number=by_number))
    return list(found)


def base_of(leaf: LeafInfo) -> str:
    """Returns the name of a leaf's transformation without its number."""
    return leaf.transformation.partition("#")[0]


def transformation_of(leaf: LeafInfo, schema: Schema) -> Transformation | None:
    """Returns the transformation that keeps a leaf, `None` where it is not known which that is."""
    given = _likes(schema.optimizer).get((leaf.group, base_of(leaf)), [])
    number = int(leaf.transformation.partition("#")[2] or 1)
    if len(given) > 1 and any(t.number is None for t in given):
        return given[0] if all(t.settings == given[0].settings for t in given) else None
    return given[number - 1] if number <= len(given) else None


def occurrences(
    old: Sequence[Transformation], new: Sequence[Transformation]
) -> dict[Like, str | None]:
    """Returns which of the like transformations of the checkpoint each of the target's is.

    Two `ema` of different decay keep their states when they change places, or when one is gone.

    Returns:
      For the group and name (`'ema#2'`) in the target the name in the checkpoint, `None` for one
      that is new; only where these differ, and where nothing says which one it was.
    """
    before, after = _likes(old), _likes(new)
    found: dict[Like, str | None] = {}
    for group, base in before.keys() & after.keys():
        is_unclear = _are_unclear(before[group, base], after[group, base])
        for j, i in enumerate(_pairs(before[group, base], after[group, base])):
            if is_unclear and i is not None:
                found[group, _nth(base, j)] = _nth(base, i)
            elif i is None and j < len(before[group, base]):
                found[group, _nth(base, j)] = None
            elif i is not None and i != j:
                found[group, _nth(base, j)] = _nth(base, i)
    return found


def home_of(
    transformation: str,
    old: Sequence[Transformation],
    home: Names,
    new: Sequence[Transformation],
    group: Names,
) -> str:
    """Returns the name in a group of the checkpoint of a transformation in one of the target."""
    base, _, number = transformation.partition("#")
    before = _likes(old).get((home, base), [])
    after = _likes(new).get((group, base), [])
    j = int(number or 1) - 1
    i = _pairs(before, after)[j] if j < len(after) else None
    return transformation if i is None else _nth(base, i)


def _are_unclear(old: Sequence[Transformation], new: Sequence[Transformation]) -> bool:
    """Whether their order in names does not say which is which, and they are not the same."""
    known = [all(t.number is not None for t in given) for given in (old, new)]
    if all(known) or len(old) == len(new) == 1:
        return False
    return any(known) or len(old) != len(new)


def _pairs(old: Sequence[Transformation], new: Sequence[Transformation]) -> list[int | None]:
    """For each of `new` the position in `old` of the one that it goes on with.

    First those of the same settings, then the others in their order.
    """
    if not all(t.number is not None for t in (*old, *new)):
        return [j if j < len(old) else None for j in range(len(new))]
    free = list(range(len(old)))
    found: list[int | None] = [None] * len(new)
    for is_like in (_is_same, _is_alike, _is_alike_in_numbers):
        for j, t in enumerate(new):
            like = [i for i in free if _is_of_one_name(old[i], t) and is_like(old[i], t)]
            if found[j] is None and like:
                found[j] = like[0]
                free.remove(like[0])
    for j, i in enumerate(found):
        like = [k for k in free if len(old) == len(new) == 1 or _is_of_one_name(old[k], new[j])]
        if i is None and like:
            found[j] = like[0]
            free.remove(like[0])
    return found


def _is_of_one_name(old: Transformation, new: Transformation) -> bool:
    """Those that share an `init` may have different updates, which is what their names say."""
    return transformation_name(old.name) == transformation_name(new.name)


def _is_same(old: Transformation, new: Transformation) -> bool:
    return dict(old.settings) == dict(new.settings)


def _is_alike(old: Transformation, new: Transformation, *, by_digest: bool = True) -> bool:
    """By the settings of both: what wrote a checkpoint may have known fewer."""
    return all(
        old.settings[name] == new.settings[name]
        for name in old.settings.keys() & new.settings.keys()
        if by_digest or not name.endswith(DIGEST)
    )


def _is_alike_in_numbers(old: Transformation, new: Transformation) -> bool:
    """Another release of Python may compile the same function otherwise."""
    return _is_alike(old, new, by_digest=False)


def _by_group(given: Sequence[Transformation]) -> dict[Names, list[str]]:
    found: dict[Names, list[str]] = {}
    for t in given:
        found.setdefault(t.group, []).append(f"`{t.name}`")
    return found


def _likes(given: Sequence[Transformation]) -> dict[Like, list[Transformation]]:
    """By what they have in common, in the order of their numbers."""
    found: dict[Like, list[Transformation]] = {}
    for t in given:
        found.setdefault((t.group, state_name(t)), []).append(t)
    return {like: sorted(ts, key=lambda t: t.number or 0) for like, ts in found.items()}


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


def settings_changes(old: Transformation, new: Transformation, *, by_number: bool) -> Iterator[str]:
    """Yields the settings that change what a state means; all numbers, with `by_number`.

    Booleans do, and which dimensions of parameters are kept.
    """
    before, after = plain_settings(old.settings), plain_settings(new.settings)
    # What is injected comes from the checkpoint.
    by_number = by_number and INJECTED not in old.settings.keys() & new.settings.keys()
    for name in sorted(before.keys() & after.keys()):
        one, other = before[name], after[name]
        is_switch = isinstance(one, int) and isinstance(other, int)
        is_switch &= isinstance(one, bool) or isinstance(other, bool)
        are_numbers = isinstance(one, int | float) and isinstance(other, int | float)
        if one != other and (is_switch or (by_number and are_numbers)):
            yield f"`{name}` of `{new.name}`{_in(new.group)} was {one}, is {other}"
    for name in sorted(before.keys() | after.keys()):
        if isinstance(before.get(name), bool) and name not in after and name + DIGEST in after:
            yield f"`{name}` of `{new.name}`{_in(new.group)} was {before[name]}, is no boolean"
        if isinstance(after.get(name), bool) and name not in before and name + DIGEST in before:
            yield f"`{name}` of `{new.name}`{_in(new.group)} was no boolean, is {after[name]}"
    for name in sorted(old.settings.keys() & new.settings.keys()):
        one, other = old.settings[name], new.settings[name]
        if name.startswith(DIMENSIONS) and one != other:
            yield (
                f"`{name.removeprefix(DIMENSIONS)}` of `{new.name}`{_in(new.group)} had the "
                f"dimensions {one} of its parameter, has {other}"
            )


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings by the names of arguments, not of the attributes that hold them.

    Examples:
      >>> plain_settings({'_every_k_schedule.every_k_schedule': 2, '_use_grad_mean': True})
      {'every_k': 2, 'use_grad_mean': True}
    """
    return {
        name.rpartition(".")[2].lstrip("_").removesuffix("_schedule"): value
        for name, value in settings.items()
    }
