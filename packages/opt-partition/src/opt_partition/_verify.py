"""Verification of the sharding of a compiled training step, and the report."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, get_args

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from opt_partition._collectives import Collective, collectives
from opt_partition._display import format_table, human_bytes, listed
from opt_partition._hlo import parse_program
from opt_partition._judge import (
    Finding,
    Gradients,
    Severity,
    StateGathers,
    Unjudged,
    judge_collectives,
)
from opt_partition._layout import check_choice
from opt_partition._leaves import (
    Expected,
    Keys,
    LeafReport,
    Role,
    Side,
    input_leaves,
    output_leaves,
    owners,
    trace_step,
)
from opt_partition.errors import AxesError, ShardingMismatchError


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of `verify`; prints as a verdict of one line, with the figures behind it.

    `details` has the findings and the collectives, `to_json` every field.

    Attributes:
      platform: platform that the step was compiled for, e.g. `'cpu'`.
      num_devices: number of devices that run the step.
      leaves: every argument and result.
      collectives: every array communicated by a collective.
      findings: the problems found; errors first.
      unjudged: the collectives that communicate state, or values derived from it, and that `verify`
        could not judge.
    """

    platform: str
    num_devices: int
    leaves: tuple[LeafReport, ...]
    collectives: tuple[Collective, ...]
    findings: tuple[Finding, ...]
    unjudged: tuple[Unjudged, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there are no errors."""
        return not self.errors

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings for which `verify` raises."""
        return tuple(f for f in self.findings if f.severity == "error")

    def bytes_per_device(self, role: Role, side: Side = "input") -> int:
        """Returns the bytes per device of the parameters, the state or the rest."""
        return sum(
            leaf.bytes_found for leaf in self.leaves if (leaf.side, leaf.role) == (side, role)
        )

    @property
    def collective_bytes(self) -> int:
        """Bytes sent by one device per step; loops of unknown length count once."""
        return _total_bytes(self.collectives)

    def to_json(self, indent: int | None = None) -> str:
        """Returns all fields of the report as JSON."""
        data = {"ok": self.ok, **dataclasses.asdict(self)}
        return json.dumps(data, indent=indent, default=str)

    def __str__(self) -> str:
        checked = sum(leaf.asked is not None for leaf in self.leaves)
        params = human_bytes(self.bytes_per_device("params"))
        state = human_bytes(self.bytes_per_device("state"))
        sent = human_bytes(self.collective_bytes)
        others = self._counts("warning", "note")
        others += [f"{len(self.unjudged)} not judged"] * bool(self.unjudged)
        figures = [
            f"{checked} of {len(self.leaves)} leaves checked",
            f"{params} of parameters and {state} of state per device",
            f"{_several(len(self.collectives), 'collective')}, {sent} sent per device and step",
        ]
        verdict = ", ".join(self._counts("error")) or "as expected"
        figures += [", ".join(others)] * bool(others)
        devices = _several(self.num_devices, f"{self.platform} device")
        return f"{verdict} on {devices}: {'; '.join(figures)}"

    def _counts(self, *severities: Severity) -> list[str]:
        """Returns how many findings of each severity there are, and of which kinds."""
        said = []
        for severity in severities:
            kinds = Counter(f.kind for f in self.findings if f.severity == severity)
            if number := kinds.total():
                said.append(f"{_several(number, severity)} ({', '.join(kinds)})")
        return said

    def details(self) -> str:
        """Returns the verdict, the findings with what to do, and a table of the collectives."""
        lines: list[str] = []
        for kind in dict.fromkeys(finding.kind for finding in self.findings):
            lines += _first([f for f in self.findings if f.kind == kind], "findings")
        lines += [f"not judged: {line}" for line in _first(self.unjudged, "unjudged")]
        kinds = dict.fromkeys(finding.kind for finding in self.errors)
        lines += [f"what to do: {_ADVICE[kind]}" for kind in kinds]
        table = _collective_table(self.collectives).split("\n")
        indented = [f"  {line}" for line in (*lines, "collectives, per device and step", *table)]
        return "\n".join([str(self), *indented])


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
    3. *State is communicated.* Every value of the program is traced to the arguments it depends on,
       and what a device receives is summed over loops and all kinds of collectives. A state leaf
       belongs to the parameter whose path is contained in its own. Allowed are

       - of state alone, fewer elements of a leaf than a device holds;
       - of state mixed with parameters or gradients, once the part of the parameter that a device
         holds, as ZeRO-1 gathers the update; nothing if state and parameter are sharded alike;
       - of leaves smaller than their parameter, such as the rows of a factored second moment, as
         much as the parameter has.

       Shards reduced over devices into their own leaf (`pmean` of new moments) count like gathered
       ones; norms, clipping and factored moments, which reduce on the device before, do not. Of a
       `lax.cond` the branch that communicates most counts, and a loop over steps counts as one.
       Parameters (FSDP) and activations are not judged; `Report.unjudged` lists what could not be.
    4. *Gradients are all-reduced*, or gathered and summed, although each device uses only a part:
       the sum over mesh axes that shard the new parameter or state has the size of the unsharded
       gradient, and ends up there elementwise.

    Parameters and state that are not donated cause a warning with the bytes held twice, and so does
    donated memory that is not reused.

    Args:
      step: the result of `jax.jit(f, ...).lower(...)`, compiled or not; not of `nnx.jit`.
      expected: the expected sharding.
      gradients: `'auto'` makes an all-reduced gradient an error where XLA creates reduce-scatters
        by itself, i.e. of matrices on GPUs and TPUs, and a warning elsewhere: vectors, arrays below
        64 KiB, CPUs. `'reduce-scatter'`, for steps that call `psum_scatter`, makes all of them
        errors, except small ones on TPUs; `'any'` makes them notes.
      state_gathers: `'any'` makes communication of state a note, for optimizers that need whole
        matrices.
      raises: `False` returns the report even if there are errors.

    Returns:
      The report. It prints as a line; `details` and `to_json` have everything.

    Raises:
      ShardingMismatchError: there are errors; see its `report`.
      AxesError: `expected` does not match the arguments or the result of the step, which must
        return parameters and state with the same paths and shapes.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from jax.sharding import NamedSharding, PartitionSpec
      >>> tx = optax.sgd(0.1, momentum=0.9)
      >>> params = {'w': jnp.ones((8, 4))}
      >>> def step(params, state, grads):
      ...     updates, state = tx.update(grads, state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> whole = NamedSharding(jax.make_mesh((1,), ('data',)), PartitionSpec())
      >>> jitted = jax.jit(step, out_shardings=whole, donate_argnums=(0, 1))
      >>> lowered = jitted.lower(*jax.device_put((params, tx.init(params), params), whole))
      >>> report = verify(lowered, Expected(inputs=(whole, whole), outputs=(whole, whole)))
      >>> report.ok, report.bytes_per_device('state'), report.collectives
      (True, 128, ())
    """
    check_choice("gradients", gradients, get_args(Gradients))
    check_choice("state_gathers", state_gathers, get_args(StateGathers))
    compiled = _compiled(step)
    if any(map(_is_numbered, jax.tree.leaves(compiled.args_info, is_leaf=_is_numbered))):
        raise TypeError(f"{_STEP}. {_NNX_JIT}")
    module = parse_program(compiled.as_text() or "")
    inputs = input_leaves(compiled, expected, module)
    traced = trace_step(module, inputs)
    outputs = output_leaves(compiled, expected, inputs, traced)
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    devices = (device for sharding in shardings for device in sharding.device_set)
    platform = next((device.platform for device in devices), jax.default_backend())
    judged = judge_collectives(
        module,
        traced,
        inputs,
        outputs,
        dict(max(meshes, key=attrgetter("size")).shape) if meshes else {},
        platform,
        gradients=gradients,
        state_gathers=state_gathers,
    )
    findings = [
        *_leaf_findings(inputs, outputs),
        *_role_findings(inputs, outputs, expected),
        *donation_findings(inputs),
        *_keyword_findings(compiled, expected),
        *judged.findings,
    ]
    report = Report(
        platform=platform,
        num_devices=module.num_partitions,
        leaves=(*inputs, *outputs),
        collectives=judged.collectives,
        findings=tuple(sorted(findings, key=lambda f: get_args(Severity).index(f.severity))),
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
    return tuple(collectives(module, {} if mesh is None else dict(mesh.shape)))


def _compiled(step: Any) -> jax.stages.Compiled:
    compiled = step.compile() if isinstance(step, jax.stages.Lowered) else step
    if not isinstance(compiled, jax.stages.Compiled):
        kind = f"{type(step).__module__}.{type(step).__qualname__}"
        raise TypeError(f"{_STEP}; got {kind}{f'. {_NNX_JIT}' * kind.startswith('flax.nnx')}")
    return compiled


_STEP = "`step` must be the result of `jax.jit(f).lower(...)`, compiled or not"
_NNX_JIT = (
    "`nnx.jit` numbers the leaves of its arguments: compile with `jax.jit` a function that takes "
    "and returns the model and the optimizer, which are pytrees"
)


def _is_numbered(node: Any) -> bool:
    return type(node).__module__.startswith("flax.nnx") and type(node).__name__ == "NodeStates"


def _leaf_findings(
    inputs: Sequence[LeafReport], outputs: Sequence[LeafReport]
) -> Iterator[Finding]:
    """Yields an error for each unexpected sharding or dtype, and for each dtype that changes."""
    for leaf in (*inputs, *outputs):
        if not leaf.sharding_ok:
            elsewhere = ", on other devices or in a different order" * (leaf.asked == leaf.found)
            message = (
                f"{leaf}: expected {leaf.asked}, {leaf.bytes_asked:,} bytes per device; found "
                f"{leaf.found}, {leaf.bytes_found:,} bytes per device{elsewhere}"
            )
            yield Finding("sharding", "error", leaf.path, message)
        if leaf.dtype_asked not in (None, leaf.dtype):
            message = f"{leaf}: expected {leaf.dtype_asked}; found {leaf.dtype}"
            yield Finding("dtype", "error", leaf.path, message)
    before: dict[tuple[Role, Keys], LeafReport]
    before = {(leaf.role, leaf.name): leaf for leaf in inputs if leaf.role != "other"}
    for leaf in outputs:
        old = before.get((leaf.role, leaf.name))
        if old is not None and old.dtype != leaf.dtype and leaf.dtype_asked in (None, leaf.dtype):
            message = (
                f"{leaf}: was {old.dtype} as input {old.path}; the step is recompiled for its own "
                "result, and donated memory cannot be reused"
            )
            yield Finding("dtype", "error", leaf.path, message)


def donation_findings(inputs: Sequence[LeafReport]) -> Iterator[Finding]:
    """Yields warnings of donated memory that is not reused, and of leaves that are not donated."""
    used = [leaf for leaf in inputs if leaf.found is not None]
    held = [leaf for leaf in used if leaf.role != "other" and not leaf.aliased]
    for leaf in held:
        if leaf.donated:
            message = (
                f"{leaf}: donated, but its {leaf.bytes_found:,} bytes are not reused: no result "
                "has its shape, dtype, sharding and memory kind"
            )
            yield Finding("donation", "warning", leaf.path, message)
    kept = [leaf for leaf in held if not leaf.donated]
    if total := sum(leaf.bytes_found for leaf in kept):
        arguments = dict.fromkeys(leaf.path.split("/", 1)[0] for leaf in kept)
        message = (
            f"{total:,} bytes per device are held twice, before and after the step; pass arguments "
            f"{listed([*arguments])} as `donate_argnums` or `donate_argnames` of `jax.jit`"
        )
        yield Finding("donation", "warning", kept[0].path, message)


def _keyword_findings(compiled: jax.stages.Compiled, expected: Expected) -> Iterator[Finding]:
    """Yields a note for each keyword argument without an expectation."""
    for name, argument in compiled.args_info[1].items():
        count = len(jax.tree.leaves(argument))
        if count and name not in expected.keywords:
            message = f"{name}: {count} arrays are not checked; pass `Expected(..., keywords=...)`"
            yield Finding("keyword argument", "note", name, message)


def _role_findings(
    inputs: Sequence[LeafReport], outputs: Sequence[LeafReport], expected: Expected
) -> Iterator[Finding]:
    """Checks the paths of parameters and state; yields a warning of state without parameters."""
    params = [leaf for leaf in inputs if leaf.role == "params"]
    state = [leaf for leaf in inputs if leaf.role == "state"]
    if not params:
        raise AxesError(f"`params`: found no arrays at {expected.params!r}; {_REMEDY}")
    for role, path, leaves in (
        ("params", expected.params, params),
        ("state", expected.state, state),
    ):
        if leaves and not any(leaf.role == role for leaf in outputs):
            raise AxesError(
                f"`{role}`: found {_described(leaves)} at {path!r}, but nothing with the same "
                f"paths and shapes in the result, which should contain the new {role}; {_REMEDY}"
            )
    # Counters say nothing, unless a scalar is the whole state, which no optimizer has.
    telling = [leaf for leaf in state if leaf.shape or not leaf.name]
    flat = (sum(leaf.size for leaf in params),)  # of `optax.flatten`
    if (
        not telling
        or any(leaf.shape == flat for leaf in telling)
        or any(map(owners(params), telling))
    ):
        return
    both = (
        f"found {_described(state)} at {expected.state!r}, which does not belong to the parameters "
        f"at {expected.params!r}, {_described(params)}"
    )
    # Swapped, the parameters look like state of the state.
    of_params = owners([leaf for leaf in state if leaf.name])
    owned = [of_params(leaf) for leaf in params if leaf.shape]
    arrays = {leaf.name for leaf in state if leaf.shape}
    if owned and all(owned) and {owner.name for owner in owned if owner} == arrays:
        raise AxesError(f"`params` and `state` are swapped: {both}; {_REMEDY}")
    message = (
        f"`state`: {both}, according to its paths: state is checked only where it is gathered by "
        f"itself; if these are not the optimizer state and the parameters, {_REMEDY}"
    )
    yield Finding("ownership", "warning", None, message)


_REMEDY = (
    "pass the paths of the parameters and of the optimizer state in the arguments, e.g. "
    "`Expected(..., params='0/params', state='0/opt_state')`, or `state='state'` for a keyword "
    "argument"
)


def _described(leaves: Sequence[LeafReport]) -> str:
    return listed([f"{'/'.join(x.name)} {x.dtype}{list(x.shape)}".strip() for x in leaves])


_ADVICE = {
    "sharding": "pass the expected shardings to `jax.jit` as `in_shardings` and `out_shardings`",
    "state gather": (
        "keep everything between state and update sharded like the state, e.g. with "
        "`with_sharding_constraint` on gradients and updates"
    ),
    "dtype": "cast the state returned by `update` back to its original dtype",
    "gradient all-reduce": (
        "constrain the gradients to the sharding of the state with `with_sharding_constraint` "
        "before any other use, or reduce them with `jax.lax.psum_scatter` under `jax.shard_map`"
    ),
}


def _several(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _first(items: Sequence[object], field: str) -> list[str]:
    """Returns lines for the first 20 items of a field, and how many more there are."""
    more = len(items) - 20
    return [*map(str, items[:20]), *[f"{more} more, in `{field}`"] * (more > 0)]


def _collective_table(collectives: Sequence[Collective]) -> str:
    """Returns a table with a row for all collectives that differ only in name and origin."""
    if not collectives:
        return "none"
    alike: dict[Any, list[Collective]] = {}
    for row in collectives:
        key = dataclasses.replace(row, name="", op_name="", count=0, bytes=0)
        alike.setdefault(key, []).append(row)
    rows = []
    for group in sorted(alike.values(), key=lambda group: -_total_bytes(group)):
        row = group[0]
        count = f"{sum(row.count for row in group)}{' per iteration' * row.per_iteration}"
        rows.append(
            [
                row.kind,
                row.array,
                "+".join(row.axes) if row.axes else f"{row.group_size} devices",
                count + " at most" * row.conditional,
                f"{_total_bytes(group):,}",
                listed(row.sources) or "-",
                row.op_name or "-",
            ]
        )
    rows.append(["all", "", "", "", f"{_total_bytes(collectives):,}", "", ""])
    head = ["kind", "array", "over", "count", "bytes sent", "depends on", "from"]
    return format_table(head, rows)


def _total_bytes(rows: Sequence[Collective]) -> int:
    return sum(row.total_bytes for row in rows)
