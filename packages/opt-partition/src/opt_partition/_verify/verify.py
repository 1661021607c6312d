"""Verification of the sharding of a compiled training step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax

from opt_partition._verify import leaf_findings, state_moves
from opt_partition._verify import leaves as leaves_
from opt_partition._verify import moved as moved_
from opt_partition._verify.collectives import Collective, collectives
from opt_partition._verify.concatenated_sums import parse_program
from opt_partition._verify.expected import Expected
from opt_partition._verify.gradients import gradient_all_reduces
from opt_partition._verify.hlo import Module
from opt_partition._verify.ownership import check_roles
from opt_partition._verify.report import Finding, Memory, Report, Severity, Unjudged
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
    """Checks that a compiled step is sharded as expected, and communicates no more than needed.

    There are four kinds of errors.

    1. *The sharding or memory kind of an argument or result differs* from the expected one.
       Arguments that the step does not use are skipped.
    2. *A dtype differs* from the expected one, or the dtype of a parameter or state leaf changes in
       the step. Expected dtypes are given by a `Layout` or by (abstract) arrays.
    3. *State is communicated.* Every value of the compiled program is traced to the arguments it
       depends on, and all communication is summed, including loops: gathers, all-to-alls, permutes,
       and sums over devices of shards that each device wrote to its own position.

       - Values that depend on state only should not be communicated: it is an error if a device
         receives as many elements of a leaf as it holds, in any number of pieces; fewer are noted.
       - Values that depend on state *and* on parameters or gradients may be communicated once per
         parameter, up to the part of it that a device holds, as ZeRO-1 gathers the new parameter or
         its update; and not at all if state and parameter are sharded alike. More means that
         moments were communicated, or sliced and gathered again.
       - Leaves smaller than their parameter, e.g. the rows and columns of a factored second moment,
         may be communicated up to the size of the parameter, which is noted.
       - Shards that are reduced over devices into their own leaf, alone or mixed with gradients
         (`pmean` of the new moments), are an error as if they were gathered. Reductions of which a
         device has reduced its part before, and that are smaller, are what norms, clipping and
         factored moments need, and are not judged.

       Communication of parameters (FSDP) and activations (tensor parallelism) does not depend on
       state and is not judged. For a `lax.cond`, the branch that communicates most counts. In a
       loop that updates all parameters and state, each iteration is a step. A state leaf belongs to
       the parameter whose path is contained in its own; one that belongs to none, as in
       `optax.flatten`, is judged only if communicated by itself. `Report.unjudged` lists what could
       not be judged, and why: derived from such state, through products or reductions, in a loop of
       unknown length, or reduced over devices without ending in the leaf that it comes from.
    4. *Gradients are all-reduced* although each device uses only a part: the sum over mesh axes
       that shard the new parameter or a leaf of the new state has the size of the unsharded
       gradient, and ends up there elementwise. So it is if the gradients of all devices are
       gathered in full and summed on each. Replicated parameters with only factored state are not
       judged.

    Parameters and state that are not donated cause a warning with the bytes held twice, and so does
    donated memory that is not reused.

    Args:
      step: the result of `jax.jit(f, ...).lower(...)`, compiled or not.
      expected: the expected sharding.
      gradients: `'auto'` makes an all-reduced gradient an error if XLA would have created a
        reduce-scatter by itself, i.e. for matrices on GPUs and TPUs; vectors, arrays below 64 KiB
        and anything on CPUs are warnings. `'reduce-scatter'` makes all of them errors, for steps
        that call `psum_scatter` themselves, except for the small ones on TPUs, which XLA
        all-reduces in any case. `'any'` makes all of them notes.
      state_gathers: `'any'` makes communication of state a note, for optimizers that need whole
        matrices.
      raises: `False` returns the report even if there are errors.

    Returns:
      The report: every leaf, every collective with its dependencies and bytes, the findings, and
      the collectives that were not judged. It prints as a line; `details` and `to_json` have
      everything.

    Raises:
      ShardingMismatchError: there are errors; see its `report`.
      AxesError: `expected` does not match the arguments or the result of the step, which must
        return parameters and state with the same paths and shapes.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from jax.sharding import NamedSharding, PartitionSpec
      >>> tx = optax.sgd(0.1, momentum=0.9)
      >>> params = {'w': jnp.ones((8, 4))}
      >>> def step(params, state, batch):
      ...     grads = jax.grad(lambda params: jnp.mean((batch @ params['w']) ** 2))(params)
      ...     updates, state = tx.update(grads, state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> whole = NamedSharding(jax.make_mesh((1,), ('data',)), PartitionSpec())
      >>> jitted = jax.jit(
      ...     step, in_shardings=whole, out_shardings=whole, donate_argnums=(0, 1)
      ... )
      >>> lowered = jitted.lower(params, tx.init(params), jnp.ones((2, 8)))
      >>> report = verify(lowered, Expected(inputs=(whole, whole), outputs=(whole, whole)))
      >>> report.ok, report.bytes_per_device('state'), report.collectives
      (True, 128, ())
    """
    _check("gradients", gradients, Gradients)
    _check("state_gathers", state_gathers, StateGathers)
    compiled = step.compile() if isinstance(step, jax.stages.Lowered) else step
    if not isinstance(compiled, jax.stages.Compiled):
        raise TypeError(
            "`step` must be the result of `jax.jit(f).lower(...)`, compiled or not; got "
            f"{type(step).__name__}"
        )
    if not isinstance(expected, Expected):
        raise TypeError(
            "`expected` must be an `Expected`, e.g. `Expected(inputs=..., outputs=...)`; got "
            f"{type(expected).__name__}"
        )
    inputs = leaves_.input_leaves(compiled, expected)
    module = parse_program(compiled.as_text() or "")
    outputs = leaves_.output_leaves(compiled, expected, inputs, module)
    leaves = [*inputs, *outputs]
    platform = leaves_.platform(leaves)
    reports = leaf_findings.leaf_reports(leaves, module)
    findings = [
        *leaf_findings.sharding_findings(leaves),
        *leaf_findings.dtype_findings(inputs, outputs),
        *check_roles(inputs, outputs, expected),
        *leaf_findings.donation_findings(reports),
        *leaf_findings.undonated_findings(inputs, module.aliased_parameters),
        *leaf_findings.keyword_findings(compiled, expected),
    ]
    judged = judge_collectives(
        module, inputs, outputs, platform, gradients=gradients, state_gathers=state_gathers
    )
    findings += judged.findings
    report = Report(
        platform=platform,
        num_devices=module.num_partitions,
        leaves=tuple(reports),
        collectives=judged.collectives,
        findings=tuple(sorted(findings, key=lambda f: get_args(Severity).index(f.severity))),
        memory=_memory(compiled),
        unjudged=judged.unjudged,
    )
    if raises and not report.ok:
        raise ShardingMismatchError(report)
    return report


@dataclasses.dataclass(frozen=True)
class Judged:
    """The judged collectives of a step; see `Report` for the fields."""

    collectives: tuple[Collective, ...]
    findings: tuple[Finding, ...]
    unjudged: tuple[Unjudged, ...]


def judge_collectives(
    module: Module,
    inputs: Sequence[leaves_.Leaf],
    outputs: Sequence[leaves_.Leaf],
    platform: str,
    *,
    gradients: Gradients = "auto",
    state_gathers: StateGathers = "error",
) -> Judged:
    """Judges the collectives of a compiled step."""
    mesh = leaves_.mesh_shape([*inputs, *outputs])
    moved = moved_.moved_arrays(module, inputs, outputs, mesh)
    if moved is None:
        found = tuple(collectives(module, mesh))
        unjudged = tuple(Unjudged(row, "its origin is unknown") for row in found)
        return Judged(found, (_UNTRACED,), unjudged)
    moves = state_moves.StateMoves(moved, inputs)
    findings = (
        *state_moves.state_gathers(moves, _GATHER_SEVERITY[state_gathers]),
        *gradient_all_reduces(moved, mesh, *_gradient_severities(gradients, platform)),
    )
    return Judged(tuple(array.row for array in moved), findings, tuple(moves.unjudged))


_GATHER_SEVERITY: dict[StateGathers, Severity] = {"error": "error", "any": "note"}
_UNTRACED = Finding(
    "not traced",
    "warning",
    None,
    "the parameters of the compiled program do not match the arguments of the step: the origin "
    "of its collectives is unknown, and gathers and all-reduces are not checked",
)


def _gradient_severities(gradients: Gradients, platform: str) -> tuple[Severity, Severity]:
    """Returns the severities of an all-reduce of a matrix, and of a vector or a small array."""
    if gradients != "auto":
        severity: Severity = "note" if gradients == "any" else "error"
        return severity, "warning" if platform == "tpu" and severity == "error" else severity
    return "warning" if platform == "cpu" else "error", "warning"


def _memory(compiled: jax.stages.Compiled) -> Memory | None:
    """Returns the memory reported by XLA, if any."""
    try:
        stats: Any = compiled.memory_analysis()
    except NotImplementedError:
        return None
    if stats is None:
        return None
    fields = ("argument", "output", "alias", "temp")
    [arguments, outputs, aliased, temporaries] = (
        int(getattr(stats, f"{field}_size_in_bytes")) for field in fields
    )
    host = sum(int(getattr(stats, f"host_{field}_size_in_bytes")) for field in fields)
    return Memory(arguments, outputs, aliased, temporaries, host)


def _check(argument: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"`{argument}` must be one of {get_args(choices)}; got {value!r}")
