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
    """Returns the name that instructions of a group carry through compilation."""
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
    for row in read_collectives(compiled):
        found = _SCOPE.search(row.op_name)
        if found is None or int(found[1]) >= len(plan.groups):
            others.append(f"{row.name}: {row.kind} {row.dtype}{list(row.shape)} {row.op_name}")
            continue
        counts[int(found[1])] += row.count
        moved[int(found[1])] += round(row.count * math.prod(row.shape) * _itemsize(row.dtype))
    problems = [
        f"group {number} ({group.leaves[0]}, {group.choice}): planned {group.collectives} "
        f"collectives and {group.bytes_per_device:,} bytes, found {count} and {size:,}"
        for number, (group, count, size) in enumerate(zip(plan.groups, counts, moved, strict=True))
        if count > group.collectives or size > group.bytes_per_device
    ]
    if any(group.collectives for group in plan.groups) and not any(counts):
        problems.append("none of the planned collectives is in the program: is it of this plan?")
    if exclusive and others:
        problems.append("collectives of nothing that was planned:\n    " + "\n    ".join(others))
    if problems:
        raise PlanMismatchError("the program is not as planned:\n  " + "\n  ".join(problems))


def _itemsize(dtype: str) -> float:
    """Bytes of an element, by HLO's name.

    Examples:
      >>> _itemsize('f32'), _itemsize('bf16'), _itemsize('pred')
      (4.0, 2.0, 1.0)
    """
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) / 8 if bits else 1.0
