"""Updates that are traced once for leaves that are alike."""

from __future__ import annotations

import pickle
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import opt_optax_bridge as opt
import optax
import pytest
from opt_core import flatten_with_paths
from opt_optax_bridge import _wrapper
from opt_optax_bridge._description.known import KNOWN
from opt_optax_bridge._per_leaf import PER_LEAF, acts_per_leaf, update_per_leaf
from opt_optax_bridge._program import Program, _needed

pytestmark = pytest.mark.usefixtures("optax_promotion")


def product(grad: Any, param: Any) -> Any:
    return grad * param


# Optax exports some of them without saying so to type checkers.
OPTAX: Any = optax
CONTRIB: Any = optax.contrib
LISTED: dict[str, Any] = {
    "acprop": CONTRIB.scale_by_acprop(),
    "adadelta": optax.scale_by_adadelta(),
    "adam": optax.scale_by_adam(nesterov=True),
    "adamax": optax.scale_by_adamax(),
    "adan": optax.scale_by_adan(),
    "adaptive_grad_clip": optax.adaptive_grad_clip(0.1),
    "add_decayed_weights": optax.add_decayed_weights(optax.linear_schedule(0.1, 0.2, 3)),
    "ademamix": CONTRIB.scale_by_ademamix(),
    "adopt": CONTRIB.scale_by_adopt(),
    "amsgrad": optax.scale_by_amsgrad(),
    "belief": optax.scale_by_belief(),
    "centralize": optax.centralize(),
    "clip": optax.clip(0.1),
    "clip_by_block_rms": optax.clip_by_block_rms(0.1),
    "ema": optax.ema(0.9),
    "factored_rms": optax.scale_by_factored_rms(min_dim_size_to_factor=2),
    "keep_params_nonnegative": optax.keep_params_nonnegative(),
    "lion": optax.scale_by_lion(),
    "optimistic_gradient": OPTAX.scale_by_optimistic_gradient(),
    "param_block_norm": optax.scale_by_param_block_norm(),
    "param_block_rms": optax.scale_by_param_block_rms(),
    "radam": optax.scale_by_radam(),
    "rms": optax.scale_by_rms(),
    "rprop": optax.scale_by_rprop(0.1),
    "rss": optax.scale_by_rss(),
    "scale": optax.scale(0.1),
    "schedule": optax.scale_by_schedule(optax.linear_schedule(0.1, 0.2, 3)),
    "set_to_zero": optax.set_to_zero(),
    "sign": optax.scale_by_sign(),
    "stateless_with_tree_map": optax.stateless_with_tree_map(product),
    "stddev": optax.scale_by_stddev(),
    "trace": optax.trace(0.9),
    "trust_ratio": optax.scale_by_trust_ratio(),
    "yogi": optax.scale_by_yogi(),
    "zero_nans": optax.zero_nans(),
}
ADAMW = optax.adamw(optax.cosine_decay_schedule(0.1, 10), weight_decay=0.1)


def tree(layers: int = 2) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), layers)
    return {
        f"layer_{i}": {"w": jax.random.normal(key, (4, 3)), "b": jnp.full(3, 0.1 * i)}
        for i, key in enumerate(keys)
    }


def owner(path: Any) -> str | None:
    names = "/".join(map(str, path))
    found = re.search(r"layer_\d+/[wb]", names)
    return found[0] if found else None


@pytest.mark.parametrize("name", sorted(PER_LEAF))
def test_what_is_listed_updates_each_leaf_from_that_leaf_alone(name: str) -> None:
    """As the installed Optax is traced: also what leaves share depends on nothing else."""
    tx, params = LISTED[name], tree()
    assert name in KNOWN
    assert acts_per_leaf(tx)
    operands = (params, jax.eval_shape(tx.init, params), params)
    program = Program.trace(lambda g, s, p: tx.update(g, s, p), *operands)
    result = jax.tree.unflatten(program.output, range(len(program.jaxpr.jaxpr.outvars)))
    inputs = [owner(path) for path, _ in flatten_with_paths(operands)]
    assert {*inputs} - {None} == {owner(path) for path, _ in flatten_with_paths(params)}
    for path, number in flatten_with_paths(result):
        needed = _needed(program.jaxpr, [program.jaxpr.jaxpr.outvars[number]])
        variables = zip(inputs, program.jaxpr.jaxpr.invars, strict=True)
        reached = {of for of, variable in variables if variable in needed}
        assert reached <= {owner(path), None}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", sorted(PER_LEAF))
