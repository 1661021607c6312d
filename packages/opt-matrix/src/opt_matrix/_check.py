"""What a compiled program moves, against what was planned."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import jax

from opt_matrix.errors import OptionError, PlanMismatchError

if TYPE_CHECKING:
    from opt_matrix._plan import MatrixPlan

_SCOPE = re.compile(r"\bopt_matrix\.(\d+)\b")


def scope(number: int) -> str:
    """The name that instructions of a group carry through compilation."""
    return f"opt_matrix.{number}"


def check(plan: MatrixPlan, compiled: Any, *, exclusive: bool) -> None:
    """See `MatrixPlan.check`."""
    try:
        from opt_partition import read_collectives
    except ImportError:
        raise OptionError(
            "`check` reads the program with opt-partition: install `opt-matrix[partition]`"
        ) from None
    if not isinstance(compiled, jax.stages.Compiled):
        raise OptionError(
            "`compiled` must be what `jax.jit(f).lower(...).compile()` returns; got "
            f"{type(compiled).__name__}"
        )
    counts, moved, others = [0] * len(plan.groups), [0] * len(plan.groups), list[str]()
    together = [
        set(range(first, first + turns)) for first, turns in plan.loops() for _ in range(turns)
    ]
    for row in read_collectives(compiled):
        scopes = [int(number) for number in _SCOPE.findall(row.op_name)]
        scoped = sorted(set(scopes))
        is_known = bool(scoped) and scoped[-1] < len(plan.groups)
        # XLA may also combine a sum of a group with sums of others, such as that of the loss.
        is_mixed = row.op_name.count(":") >= len(scopes)
        if is_known and is_mixed and row.shape[:1] not in {(plan.groups[n].count,) for n in scoped}:
            is_known = False
        if not is_known:
            others.append(f"{row.name}: {row.kind} {row.dtype}{list(row.shape)} {row.op_name}")
            continue
        # XLA may combine sums of several groups in one collective.
        joined = set[int]().union(*(together[number] for number in scoped))
        for number in joined:
            together[number] = joined
        counts[scoped[0]] += row.count
        moved[scoped[0]] += round(row.count * math.prod(row.shape) * _itemsize(row.dtype))
    problems = []
    for numbers in sorted({tuple(sorted(joined)) for joined in together}):
        groups = [plan.groups[number] for number in numbers]
        expected = sum(group.collectives for group in groups)
        planned = sum(group.bytes_per_device for group in groups)
        count, size = (sum(each[number] for number in numbers) for each in (counts, moved))
        if count > expected or size > planned:
            named = ", ".join(
                f"group {number} ({group.leaves[0]}, {group.choice})"
                for number, group in zip(numbers, groups, strict=True)
            )
            problems.append(
                f"{named}: planned {expected} collectives and {planned:,} bytes, found {count} "
                f"and {size:,}"
            )
    if any(group.collectives for group in plan.groups) and not any(counts):
        problems.append("none of the planned collectives is in the program: is it of this plan?")
    if exclusive and others:
        problems.append("collectives of nothing that was planned:\n    " + "\n    ".join(others))
    if problems:
        raise PlanMismatchError("the program is not as planned:\n  " + "\n  ".join(problems))


def _itemsize(dtype: str) -> float:
    """Bytes of an element, by HLO's name, as `bf16`."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) / 8 if bits else 1.0
