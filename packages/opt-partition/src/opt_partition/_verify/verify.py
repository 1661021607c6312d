"""Verification of the sharding of a compiled training step."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Any, get_args

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from opt_partition._verify.collectives import Collective, collectives
from opt_partition._verify.expected import Expected, Keys, Role
from opt_partition._verify.hlo import Module, parse_program
from opt_partition._verify.judge import Gradients, StateGathers, judge_collectives
from opt_partition._verify.leaves import (
    Leaf,
    check_roles,
    input_leaves,
    output_leaves,
    platform_of,
)
from opt_partition._verify.report import Finding, LeafReport, Memory, Report, Severity
from opt_partition.errors import ShardingMismatchError


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

       - Values that depend on state only: it is an error if a device receives as many elements of
         a leaf as it holds, in any number of pieces; fewer are noted.
       - Values that depend on state *and* on parameters or gradients may be communicated once per
         parameter, up to the part of it that a device holds, as ZeRO-1 gathers the new parameter or
         its update; and not at all if state and parameter are sharded alike.
       - Leaves smaller than their parameter, e.g. the rows and columns of a factored second
         moment, may be communicated up to the size of the parameter, which is noted.
       - Shards that are reduced over devices into their own leaf (`pmean` of the new moments) are
         an error as if they were gathered. Norms, clipping and factored moments reduce parts on the
         device before, and are not judged.

       Communication of parameters (FSDP) and activations (tensor parallelism) is not judged. For
       a `lax.cond`, the branch that communicates most counts; an iteration of a loop that updates
       all parameters and state is a step. A state leaf belongs to the parameter whose path is
       contained in its own; one that belongs to none, as in `optax.flatten`, is judged only if
       communicated by itself. `Report.unjudged` lists what could not be judged, and why.
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
    compiled = _compiled(step)
    if not isinstance(expected, Expected):
        raise TypeError(
            "`expected` must be an `Expected`, e.g. `Expected(inputs=..., outputs=...)`; got "
            f"{type(expected).__name__}"
        )
    inputs = input_leaves(compiled, expected)
    module = parse_program(compiled.as_text() or "")
    outputs = output_leaves(compiled, expected, inputs, module)
    leaves = [*inputs, *outputs]
    reports = leaf_reports(leaves, module)
    unclear = check_roles(inputs, outputs, expected)
    findings = [
        *_sharding_findings(leaves),
        *_dtype_findings(inputs, outputs),
        *([Finding("ownership", "warning", None, unclear)] if unclear else []),
        *donation_findings(reports),
        *undonated_findings(inputs, module.aliased_parameters),
        *_keyword_findings(compiled, expected),
    ]
    platform = platform_of(leaves)
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


def read_collectives(
    step: jax.stages.Compiled | jax.stages.Lowered, mesh: Mesh | AbstractMesh | None = None
) -> tuple[Collective, ...]:
    """Returns every array that a collective of a compiled program moves, in program order.

    For programs that are not training steps; `verify` judges those.

    Args:
      step: `jax.jit(f, ...).lower(...)`, compiled or not yet.
      mesh: names the axes that each collective runs over.

    Examples:
      >>> import jax.numpy as jnp
      >>> read_collectives(jax.jit(jnp.sum).lower(jnp.ones(3)))
      ()
    """
    module = parse_program(_compiled(step).as_text() or "")
    return tuple(collectives(module, None if mesh is None else dict(mesh.shape)))


def _compiled(step: Any) -> jax.stages.Compiled:
    compiled = step.compile() if isinstance(step, jax.stages.Lowered) else step
    if not isinstance(compiled, jax.stages.Compiled):
        raise TypeError(
            "`step` must be the result of `jax.jit(f).lower(...)`, compiled or not; got "
            f"{type(step).__name__}"
        )
    return compiled


def leaf_reports(leaves: Sequence[Leaf], module: Module) -> list[LeafReport]:
    """Returns the report of each leaf."""
    used = [leaf for leaf in leaves if leaf.side == "input" and leaf.found is not None]
    aliased = {id(used[n]) for n in module.aliased_parameters if n < len(used)}
    return [
        LeafReport(
            side=leaf.side,
            path=leaf.path,
            role=leaf.role,
            shape=leaf.shape,
            dtype=_dtype_name(leaf.dtype),
            asked=_in_words(leaf.asked.sharding, leaf),
            found=_in_words(leaf.found, leaf),
            dtype_asked=None if leaf.asked.dtype is None else _dtype_name(leaf.asked.dtype),
            bytes_asked=leaf.bytes_asked,
            bytes_found=leaf.bytes_found,
            ok=leaf.ok and leaf.dtype_ok,
            donated=leaf.donated,
            aliased=id(leaf) in aliased,
        )
        for leaf in leaves
    ]


def _in_words(sharding: Sharding | None, leaf: Leaf) -> str | None:
    """Formats a sharding, e.g. as `P('data', None)`."""
    if not isinstance(sharding, NamedSharding):
        return None if sharding is None else repr(sharding)
    entries = [*sharding.spec, *[None] * (len(leaf.shape) - len(sharding.spec))]
    where = f" in {sharding.memory_kind}" * (sharding.memory_kind not in (None, "device"))
    return f"P({', '.join(map(repr, entries)) if any(entries) else ''}){where}"


def _sharding_findings(leaves: Sequence[Leaf]) -> Iterator[Finding]:
    """Yields an error for each leaf that is not sharded as expected."""
    for leaf in leaves:
        if not leaf.ok:
            asked, found = _in_words(leaf.asked.sharding, leaf), _in_words(leaf.found, leaf)
            elsewhere = ", on other devices or in a different order" * (asked == found)
            yield Finding(
                "sharding",
                "error",
                leaf.path,
                f"{leaf}: expected {asked}, {leaf.bytes_asked:,} bytes per device; found {found}, "
                f"{leaf.bytes_found:,} bytes per device{elsewhere}",
            )


def _dtype_findings(inputs: Sequence[Leaf], outputs: Sequence[Leaf]) -> Iterator[Finding]:
    """Yields an error for each leaf with an unexpected dtype, or whose dtype the step changes."""
    for leaf in (*inputs, *outputs):
        if not leaf.dtype_ok:
            said = f"{leaf}: expected {leaf.asked.dtype}; found {leaf.dtype}"
            yield Finding("dtype", "error", leaf.path, said)
    before: dict[tuple[Role, Keys], Leaf] = {
        (leaf.role, leaf.name): leaf for leaf in inputs if leaf.role != "other"
    }
    for leaf in outputs:
        old = before.get((leaf.role, leaf.name))
        if old is not None and old.dtype != leaf.dtype and leaf.dtype_ok:
            yield Finding(
                "dtype",
                "error",
                leaf.path,
                f"{leaf}: was {old.dtype} as input {old.path}; the step is recompiled for its own "
                "result, and donated memory cannot be reused",
            )


def _keyword_findings(compiled: jax.stages.Compiled, expected: Expected) -> Iterator[Finding]:
    """Yields a note for each keyword argument without an expectation."""
    for name, argument in compiled.args_info[1].items():
        count = len(jax.tree.leaves(argument))
        if count and name not in expected.keywords:
            yield Finding(
                "keyword argument",
                "note",
                name,
                f"{name}: {count} array{'s' * (count > 1)} not checked; pass `Expected(..., "
                f"keywords={{{name!r}: ...}})`, with `None` to accept any sharding",
            )


def donation_findings(reports: Sequence[LeafReport]) -> Iterator[Finding]:
    """Yields a warning for each donated leaf whose memory is not reused."""
    for leaf in reports:
        if leaf.donated and not leaf.aliased and leaf.found and leaf.role != "other":
            yield Finding(
                "donation",
                "warning",
                leaf.path,
                f"{leaf}: donated, but its {leaf.bytes_found:,} bytes are not reused: no result "
                "has its shape, dtype, sharding and memory kind",
            )


def undonated_findings(inputs: Sequence[Leaf], aliased: Collection[int]) -> Iterator[Finding]:
    """Yields a warning if old and new parameters or state are in memory at the same time.

    `aliased` has the numbers, among the used arguments, of those whose memory is reused.
    """
    used = [leaf for leaf in inputs if leaf.found is not None]
    kept = [leaf for n, leaf in enumerate(used) if not leaf.donated and n not in aliased]
    roles: tuple[Role, ...] = ("params", "state")
    held = {role: [leaf for leaf in kept if leaf.role == role] for role in roles}
    sizes = {role: sum(leaf.bytes_found for leaf in leaves) for role, leaves in held.items()}
    if total := sum(sizes.values()):
        each = " and ".join(f"{size:,} of the {role}" for role, size in sizes.items() if size)
        arguments = dict.fromkeys(
            leaf.path.split("/", 1)[0] for leaves in held.values() for leaf in leaves
        )
        numbers = tuple(int(name) for name in arguments if name.isdigit())
        names = tuple(name for name in arguments if not name.isdigit())
        remedy = [f"donate_argnums={numbers}"] * bool(numbers)
        remedy += [f"donate_argnames={names}"] * bool(names)
        yield Finding(
            "donation",
            "warning",
            next(leaf.path for leaves in held.values() for leaf in leaves),
            f"{total:,} bytes per device are held twice, before and after the step: {each}; pass "
            f"`jax.jit(..., {', '.join(remedy)})`",
        )


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


_dtype_name = functools.cache(str)  # NumPy composes the name of a dtype each time
