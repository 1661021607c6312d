"""`verify` on tables of training steps: the faults that were planted are found, nothing else is.

The steps are compiled for eight virtual CPU devices here, and never run. What other compilers made
of them is stored in `verify_texts/`: under jax 0.10.2 XLA for eight H100s, and libtpu 0.0.42 for
eight chips of a v5e; for CPUs jaxlib 0.8.0, the oldest that we claim. `verify_texts.py` makes these
files.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import AxisType
from opt_partition import Report, Unjudged, verify
from opt_partition._verify.hlo import parse_program
from opt_partition._verify.judge import Finding, Judged, judge_collectives
from opt_partition._verify.leaves import aliased_leaves
from opt_partition._verify.verify import donation_findings
from verify_faulty import FAULTY, FAULTY_ON_CPUS, WASTEFUL, is_undone
from verify_healthy import HEALTHY, is_summed
from verify_recipes import Meshes, Program
from verify_texts import FOLDER, load, unpacked_leaf

# Machine code is not looked at.
QUICKLY: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
PROGRAMS = {program.name: program for program in (*FAULTY, *WASTEFUL, *HEALTHY)}
FILES = sorted(FOLDER.glob("*.json.xz"))


def checked(program: Program, kind: AxisType = AxisType.Auto) -> Report:
    step = program.build(Meshes(jax.devices(), kind))
    compiled = step.lower().compile(compiler_options=QUICKLY)
    return verify(compiled, step.expected, raises=False, **program.options)


def named(findings: Any) -> set[tuple[str, str | None]]:
    return {(finding.kind, finding.path) for finding in findings}


def others(findings: Any) -> list[Finding]:
    """Warnings of something else than gradients, which CPUs sum whole."""
    return [
        finding
        for finding in findings
        if finding.severity == "warning" and finding.kind != "gradient all-reduce"
    ]


def reductions(unjudged: Any) -> list[Unjudged]:
    """Reductions over devices of state that could not be judged."""
    return [u for u in unjudged if u.collective.kind in ("all-reduce", "reduce-scatter")]


def by_name(program: Program) -> str:
    return program.name


def test_the_tables_are_large_enough() -> None:
    assert len(PROGRAMS) == len(FAULTY) + len(WASTEFUL) + len(HEALTHY)
    assert len(FAULTY) >= 40
    assert len(HEALTHY) >= 40


@pytest.mark.sample(5)
@pytest.mark.parametrize("program", HEALTHY, ids=by_name)
def test_healthy_steps_pass(program: Program) -> None:
    report = checked(program)
    assert report.errors == ()
    assert others(report.findings) == []
    assert reductions(report.unjudged) == []


@pytest.mark.sample(10)
@pytest.mark.parametrize("program", [*FAULTY, *FAULTY_ON_CPUS], ids=by_name)
def test_faults_are_found(program: Program) -> None:
    report = checked(program)
    assert named(report.errors) == program.finds
    assert {finding.kind for finding in others(report.findings)} == program.warns


@pytest.mark.parametrize("program", WASTEFUL, ids=by_name)
def test_waste_is_warned_of(program: Program) -> None:
    report = checked(program)
    assert report.ok
    assert {finding.kind for finding in others(report.findings)} == program.warns


EXPLICIT = [
    "zero1_adamw",
    "zero1_over_tp",
    "zero1_ring",
    "fsdp_tp_adamw",
    "zero1_multi_steps",
    "gather_slices_before",
    "exchange_after",
    "layers_ring_before",
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", EXPLICIT)
def test_explicit_meshes(name: str) -> None:
    report = checked(PROGRAMS[name], AxisType.Explicit)
    assert named(report.errors) == PROGRAMS[name].finds


@functools.cache
def stored(path: Path) -> dict[str, Any]:
    return load(path)


def judged(path: Path, name: str) -> tuple[Judged, list[Finding]]:
    """What is said of the collectives and of the donations of a stored program."""
    text, *sides = stored(path)["programs"][name]
    module = parse_program(text)
    inputs, outputs = (list(map(unpacked_leaf, side)) for side in sides)
    platform, options = stored(path)["platform"], PROGRAMS[name].options
    found = judge_collectives(module, inputs, outputs, platform, **options)
    return found, list(donation_findings(inputs, aliased_leaves(inputs, module)))


STORED = [
    pytest.param(path, name, id=f"{path.name.removesuffix('.json.xz')}-{name}")
    for path in FILES
    for name in stored(path)["programs"]
]


@pytest.mark.sample(160)
@pytest.mark.parametrize(("path", "name"), STORED)
def test_stored_programs(path: Path, name: str) -> None:
    found, donations = judged(path, name)
    errors = [finding for finding in found.findings if finding.severity == "error"]
    gathers = [finding for finding in errors if finding.kind == "state gather"]
    assert named(gathers) == PROGRAMS[name].finds
    assert {finding.kind for finding in donations} == PROGRAMS[name].warns
    if not PROGRAMS[name].finds:
        summed = {"gradient all-reduce"} if is_summed(name, stored(path)["platform"]) else set()
        assert {finding.kind for finding in errors} == summed
        assert reductions(found.unjudged) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_stored_files_are_complete(path: Path) -> None:
    kinds = {program.name: {kind for kind, _ in program.finds} for program in FAULTY + HEALTHY}
    wanted = {name for name, found in kinds.items() if found <= {"state gather"}}
    wanted = {name for name in wanted if not is_undone(name, stored(path)["platform"])}
    wasteful = {program.name for program in WASTEFUL}
    # The files of other platforms are older than these.
    wanted |= wasteful if stored(path)["platform"] == "gpu" else set()
    assert set(stored(path)["programs"]) == wanted
    assert path.stat().st_size < 500_000
