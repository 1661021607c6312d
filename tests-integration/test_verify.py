"""What `verify` says of steps compiled for 8 virtual devices: figures, messages, other arguments.

What passes and what is found stands in `test_verify_tables.py`.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from opt_partition import Expected, Report, verify
from opt_partition.errors import AxesError, ShardingMismatchError

P = PartitionSpec
Tree = Any

DATA = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
GRID = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
PARAMS = {"w": jnp.ones((64, 32)), "b": jnp.ones(32)}
BATCH = jnp.ones((16, 64))


def loss(params: Tree, batch: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(jnp.tanh(batch @ params["w"] + params["b"])))


def on(mesh: Mesh, *spec: Any) -> NamedSharding:
    return NamedSharding(mesh, P(*spec))


def like_params(tx: optax.GradientTransformation, sharded: Tree, rest: NamedSharding) -> Tree:
    """State shardings: of the parameters' copies `sharded`, of everything else `rest`."""
    state = jax.eval_shape(tx.init, PARAMS)
    return optax.tree_map_params(
        tx, lambda _, s: s, state, sharded, transform_non_params=lambda _: rest
    )


def train(
    tx: optax.GradientTransformation,
    *,
    params: Tree,
    state: Tree,
    batch: NamedSharding,
    out_state: Tree = None,
    constrain: Callable[[Tree], Tree] = lambda grads: grads,
    amid: Callable[[Tree], Tree] = lambda state: state,
    micro_batches: int | None = None,
) -> jax.stages.Lowered:
    """A training step; `constrain` sees the gradients, `amid` the new state."""

    def gradients(values: Tree, data: jax.Array) -> Tree:
        if micro_batches is None:
            return jax.grad(loss)(values, data)

        def add(total: Tree, part: jax.Array) -> tuple[Tree, None]:
            return jax.tree.map(jnp.add, total, jax.grad(loss)(values, part)), None

        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, values), data)[0]

    def step(values: Tree, opt_state: Tree, data: jax.Array) -> tuple[Tree, Tree]:
        grads = constrain(gradients(values, data))
        updates, opt_state = tx.update(grads, opt_state, values)
        return optax.apply_updates(values, updates), amid(opt_state)

    shape = BATCH.shape if micro_batches is None else (micro_batches, *BATCH.shape)
    return jax.jit(
        step,
        in_shardings=(params, state, batch),
        out_shardings=(params, state if out_state is None else out_state),
        donate_argnums=(0, 1),
    ).lower(PARAMS, jax.eval_shape(tx.init, PARAMS), jax.ShapeDtypeStruct(shape, jnp.float32))


ADAMW = optax.adamw(1e-3)
WHOLE = {"w": on(DATA), "b": on(DATA)}
SPREAD = {"w": on(DATA, "data"), "b": on(DATA, "data")}
ZERO1 = like_params(ADAMW, SPREAD, on(DATA))
EXPECTED = Expected(inputs=(WHOLE, ZERO1), outputs=(WHOLE, ZERO1))


def zero1(**changed: Any) -> jax.stages.Lowered:
    arguments = {"params": WHOLE, "state": ZERO1, "batch": on(DATA, "data"), **changed}
    return train(ADAMW, **arguments)


def errors(report: Report) -> list[tuple[str, str | None]]:
    return [(finding.kind, finding.path) for finding in report.errors]


@pytest.fixture(scope="module")
def correct() -> Report:
    return verify(zero1(), EXPECTED)


