"""`verify` on one device: what it takes, what it says; tests-integration has the sharded steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from opt_partition._verify.leaves import Expected, sharding_str
from opt_partition._verify.verify import verify
from opt_partition.errors import AxesError, ShardingMismatchError

P = PartitionSpec
MESH = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
WHOLE = NamedSharding(MESH, P())
PARAMS = {"w": jnp.ones((8, 4))}
STATE = {"mu": PARAMS, "count": jnp.zeros((), jnp.int32)}


def step(params: Any, state: Any, batch: jax.Array) -> Any:
    grads = jax.grad(lambda p: jnp.mean((batch @ p["w"]) ** 2))(params)
    mu = jax.tree.map(lambda m, g: 0.9 * m + g, state["mu"], grads)
    new = jax.tree.map(lambda p, m: p - 0.1 * m, params, mu)
    return new, {"mu": mu, "count": state["count"] + 1}


@pytest.fixture(scope="module")
def compiled() -> jax.stages.Compiled:
    jitted = jax.jit(step, in_shardings=WHOLE, out_shardings=WHOLE)
    return jitted.lower(PARAMS, STATE, jnp.ones((2, 8))).compile()


def test_what_was_not_asked_is_not_checked(compiled: jax.stages.Compiled) -> None:
    report = verify(compiled, Expected(None, None))
    assert report.ok
    assert {leaf.asked for leaf in report.leaves} == {None}
    assert {leaf.path for leaf in report.leaves if leaf.role == "state"} == {
        "1/count",
        "1/mu/w",
    }


def test_one_sharding_stands_for_all_leaves_below(compiled: jax.stages.Compiled) -> None:
    report = verify(compiled, Expected((WHOLE, {"mu": WHOLE, "count": None}), (WHOLE,)))
    asked = {(leaf.side, leaf.path): leaf.asked for leaf in report.leaves}
    assert asked["input", "1/mu/w"] == asked["output", "0/w"] == "P()"
    assert asked["input", "1/count"] is asked["output", "1/mu/w"] is None


def test_memory_kinds_are_compared(compiled: jax.stages.Compiled) -> None:
    host = WHOLE.with_memory_kind("pinned_host")
    with pytest.raises(ShardingMismatchError, match=r"asked P\(\) in pinned_host, 128 bytes"):
        verify(compiled, Expected((None, {"mu": host, "count": None}), None))


@pytest.mark.parametrize(
    ("expected", "said"),
    [
        (
            Expected((None, {"mu": None}), None),
            r"`inputs/1`: not a prefix of the step's tree of .* missing \['count'\]",
        ),
        (
            Expected((None, None, None, WHOLE), None),
            r"`inputs`: not a prefix .* unknown \['3'\]",
        ),
        (Expected((P(), None), None), "`inputs/0`: expected a `Layout`, a sharding or `None`"),
        (Expected(None, ({"w": {"v": WHOLE}},)), "`outputs/0/w`: the step has one leaf there"),
        (Expected(None, None, state="1/nu"), r"`state`: no argument .* 1 has \['count', 'mu'\]"),
        (Expected(None, None, params="9"), "`params`: no argument of the step is at '9'; the top"),
        (
            Expected((None, NamedSharding(MESH, P("data"))), None),
            r"input 1/count has shape \(\); .* of more dimensions",
        ),
    ],
)
def test_what_does_not_fit_the_step(
    compiled: jax.stages.Compiled, expected: Expected, said: str
) -> None:
    with pytest.raises(AxesError, match=said):
        verify(compiled, expected)


def test_other_arguments(compiled: jax.stages.Compiled) -> None:
    nothing = Expected(None, None)
    with pytest.raises(ValueError, match=r"`gradients` must be one of \('auto', 'reduce-scatter'"):
        verify(compiled, nothing, gradients="all-reduce")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`state_gathers` must be one of"):
        verify(compiled, nothing, state_gathers="none")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"`step` must be what `jax.jit\(f\).lower"):
        verify(jax.jit(step), nothing)  # type: ignore[arg-type]


def test_keyword_arguments_and_typed_keys() -> None:
    def draw(params: Any, state: Any, *, key: jax.Array) -> Any:
        return params + jax.random.normal(key, params.shape), state

    lowered = jax.jit(draw).lower(jnp.ones(4), (), key=jax.random.key(0))
    report = verify(lowered, Expected(None, None))
    key = next(leaf for leaf in report.leaves if leaf.path == "key")
    assert (key.role, key.bytes_found) == ("other", 8)


def test_shardings_in_words() -> None:
    mesh = AbstractMesh((4, 2), ("data", "model"))
    assert sharding_str(NamedSharding(mesh, P(None, ("data", "model"))), 3) == (
        "P(None, ('data', 'model'), None)"
    )
