"""`verify` on reductions over devices that depend on state: judged, or named as not judged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from opt_partition import Report, verify
from verify_moves import moving, on_shards
from verify_recipes import MOMENTUM, Meshes, P, Program, Recipe, Tree
from verify_steps import all_gather, by_hand, exchange_and_sum, gather_and_sum

STATE_W = "1/0/trace/w"


def checked(build: Callable[[Meshes], Any], **options: Any) -> Report:
    program = Program("", build, options)
    step = program.build(Meshes(jax.devices()))
    return verify(step.lower(), step.expected, raises=False, **program.options)


def unjudged(report: Report) -> list[tuple[str, str]]:
    """Reasons and shapes of the reductions that are not judged."""
    return [(u.reason, str(list(u.collective.shape))) for u in report.unjudged]


def average(part: jax.Array) -> Any:
    return jax.lax.pmean(part, "data")


def of_momentum(change: Callable[[Tree, Tree], Tree]) -> optax.GradientTransformation:
    """Momentum, whose updates and new trace `change` sees; the updates come first."""

    def update(grads: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        new: Any
        updates, new = MOMENTUM.update(grads, state, params)
        updates, trace = change(updates, new[0].trace)
        return updates, (optax.TraceState(trace), *new[1:])

    anything: Any = update
    return optax.GradientTransformation(MOMENTUM.init, anything)


def mapped(function: Callable[..., Any], mesh: Mesh, *specs: Any, out: Any) -> Any:
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)


def test_a_reduction_of_updates_is_not_judged() -> None:
    """State mixed with gradients that does not end in the state."""

    def build(meshes: Meshes) -> Any:
        def change(updates: Tree, trace: Tree) -> Tree:
            reduced = mapped(average, meshes.data, P("data"), out=P("data"))
            return {**updates, "w": reduced(updates["w"])}, trace

        return Recipe(tx=of_momentum(change))(meshes)

    report = checked(build)
    assert report.ok
    assert unjudged(report) == [
        ("a reduction over devices of state, which does not end in that state", "[32, 512]")
    ]


def test_replicas_of_the_state_are_not_judged() -> None:
    """Over the devices that hold the same shards, where the gradients may still differ."""

    def mean(state: Tree, mesh: Mesh) -> Tree:
        reduced = mapped(lambda x: jax.lax.pmean(x, "model"), mesh, P("data"), out=P("data"))
        trace = state[0].trace
        return (optax.TraceState({**trace, "w": reduced(trace["w"])}), *state[1:])

    report = checked(Recipe("grid", after=mean))
    assert report.ok
    assert unjudged(report) == [
        (
            "a reduction over devices that hold the same state, mixed with other values",
            "[64, 512]",
        )
    ]
    assert [f.path for f in checked(Recipe("grid", before=mean)).errors] == [STATE_W]


def test_half_of_a_shard_is_not_judged() -> None:
    def half(part: jax.Array) -> Any:
        return jnp.concatenate([average(part[:, :256]), part[:, 256:]], -1)

    report = checked(Recipe(after=moving("w", on_shards(half, "data"))))
    assert report.ok
    assert unjudged(report) == [
        ("a reduction over devices of a part of the state, or of a factor", "[32, 256]")
    ]


def test_sums_and_products_of_state_that_end_in_it_are_not_judged() -> None:
    """A partial sum of a device as large as its shard: a statistic would be smaller."""

    def sums(part: jax.Array) -> Any:
        weights = jax.lax.optimization_barrier(jnp.arange(4.0))
        return jax.lax.psum(jnp.sum(part[None] * weights[:, None, None], 0), "data")

    def products(part: jax.Array) -> Any:
        return jax.lax.psum(part @ (part.T @ part), "data")

    for function, what in (
        (sums, "reduction over devices of sums"),
        (products, "sum over devices of products"),
    ):
        report = checked(Recipe(after=moving("w", on_shards(function, "data"))))
        assert unjudged(report) == [(f"a {what} of state, which ends in the state", "[32, 512]")]


def scaled_by_norms(state: Tree, mesh: Mesh) -> Tree:
    """Each column of the momentum, divided by its norm and by that of everything."""
    trace = state[0].trace
    norm = jnp.sqrt(sum(jnp.sum(x * x) for x in jax.tree.leaves(trace)))
    columns = jnp.sqrt(jnp.sum(trace["w"] ** 2, axis=0))
    sharding = NamedSharding(mesh, P("data"))
    w = jax.lax.with_sharding_constraint(trace["w"] / columns / norm, sharding)
    return (optax.TraceState({**trace, "w": w}), *state[1:])


@pytest.mark.parametrize("when", ["before", "after"])
def test_norms_of_the_state_are_silent(when: str) -> None:
    hook: Any = {when: scaled_by_norms}
    report = checked(Recipe(**hook))
    reduced = [
        row for row in report.collectives if STATE_W in row.sources and max(row.shape or [1]) > 1
    ]
    assert "all-reduce" in {row.kind for row in reduced}
    assert report.ok
    assert report.unjudged == ()


def test_gradients_reduced_by_an_exchange_pass() -> None:
    report = checked(by_hand(exchange_and_sum, all_gather), gradients="reduce-scatter")
    assert report.ok
    assert {row.kind for row in report.collectives} == {"all-gather", "all-to-all"}


def test_what_is_said() -> None:
    report = checked(Recipe(before=moving("w", on_shards(average, "data"))))
    [error] = report.errors
    assert error.message.startswith(
        "1/0/trace/w is reduced over devices, shard by shard: a device receives 16,384 elements "
        "per step of a leaf of 131,072, of which it holds 16,384, by `all-reduce"
    )

    report = checked(by_hand(gather_and_sum, all_gather), gradients="reduce-scatter")
    assert (
        "to f32[8,256,512] over data gathers the summands of a gradient of which 1/0/trace/w uses "
        "only 1/8 per device: a reduce-scatter would send 1/8 of these 3,670,016 bytes"
    ) in report.errors[-1].message