class TestRightSteps:
    def test_zero1(self, correct: Report) -> None:
        assert correct.ok
        assert correct.num_devices == 8
        gather = next(row for row in correct.collectives if row.shape == (64, 32))
        assert gather.axes == ("data",)
        assert gather.bytes == 64 * 32 * 4 * 7 // 8
        assert gather.sources == ("1/0/mu/w", "1/0/nu/w", "params", "inputs")

    def test_bytes_are_those_of_the_arrays(self, correct: Report) -> None:
        held = 64 * 32 * 4 + 32 * 4
        assert correct.bytes_per_device("params") == held
        assert correct.bytes_per_device("state") == 2 * held // 8 + 4
        assert correct.bytes_per_device("state", "output") == 2 * held // 8 + 4
        assert correct.memory is not None
        state_and_params = held + 2 * held // 8 + 4
        assert correct.memory.arguments == state_and_params + 2 * 64 * 4
        assert correct.memory.aliased == state_and_params
        assert all(leaf.aliased for leaf in correct.leaves if leaf.donated)

    def test_cpus_leave_gradients_all_reduced(self, correct: Report) -> None:
        said = [(f.kind, f.severity, f.path) for f in correct.findings]
        assert said == [
            ("gradient all-reduce", "warning", "1/0/mu/b"),
            ("gradient all-reduce", "warning", "1/0/mu/w"),
        ]
        assert verify(zero1(), EXPECTED, gradients="any").findings[0].severity == "note"

    def test_scanned_micro_batches_count_as_often_as_they_run(self) -> None:
        step = zero1(micro_batches=5, batch=on(DATA, None, "data"))
        report = verify(step, EXPECTED)
        sums = [row for row in report.collectives if row.kind == "all-reduce" and row.shape]
        assert {(row.count, row.per_iteration) for row in sums} == {(5, False)}
        assert sum(row.total_bytes for row in sums) >= 5 * 2 * (64 * 32 + 32) * 4 * 7 // 8
        assert ", 5 times per step" in str(report.findings[-1])

    def test_branches_gather_one_at_a_time(self) -> None:
        def step(params: Tree, state: Tree, batch: jax.Array, fast: jax.Array) -> Tree:
            grads = jax.grad(loss)(params, batch)
            updates, state = ADAMW.update(grads, state, params)

            def gathered(scale: float) -> Callable[[], Tree]:
                new = jax.tree.map(lambda p, u: p + jnp.tanh(scale * u), params, updates)
                return lambda: jax.lax.with_sharding_constraint(
                    jax.tree.map(jnp.sin, jax.lax.with_sharding_constraint(new, SPREAD)), WHOLE
                )

            return jax.lax.cond(fast, gathered(10.0), gathered(1.0)), state

        lowered = jax.jit(
            step,
            in_shardings=(WHOLE, ZERO1, on(DATA, "data"), on(DATA)),
            out_shardings=(WHOLE, ZERO1),
        ).lower(PARAMS, jax.eval_shape(ADAMW.init, PARAMS), BATCH, jnp.asarray(True))
        report = verify(lowered, EXPECTED)
        gathers = [row for row in report.collectives if row.shape == (64, 32)]
        assert [row.conditional for row in gathers if row.kind == "all-gather"] == [True, True]

    def test_the_verdict_is_a_line(self, correct: Report) -> None:
        sent = correct.collective_bytes
        assert str(correct) == (
            "as expected on 8 cpu devices: 14 of 15 leaves checked; 8.12 KiB of parameters and "
            f"2.04 KiB of state per device; {len(correct.collectives)} collectives, "
            f"{sent / 1024:.2f} KiB sent per device and step; 2 warnings (gradient all-reduce)"
        )