def test_updates_are_the_same_to_the_bit(name: str) -> None:
    same_updates(LISTED[name])


@pytest.mark.parametrize(
    "tx",
    [
        ADAMW,
        optax.chain(optax.clip_by_global_norm(0.1), optax.chain(optax.trace(0.9), ADAMW)),
        optax.adamw(0.1, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params)),
        optax.chain(
            optax.clip(1.0), optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation()
        ),
    ],
    ids=["adamw", "norm", "mask", "window"],
)
def test_parts_of_a_chain_that_need_all_leaves_are_called_as_they_are(tx: Any) -> None:
    same_updates(tx)


def same_updates(tx: Any) -> None:
    params = tree()
    state = tx.init(params)
    for _ in range(2):
        expected = jax.jit(tx.update)(params, state, params)
        found = jax.jit(lambda *args: update_per_leaf(tx, *args))(params, state, params)
        chex.assert_trees_all_equal(found, expected, strict=True)
        chex.assert_trees_all_equal_structs(found, expected)
        state = expected[1]


def lowered(definition: Any, layers: int, **overrides: Any) -> Any:
    params = tree(layers)

    def step(optimizer: Any, grads: Any, overrides: Any) -> Any:
        return optimizer.apply_gradient(grads, **overrides)

    return jax.jit(step).lower(definition.create(params), params, overrides)


@pytest.mark.parametrize("overrides", [{}, {"weight_decay": 0.2}], ids=["none", "override"])
def test_a_program_has_one_function_for_each_shape(overrides: Any) -> None:
    definition = opt.adamw(0.1, weight_decay=0.1)
    few, many, whole = (
        lowered(one, layers, **overrides)
        for one, layers in (
            (definition.with_per_leaf(), 2),
            (definition.with_per_leaf(), 8),
            (definition, 8),
        )
    )
    functions = [text.as_text().count("func.func private @update_leaf") for text in (few, many)]
    assert functions == [2, 2]
    assert len(many.as_text()) < 0.5 * len(whole.as_text())
    per_leaf, raw = (one.compile() for one in (many, whole))
    costs = [one.cost_analysis()["bytes accessed"] for one in (per_leaf, raw)]
    assert costs[0] == costs[1]
    optimizer = definition.create(tree(8))
    steps = [one(optimizer, tree(8), overrides) for one in (per_leaf, raw)]
    chex.assert_trees_all_equal(*(jax.tree.leaves(step) for step in steps))


def test_nothing_is_compiled_that_the_caller_does_not_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(_wrapper, "update_per_leaf", refused)
    optimizer = opt.adamw(0.1).with_per_leaf().create(tree())
    optimizer.apply_gradient(tree())
    optimizer.apply_gradient(tree(), learning_rate=0.2)
    with pytest.raises(AssertionError):
        jax.jit(lambda optimizer: optimizer.apply_gradient(tree()))(optimizer)


def own_update(updates: Any, state: Any, params: Any = None) -> Any:
    return jax.tree.map(lambda x: x / optax.tree.norm(updates), updates), state


@pytest.mark.parametrize(
    "tx",
    [
        optax.clip_by_global_norm(1.0),
        optax.masked(optax.scale_by_adam(), lambda params: params),
        optax.GradientTransformation(lambda params: optax.EmptyState(), own_update),
    ],
    ids=["norm", "masked", "own"],
)
def test_what_acts_on_all_leaves_is_refused(tx: Any) -> None:
    with pytest.raises(ValueError, match=r"`per_leaf`: no part of this transformation is known"):
        opt.OptaxWrapper(tx, per_leaf=True)


def test_the_option_stays_with_the_definition() -> None:
    definition = opt.OptaxWrapper(optax.adamw(0.1), per_leaf=True)
    assert pickle.loads(pickle.dumps(definition)).per_leaf
    assert definition.with_aliases({"adam": "mine"}).per_leaf
    assert not opt.OptaxWrapper(optax.adamw(0.1)).per_leaf
    with pytest.raises(AttributeError, match="`per_leaf` of a definition cannot change"):
        definition.per_leaf = False
