"""The report of `verify`."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from opt_partition._display import format_table, human_bytes
from opt_partition._verify.collectives import Collective

Side = Literal["input", "output"]
Role = Literal["params", "state", "other"]
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
        return sum(row.total_bytes for row in self.collectives)

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
        lines = [str(self), *(f"  {line}" for line in _said(self.findings))]
        if self.unjudged:
            lines += ["  not judged:", *(f"    {line}" for line in _first(self.unjudged))]
        if self.errors:
            lines.append(_advice(self.errors))
        lines += ["", "bytes per device", _table(_memory_rows(self))]
        lines += [
            "",
            "collectives, per device and step",
            _table(_collective_rows(self.collectives)),
        ]
        return "\n".join(lines)


def _several(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _said(findings: Sequence[Finding], most: int = 20) -> list[str]:
    """Returns lines for the first few findings of each kind and severity."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.severity, finding.kind), []).append(finding)
    lines: list[str] = []
    for (severity, kind), group in groups.items():
        lines += map(str, group[:most])
        if len(group) > most:
            lines.append(f"{severity}: {kind}: {len(group) - most} more, in `findings`")
    return lines


def _first(unjudged: Sequence[Unjudged], most: int = 10) -> list[str]:
    """Returns lines for the first few unjudged collectives."""
    more = [f"{len(unjudged) - most} more, in `unjudged`"] * (len(unjudged) > most)
    return [*map(str, unjudged[:most]), *more]


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


def _advice(errors: Sequence[Finding]) -> str:
    kinds = dict.fromkeys(finding.kind for finding in errors)
    return "\n".join(f"  what to do: {_ADVICE[kind]}" for kind in kinds)


def _memory_rows(report: Report) -> list[list[str]]:
    rows = [["", "expected", "input", "output"]]
    for role in ("params", "state", "other"):
        asked = [
            leaf.bytes_asked
            for leaf in report.leaves
            if (leaf.side, leaf.role) == ("input", role) and leaf.bytes_asked is not None
        ]
        found = [report.bytes_per_device(role, side) for side in ("input", "output")]
        rows.append([role, f"{sum(asked):,}" if asked else "-", *(f"{n:,}" for n in found)])
    if memory := report.memory:
        rows.append(["all, XLA", "", f"{memory.arguments:,}", f"{memory.outputs:,}"])
        rows.append(["aliased", "", f"{memory.aliased:,}", ""])
        rows.append(["temporaries", "", f"{memory.temporaries:,}", ""])
    return rows


def _collective_rows(collectives: Sequence[Collective]) -> list[list[str]]:
    """Returns table rows, one for all collectives that differ only in name and origin."""
    if not collectives:
        return [["none"]]
    same: dict[tuple[Any, ...], list[Collective]] = {}
    for row in collectives:
        what = (row.kind, row.dtype, row.operand_shape, row.shape, row.sources)
        how = (row.axes, row.group_size, row.per_iteration, row.conditional)
        same.setdefault((what, how), []).append(row)
    rows = [["kind", "array", "over", "count", "bytes sent", "depends on", "from"]]
    for group in sorted(same.values(), key=lambda g: -sum(row.total_bytes for row in g)):
        first = group[0]
        rows.append(
            [
                first.kind,
                _array(first),
                "+".join(first.axes) if first.axes else f"{first.group_size} devices",
                _count(group),
                f"{sum(row.total_bytes for row in group):,}",
                _shortened(first.sources),
                first.op_name or "-",
            ]
        )
    rows.append(["all", "", "", "", f"{sum(row.total_bytes for row in collectives):,}", "", ""])
    return rows


def _array(row: Collective) -> str:
    shapes = dict.fromkeys((row.operand_shape, row.shape))
    return f"{row.dtype} " + " → ".join(f"[{','.join(map(str, shape))}]" for shape in shapes)


def _count(group: Sequence[Collective]) -> str:
    first = group[0]
    unknown = " per iteration" if first.per_iteration else ""
    return f"{sum(row.count for row in group)}{unknown}{' at most' if first.conditional else ''}"


def _shortened(sources: Sequence[str], most: int = 3) -> str:
    more = f", {len(sources) - most} more" if len(sources) > most else ""
    return ", ".join(sources[:most]) + more or "-"


def _table(rows: Sequence[Sequence[str]]) -> str:
    return textwrap.indent(format_table(rows[0], rows[1:]), "  ")
