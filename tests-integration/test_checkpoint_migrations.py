"""Restores into another optimizer: refused as they are, then admitted, then trained on.

The oracle is the same switch done by hand: Optax's own states put together, Optax's own updates.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import opt_adafactor
import opt_optax_bridge as opt
import pytest
from opt_checkpoint import Rename, named_state, plan_restore
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


assert_same = partial(chex.assert_trees_all_equal, strict=True)


def migrated(
    saved: Any, target: Optimizer, allow: Iterable[str] = (), rules: Sequence[Any] = ()
) -> Optimizer:
    """Restores; before that, checks that no less is enough."""
    for word in allow:
        plan = plan_restore(saved, target, allow={*allow} - {word}, rules=rules)
        assert word in plan.missing_words
    return plan_restore(saved, target, allow=allow, rules=rules).apply()


def assert_goes_on(restored: Optimizer, tx: Any, params: Any, state: Any) -> None:
    """As Optax does from the same parameters and the state put together by hand."""
    assert_same(restored.target, params)
    assert_same(restored.state.param_states, state)
    params, state = by_optax(tx, params, state)
    on = train(restored, 2)
    assert_same(on.target, params)
    assert_same(on.state.param_states, state)


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
    target = opt.adam(SCHEDULE).create(make_params())
    restored = migrated(named_state(old), target, rules=rules)
    state = (old.state.param_states[0], optax.ScaleByScheduleState(jnp.int32(count)))
    assert_goes_on(restored, optax.adam(SCHEDULE), old.target, state)


# Groups: other names and other divisions of the same mathematics go on as if nothing was changed.

ADAM, FINE = opt.adam(0.1), opt.adam(0.01)
TWO = (("fast", "w|b", ADAM), ("slow", "e", FINE))
REGROUPED: dict[str, Any] = {
    "names exchanged": groups(("slow", "w|b", ADAM), ("fast", "e", FINE)),
    "split": groups(("weights", "w", ADAM), ("biases", "b", ADAM), TWO[1]),
    "partition": wrapped(
        optax.partition(
            {"fast": optax.adam(0.1), "slow": optax.adam(0.01)},
            {"b": "fast", "e": "slow", "w": "fast"},
        )
    ),
}


@pytest.mark.parametrize("case", REGROUPED)
def test_groups_are_rearranged_and_back(case: str) -> None:
    """Two groups, one of which was frozen for three steps: their counts are 5 and 2."""
    frozen = trained(groups(TWO[0], ("slow", "e", FROZEN)))
    old = train(migrated(named_state(frozen), groups(*TWO).create(make_params())), 2)
    restored = migrated(named_state(old), REGROUPED[case].create(make_params()))
    assert_same(train(restored, 2).target, train(old, 2).target)
    back = migrated(named_state(restored), groups(*TWO).create(make_params()))
    assert_same(back.state, old.state)


# Adafactor.

MEANS = r"/(v_row|v_col|v)((?:/.*)?)"
COUNTS = r"state/(?:factored_rms|ema|schedule)/count"
# Ours has one step where Optax counts in each transformation, and a placeholder without momentum.
TO_OURS = (r"state/adafactor" + MEANS, Rename(r"state/factored_rms/\1\2"))
TO_OPTAX = (r"state/factored_rms" + MEANS, Rename(r"state/adafactor/\1\2"))
WITHOUT = [TO_OURS, (r"state/adafactor/m/.*", "initialise"), (COUNTS, "drop")]
WITH_MOMENTUM = [
    (r"state/adafactor/m(/.*)", Rename(r"state/ema/ema\1")),
    TO_OURS,
    (COUNTS, "drop"),
]
BACK_WITHOUT = [TO_OPTAX, (COUNTS, Rename("state/step")), (r"state/adafactor/m/.*", "drop")]
BACK_WITH_MOMENTUM = [
    TO_OPTAX,
    (r"state/ema/ema(/.*)", Rename(r"state/adafactor/m\1")),
    (COUNTS, Rename("state/step")),
]


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [None, 0.9])
def test_adafactor_moves_between_optax_and_ours(momentum: float | None) -> None:
    tx = optax.adafactor(0.05, min_dim_size_to_factor=8, momentum=momentum)
    ours = opt_adafactor.Adafactor(0.05, min_dim_size_to_factor=8, beta1=momentum)
    to_ours, to_optax = (WITH_MOMENTUM, BACK_WITH_MOMENTUM) if momentum else (WITHOUT, BACK_WITHOUT)
    shapes = {"tall": (9, 8), "wide": (8, 10), "small": (2, 3), "b": (9,)}
    params = {name: jnp.cos(jnp.arange(np.prod(s))).reshape(s) for name, s in shapes.items()}
    old = trained(wrapped(tx), params)
    restored = migrated(named_state(old), ours.create(params), rules=to_ours)
    by_hand = opt_adafactor.from_optax_state(old.state.param_states)
    assert_same(restored.state, by_hand)
    expected, _ = by_optax(tx, old.target, old.state.param_states)
    on = train(restored, 2)
    for name in params:  # other operations in another order
        np.testing.assert_allclose(on.target[name], expected[name], rtol=2e-6, atol=1e-6)
    back = migrated(named_state(restored), wrapped(tx).create(params), rules=to_optax)
    assert_goes_on(back, tx, old.target, old.state.param_states)
