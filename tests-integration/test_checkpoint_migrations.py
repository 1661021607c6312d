"""Restores into another optimizer: refused as they are, then admitted, then trained on.

The oracle is the same switch done by hand: Optax's own states put together, Optax's own updates.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import opt_adafactor
import opt_checkpoint
import opt_optax_bridge as opt
import pytest
from opt_checkpoint import Rename, errors, named_state, plan_restore
from opt_core import FROZEN, MultiOptimizer, Optimizer, OptimizerDef
from opt_optax_bridge import OptaxWrapper

optax: Any = importlib.import_module("optax")  # much of it is not exported explicitly
Params = dict[str, Any]
SCHEDULE = optax.linear_schedule(0.1, 0.0, 10)


def make_params() -> Params:
    return {
        "b": jnp.array([0.5, -1.5, 2.0]),
        "e": jnp.arange(8.0).reshape(4, 2) / 7 - 0.4,
        "w": jnp.array([[0.3, -0.7, 1.1], [-0.2, 0.9, -1.3]]),
    }


def gradients(params: Any) -> Any:
    return jax.tree.map(lambda p: jnp.cos(p.astype(jnp.float32)) * 2 + p / 3, params)


def train(optimizer: Optimizer, steps: int = 3) -> Optimizer:
    for _ in range(steps):
        optimizer = optimizer.apply_gradient(gradients(optimizer.target))
    return optimizer


def trained(definition: OptimizerDef, params: Params | None = None) -> Optimizer:
    return train(definition.create(make_params() if params is None else params))


def by_optax(tx: Any, params: Any, state: Any, steps: int = 2) -> tuple[Any, Any]:
    """Steps of Optax itself."""
    for _ in range(steps):
        updates, state = tx.update(gradients(params), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def wrapped(tx: Any) -> OptimizerDef:
    return OptaxWrapper(tx)


def groups(*rules: Any, **options: Any) -> OptimizerDef:
    return MultiOptimizer.from_rules(list(rules), **options)


def assert_same(a: Any, b: Any) -> None:
    before: Any = jax.tree.structure(a)
    assert before == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def assert_own_buffers(*trees: Any) -> None:
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(trees)]
    assert len(pointers) == len(set(pointers))


def migrated(
    saved: Any,
    target: Optimizer,
    allow: Iterable[str] = (),
    told: Sequence[str] = (),
    rules: Sequence[Any] = (),
) -> Optimizer:
    """Restores; before that, checks that no less is enough, and what the plan says."""
    kinds = set(allow)
    plain = plan_restore(saved, target)
    for text in told:
        assert text in str(plain)
    if kinds:
        with pytest.raises(errors.PlanError):
            plain.apply()
    for kind in kinds:
        plan = plan_restore(saved, target, allow=kinds - {kind}, rules=rules)
        assert not plan.is_ok, f"{kind} is not needed"
        assert kind in plan.missing_words
    restored = plan_restore(saved, target, allow=kinds, rules=rules).apply()
    before: Any = jax.tree.structure(target)
    assert before == jax.tree.structure(restored)
    assert_own_buffers(restored, target)
    return restored


def assert_goes_on(restored: Optimizer, tx: Any, params: Any, state: Any) -> None:
    """As Optax does from the same parameters and the state put together by hand."""
    assert_same(restored.target, params)
    assert_same(restored.state.param_states, state)
    params, state = by_optax(tx, params, state)
    on = train(restored, 2)
    assert_same(on.target, params)
    assert_same(on.state.param_states, state)


def assert_groups_go_on(restored: Optimizer, by_hand: Mapping[str, tuple[Any, Any]]) -> None:
    """The same of every group: Optax alone on its parameters, from a state put together by hand."""
    before, after = split(restored), split(train(restored, 2))
    assert before.keys() == by_hand.keys()
    for name, (tx, state) in by_hand.items():
        params, own_state = before[name]
        assert_same(own_state, state)
        params, state = by_optax(tx, params, state)
        assert_same(after[name], (params, state))


def split(optimizer: Optimizer) -> dict[str, tuple[Any, Any]]:
    """The parameters and the state of each group, without what belongs to others."""
    assert isinstance(optimizer.optimizer_def, MultiOptimizer)
    parts = optimizer.optimizer_def.split(optimizer)
    return {name: own((part.target, part.state.param_states)) for name, part in parts.items()}


def split_states(optimizer: Optimizer) -> dict[str, Any]:
    return {name: state for name, (_, state) in split(optimizer).items()}


def own(tree: Any) -> Any:
    """A tree without the `()` that stand for leaves of other groups."""
    if isinstance(tree, Mapping):
        children = {name: own(child) for name, child in tree.items()}
        return {name: child for name, child in children.items() if type(child) is not tuple}
    if isinstance(tree, tuple):
        items = map(own, tree)
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    return tree


def pick(tree: Any, *keys: str) -> Any:
    """A part of Adam's state: `mu` and `nu` of some parameters, with the count."""
    return tree._replace(mu={k: tree.mu[k] for k in keys}, nu={k: tree.nu[k] for k in keys})


