"""Groups of wrapped Optax optimizers: against Optax alone, and under surgery."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import optax
import optax.contrib
import pytest
from opt_core import MultiOptimizer, Optimizer, freeze

contrib: Any = optax.contrib  # exports without saying so


def make_params() -> Any:
    draw = np.random.default_rng(0)
    shapes = {
        "embed": {"embedding": (16, 8)},
        "layer": {"kernel": (8, 32), "bias": (32,), "scale": (8,)},
        "out": {"kernel": (32, 8), "bias": (8,)},
    }
    return jax.tree.map(
        lambda s: jnp.asarray(draw.normal(size=s), jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


GRADS = jax.tree.map(lambda p: 0.1 * p + 0.01, make_params())
LABELS = {
    "embed": {"embedding": "tables"},
    "layer": {"kernel": "kernels", "bias": "vectors", "scale": "vectors"},
    "out": {"kernel": "kernels", "bias": "vectors"},
}
RULES = {"tables": "embed/.*", "kernels": ".*/kernel", "vectors": ".*/(bias|scale)"}


def mask_of(wanted: str) -> Any:
    """A mask over the whole tree, as users of Optax write one."""
    return jax.tree.map(lambda label: label == wanted, LABELS)


SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)

# One transformation per group; every kind of state.
MIXTURES: dict[str, dict[str, Any]] = {
    "adamw": {name: functools.partial(optax.adamw, 1e-2 * (i + 1)) for i, name in enumerate(RULES)},
    "three kinds": {
        "tables": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
        "kernels": lambda: optax.adamw(SCHEDULE),
        "vectors": lambda: optax.sgd(1e-2),
    },
    "masks": {
        "tables": lambda: optax.adamw(1e-2, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
        "kernels": lambda: optax.adamw(1e-2, mask=mask_of("kernels")),
        "vectors": lambda: optax.masked(optax.sgd(1e-2, momentum=0.9), mask_of("tables")),
    },
    "wrappers": {
        "tables": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
        "kernels": lambda: optax.partition({"a": optax.lion(1e-3), "b": optax.sgd(1e-2)}, ab()),
        "vectors": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
    },
    "stateless": dict.fromkeys(RULES, lambda: optax.sgd(1e-2)),
    "clipped": {
        "tables": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.rmsprop(1e-2)),
        "kernels": lambda: contrib.muon(1e-2),
        "vectors": lambda: optax.inject_hyperparams(optax.adam)(1e-2),
    },
}


def ab() -> Any:
    return {
        "embed": {"embedding": "a"},
        "layer": {"kernel": "a", "bias": "a", "scale": "b"},
        "out": {"kernel": "b", "bias": "a"},
    }


def definition_of(mixture: str) -> MultiOptimizer:
    wrapped = {name: opt.OptaxWrapper(make()) for name, make in MIXTURES[mixture].items()}
    return MultiOptimizer.from_rules([(name, RULES[name], wrapped[name]) for name in RULES])


@pytest.mark.parametrize(
    "mixture",
    [
        "three kinds",
        *(pytest.param(x, marks=pytest.mark.slow) for x in MIXTURES if x != "three kinds"),
    ],
)
def test_every_group_is_optax_on_its_leaves(mixture: str) -> None:
    """`optax.partition` gives every transformation the same leaves: the same updates."""
    optimizer = definition_of(mixture).create(make_params())
    tx = optax.partition({name: as_tx(make()) for name, make in MIXTURES[mixture].items()}, LABELS)
    params, state = make_params(), tx.init(make_params())
    traces = []

    @jax.jit
    def step(optimizer: Optimizer, grads: Any) -> Optimizer:
        traces.append(1)
        return optimizer.apply_gradient(grads)

    @jax.jit
    def theirs(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for t in range(3):
        grads = jax.tree.map(lambda g, t=t: g * (t + 1), GRADS)
        optimizer = step(optimizer, grads)
        params, state = theirs(params, state, grads)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
        optimizer.target,
        params,
    )
    assert len(traces) == 1


def as_tx(tx: Any) -> Any:
    return tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx


# What is compiled.


def cost(function: Any, *operands: Any) -> dict[str, float]:
    found: Any = jax.jit(function).lower(*operands).compile().cost_analysis()
    counts: dict[str, float] = found[0] if isinstance(found, list) else found
    return counts


@pytest.mark.sample(1)
@pytest.mark.parametrize("mixture", ["adamw", "three kinds", "stateless"])
def test_a_compiled_step_accesses_no_more_than_optax_partition(mixture: str) -> None:
    optimizer = definition_of(mixture).create(make_params())
    tx = optax.partition({name: make() for name, make in MIXTURES[mixture].items()}, LABELS)

    def theirs(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    ours = cost(lambda o, g: o.apply_gradient(g), optimizer, GRADS)
    reference = cost(theirs, make_params(), tx.init(make_params()), GRADS)
    # Ours counts steps besides: one int32 in, one out, and what XLA makes of the addition.
    assert ours["bytes accessed"] <= reference["bytes accessed"] + 32


@pytest.mark.parametrize("wrapper", ["multi_transform"])
def test_surgery_under_masks_of_the_whole_tree(wrapper: str) -> None:
    params = {"kernel": jnp.ones((3, 3)), "other": jnp.ones((3, 3)), "bias": jnp.ones(3)}
    mask = {"kernel": True, "other": True, "bias": False}
    labels = jax.tree.map(lambda kept: "adam" if kept else "sgd", mask)
    transforms: dict[Any, Any] = {"adam": optax.adam(0.1), "sgd": optax.sgd(0.1)}
    tx = {
        "masked": optax.masked(optax.adam(0.1), mask),
        "multi_transform": optax.multi_transform(transforms, labels),
    }[wrapper]
    grouped = MultiOptimizer.from_rules([("all", ".*", opt.OptaxWrapper(tx))])
    optimizer = grouped.create(params).apply_gradient(params)
    _, plan = freeze(optimizer, "bias")
    assert plan.initialised == plan.dropped == ()
    found, plan = freeze(optimizer, "other")
    assert (plan.initialised, len(plan.dropped)) == ((), 2)
    stepped = found.apply_gradient(params).target
    expected = optimizer.apply_gradient(params).target
    assert jnp.array_equal(stepped["kernel"], expected["kernel"])
