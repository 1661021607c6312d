"""`verify` on steps for 8 virtual devices, and on what other compilers made (`verify_texts.py`)."""

from __future__ import annotations

import functools
import json
import math
import pickle
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from opt_partition import Expected, Report, Unjudged, verify
from opt_partition._hlo import parse_program
from opt_partition._judge import Finding, Judged, judge_collectives
from opt_partition._leaves import trace_step, with_aliased
from opt_partition._verify import donation_findings
from opt_partition.errors import AxesError, ShardingMismatchError
from partition_oracles import QUICK
from verify_programs import (
    FAULTY,
    HEALTHY,
    LAYERS_SUMMED,
    WASTEFUL,
    is_summed,
    is_undone,
    on_shards,
)
from verify_steps import (
    ADAM,
    BATCH,
    FSDP,
    FSDP_TP,
    MOMENTUM,
    RING,
    Meshes,
    P,
    Program,
    Recipe,
    Step,
    Tree,
    all_gather,
    both,
    by_hand,
    by_shape,
    constrain,
    dense_loss,
    exchange_and_sum,
    gather_and_sum,
    micro_batched,
    moving,
)
from verify_texts import FOLDER, load, unpacked_leaf

STATE_W = "1/0/trace/w"
W = 256 * 512
BYTES = 4 * (W + 512)
MESHES = Meshes(jax.devices())


def checked(build: Callable[[Meshes], Step], **options: Any) -> Report:
    step = build(MESHES)
    return verify(step.lower(), step.expected, raises=False, **options)


def errors(report: Report) -> list[tuple[str, str | None]]:
    return [(finding.kind, finding.path) for finding in report.errors]


def unjudged(report: Report) -> list[tuple[str, str]]:
    """Reasons and shapes of the reductions that are not judged."""
    return [(u.reason, str(list(u.collective.shape))) for u in report.unjudged]


ZERO1 = Recipe(tx=ADAM)


@pytest.fixture(scope="module")
def correct() -> Report:
    return checked(ZERO1)


class TestRightSteps:
    def test_zero1_has_the_bytes_of_its_arrays(self, correct: Report) -> None:
        assert correct.ok
        assert correct.num_devices == 8
        gather = next(row for row in correct.collectives if row.shape == (256, 512))
        assert gather.axes == ("data",)
        assert gather.bytes == 4 * W * 7 // 8
        assert gather.sources == ("1/0/mu/w", "1/0/nu/w", "params", "inputs")
        state = 2 * BYTES // 8 + 4
        assert correct.bytes_per_device("params") == BYTES
        assert correct.bytes_per_device("state") == state
        assert correct.bytes_per_device("state", "output") == state
        memory: Any = ZERO1(MESHES).lower().compile().memory_analysis()
        assert memory.argument_size_in_bytes == BYTES + state + 4 * BATCH.size // 8
        assert memory.alias_size_in_bytes == BYTES + state
        assert all(leaf.aliased for leaf in correct.leaves if leaf.donated)

    def test_cpus_leave_gradients_all_reduced(self, correct: Report) -> None:
        said = [(f.kind, f.severity, f.path) for f in correct.findings]
        assert said == [
            ("gradient all-reduce", "warning", "1/0/mu/b"),
            ("gradient all-reduce", "warning", "1/0/mu/w"),
        ]
        assert checked(ZERO1, gradients="any").findings[0].severity == "note"

    def test_scanned_micro_batches_count_as_often_as_they_run(self) -> None:
        report = checked(
            Recipe(
                tx=ADAM,
                batch=jax.ShapeDtypeStruct((5, *BATCH.shape), BATCH.dtype),
                batch_spec=P(None, "data"),
                gradients=micro_batched(True),
            )
        )
        sums = [row for row in report.collectives if row.kind == "all-reduce" and row.shape]
        assert {(row.count, row.per_iteration) for row in sums} == {(5, False)}
        assert sum(row.total_bytes for row in sums) >= 5 * 2 * BYTES * 7 // 8
        assert ", 5 times per step" in str(report.findings[-1])

    def test_branches_gather_one_at_a_time(self) -> None:
        zero1 = ZERO1(MESHES)
        whole, spread = zero1.inputs[0], zero1.inputs[1][0].mu

        def step(params: Tree, state: Tree, batch: jax.Array, fast: jax.Array) -> Tree:
            grads = jax.grad(dense_loss)(params, batch)
            updates, state = ADAM.update(grads, state, params)

            def gathered(scale: float) -> Callable[[], Tree]:
                new = jax.tree.map(lambda p, u: p + jnp.tanh(scale * u), params, updates)
                return lambda: constrain(jax.tree.map(jnp.sin, constrain(new, spread)), whole)

            return jax.lax.cond(fast, gathered(10.0), gathered(1.0)), state

        jitted = jax.jit(
            step,
            in_shardings=(*zero1.inputs, NamedSharding(MESHES.data, P())),
            out_shardings=zero1.outputs,
        )
        report = verify(jitted.lower(*zero1.arguments, jnp.asarray(True)), zero1.expected)
        gathers = [row for row in report.collectives if row.shape == (256, 512)]
        assert [row.conditional for row in gathers if row.kind == "all-gather"] == [True, True]