# Transformations that come and go.


COUNT = "state/schedule/count"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("rules", "count"),
    [([], 3), ([(COUNT, "initialise")], 0), ([(COUNT, Rename("state/step"))], 3)],
    ids=["continues", "restarts", "continues by a rule"],
)
def test_a_schedule_is_added(rules: list[Any], count: int) -> None:
    """It takes the step, as in surgery, if no rule says otherwise."""
    old = trained(opt.adam(0.1))
    restored = migrated(
        named_state(old),
        opt.adam(SCHEDULE).create(make_params()),
        (),
        ["~ state/schedule/count int32[] <- state/step", "`schedule` is new"],
        rules=rules,
    )
    state = (old.state.param_states[0], optax.ScaleByScheduleState(jnp.int32(count)))
    assert_goes_on(restored, optax.adam(SCHEDULE), old.target, state)


# Adam and its like.


def test_a_count_that_begins_beside_moments_that_go_on_has_to_be_admitted() -> None:
    """From 0 it would correct the bias of moments that have none any more."""
    target = wrapped(optax.rmsprop(0.1, bias_correction=True)).create(make_params())
    plan = plan_restore(named_state(trained(wrapped(optax.rmsprop(0.1)))), target)
    assert plan.missing_words == {"initialise"}
    assert "!+ state/rms/count int32[]" in str(plan)


# Groups.

ADAM, FINE = opt.adam(0.1), opt.adam(0.01)
TWO = (("fast", "w|b", ADAM), ("slow", "e", FINE))


def adam_group(state: Any, *keys: str) -> Any:
    return (pick(state[0], *keys), state[1])


def labels(params: Params) -> dict[str, str]:
    return {name: "slow" if name == "e" else "fast" for name in params}


def test_partitions_of_optax_become_groups_and_back() -> None:
    tx = optax.partition({"fast": optax.adam(0.1), "slow": optax.adam(0.01)}, labels)
    old = trained(wrapped(tx))
    # Names and transformations are the same: nothing has to be admitted.
    restored = plan_restore(named_state(old), groups(*TWO).create(make_params())).apply()
    inner = old.state.param_states.inner_states
    fast, slow = (inner[name].inner_state for name in ("fast", "slow"))  # with `MaskedNode`s
    assert_groups_go_on(
        restored,
        {
            "fast": (optax.adam(0.1), adam_group(fast, "b", "w")),
            "slow": (optax.adam(0.01), adam_group(slow, "e")),
        },
    )
    back = plan_restore(named_state(restored), wrapped(tx).create(make_params())).apply()
    assert_goes_on(back, tx, old.target, old.state.param_states)


def of_two_counts() -> Optimizer:
    """Two groups, one of which was frozen for three steps: their counts are 5 and 2."""
    old = trained(groups(TWO[0], ("slow", "e", FROZEN)))
    target = groups(*TWO).create(make_params())
    return train(plan_restore(named_state(old), target).apply(), 2)