class TestPlantedFaults:
    @pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
    def test_state_comes_out_replicated(self) -> None:
        replicated = like_params(ADAMW, WHOLE, on(DATA))
        with pytest.raises(ShardingMismatchError) as caught:
            verify(zero1(out_state=replicated), EXPECTED)
        report = caught.value.report
        wrong = [path for kind, path in errors(report) if kind == "sharding"]
        assert wrong == [f"1/0/{name}/{leaf}" for name in ("mu", "nu") for leaf in ("b", "w")]
        assert (
            "output 1/0/mu/w float32[64, 32]: expected P('data', None), 1,024 bytes per device; "
            "found P(), 8,192 bytes per device"
        ) in str(caught.value)
        lost = [f.path for f in report.findings if f.kind == "donation"]
        assert lost == wrong
        assert "donated, but its 1,024 bytes are not reused" in str(caught.value)

    def test_state_is_gathered_and_sliced_again(self) -> None:
        def amid(state: Tree) -> Tree:
            whole = jax.lax.with_sharding_constraint(state[0].mu, on(DATA))
            whole = jax.lax.optimization_barrier(whole)
            return (state[0]._replace(mu=whole), *state[1:])

        with pytest.raises(ShardingMismatchError, match="are communicated too often") as caught:
            verify(zero1(amid=amid), EXPECTED)
        assert errors(caught.value.report) == [
            ("state gather", "1/0/mu/b"),
            ("state gather", "1/0/mu/w"),
        ]
        assert (
            "values derived from 1/0/mu/w, 1/0/nu/w are communicated too often: a device receives "
            "4,096 elements per step, where 2,048 of the new parameter or its update would "
            "suffice, by `all-gather"
        ) in str(caught.value)
        assert "`state_gathers='any'`" in str(caught.value)
        assert verify(zero1(amid=amid), EXPECTED, state_gathers="any").ok

    @pytest.mark.parametrize("optimizer", ["muon", "dadapt_adamw"])
    def test_optimizers_that_need_whole_matrices(self, optimizer: str) -> None:
        """Muon multiplies them; D-Adaptation's inner products flatten what is sharded twice."""
        tx = getattr(optax.contrib, optimizer)(1e-3)
        params = {"w": on(GRID, "data", "model"), "b": on(GRID, "model")}
        axes = {(64, 32): params["w"], (32,): params["b"]}
        shapes = jax.eval_shape(tx.init, PARAMS)
        state = jax.tree.map(lambda leaf: axes.get(leaf.shape, on(GRID)), shapes)
        expected = Expected((params, state), (params, state))
        step = train(tx, params=params, state=state, batch=on(GRID, "data"))
        [error, *_] = verify(step, expected, raises=False).errors
        line = "write `opt_matrix.muon(learning_rate, plan=...)` with a plan of"
        assert (line in error.message) == (optimizer == "muon")
        assert "pass `state_gathers='any'`" in error.message
        assert verify(step, expected, state_gathers="any").ok


class TestExpected:
    def test_arguments_that_are_not_used(self) -> None:
        def step(params: Tree, state: Tree, unused: Tree, batch: jax.Array) -> tuple[Tree, Tree]:
            updates, state = ADAMW.update(jax.grad(loss)(params, batch), state, params)
            return optax.apply_updates(params, updates), state

        lowered = jax.jit(
            step,
            in_shardings=(WHOLE, ZERO1, on(DATA), on(DATA, "data")),
            out_shardings=(WHOLE, ZERO1),
        ).lower(PARAMS, jax.eval_shape(ADAMW.init, PARAMS), {"k": jnp.ones(3)}, BATCH)
        report = verify(lowered, Expected((WHOLE, ZERO1, on(DATA, "data")), (WHOLE, ZERO1)))
        unused = next(leaf for leaf in report.leaves if leaf.path == "2/k")
        assert (unused.found, unused.bytes_found, unused.ok) == (None, 0, True)
        gather = next(row for row in report.collectives if row.shape == (64, 32))
        assert gather.sources == ("1/0/mu/w", "1/0/nu/w", "params", "inputs")

    def test_layouts_of_an_abstract_mesh(self) -> None:
        abstract = jax.tree.map(lambda s: NamedSharding(DATA.abstract_mesh, s.spec), (WHOLE, ZERO1))
        assert verify(zero1(), Expected(abstract, abstract)).ok
        other = NamedSharding(GRID.abstract_mesh, P("data"))
        with pytest.raises(
            AxesError, match="create the layout with the mesh that the step runs on"
        ):
            verify(zero1(), Expected((other, None), None))

    def test_the_report_can_be_kept(self, correct: Report) -> None:
        data = json.loads(correct.to_json())
        assert data["ok"] is True
        assert data["memory"]["temporaries"] == correct.memory.temporaries  # type: ignore[union-attr]
        assert len(data["leaves"]) == len(correct.leaves) == 15
        assert {row["kind"] for row in data["collectives"]} == {"all-gather", "all-reduce"}
        error = pickle.loads(pickle.dumps(ShardingMismatchError(correct)))
        assert error.report == correct
        assert "all-gather  f32 [8,32] → [64,32]" in correct.details()