class TestPlantedFaults:
    @pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
    def test_state_comes_out_replicated(self) -> None:
        step = Recipe(tx=ADAM, out_state={})(MESHES)
        with pytest.raises(ShardingMismatchError) as caught:
            verify(step.lower(), step.expected)
        report = caught.value.report
        wrong = [path for kind, path in errors(report) if kind == "sharding"]
        assert wrong == [f"1/0/{name}/{leaf}" for name in ("mu", "nu") for leaf in ("b", "w")]
        assert (
            "output 1/0/mu/w float32[256, 512]: expected P('data', None), 65,536 bytes per device; "
            "found P(), 524,288 bytes per device"
        ) in str(caught.value)
        lost = [f.path for f in report.findings if f.kind == "donation"]
        assert lost == wrong
        assert "donated, but its 65,536 bytes are not reused" in str(caught.value)

    def test_state_is_gathered_and_sliced_again(self) -> None:
        def gathered(state: Tree, mesh: Mesh) -> Tree:
            whole = constrain(state[0].mu, {name: NamedSharding(mesh, P()) for name in "wb"})
            return (state[0]._replace(mu=jax.lax.optimization_barrier(whole)), *state[1:])

        report = checked(Recipe(tx=ADAM, after=gathered))
        assert errors(report) == [("state gather", "1/0/mu/b"), ("state gather", "1/0/mu/w")]
        message = report.errors[1].message
        assert message.startswith(
            "values derived from 1/0/mu/w, 1/0/nu/w are communicated too often: a device receives "
            "262,144 elements per step, where 131,072 of the new parameter or its update would "
            "suffice, by `all-gather"
        )
        assert "`state_gathers='any'`" in message
        assert checked(Recipe(tx=ADAM, after=gathered), state_gathers="any").ok

    def test_state_sharded_like_its_parameter_is_not_moved_even_once(self) -> None:
        """With ZeRO-1 a device needs the new parameters of the others; here it does not."""
        rotated = on_shards(lambda part: jax.lax.ppermute(part, "data", RING), "data")
        [error] = checked(Recipe(**both(FSDP), after=moving("w", rotated))).errors
        assert (error.kind, error.path) == ("state gather", STATE_W)
        assert "receives 16,384 elements per step, where 0 of the new parameter" in error.message

    def test_optimizers_that_need_whole_matrices(self) -> None:
        """D-Adaptation's inner products flatten what is sharded twice."""
        specs = by_shape({(256, 512): P("data", "model"), (512,): P("model")})
        contrib: Any = optax.contrib
        tx = contrib.dadapt_adamw(1e-3)
        step = Recipe("grid", FSDP_TP, tx=tx, place_state=specs)(MESHES)
        lowered = step.lower()
        [error, *_] = verify(lowered, step.expected, raises=False).errors
        assert "write `opt_matrix.muon(learning_rate, plan=...)` with a plan of" in error.message
        assert verify(lowered, step.expected, state_gathers="any").ok


