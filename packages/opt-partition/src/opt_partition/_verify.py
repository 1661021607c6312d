"""Whether a compiled training step does what was asked of its sharding."""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax

from opt_partition import _verify_leaves as leaves_
from opt_partition._collectives import collectives
from opt_partition._hlo import parse
from opt_partition._verify_leaves import Expected
from opt_partition._verify_report import Memory, Report, Severity
from opt_partition.errors import ShardingMismatchError

Gradients = Literal["auto", "reduce-scatter", "any"]
StateGathers = Literal["error", "any"]


def verify(
    step: jax.stages.Compiled | jax.stages.Lowered,
    expected: Expected,
    *,
    gradients: Gradients = "auto",
    state_gathers: StateGathers = "error",
    raises: bool = True,
) -> Report:
    """Compares what a compiled step does with what was asked of its sharding.

    Args:
      step: `jax.jit(f, ...).lower(...)`, compiled or not yet.
      expected: what was asked.
      gradients: see above.
      state_gathers: see above.
      raises: `False` returns the report whatever it says.

    Returns:
      The report; `print` it.

    Raises:
      ShardingMismatchError: the step is not as asked; its `report` says why.
      AxesError: `expected` does not fit the step's arguments or result.
    """
    _check("gradients", gradients, Gradients)
    _check("state_gathers", state_gathers, StateGathers)
    compiled = step.compile() if isinstance(step, jax.stages.Lowered) else step
    if not isinstance(compiled, jax.stages.Compiled):
        raise TypeError(
            "`step` must be what `jax.jit(f).lower(...)` returns, compiled or not; got "
            f"{type(step).__name__}"
        )
    inputs = leaves_.input_leaves(compiled, expected)
    outputs = leaves_.output_leaves(compiled, expected, inputs)
    leaves = [*inputs, *outputs]
    module = parse(compiled.as_text() or "")
    reports = leaves_.leaf_reports(leaves, module)
    findings = [*leaves_.sharding_findings(reports), *leaves_.donation_findings(reports)]
    report = Report(
        platform=leaves_.platform(leaves),
        num_devices=module.num_partitions,
        leaves=tuple(reports),
        collectives=tuple(collectives(module, leaves_.mesh_shape(leaves))),
        findings=tuple(sorted(findings, key=lambda f: get_args(Severity).index(f.severity))),
        memory=_memory(compiled),
    )
    if raises and not report.ok:
        raise ShardingMismatchError(report)
    return report


def _memory(compiled: jax.stages.Compiled) -> Memory | None:
    """XLA's account of the memory, where there is one."""
    try:
        stats: Any = compiled.memory_analysis()
    except NotImplementedError:
        return None
    if stats is None:
        return None
    fields = ("argument", "output", "alias", "temp")
    return Memory(
        *(getattr(stats, f"{field}_size_in_bytes") for field in fields),
        host=sum(getattr(stats, f"host_{field}_size_in_bytes") for field in fields),
    )


def _check(argument: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"`{argument}` must be one of {get_args(choices)}; got {value!r}")
