"""An optimizer that did not change is restored without a word, whatever it is nested in."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest
from opt_core import Optimizer
from opt_optax_bridge import OptaxWrapper
from opt_optax_bridge.checkpoint import named_state, plan_restore

contrib: Any = optax.contrib  # exports most of its names in no `__all__`

pytestmark = pytest.mark.usefixtures("optax_promotion")

_RATE = optax.linear_schedule(1.0, 0.0, 100)
_LABELS = {"a": "x", "b": "y"}


def abstract(tx: Any) -> Optimizer:
    """Leaves without values: nothing can be found by agreeing counts."""
    params = {"a": jnp.ones((4, 4)), "b": jnp.ones(3)}
    made: Optimizer = jax.eval_shape(lambda: OptaxWrapper(tx).create(params))
    return made


def groups(x: Any, y: Any) -> Any:
    return optax.partition({"x": x, "y": y}, _LABELS)


def steps(tx: Any, k: Any, **options: Any) -> Any:
    return optax.MultiSteps(tx, k, **options).gradient_transformation()


def mask(tx: Any, *names: str) -> Any:
    return optax.masked(tx, {name: name in names for name in "ab"})


def everything_in(label: str) -> Any:
    return lambda tree: jax.tree.map(lambda _: label, tree)


_OPTIMIZERS = {
    "outer schedule": optax.chain(
        groups(optax.adamw(_RATE), optax.sgd(_RATE)), optax.scale_by_schedule(_RATE)
    ),
    "schedules alone": groups(optax.sgd(_RATE), optax.sgd(_RATE)),
    "outer adam": optax.chain(
        optax.scale_by_adam(), groups(optax.scale_by_adam(), optax.identity())
    ),
    "windows in a window": steps(groups(steps(optax.sgd(0.1), 2), optax.sgd(0.1)), 3),
    "two levels": groups(
        optax.chain(
            mask(optax.adam(0.1), "a"),
            optax.partition({"q": optax.adam(_RATE), "r": optax.adam(0.1)}, everything_in("q")),
            optax.scale_by_schedule(_RATE),
        ),
        optax.sgd(_RATE, 0.9),
    ),
    "masks": optax.chain(mask(optax.adam(0.1), "a"), mask(optax.adam(0.1), "b")),
    "mask in a mask": mask(mask(optax.adam(0.1), "a", "b"), "a"),
    "sam": contrib.sam(optax.sgd(0.1, 0.9), optax.sgd(0.2, 0.5)),
    "named": optax.named_chain(("one", optax.adam(0.1)), ("two", optax.adam(0.2))),
    "windows": steps(steps(optax.sgd(0.1, 0.9), 3), 2),
    "finite": optax.apply_if_finite(optax.apply_if_finite(optax.adam(0.1), 3), 5),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, 0), optax.add_noise(0.1, 0.5, 1)),
    "muon": contrib.muon(0.1),
    "schedule free": contrib.schedule_free(optax.adam(0.1), learning_rate=0.1),
    "injected": optax.inject_hyperparams(optax.adamw)(learning_rate=_RATE),
}


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_an_optimizer_is_restored_into_itself(name: str) -> None:
    optimizer = abstract(_OPTIMIZERS[name])
    plan = plan_restore(named_state(optimizer), optimizer)
    assert plan.is_exact, str(plan)


def test_a_group_that_took_in_a_parameter_is_not_as_it_was() -> None:
    both = {"a": "x", "b": "x"}
    before = abstract(groups(optax.adam(0.1), optax.adam(0.1)))
    after = abstract(
        optax.partition({"x": optax.adam(0.1), "y": optax.adam(0.1)}, both),
    )
    rows = {row.leaf.name: row for row in plan_restore(named_state(before), after).rows}
    assert rows["state/groups/x/adam/count"].note.startswith("anew: its groups do not agree")