# The rules, and of each new group the old one and its parameters.
REGROUPED: dict[str, tuple[Any, dict[str, tuple[str, str]]]] = {
    "names exchanged": (  # counts follow the parameters
        [("slow", "w|b", ADAM), ("fast", "e", FINE)],
        {"slow": ("fast", "bw"), "fast": ("slow", "e")},
    ),
    "split": (
        [("weights", "w", ADAM), ("biases", "b", ADAM), TWO[1]],
        {"weights": ("fast", "w"), "biases": ("fast", "b"), "slow": ("slow", "e")},
    ),
}


@pytest.mark.parametrize("case", REGROUPED)
def test_groups_are_rearranged_and_back(case: str) -> None:
    rules, sources = REGROUPED[case]
    old = of_two_counts()
    restored = migrated(named_state(old), groups(*rules).create(make_params()))
    states = split_states(old)
    rates = {"fast": optax.adam(0.1), "slow": optax.adam(0.01)}
    assert_groups_go_on(
        restored,
        {
            name: (rates[source], adam_group(states[source], *keys))
            for name, (source, keys) in sources.items()
        },
    )
    back = migrated(named_state(restored), groups(*TWO).create(make_params()))
    assert_same(split_states(back), states)


# Adafactor.


def factored_params() -> Params:
    """Tall, wide, too small, a vector."""
    random = np.random.default_rng(0)
    shapes = {"tall": (9, 8), "wide": (8, 10), "small": (2, 3), "b": (9,)}
    return {name: jnp.asarray(random.normal(size=s), jnp.float32) for name, s in shapes.items()}


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [None, 0.9])
def test_adafactor_moves_between_optax_and_ours(momentum: float | None) -> None:
    tx = optax.adafactor(0.05, min_dim_size_to_factor=8, momentum=momentum)
    ours = opt_adafactor.Adafactor(0.05, min_dim_size_to_factor=8, beta1=momentum)
    to_ours, to_optax = (
        (opt_checkpoint.ADAFACTOR_MOMENTUM_FROM_OPTAX, opt_checkpoint.OPTAX_MOMENTUM_FROM_ADAFACTOR)
        if momentum
        else (opt_checkpoint.ADAFACTOR_FROM_OPTAX, opt_checkpoint.OPTAX_FROM_ADAFACTOR)
    )
    params = factored_params()
    old = trained(wrapped(tx), params)
    restored = migrated(
        named_state(old),
        ours.create(params),
        (),
        ["- state/factored_rms/v_row/tall", "+ state/adafactor/v_row/tall"],
        rules=to_ours,
    )
    by_hand = opt_adafactor.from_optax_state(old.state.param_states)
    assert_same(restored.state, by_hand)
    expected, _ = by_optax(tx, old.target, old.state.param_states)
    on = train(restored, 2)
    for name in params:  # other operations in another order
        np.testing.assert_allclose(on.target[name], expected[name], rtol=2e-6, atol=1e-6)
    back = migrated(named_state(restored), wrapped(tx).create(params), rules=to_optax)
    assert_goes_on(back, tx, old.target, old.state.param_states)


# Dtypes, and parameters that come and go.


def test_several_changes_at_once() -> None:
    """Groups, another parameter, a schedule, bfloat16."""
    old = trained(opt.adam(0.1))
    params = flax.core.freeze(make_params() | {"n": jnp.ones(2)})
    table = (("fast", "w|n", opt.adam(SCHEDULE, mu_dtype=jnp.bfloat16)), ("slow", "e", FINE))
    restored = migrated(
        named_state(old),
        groups(*table, ("stopped", "b", FROZEN)).create(params),
        {"initialise", "drop"},
        rules=[("state/groups/fast/schedule/count", Rename("state/step"))],
    )
    on = train(restored, 2)
    assert_same(on.target["b"], old.target["b"])
    assert int(split_states(on)["fast"][1].count) == 5
