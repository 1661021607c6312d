"""The report of `verify`."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, Literal

from opt_partition._display import format_table, human_bytes
from opt_partition._verify.collectives import Collective
from opt_partition._verify.expected import Role
from opt_partition._verify.leaves import Side

Severity = Literal["error", "warning", "note"]


@dataclasses.dataclass(frozen=True)
class LeafReport:
    """The found and expected sharding of one argument or result of the step.

    Attributes:
      side: `'input'` or `'output'`.
      path: `/`-joined keys in the arguments or the result.
      role: its role according to `Expected`.
      shape: global shape.
      dtype: name of the dtype.
      asked: the expected sharding, as text; `None` for any.
      found: the compiled sharding, as text; `None` for an argument that the step does not use.
      bytes_asked: expected bytes per device; `None` for any sharding.
      bytes_found: bytes per device; `0` for an argument that is not used.
      ok: whether the expectation is met.
      donated: whether it is a donated argument.
      aliased: whether a result reuses its memory.
      dtype_asked: the expected dtype; `None` for any.
    """

    side: Side
    path: str
    role: Role
    shape: tuple[int, ...]
    dtype: str
    asked: str | None
    found: str | None
    bytes_asked: int | None
    bytes_found: int
    ok: bool
    donated: bool = False
    aliased: bool = False
    dtype_asked: str | None = None

    def __str__(self) -> str:
        return f"{self.side} {self.path} {self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class Finding:
    """A problem, or something that could not be checked.

    Attributes:
      kind: `'sharding'`, `'dtype'`, `'state gather'`, `'gradient all-reduce'`, `'donation'`,
        `'ownership'`, `'keyword argument'` or `'not traced'`.
      severity: `verify` raises for an `'error'`.
      path: path of the leaf concerned, if any.
      message: the leaf, what was expected, and what was found.
    """

    kind: str
    severity: Severity
    path: str | None
    message: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.kind}: {self.message}"


@dataclasses.dataclass(frozen=True)
class Unjudged:
    """A collective that communicates values derived from state and could not be judged.

    Attributes:
      collective: the collective.
      reason: why it could not be judged.
    """

    collective: Collective
    reason: str

    def __str__(self) -> str:
        row = self.collective
        return f"{row.name}: {row.kind} of {_array(row)}, {_shortened(row.sources)}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory per device in bytes as reported by XLA, including padding.

    Attributes:
      arguments: bytes of all arguments.
      outputs: bytes of all results, including aliased ones.
      aliased: bytes of the results that reuse the memory of an argument.
      temporaries: bytes of temporary buffers.
      host: bytes of all of these in host memory.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    host: int


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of `verify`; prints as a verdict of one line, with the figures behind it.

    `details` has the findings and tables, `to_json` every field.

    Attributes:
      platform: platform that the step was compiled for, e.g. `'cpu'`.
      num_devices: number of devices that run the step.
      leaves: every argument and result.
      collectives: every array communicated by a collective.
      findings: the problems found; errors first.
      memory: memory as reported by XLA; `None` if the platform does not report it.
      unjudged: the collectives that communicate state, or values derived from it, and that `verify`
        could not judge.
    """

    platform: str
    num_devices: int
    leaves: tuple[LeafReport, ...]
    collectives: tuple[Collective, ...]
    findings: tuple[Finding, ...]
    memory: Memory | None
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
        """Returns the verdict, the findings with what to do, and tables of all that was found."""
        lines = [str(self), *(f"  {line}" for line in _finding_lines(self.findings))]
        if self.unjudged:
            lines += [
                "  not judged:",
                *(f"    {unjudged}" for unjudged in self.unjudged[:_UNJUDGED]),
            ]
        if (more := len(self.unjudged) - _UNJUDGED) > 0:
            lines.append(f"    {more} more, in `unjudged`")
        lines += [
            f"  what to do: {_ADVICE[kind]}" for kind in dict.fromkeys(f.kind for f in self.errors)
        ]
        bytes_table, moves = _memory_table(self), _collective_table(self.collectives)
        lines += ["", "bytes per device", textwrap.indent(bytes_table, "  ")]
        lines += ["", "collectives, per device and step", textwrap.indent(moves, "  ")]
        return "\n".join(lines)


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
_FINDINGS: Final = 20
_UNJUDGED: Final = 10


def _several(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _finding_lines(findings: Sequence[Finding]) -> list[str]:
    """Returns lines for the first few findings of each kind and severity."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.severity, finding.kind), []).append(finding)
    lines: list[str] = []
    for (severity, kind), group in groups.items():
        lines += map(str, group[:_FINDINGS])
        if len(group) > _FINDINGS:
            lines.append(f"{severity}: {kind}: {len(group) - _FINDINGS} more, in `findings`")
    return lines


def _memory_table(report: Report) -> str:
    rows = []
    roles: tuple[Role, ...] = ("params", "state", "other")
    for role in roles:
        asked = [
            leaf.bytes_asked
            for leaf in report.leaves
            if (leaf.side, leaf.role) == ("input", role) and leaf.bytes_asked is not None
        ]
        found = (report.bytes_per_device(role), report.bytes_per_device(role, "output"))
        rows.append([role, f"{sum(asked):,}" if asked else "-", *(f"{n:,}" for n in found)])
    if memory := report.memory:
        rows.append(["all, XLA", "", f"{memory.arguments:,}", f"{memory.outputs:,}"])
        rows.append(["aliased", "", f"{memory.aliased:,}", ""])
        rows.append(["temporaries", "", f"{memory.temporaries:,}", ""])
    return format_table(["", "expected", "input", "output"], rows)


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
                _array(row),
                "+".join(row.axes) if row.axes else f"{row.group_size} devices",
                count + " at most" * row.conditional,
                f"{_total_bytes(group):,}",
                _shortened(row.sources),
                row.op_name or "-",
            ]
        )
    rows.append(["all", "", "", "", f"{_total_bytes(collectives):,}", "", ""])
    head = ["kind", "array", "over", "count", "bytes sent", "depends on", "from"]
    return format_table(head, rows)


def _total_bytes(rows: Sequence[Collective]) -> int:
    return sum(row.total_bytes for row in rows)


def _array(row: Collective) -> str:
    shapes = dict.fromkeys((row.operand_shape, row.shape))
    return f"{row.dtype} " + " → ".join(f"[{','.join(map(str, shape))}]" for shape in shapes)


def _shortened(sources: Sequence[str], most: int = 3) -> str:
    more = f", {len(sources) - most} more" if len(sources) > most else ""
    return ", ".join(sources[:most]) + more or "-"
