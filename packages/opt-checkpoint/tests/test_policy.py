"""What a change of optimizer asks for: a restore and surgery in memory give one verdict."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import pytest
from checkpoint_testing import EVERYTHING
from opt_checkpoint import Plan, named_state, plan_restore
from opt_core import (
    FROZEN,
    MultiOptimizer,
    Optimizer,
    OptimizerDef,
    OptimizerState,
    regroup,
    reset,
)
from opt_core.errors import SurgeryError

optax: Any = importlib.import_module("optax")  # much of it is not exported explicitly
contrib: Any = importlib.import_module("optax.contrib")
pytestmark = pytest.mark.usefixtures("optax_promotion")

PARAMS = {"w": jnp.arange(8.0).reshape(2, 4), "b": jnp.ones(4)}


def trained(definition: OptimizerDef, steps: int = 3) -> Optimizer:
    optimizer = definition.create(PARAMS)
    for step in range(steps):
        grads = {name: jnp.cos(param + step) for name, param in PARAMS.items()}
        optimizer = optimizer.apply_gradient(grads)
    return optimizer


def wrapped(tx: Any) -> OptimizerDef:
    return opt.OptaxWrapper(tx)


def chained(*parts: Any) -> OptimizerDef:
    return wrapped(optax.chain(*parts))


def before_adam(tx: Any) -> OptimizerDef:
    return chained(tx, optax.adam(0.1))


def steps(k: int, tx: Any = None) -> OptimizerDef:
    return wrapped(optax.MultiSteps(tx or optax.adam(0.1), k).gradient_transformation())


def groups(*rules: Any, rest: Any = None) -> MultiOptimizer:
    return MultiOptimizer.from_rules(rules, rest=rest)


def decay(rate: float = 0.1) -> Any:
    return optax.linear_schedule(rate, 0.0, 100)


def nameless(update: Any) -> OptimizerDef:
    """A transformation whose `init` has no name."""
    init = lambda params: {"m": jax.tree.map(jnp.zeros_like, params)}  # noqa: E731
    return wrapped(optax.GradientTransformation(init, update))


def lengths(updates: Any, state: Any, params: Any = None) -> Any:
    return updates, {"m": updates}


def squares(updates: Any, state: Any, params: Any = None) -> Any:
    return updates, {"m": jax.tree.map(jnp.square, updates)}


def codes() -> OptimizerDef:
    """Moments in integers."""

    def init(params: Any) -> Any:
        return {"m": jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.int8), params)}

    return wrapped(
        optax.GradientTransformation(init, lambda updates, state, params: (updates, state))
    )


class First(OptimizerDef):
    """A definition that no transformation describes."""

    def init_state(self, params: Any) -> OptimizerState:
        return OptimizerState(jnp.int32(0), jax.tree.map(jnp.zeros_like, params))

    def compute_updates(
        self, hyper_params: Any, params: Any, state: OptimizerState, grads: Any, **extra_args: Any
    ) -> Any:
        return grads, OptimizerState(state.step + 1, grads)


class Second(First):
    """Another one."""


ADAM, ADAMW, SGD = opt.adam(0.1), opt.adamw(0.1), opt.sgd(0.1)
MOMENTUM = opt.sgd(0.1, momentum=0.9)
LEARNERS = (optax.scale_by_adam(), optax.trace(0.9))
TWO, HALF = (groups(("w", "w", ADAM), rest=rest) for rest in (ADAM, FROZEN))

# The change, and the words that it needs: none where it is only reported.
ASKED: dict[str, tuple[OptimizerDef, OptimizerDef, set[str]]] = {
    "a clip in front": (ADAMW, opt.chain(opt.clip_by_global_norm(1.0), ADAMW), set()),
    "another clip": (before_adam(optax.clip(1.0)), before_adam(optax.clip(2.0)), set()),
    "weight decay gone": (ADAMW, ADAM, set()),
    "another weight decay": (ADAMW, opt.adamw(0.1, weight_decay=0.5), set()),
    "another rate": (ADAM, opt.adam(0.2), set()),
    "other decay rates": (ADAM, opt.adam(0.1, b1=0.5, b2=0.9, eps=1e-6), set()),
    "a schedule at the end": (ADAM, opt.chain(ADAM, opt.scale_by_schedule(decay(1.0))), set()),
    "a rate becomes a schedule": (ADAM, opt.adam(decay()), set()),
    "a schedule becomes a rate": (opt.adam(decay()), ADAM, set()),
    "another schedule": (opt.adam(decay()), opt.adam(decay(0.2)), set()),
    "a window new": (ADAM, steps(4), set()),
    "a window gone": (steps(3), ADAM, set()),
    "a window of another length": (steps(3), steps(2), set()),
    "a moment in bfloat16": (ADAM, opt.adam(0.1, mu_dtype=jnp.bfloat16), set()),
    "into groups": (ADAM, TWO, set()),
    "out of groups": (TWO, ADAM, set()),
    "groups renamed": (TWO, groups(("v", "w", ADAM), rest=ADAM), set()),
    "thawed": (HALF, TWO, set()),
    "a guard around": (ADAM, wrapped(optax.apply_if_finite(optax.adam(0.1), 3)), set()),
    "momentum new": (SGD, MOMENTUM, {"initialise"}),
    "joins a count": (HALF, groups(("w", ".*", ADAM)), {"initialise"}),
    "momentum gone": (MOMENTUM, SGD, {"drop"}),
    "frozen": (ADAM, HALF, {"drop"}),
    "other moments": (ADAM, MOMENTUM, {"drop", "initialise"}),
    "a lookalike": (ADAM, opt.adamax(0.1), {"drop", "initialise"}),
    "nesterov": (ADAM, opt.nadam(0.1), {"optimizer"}),
    "a scale before new": (ADAM, before_adam(optax.scale(0.5)), {"optimizer"}),
    "another scale before": (
        before_adam(optax.scale(0.5)),
        before_adam(optax.scale(2.0)),
        {"optimizer"},
    ),
    "another order": (chained(*LEARNERS), chained(*reversed(LEARNERS)), {"optimizer"}),
    "two of a kind in another order": (
        chained(optax.scale_by_adam(), optax.scale_by_adam(b1=0.5)),
        chained(optax.scale_by_adam(b1=0.5), optax.scale_by_adam()),
        {"optimizer"},
    ),
    "integers gone": (codes(), SGD, {"drop"}),
    "one masked out": (
        ADAM,
        wrapped(optax.masked(optax.adam(0.1), {"w": True, "b": False})),
        {"drop"},
    ),
}


def free(b1: float) -> OptimizerDef:
    return wrapped(contrib.schedule_free(optax.sgd(0.1), 0.1, b1=b1))


# The change, and what is said of it; no word of `allow` admits it.
REFUSED: dict[str, tuple[OptimizerDef, OptimizerDef, str]] = {
    "an open window gone": (steps(4), ADAM, "a window is open"),
    "an open window shorter": (steps(4), steps(2), "a window is open"),
    "another function of a nameless init": (nameless(lengths), nameless(squares), "`update` of"),
    "another definition in a chain": (
        opt.chain(opt.clip(1.0), First({})),
        opt.chain(opt.clip(1.0), Second({})),
        "`definition` of `as_transformation` was <First>, is <Second>",
    ),
    "what schedule_free averages": (free(0.9), free(0.5), "`b1` of `schedule_free` was 0.9"),
}


def verdicts(old: Optimizer, new: OptimizerDef, allow: Any) -> tuple[Plan[Any], Any]:
    """The plan of a restore, and what surgery returns or raises."""
    plan = plan_restore(named_state(old), new.create(PARAMS), allow=allow)
    try:
        return plan, regroup(old, new, allow=allow)
    except SurgeryError as error:
        return plan, error


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", ASKED)
def test_both_doors_ask_for_the_same_words(name: str) -> None:
    before, after, words = ASKED[name]
    old = trained(before)
    for word in words:
        plan, refusal = verdicts(old, after, EVERYTHING - {word})
        assert not plan.is_ok
        assert isinstance(refusal, SurgeryError)
        assert refusal.plan.problems == plan.problems
        assert all(f"'{word}'" in problem for problem in plan.problems)
    plan, surgery = verdicts(old, after, words)
    assert plan.is_ok, plan.problems
    moved, done = surgery
    assert (done.problems, done.notes) == (plan.problems, plan.notes)
    assert [(row.leaf.name, row.action) for row in done.rows] == [
        (row.leaf.name, row.action) for row in plan.rows
    ]
    restored = plan.apply()
    structure: Any = jax.tree.structure(restored)
    assert structure == jax.tree.structure(moved)
    jax.tree.map(np.testing.assert_array_equal, restored, moved)


@pytest.mark.parametrize("name", REFUSED)
def test_both_doors_refuse_what_nothing_admits(name: str) -> None:
    before, after, told = REFUSED[name]
    plan, refusal = verdicts(trained(before), after, EVERYTHING)
    assert isinstance(refusal, SurgeryError)
    assert refusal.plan.problems == plan.problems
    assert any(told in problem for problem in plan.problems)


def test_lookalikes_are_initialised_never_kept() -> None:
    plan, (moved, _) = verdicts(trained(ADAM), opt.adamax(0.1), EVERYTHING)
    assert {"state/adamax/mu/w", "state/adamax/nu/w"} <= {*plan.initialised}
    assert not any(leaf.any() for leaf in jax.tree.leaves(moved.state.param_states))


def test_reset_does_not_keep_perturbed_parameters() -> None:
    normalize = optax.chain(contrib.normalize(), optax.sgd(0.05))
    sam = wrapped(contrib.sam(optax.sgd(0.1, momentum=0.9), normalize, sync_period=2))
    optimizer = trained(groups(("w", "w", sam), rest=ADAM))
    with pytest.raises(SurgeryError, match=r"sam/cache/w.*a window is open"):
        reset(optimizer, "w")
