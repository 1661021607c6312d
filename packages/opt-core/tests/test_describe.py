"""The table of groups, and their norms."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core_testing import Momentum
from flax_optim import Adam
from opt_core import (
    FROZEN,
    GroupNorms,
    MultiOptimizer,
    OptimizerDef,
    OptimizerState,
    clip_metrics,
    describe,
    group_metrics,
)
from opt_core.errors import TreeMismatchError


class Schedules(OptimizerDef):
    """Has a state without arrays of its own."""

    def init_state(self, params: Any) -> OptimizerState:
        return OptimizerState(jnp.zeros((), jnp.int32), jax.random.key(0))


def make_params() -> Any:
    return {"a": {"w": jnp.ones((64, 32)), "b": jnp.ones(32)}, "c": {"w": jnp.ones((2, 2))}}


def test_the_table_in_full() -> None:
    inner = MultiOptimizer.from_rules([("w", ".*/w", Adam(0.1))], rest=Schedules(None))
    definition = MultiOptimizer.from_rules([("a", "a/.*", inner)], rest=FROZEN)
    expected = """\
group   pattern   leaves  elements     state  definition  hyper-parameters
a/w     '.*/w'         1     2,048  16.0 KiB  Adam        learning_rate=0.1
a/rest  the rest       1        32       8 B  Schedules
rest    the rest       1         4       0 B  frozen
total                  3     2,084  16.0 KiB"""
    assert str(describe(definition.create(make_params()))) == expected
    assert str(describe(jax.eval_shape(lambda: definition.create(make_params())))) == expected


def in_bfloat16(tx: Any) -> Any:
    return tx


class Rounded(Momentum):
    """Stores its parameters in its own way."""

    precision = staticmethod(in_bfloat16)


def is_weight(path: str, leaf: Any) -> bool:
    return path.endswith("w")


def test_precision_has_a_column_functions_have_names_and_long_patterns_are_cut() -> None:
    rules = [("w", is_weight, Rounded(0.5)), ("b", "a/b|" + "x" * 80, Momentum(0.5))]
    found = describe(MultiOptimizer.from_rules(rules).create(make_params()))
    assert [row.precision for row in found.rows] == ["in_bfloat16", ""]
    lines = str(found).splitlines()
    assert lines[0].split()[-2:] == ["precision", "hyper-parameters"]
    assert lines[1].index("in_bfloat16") == lines[0].index("precision")
    assert "is_weight" in lines[1]
    assert "xxx...  " in lines[2]
    assert max(map(len, lines)) < 200


def tree(seed: int) -> Any:
    draw = np.random.default_rng(seed)
    shapes = {"kernel": (4, 3), "bias": (3,), "scale": (), "count": (2,)}
    return {k: jnp.asarray(draw.normal(size=s).astype(np.float32)) for k, s in shapes.items()}


def definition() -> MultiOptimizer:
    return MultiOptimizer.from_rules(
        [("vectors", "bias|scale", Momentum(0.1)), ("kernels", "kernel", Momentum(0.5))],
        rest=FROZEN,
    )


def norm(*arrays: Any) -> float:
    """By NumPy, in float64."""
    return float(np.sqrt(sum(np.sum(np.asarray(a, np.float64) ** 2) for a in arrays)))


def test_against_numpy() -> None:
    before, grads, rtol = definition().create(tree(0)), tree(1), 1e-6
    after = before.apply_gradient(grads)
    found = jax.jit(group_metrics)(before, grads, after)
    assert list(found) == ["vectors", "kernels", "rest"]  # the order of the groups
    for name, keys in {"vectors": ["bias", "scale"], "kernels": ["kernel"]}.items():
        old, new = ([o.target[k] for k in keys] for o in (before, after))
        updates = [np.asarray(b, np.float64) - np.asarray(a, np.float64) for a, b in zip(old, new)]  # noqa: B905
        expected = (norm(*(grads[k] for k in keys)), norm(*old), norm(*updates))
        got = found[name]
        assert isinstance(got, GroupNorms)
        assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype(jnp.float32)}
        np.testing.assert_allclose((got.gradient, got.parameter, got.update), expected, rtol=rtol)
        np.testing.assert_allclose(got.update_to_parameter, expected[2] / expected[1], rtol=rtol)


def test_frozen_groups_have_parameters_alone() -> None:
    before = definition().create(tree(0))
    grads = {k: v for k, v in tree(1).items() if k != "count"}
    found = group_metrics(before, grads, before.apply_gradient(grads))["rest"]
    assert [float(x) for x in jax.tree.leaves(found)] == pytest.approx(
        [0.0, norm(before.target["count"]), 0.0, 0.0]
    )
    with pytest.raises(TreeMismatchError, match="bias"):
        group_metrics(before, {"kernel": grads["kernel"]}, before)


def test_what_clipping_does_is_known_from_the_norms() -> None:
    before, grads = definition().create(tree(0)), {**tree(1), "count": jnp.zeros(2)}
    for scale, bound in ((0.1, 1.0), (10.0, 1.0)):
        scaled = jax.tree.map(lambda g: scale * g, grads)  # noqa: B023
        found = clip_metrics(group_metrics(before, scaled, before), bound)
        expected = norm(*scaled.values())
        np.testing.assert_allclose(found.norm, expected, rtol=1e-6)
        np.testing.assert_allclose(found.factor, min(1.0, bound / expected), rtol=1e-6)
        assert float(found.clipped) == (expected > bound)


def test_in_one_pass_over_the_arrays() -> None:
    """Beside the update, no more than three sums of squares read, whether it is clipped or not."""
    params = {"kernel": jnp.ones((256, 256)), "bias": jnp.ones(256)}
    rules = [("kernels", "kernel", Momentum(0.5))]
    optimizer = MultiOptimizer.from_rules(rules, rest=Momentum(0.1)).create(params)

    def step(optimizer: Any, grads: Any) -> Any:
        return optimizer.apply_gradient(grads)

    def with_metrics(optimizer: Any, grads: Any) -> Any:
        after = optimizer.apply_gradient(grads)
        metrics = group_metrics(optimizer, grads, after)
        return after, metrics, clip_metrics(metrics, 1.0)

    def squares(grads: Any, old: Any, new: Any) -> Any:
        updates = jax.tree.map(jnp.subtract, new, old)
        return jax.tree.map(lambda x: jnp.sum(jnp.square(x)), (grads, old, updates))

    plain, metered = (bytes_accessed(f, optimizer, params) for f in (step, with_metrics))
    scalars = 4 * 64
    assert metered - plain <= bytes_accessed(squares, params, params, params) + scalars


def bytes_accessed(function: Any, *operands: Any) -> float:
    cost: Any = jax.jit(function).lower(*operands).compile().cost_analysis()
    return float((cost[0] if isinstance(cost, list) else cost)["bytes accessed"])
