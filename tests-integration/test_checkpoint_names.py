"""Every optimizer of the tables by names, and the other layouts of the same state."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_adafactor
import opt_optax_bridge as opt
import pytest
from jax.sharding import PartitionSpec
from opt_checkpoint import (
    Schema,
    TrainingState,
    errors,
    named_state,
    plan_restore,
    restore_named,
)
from opt_core import FROZEN, MultiOptimizer, Optimizer
from opt_optax_bridge import OptaxWrapper
from optax_table import TABLE

PARAMS: dict[str, Any] = {
    "b": jnp.arange(8.0),
    "deep": {"k": jnp.ones((8, 16))},
    "w": jnp.arange(64.0).reshape(8, 8),
}


def distinct(optimizer: Optimizer) -> Optimizer:
    """Every leaf of the state with a value of its own."""
    leaves, structure = jax.tree.flatten(optimizer.state)

    def value(i: int, leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.fold_in(leaf, i)
        return (jnp.arange(leaf.size).reshape(leaf.shape) % 7 + i).astype(leaf.dtype)

    return optimizer.replace(
        state=jax.tree.unflatten(structure, [value(i, leaf) for i, leaf in enumerate(leaves)])
    )


def bits(tree: Any) -> list[Any]:
    found = []
    for leaf in jax.tree.leaves(tree):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        found.append(np.asarray(jax.random.key_data(leaf) if is_key else leaf))
    return found


def assert_same(a: Any, b: Any) -> None:
    before: Any = jax.tree.structure(a)
    assert before == jax.tree.structure(b)
    for x, y in zip(bits(a), bits(b), strict=True):
        assert x.dtype == y.dtype
        assert x.tobytes() == y.tobytes()


def built(name: str) -> Optimizer:
    case = TABLE[name]
    params = case.wrap({k: v for k, v in PARAMS.items() if k not in case.without})
    params = jax.tree.map(lambda x: x.astype(case.dtype), params)
    return distinct(OptaxWrapper(case.build(params)).create(params))


def assert_every_layout_comes_back(optimizer: Optimizer) -> None:
    named = named_state(optimizer)
    data = json.loads(json.dumps(named.schema.to_data()))
    assert Schema.from_data(data) == named.schema
    fresh = optimizer.optimizer_def.create(optimizer.target)

    # Named states, whole and bare, into a target that has nothing but shapes.
    abstract = jax.eval_shape(lambda: fresh)
    assert list(named_state(abstract)) == list(named)
    plan = plan_restore(named, abstract)
    assert plan.is_exact
    restored = plan.apply()
    assert_same(restored, optimizer)
    assert_same(restore_named(fresh, dict(named)), optimizer)

    # State dicts of T5X and Flax.
    written = optimizer.state_dict()
    again = named_state(fresh.restore_state(written))
    assert_same(dict(again), dict(named))
    assert_same(restored.state_dict(), written)


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", TABLE)
def test_every_optimizer_of_optax_comes_back_from_every_layout(name: str) -> None:
    optimizer = built(name)
    assert_every_layout_comes_back(optimizer)
    # Raw states of Optax.
    definition = optimizer.optimizer_def
    assert isinstance(definition, OptaxWrapper)
    plain = TrainingState(
        definition.optax_optimizer,
        optimizer.target,
        optimizer.state.param_states,
        optimizer.state.step,
    )
    assert_same(dict(named_state(plain)), dict(named_state(optimizer)))
    assert_same(restore_named(plain, named_state(optimizer)), plain)


INNER = MultiOptimizer.from_rules([("x", "b", opt.lion(0.1))], rest=opt.adam(0.1))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "definition",
    [
        opt_adafactor.Adafactor(0.1, min_dim_size_to_factor=8, beta1=0.9),
        MultiOptimizer.from_rules([("m", "w|deep/k", opt.adamw(0.1))], rest=FROZEN),
        MultiOptimizer.from_rules([("n", "b|deep/k", INNER)], rest=opt_adafactor.Adafactor(0.1)),
    ],
    ids=["adafactor", "frozen", "nested"],
)
def test_definitions_of_other_kinds_come_back_from_every_layout(definition: Any) -> None:
    assert_every_layout_comes_back(distinct(definition.create(PARAMS)))


def _by_map(*dims: Any) -> opt_adafactor.Adafactor:
    rules = opt_adafactor.HParamMap([(".*", dims)])
    return opt_adafactor.Adafactor(0.1, min_dim_size_to_factor=4, factor_map=rules)


def _by_axes(*axes: str) -> opt_adafactor.Adafactor:
    rules = {**opt_adafactor.standard_logical_factor_rules()}
    made = opt_adafactor.Adafactor(0.1, min_dim_size_to_factor=4, logical_factor_rules=rules)
    return made.with_param_axes({"w": PartitionSpec(*axes)})


_DIM = opt_adafactor.FactorDim


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            _by_map(_DIM.BATCH, _DIM.ROW, _DIM.COLUMN),
            _by_map(_DIM.BATCH, _DIM.COLUMN, _DIM.ROW),
        ),
        (_by_axes("layers", "embed", "mlp"), _by_axes("layers", "mlp", "embed")),
        (_by_map(_DIM.BATCH, _DIM.ROW, _DIM.COLUMN), _by_axes("layers", "mlp", "embed")),
    ],
)
def test_factors_of_other_dimensions_are_refused(old: Any, new: Any) -> None:
    params = {"w": jnp.ones((2, 8, 8))}
    saved = named_state(old.create(params))
    assert plan_restore(saved, old.create(params)).is_exact
    with pytest.raises(errors.PlanError) as caught:
        plan_restore(saved, new.create(params)).apply()
    expected = "`v_row/w` of `adafactor` had the dimensions 0,1 of its parameter, has 0,2"
    assert expected in str(caught.value)


def test_the_same_factors_by_another_rule_are_the_same() -> None:
    params = {"w": jnp.ones((2, 8, 8))}
    old, new = _by_map(_DIM.BATCH, _DIM.ROW, _DIM.COLUMN), _by_axes("layers", "embed", "mlp")
    assert plan_restore(named_state(old.create(params)), new.create(params)).is_exact
