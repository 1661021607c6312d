"""Whether a compiled training step does what was asked of its sharding."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax

from opt_partition._verify import leaf_findings, state_moves
from opt_partition._verify import leaves as leaves_
from opt_partition._verify import moved as moved_
from opt_partition._verify.collectives import Collective, collectives
from opt_partition._verify.expected import Expected
from opt_partition._verify.gradients import gradient_all_reduces
from opt_partition._verify.hlo import Module, parse
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
    """Compares what a compiled step does with what was asked of its sharding.

    Four things are errors.

    1. *A leaf does not lie as asked*, going in or coming out, or lies in another memory. Arguments
       that the step does not use lie nowhere and are passed over.
    2. *A dtype is not as asked*, or a parameter or a leaf of the state has another one coming out
       than going in. Dtypes are asked for by a `Layout` or by arrays, abstract ones or others.
    3. *State moves.* Every value of the compiled program is traced to the arguments that it depends
       on, and all that moves is summed, loops multiplied out: gathers, all-to-alls, permutes, and
       sums over devices of shards that each device put at a place of its own. Of what depends on
       state alone, nothing should move: an error as soon as a device gets as many elements of a
       leaf as it holds, in whatever pieces; less is noted. What depends on state *and* on
       parameters or gradients may move once for each parameter, up to the part of it that a
       device holds, as ZeRO-1 gathers the new parameter or its update; and not at all where state
       and parameter lie alike. More means that moments were moved, or sliced and gathered again.
       What FSDP moves of parameters and tensor parallelism of activations depends on no state and
       is not judged here. Leaves smaller than their parameter, as the rows and columns of a
       factored second moment, may move up to the parameter's size; that is noted. Of a `lax.cond`,
       the branch that moves most counts. Where a loop makes parameters and state anew, each
       iteration is a step. A state leaf belongs to the parameter whose path is part of its own;
       one that belongs to none, as `optax.flatten` keeps, is judged only where it moves by itself.
       `Report.unjudged` lists what moves and could not be judged, and why: made of such state,
       by products or reductions, or in a loop whose length is not known.
    4. *Gradients are all-reduced* of which each device then uses its part: the sum, taken over mesh
       axes that the new parameter or a leaf of the new state is divided over, is as large as if it
       were not, and ends up there element by element. Parameters with nothing but factored
       state, replicated themselves, are not judged.

    Parameters and state that were not donated are a warning that says how many bytes are held
    twice; so is donated memory that no result takes over.

    Args:
      step: `jax.jit(f, ...).lower(...)`, compiled or not yet.
      expected: what was asked.
      gradients: `'auto'` makes an all-reduced gradient an error where XLA would have made a
        reduce-scatter of it by itself: of matrices on GPUs and TPUs. Vectors and what has less
        than 64 KiB it leaves be, and on CPUs it leaves all be; these are warnings.
        `'reduce-scatter'` makes them errors everywhere, for steps that say `psum_scatter`
        themselves, but for those small ones on TPUs, where XLA sums them whole all the same;
        `'any'` makes all of them notes.
      state_gathers: `'any'` makes moves of state notes, for optimizers that need whole matrices.
      raises: `False` returns the report whatever it says.

    Returns:
      The report: every leaf, every collective with what it depends on, bytes, findings, and what
      was not judged. Its `str` is a table, `to_json` all of it.

    Raises:
      ShardingMismatchError: the step is not as asked; its `report` says why.
      AxesError: `expected` does not fit the step's arguments or result: its `params` and `state`
        must be returned as they came, with the same paths and shapes.

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
            "`step` must be what `jax.jit(f).lower(...)` returns, compiled or not; got "
            f"{type(step).__name__}"
        )
    if not isinstance(expected, Expected):
        raise TypeError(
            "`expected` must be an `Expected`, as `Expected(inputs=..., outputs=...)`; got "
            f"{type(expected).__name__}"
        )
    inputs = leaves_.input_leaves(compiled, expected)
    module = parse(compiled.as_text() or "")
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
    """The collectives of a step, and what is to be said of them; fields as of `Report`."""

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
    """Holds what the collectives of a compiled step move against what they should."""
    mesh = leaves_.mesh_shape([*inputs, *outputs])
    moved = moved_.moved_arrays(module, inputs, outputs, mesh)
    if moved is None:
        found = tuple(collectives(module, mesh))
        unjudged = tuple(Unjudged(row, "where it comes from is not known") for row in found)
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
    "the parameters of the compiled program are not the arguments that the step uses: where its "
    "collectives come from is not known, and gathers and all-reduces are not judged",
)


def _gradient_severities(gradients: Gradients, platform: str) -> tuple[Severity, Severity]:
    """How bad an all-reduce is, of a matrix and of a vector or of little."""
    if gradients != "auto":
        severity: Severity = "note" if gradients == "any" else "error"
        return severity, "warning" if platform == "tpu" and severity == "error" else severity
    return "warning" if platform == "cpu" else "error", "warning"


def _memory(compiled: jax.stages.Compiled) -> Memory | None:
    """XLA's account of the memory, where there is one."""
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
