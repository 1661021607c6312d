"""`verify` on one device: what it takes, what it says; tests-integration has the sharded steps."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from opt_partition import Expected, verify
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


def test_one_sharding_stands_for_all_leaves_below(compiled: jax.stages.Compiled) -> None:
    report = verify(compiled, Expected((WHOLE, {"mu": WHOLE, "count": None}), (WHOLE,)))
    asked = {(leaf.side, leaf.path): leaf.asked for leaf in report.leaves}
    assert asked["input", "1/mu/w"] == asked["output", "0/w"] == "P()"
    assert asked["input", "1/count"] is asked["output", "1/mu/w"] is None


def test_memory_kinds_are_compared(compiled: jax.stages.Compiled) -> None:
    host = WHOLE.with_memory_kind("pinned_host")
    with pytest.raises(ShardingMismatchError, match=r"expected P\(\) in pinned_host, 128 bytes"):
        verify(compiled, Expected((None, {"mu": host, "count": None}), None))


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="JAX raises in `Compiled.out_info`")
def test_parameters_of_a_program_that_are_no_arguments() -> None:
    def told(*arguments: Any) -> Any:
        jax.debug.print("a token comes before the arguments", ordered=True)
        return step(*arguments)

    jitted = jax.jit(told, in_shardings=WHOLE, out_shardings=WHOLE, donate_argnums=(0, 1))
    lowered = jitted.lower(PARAMS, STATE, jnp.ones((2, 8)))
    assert verify(lowered, Expected(None, None)).findings == ()


@pytest.mark.parametrize(
    ("expected", "said"),
    [
        (
            Expected((None, {"mu": None}), None),
            r"`inputs`: (.*\n)*.*\nUse `None` for what is not checked",
        ),
        (Expected((P(), None), None), "`inputs/0/w`: expected a `Layout`, a sharding, an array or"),
        (
            Expected(None, None, state="1/nu"),
            r"`state`: the step has no argument .* 1 has \['count', 'mu'\]",
        ),
        (
            Expected((None, {"mu": {"w": jnp.ones((4, 8))}, "count": None}), None),
            r"`inputs/1/mu/w`: expected float32\[8, 4\], as in the step; got float32\[4, 8\]",
        ),
    ],
)
def test_what_does_not_fit_the_step(
    compiled: jax.stages.Compiled, expected: Expected, said: str
) -> None:
    with pytest.raises(AxesError, match=said):
        verify(compiled, expected)


@pytest.fixture(scope="module")
def by_keyword() -> jax.stages.Compiled:
    def keyword_step(params: Any, *, batch: jax.Array, state: Any) -> Any:
        return step(params, state, batch)

    jitted = jax.jit(
        keyword_step, out_shardings=WHOLE, donate_argnums=0, donate_argnames=("state",)
    )
    arguments = jax.device_put({"batch": jnp.ones((2, 8)), "state": STATE}, WHOLE)
    return jitted.lower(jax.device_put(PARAMS, WHOLE), **arguments).compile()


class TestKeywordArguments:
    def test_they_are_found_by_name(self, by_keyword: jax.stages.Compiled) -> None:
        asked = {"state": {"mu": WHOLE, "count": None}, "batch": None}
        report = verify(by_keyword, Expected(None, None, state="state", keywords=asked))
        assert report.findings == ()
        leaves = {leaf.path: leaf for leaf in report.leaves if leaf.side == "input"}
        assert {path for path, leaf in leaves.items() if leaf.role == "state"} == {
            "state/count",
            "state/mu/w",
        }
        assert leaves["state/mu/w"].asked == "P()"
        assert leaves["batch"].asked is None
        assert report.bytes_per_device("state", "output") == 8 * 4 * 4 + 4

    def test_those_not_asked_about_are_noted(self, by_keyword: jax.stages.Compiled) -> None:
        report = verify(by_keyword, Expected(None, None, state="state"))
        assert [(f.kind, f.severity, f.path) for f in report.findings] == [
            ("keyword argument", "note", "batch"),
            ("keyword argument", "note", "state"),
        ]

    def test_unknown_ones_are_errors(self, by_keyword: jax.stages.Compiled) -> None:
        with pytest.raises(AxesError, match=r"`keywords`: (.*\n)*.*key"):
            verify(by_keyword, Expected(None, None, state="state", keywords={"key": None}))


class TestPathsOfParametersAndState:
    """`params` and `state` of `Expected` that point elsewhere are not passed over."""

    BATCH = jnp.ones((2, 8))

    def lowered(
        self, fun: Any, *arguments: Any, donate: tuple[int, ...] = (0, 1)
    ) -> jax.stages.Lowered:
        jitted = jax.jit(fun, in_shardings=WHOLE, out_shardings=WHOLE, donate_argnums=donate)
        return jitted.lower(*arguments)

    def one_tree(self) -> jax.stages.Lowered:
        def fun(train: Any, batch: jax.Array) -> Any:
            params, state = step(train["params"], train["opt"], batch)
            return {"params": params, "opt": state}

        return self.lowered(fun, {"params": PARAMS, "opt": STATE}, self.BATCH, donate=(0,))

    def test_the_state_is_the_batch(self) -> None:
        with pytest.raises(AxesError) as caught:
            verify(self.one_tree(), Expected(None, None))
        said = "`state`: found float32[2, 8] at '1', but nothing with the same paths and shapes"
        assert str(caught.value).startswith(said)
        assert verify(self.one_tree(), Expected(None, None, "0/params", "0/opt")).findings == ()

    def test_one_is_in_the_other(self) -> None:
        with pytest.raises(AxesError, match="`params` and `state`: '0' and '0/opt' overlap"):
            verify(self.one_tree(), Expected(None, None, state="0/opt"))

    def test_they_are_swapped(self) -> None:
        def fun(state: Any, params: Any, batch: jax.Array) -> Any:
            return step(params, state, batch)[::-1]

        lowered = self.lowered(fun, STATE, PARAMS, self.BATCH)
        with pytest.raises(AxesError, match=r"`params` and `state` are swapped: found w float32"):
            verify(lowered, Expected(None, None))
        assert verify(lowered, Expected(None, None, "1", "0")).findings == ()

    @pytest.mark.parametrize(
        ("tx", "params"),
        [
            (optax.flatten(optax.adam(0.1)), {"w": jnp.ones((8, 4)), "b": jnp.ones(4)}),
            (optax.adafactor(0.1, min_dim_size_to_factor=2), {"w": jnp.ones((8, 4))}),
            (optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(), jnp.ones(4)),
        ],
    )
    def test_optimizers_are_distinguished(self, tx: Any, params: Any) -> None:
        def fun(params: Any, state: Any) -> Any:
            updates, state = tx.update(params, state, params)
            return optax.apply_updates(params, updates), state

        report = verify(self.lowered(fun, params, tx.init(params)), Expected(None, None))
        assert report.findings == ()


def by_hand(*donate: int, state: Any = STATE, result: Any = lambda new: new) -> jax.stages.Lowered:
    """The step, what is made of its result, and what it was given."""
    jitted = jax.jit(
        lambda *arguments: result(step(*arguments)),
        in_shardings=WHOLE,
        out_shardings=WHOLE,
        donate_argnums=donate,
    )
    return jitted.lower(PARAMS, state, jnp.ones((2, 8)))


class TestDtypes:
    def test_a_leaf_that_changes(self) -> None:
        def narrow(new: Any) -> Any:
            return new[0], {**new[1], "mu": {"w": new[1]["mu"]["w"].astype(jnp.bfloat16)}}

        report = verify(by_hand(0, result=narrow), Expected(None, None), raises=False)
        [error] = report.errors
        assert (error.kind, error.path) == ("dtype", "1/mu/w")
        assert error.message.startswith(
            "output 1/mu/w bfloat16[8, 4]: was float32 as input 1/mu/w; the step is recompiled"
        )
        assert "cast the state returned by `update` back" in report.details()

    def test_gradients_that_are_returned_too(self) -> None:
        """They have the paths and shapes of the parameters, and are none."""

        def fun(params: Any, state: Any, batch: jax.Array) -> Any:
            grads = jax.grad(lambda p: jnp.mean(jnp.square(batch @ p["w"])))(params)
            return *step(params, state, batch)[::-1], {"w": grads["w"].astype(jnp.bfloat16)}

        lowered = jax.jit(fun, donate_argnums=1).lower(PARAMS, STATE, jnp.ones((2, 8)))
        assert verify(lowered, Expected(None, None), raises=False).errors == ()

    def test_another_than_asked(self) -> None:
        state = {"mu": {"w": np.empty((8, 4), jnp.bfloat16)}, "count": None}
        report = verify(by_hand(0, 1), Expected((None, state), (None, state)), raises=False)
        assert [(error.kind, error.path) for error in report.errors] == [("dtype", "1/mu/w")] * 2
        said = "input 1/mu/w float32[8, 4]: expected bfloat16; found float32"
        assert report.errors[0].message == said
        leaf = next(leaf for leaf in report.leaves if leaf.path == "1/mu/w")
        assert (leaf.ok, leaf.dtype_asked, leaf.bytes_asked) == (False, "bfloat16", None)


class TestDonation:
    @pytest.mark.parametrize(
        ("donated", "said"),
        [
            ((), "260 bytes per device are held twice, .* pass arguments 0, 1 as `donate_argnums`"),
            ((1,), "128 bytes per device are held twice, .* pass arguments 0 as `donate_argnums`"),
        ],
    )
    def test_what_was_forgotten(self, donated: tuple[int, ...], said: str) -> None:
        [warning] = verify(by_hand(*donated), Expected(None, None)).findings
        assert (warning.kind, warning.severity) == ("donation", "warning")
        assert re.search(said, warning.message)

    def test_keywords(self) -> None:
        jitted = jax.jit(lambda params, *, state: (params, state), out_shardings=WHOLE)
        lowered = jitted.lower(PARAMS, state=jax.device_put(STATE, WHOLE))
        found = verify(lowered, Expected(None, None, state="state", keywords={"state": None}))
        [warning] = found.findings
        assert "pass arguments 0, state as `donate_argnums` or `donate_argnames`" in warning.message
