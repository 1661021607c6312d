"""Whether two optimizers are the same, and what changed."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from opt_optax_bridge.checkpoint._naming.makers import transformation_name
from opt_optax_bridge.checkpoint._naming.schema import Names, Schema, Transformation, leaf_name

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
    before, after = _by_group(old.optimizer), _by_group(new.optimizer)
    found = list(_groups(before, after))
    for group in before.keys() & after.keys():
        found += _order(before[group], after[group], group)
    keepers = {leaf.transformation.partition("#")[0] for leaf in (*old.leaves, *new.leaves)}
    ones, others = _likes(old.optimizer), _likes(new.optimizer)
    for like in sorted(ones.keys() & others.keys()):
        group, name = like
        pairs = _pairs(ones[like], others[like])
        is_many = name in keepers and len(pairs) > 1
        if is_many and any(i is not None and i != j for j, i in enumerate(pairs)):
            found.append(_moved(group, name, pairs))
        for j, i in enumerate(pairs):
            if i is not None:
                by_number = is_many or name == "multi_steps"
                found += _settings(ones[like][i], others[like][j], by_number=by_number)
    return found


def occurrences(
    old: Sequence[Transformation], new: Sequence[Transformation]
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


def _pairs(old: Sequence[Transformation], new: Sequence[Transformation]) -> list[int | None]:
    """For each of `new` the position in `old` of the one that it goes on with.

    First those of the same settings, then the others in their order.
    """
    settings = [dict(t.settings) for t in old]
    free = list(range(len(old)))
    found: list[int | None] = [None] * len(new)
    for j, t in enumerate(new):
        like = [i for i in free if settings[i] == dict(t.settings)]
        if like:
            found[j] = like[0]
            free.remove(like[0])
    for j, i in enumerate(found):
        if i is None and free:
            found[j] = free.pop(0)
    return found


def _by_group(given: Sequence[Transformation]) -> dict[Names, list[str]]:
    found: dict[Names, list[str]] = {}
    for t in given:
        found.setdefault(t.group, []).append(f"`{t.name}`")
    return found


def _likes(given: Sequence[Transformation]) -> dict[Like, list[Transformation]]:
    found: dict[Like, list[Transformation]] = {}
    for t in given:
        found.setdefault((t.group, transformation_name(t.name)), []).append(t)
    return found


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


def _settings(old: Transformation, new: Transformation, *, by_number: bool) -> Iterator[str]:
    kinds = (bool, int, float) if by_number else (bool,)
    before, after = plain_settings(old.settings), plain_settings(new.settings)
    for name in sorted(before.keys() & after.keys()):
        one, other = before[name], after[name]
        if one != other and isinstance(one, kinds) and isinstance(other, kinds):
            yield f"`{name}` of `{new.name}`{_in(new.group)} was {one}, is {other}"


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


def setting(given: Sequence[Transformation], group: Names, name: str) -> Mapping[str, Any]:
    """Returns the settings of the first transformation of a name in a group, if there is one."""
    for t in given:
        if transformation_name(t.name) == name and t.group == group:
            return plain_settings(t.settings)
    return {}