class TestExpected:
    def test_arguments_that_are_not_used(self) -> None:
        zero1 = ZERO1(MESHES)
        params, state, batch = zero1.inputs
        jitted = jax.jit(
            lambda values, opt_state, unused, data: zero1.function(values, opt_state, data),
            in_shardings=(params, state, NamedSharding(MESHES.data, P()), batch),
            out_shardings=zero1.outputs,
        )
        lowered = jitted.lower(*zero1.arguments[:2], {"k": jnp.ones(3)}, zero1.arguments[2])
        report = verify(lowered, Expected((params, state, batch), (params, state)))
        unused = next(leaf for leaf in report.leaves if leaf.path == "2/k")
        assert (unused.found, unused.bytes_found, unused.ok) == (None, 0, True)

    def test_layouts_of_an_abstract_mesh(self) -> None:
        zero1 = ZERO1(MESHES)
        lowered, mesh = zero1.lower(), MESHES.data.abstract_mesh
        abstract = jax.tree.map(lambda s: NamedSharding(mesh, s.spec), zero1.inputs[:2])
        assert verify(lowered, Expected(abstract, abstract)).ok
        other = NamedSharding(MESHES.grid.abstract_mesh, P("data"))
        with pytest.raises(
            AxesError, match="create the layout with the mesh that the step runs on"
        ):
            verify(lowered, Expected((other, None), None))

    def test_the_report_can_be_kept(self, correct: Report) -> None:
        data = json.loads(correct.to_json())
        assert data["ok"] is True
        assert len(data["leaves"]) == len(correct.leaves) == 15
        assert {row["kind"] for row in data["collectives"]} == {"all-gather", "all-reduce"}
        error = pickle.loads(pickle.dumps(ShardingMismatchError(correct)))
        assert error.report == correct
        assert "all-gather  f32 [32,512] → [256,512]" in correct.details()


# Reductions over devices that depend on state are judged, or named as not judged.


def average(part: jax.Array) -> Any:
    return jax.lax.pmean(part, "data")


def of_momentum(change: Callable[[Tree], Tree]) -> optax.GradientTransformation:
    """Momentum, whose updates `change` sees."""

    def update(grads: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        updates, new = MOMENTUM.update(grads, state, params)
        return change(updates), new

    anything: Any = update
    return optax.GradientTransformation(MOMENTUM.init, anything)


class TestReductions:
    def test_a_reduction_of_updates_is_not_judged(self) -> None:
        """State mixed with gradients that does not end in the state."""
        reduced = on_shards(average, "data")

        def change(updates: Tree) -> Tree:
            return {**updates, "w": reduced(updates["w"], MESHES.data)}

        report = checked(Recipe(tx=of_momentum(change)))
        assert report.ok
        assert unjudged(report) == [
            ("a reduction over devices of state, which does not end in that state", "[32, 512]")
        ]

    def test_replicas_of_the_state_are_not_judged(self) -> None:
        """Over the devices that hold the same shards, where the gradients may still differ."""
        mean = moving("w", on_shards(lambda part: jax.lax.pmean(part, "model"), "data"))
        report = checked(Recipe("grid", after=mean))
        assert report.ok
        assert unjudged(report) == [
            (
                "a reduction over devices that hold the same state, mixed with other values",
                "[64, 512]",
            )
        ]
        assert [f.path for f in checked(Recipe("grid", before=mean)).errors] == [STATE_W]

    def test_sums_and_products_of_state_that_end_in_it_are_not_judged(self) -> None:
        """A partial sum of a device as large as its shard: a statistic would be smaller."""

        def sums(part: jax.Array) -> Any:
            weights = jax.lax.optimization_barrier(jnp.arange(4.0))
            return jax.lax.psum(jnp.sum(part[None] * weights[:, None, None], 0), "data")

        def products(part: jax.Array) -> Any:
            return jax.lax.psum(part @ (part.T @ part), "data")

        reason = "a reduction over devices of sums or products of state, which ends in the state"
        for function in (sums, products):
            report = checked(Recipe(after=moving("w", on_shards(function, "data"))))
            assert unjudged(report) == [(reason, "[32, 512]")]

    def test_norms_of_the_state_are_silent(self) -> None:
        """Each column of the momentum, divided by its norm and by that of everything."""

        def scaled(state: Tree, mesh: Mesh) -> Tree:
            trace = state[0].trace
            norm = jnp.sqrt(sum(jnp.sum(x * x) for x in jax.tree.leaves(trace)))
            w = trace["w"] / jnp.sqrt(jnp.sum(trace["w"] ** 2, axis=0)) / norm
            w = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P("data")))
            return (optax.TraceState({**trace, "w": w}), *state[1:])

        report = checked(Recipe(before=scaled))
        reduced = [row for row in report.collectives if STATE_W in row.sources]
        assert "all-reduce" in {row.kind for row in reduced if max(row.shape or [1]) > 1}
        assert report.ok
        assert report.unjudged == ()

    def test_gradients_reduced_by_an_exchange_pass(self) -> None:
        report = checked(by_hand(exchange_and_sum, all_gather), gradients="reduce-scatter")
        assert report.ok
        assert {row.kind for row in report.collectives} == {"all-gather", "all-to-all"}

    def test_summands_that_are_gathered_are_an_error_in_bytes(self) -> None:
        report = checked(by_hand(gather_and_sum, all_gather), gradients="reduce-scatter")
        assert (
            "to f32[8,256,512] over data gathers the summands of a gradient of which 1/0/trace/w "
            "uses only 1/8 per device: a reduce-scatter would send 1/8 of these 3,670,016 bytes"
        ) in report.errors[-1].message


