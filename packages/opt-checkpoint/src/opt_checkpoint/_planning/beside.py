"""What becomes of one leaf beside what becomes of others."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence

from opt_checkpoint._naming.schema import Names, Schema
from opt_checkpoint._planning.plan import Row
from opt_checkpoint._planning.rules import Policy
from opt_checkpoint._planning.windows import Running, loss


def with_notes(rows: Iterable[Row]) -> list[Row]:
    """Says of what starts anew beside a count that goes on that it does."""
    rows = list(rows)
    counts: dict[tuple[Names, str], str] = {}
    for row in rows:
        leaf = row.leaf
        if row.sources and leaf.transformation and leaf.parameter is None and row.value:
            counts.setdefault(
                (leaf.group, leaf.transformation), f"`{leaf.path[-1]}` goes on from {row.value}"
            )
    return [
        dataclasses.replace(row, note=f"as `init` makes it, while {counts[where]}")
        if row.action == "initialised"
        and row.leaf.parameter is not None
        and not row.note
        and (where := (row.leaf.group, row.leaf.transformation)) in counts
        else row
        for row in rows
    ]


def with_initial(rows: Iterable[Row], saved: Schema, target: Schema) -> list[Row]:
    """Says of leaves that go on which settings only made their first values."""
    found = []
    leaves = saved.by_name
    for row in rows:
        new = target.transformation_of(row.leaf)
        is_of_values = row.sources and row.leaf.role not in ("count", "schedule_count")
        old = saved.transformation_of(leaves[row.sources[0]]) if is_of_values else None
        notes = [row.note] if row.note else []
        if old is not None and new is not None:
            for name, bearing in new.bearing.items():
                one, other = old.settings.get(name), new.settings.get(name)
                if bearing.effect == "initial" and name in old.settings and one != other:
                    notes.append(f"`{name}` was {one}, is {other}: no effect on the saved state")
        found.append(dataclasses.replace(row, note=", ".join(notes)))
    return found


def with_counts(
    rows: Iterable[Row], anew: Collection[tuple[Names, str]], policy: Policy
) -> list[Row]:
    """Refuses a count that would start anew beside moments that rules keep.

    Args:
      rows: what becomes of the leaves of the target.
      anew: the groups and names of the transformations that start anew.
      policy: what is admitted; a rule for the count itself admits it.
    """
    rows = list(rows)
    ruled: dict[tuple[Names, str], str] = {}
    for row in rows:
        where = row.leaf.group, row.leaf.transformation
        is_ruled = row.by is not None
        if where in anew and row.leaf.parameter is not None and is_ruled:
            ruled.setdefault(where, row.leaf.name)
    return [
        dataclasses.replace(
            row,
            problem=f"{row.note}, while a rule keeps `{ruled[where]}`: say by a rule what becomes "
            "of this leaf too",
        )
        if row.action == "initialised"
        and row.leaf.parameter is None
        and not row.problem
        and (where := (row.leaf.group, row.leaf.transformation)) in ruled
        and not _is_anew(row.leaf.name, policy)
        else row
        for row in rows
    ]


def joined(row: Row, running: Running, policy: Policy) -> Row:
    """Refuses what would begin in the middle of a window, unless a rule says so of the leaf."""
    if row.action != "initialised" or row.problem or _is_anew(row.leaf.name, policy):
        return row
    return dataclasses.replace(row, problem=running.joined(row.leaf))


def dropped(
    saved: Schema,
    rows: Sequence[Row],
    running: Running,
    policy: Policy,
    trained: Collection[Names],
) -> Iterator[Row]:
    """Yields the leaves of a checkpoint that nothing takes.

    Args:
      saved: of the checkpoint.
      rows: what becomes of the leaves of the target.
      running: the windows that go on.
      policy: what is admitted.
      trained: the parameters of the checkpoint that the target goes on to train.
    """
    used = {name for row in rows for name in row.sources}
    anew = {row.leaf.name for row in rows if row.is_ok and not row.sources}
    for leaf in saved.leaves:
        if leaf.kind == "extra" or leaf.name in used:
            continue
        by_rule = policy.rule(leaf.name, drop=True) is not None
        lost = "" if by_rule else loss(leaf, saved)
        problem = f"{lost}: save at the end of a window, or drop it by a rule" if lost else ""
        is_named = by_rule or (leaf.name in anew and _is_anew(leaf.name, policy))
        if not problem and not is_named and leaf.parameter in trained:
            problem = running.left(leaf)
        admitted = by_rule or "drop" in policy.allow or leaf.name in anew
        yield Row(leaf, "dropped", kinds=("drop",), problem=problem, is_admitted=admitted)
    yield from _left_slices(saved, rows, policy)


def _left_slices(saved: Schema, rows: Sequence[Row], policy: Policy) -> Iterator[Row]:
    """Yields the slices of leaves that are taken apart, of which nothing takes some."""
    taken: dict[tuple[str, int], set[int | None]] = {}
    whole = {name for row in rows if row.how != "slice" for name in row.sources}
    for row in rows:
        if row.how == "slice" and row.sources[0] not in whole:
            taken.setdefault((row.sources[0], row.axis), set()).add(row.index)
    leaves = saved.by_name
    for (name, axis), indices in taken.items():
        leaf = leaves[name]
        by_rule = policy.rule(name, drop=True) is not None
        shape = (*leaf.shape[:axis], *leaf.shape[axis + 1 :])
        for index in sorted(set(range(leaf.shape[axis])) - indices):
            where = ", ".join([*[":"] * axis, str(index)])
            one = dataclasses.replace(
                leaf, path=(*leaf.path[:-1], f"{leaf.path[-1]}[{where}]"), shape=shape
            )
            admitted = by_rule or "drop" in policy.allow
            yield Row(one, "dropped", kinds=("drop",), is_admitted=admitted)


def _is_anew(name: str, policy: Policy) -> bool:
    """Whether a rule says of a leaf of the target that it is not to come from the checkpoint."""
    found = policy.rule(name)
    return found is not None and found[1] in ("initialise", "keep")
