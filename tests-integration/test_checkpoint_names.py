"""Every optimizer of the tables by names, which say what its leaves are."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import opt_adafactor
import opt_nnx
import opt_optax_bridge as opt
import optax
import pytest
from every_definition import NAMES, bits, definition_of, optimizer_structs
from flax import nnx
from opt_checkpoint import Schema, TrainingState, named_state, plan_restore, restore_named
from opt_core import MultiOptimizer, Optimizer
from opt_core.extend import read_record, record_data


def distinct(structs: Optimizer) -> Optimizer:
    """Every leaf with values of its own."""
    leaves, structure = jax.tree.flatten(structs)

    def values(i: int, leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(i)
        return (jnp.arange(leaf.size).reshape(leaf.shape) % 7 + i).astype(leaf.dtype)

    found = [values(i, leaf) for i, leaf in enumerate(leaves)]
    made: Optimizer = jax.tree.unflatten(structure, found)
    return made


def assert_same(found: Any, expected: Any) -> None:
    structure: Any = jax.tree.structure(found)
    assert structure == jax.tree.structure(expected)
    assert bits(found) == bits(expected)


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_comes_back_by_its_names(name: str) -> None:
    """Into a target that has nothing but shapes."""
    abstract = optimizer_structs(name)
    optimizer = distinct(abstract)
    named = named_state(optimizer)
    data = json.loads(json.dumps(record_data(named.schema)))
    assert read_record(Schema, data, "schema", ValueError) == named.schema
    assert list(named_state(abstract)) == list(named)
    plan = plan_restore(named, abstract)
    assert plan.is_exact
    assert_same(plan.apply(), optimizer)
    assert_same(restore_named(abstract, dict(named)), optimizer)
    tx, state = getattr(definition_of(name), "optax_optimizer", None), optimizer.state
    if isinstance(tx, optax.GradientTransformation):  # what nothing wraps has the same names
        plain = TrainingState(tx, optimizer.target, state.param_states, state.step)
        assert_same(dict(named_state(plain)), dict(named))
        assert_same(restore_named(plain, named), plain)


def pair(tx: Any, kind: Any = opt_nnx.Optimizer, steps: int = 1) -> Any:
    """A model of Flax NNX and its optimizer."""
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(steps))
    optimizer = kind(model, tx, wrt=nnx.Param)
    for _ in range(steps):
        optimizer.update(model, nnx.state(nnx.Linear(8, 8, rngs=nnx.Rngs(2)), nnx.Param))
    return model, optimizer


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "tx",
    [
        optax.adamw(1e-2),
        MultiOptimizer.from_rules([("kernels", "kernel", opt.adam(0.1))], rest=opt.sgd(0.1)),
        opt_adafactor.Adafactor(1e-2, min_dim_size_to_factor=8, beta1=0.9),
    ],
    ids=["transformation", "groups", "adafactor"],
)
def test_pairs_of_nnx_have_the_names_of_the_other_kinds(tx: Any) -> None:
    model, optimizer = pair(tx)
    assert_same(dict(named_state((model, optimizer))), dict(named_state(optimizer.to_core(model))))


def test_what_flax_has_saved_is_read_by_opt_nnx_and_back() -> None:
    theirs = named_state(pair(optax.adamw(1e-2), nnx.Optimizer))
    ours = plan_restore(theirs, pair(opt.adamw(1e-2), steps=0)).apply()
    assert type(ours[1]) is opt_nnx.Optimizer
    assert_same(dict(named_state(ours)), dict(theirs))
    target = pair(optax.adamw(1e-2), nnx.Optimizer, steps=0)
    back = plan_restore(named_state(ours), target).apply()
    assert type(back[1]) is nnx.Optimizer
    assert_same(dict(named_state(back)), dict(theirs))