# Tables of training steps: the faults that were planted are found, nothing else is.

PROGRAMS = {program.name: program for program in (*FAULTY, *WASTEFUL, *HEALTHY)}
FILES = sorted(FOLDER.glob("*.json.xz"))


def checked_program(program: Program, kind: AxisType = AxisType.Auto) -> Report:
    step = program.build(Meshes(jax.devices(), kind))
    compiled = step.lower().compile(compiler_options=QUICK)
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


@pytest.mark.sample(5)
@pytest.mark.parametrize("program", HEALTHY, ids=attrgetter("name"))
def test_healthy_steps_pass(program: Program) -> None:
    report = checked_program(program)
    assert report.errors == ()
    assert others(report.findings) == []
    assert reductions(report.unjudged) == []


@pytest.mark.sample(20)
@pytest.mark.parametrize("program", [*FAULTY, LAYERS_SUMMED], ids=attrgetter("name"))
def test_faults_are_found(program: Program) -> None:
    report = checked_program(program)
    assert named(report.errors) == program.finds
    assert {finding.kind for finding in others(report.findings)} == program.warns


@pytest.mark.parametrize("program", WASTEFUL, ids=attrgetter("name"))
def test_waste_is_warned_of(program: Program) -> None:
    report = checked_program(program)
    assert report.ok
    assert {finding.kind for finding in others(report.findings)} == program.warns


EXPLICIT = [
    "zero1_adamw",
    "zero1_over_tp",
    "zero1_ring_in_a_loop",
    "fsdp_tp_adamw",
    "zero1_multi_steps",
    "gather_slices_before",
    "exchange_after",
    "layers_exchange_before",
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", EXPLICIT)
def test_explicit_meshes(name: str) -> None:
    report = checked_program(PROGRAMS[name], AxisType.Explicit)
    assert named(report.errors) == PROGRAMS[name].finds


@functools.cache
def stored(path: Path) -> dict[str, Any]:
    return load(path)


def judged(path: Path, name: str) -> tuple[Judged, list[Finding]]:
    """What is said of the collectives and of the donations of a stored program."""
    text, *sides = stored(path)["programs"][name]
    module = parse_program(text)
    inputs, outputs = (list(map(unpacked_leaf, side)) for side in sides)
    inputs = with_aliased(inputs, module)
    meshes = [dict(packed[6]) for side in sides for packed in side if packed[6]]
    mesh = max(meshes, key=lambda mesh: math.prod(mesh.values()))
    platform, options = stored(path)["platform"], PROGRAMS[name].options
    traced = trace_step(module, inputs)
    found = judge_collectives(module, traced, inputs, outputs, mesh, platform, **options)
    return found, list(donation_findings(inputs))


STORED = [
    pytest.param(path, name, id=f"{path.name.removesuffix('.json.xz')}-{name}")
    for path in FILES
    for name in stored(path)["programs"]
]


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
