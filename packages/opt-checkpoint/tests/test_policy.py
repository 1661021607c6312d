"""What a change of optimizer asks for: a restore and surgery in memory give one verdict."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import chex
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
    describe_state,
    regroup,
    reset,
)
from opt_core.errors import SurgeryError

optax: Any = importlib.import_module("optax")  # much of it is not exported explicitly
contrib: Any = importlib.import_module("optax.contrib")
pytestmark = pytest.mark.usefixtures("optax_promotion")

MINE = __name__.partition(".")[0]  # the package of what these tests define
PARAMS = {"w": jnp.arange(8.0).reshape(2, 4), "b": jnp.ones(8)}


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


def scaling(factor: float) -> Any:
    """A function, told from another by what it has captured."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(lambda leaf: factor * leaf, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@dataclasses.dataclass(frozen=True)
class Config:
    decay: float = 0.9
    kind: str = "mean"


def averages(config: Config) -> OptimizerDef:
    """A state that is a mean, or a sum, as a word of a record says."""

    def init(params: Any) -> Any:
        return {"average": jax.tree.map(jnp.zeros_like, params)}

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        new = 0.1 if config.kind == "mean" else 1.0
        average = jax.tree.map(lambda a, g: config.decay * a + new * g, state["average"], updates)
        return average, {"average": average}

    return wrapped(optax.GradientTransformation(init, update))


def vector_of(name: str) -> OptimizerDef:
    """The momentum of one parameter, as a vector; those of `w` and `b` are of one size."""
    return wrapped(optax.masked(optax.flatten(optax.trace(0.9)), {n: n == name for n in PARAMS}))


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
TRACE = optax.trace(0.9)
LEARNERS = (optax.scale_by_adam(), TRACE)
ALL = {"w": True, "b": True}
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
    "a wrapper around": (
        opt.chain(opt.clip(1.0), ADAM),
        opt.chain(opt.clip(1.0), opt.as_transformation(ADAM)),
        set(),
    ),
    "another function behind": (chained(TRACE, scaling(2.0)), chained(TRACE, scaling(3.0)), set()),
    "another number in a record": (averages(Config()), averages(Config(decay=0.5)), set()),
    "a mask that hides nothing": (
        chained(optax.scale(2.0), TRACE),
        chained(optax.masked(optax.scale(2.0), ALL), TRACE),
        set(),
    ),
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
    "another function before": (
        chained(scaling(2.0), TRACE),
        chained(scaling(3.0), TRACE),
        {"optimizer"},
    ),
    "another word in a record": (averages(Config()), averages(Config(kind="sum")), {"optimizer"}),
    "a schedule before gone": (
        chained(optax.scale_by_schedule(decay()), TRACE),
        chained(TRACE),
        {"optimizer"},
    ),
    "a vector of another parameter": (vector_of("w"), vector_of("b"), {"drop", "initialise"}),
    "numbers of all parameters, some frozen": (
        wrapped(contrib.mechanize(optax.sgd(0.1))),
        groups(("w", "w", wrapped(contrib.mechanize(optax.sgd(0.1)))), rest=FROZEN),
        {"optimizer", "drop"},
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
    "a count beside moments that have had none": (
        wrapped(optax.rmsprop(0.1)),
        wrapped(optax.rmsprop(0.1, bias_correction=True)),
        "`bias_correction` of `rms` was False, is True",
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


@pytest.mark.sample(12)
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
    chex.assert_trees_all_equal(plan.apply(), moved, strict=True)


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


# Rates that a program sets while it trains, as `inject_hyperparams` lets it.


def injected(rate: float) -> OptimizerDef:
    return wrapped(optax.inject_hyperparams(optax.adamw)(learning_rate=rate))


def with_rate(optimizer: Optimizer, rate: float) -> Optimizer:
    inject = optimizer.state.param_states
    changed = {**inject.hyperparams, "learning_rate": jnp.float32(rate)}
    state = inject._replace(hyperparams=changed)
    return optimizer.replace(state=optimizer.state.replace(param_states=state))


@pytest.mark.parametrize(("in_code", "acts"), [(0.5, 0.125), (0.25, 0.25)])
def test_a_rate_set_at_run_time_continues_unless_the_code_has_another(
    in_code: float, acts: float
) -> None:
    old = with_rate(trained(injected(0.5)), 0.125)
    plan, (moved, _) = verdicts(old, injected(in_code), ())
    assert plan.is_ok
    assert plan.is_exact == (in_code == 0.5)
    told = "hyperparams/learning_rate float32[]: `learning_rate` was 0.5, is 0.25 in the code"
    assert (told in str(plan)) == (in_code == 0.25)
    for new in (plan.apply(), moved):
        jax.tree.map(np.testing.assert_array_equal, new.state, with_rate(old, acts).state)


# Names: what is called like a transformation of Optax is not taken for it.


def scale_by_adam(b1: float = 0.9, b2: float = 0.999) -> Any:
    """Sums, not averages, in the classes of Optax."""

    def init_fn(params: Any) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return optax.ScaleByAdamState(jnp.int32(0), zeros, zeros)

    def update_fn(updates: Any, state: Any, params: Any = None) -> Any:
        mu = jax.tree.map(lambda m, g: b1 * m + g, state.mu, updates)
        nu = jax.tree.map(lambda v, g: b2 * v + g * g, state.nu, updates)
        return mu, optax.ScaleByAdamState(state.count + 1, mu, nu)

    return optax.GradientTransformation(init_fn, update_fn)


def with_lambdas() -> Any:
    own = scale_by_adam()
    return optax.GradientTransformation(lambda p: own.init(p), lambda u, s, p=None: (u, s))


class Trace(OptimizerDef):
    """A definition called like Optax's, with the class of its state."""

    def init_state(self, params: Any) -> OptimizerState:
        return OptimizerState(jnp.int32(0), optax.TraceState(jax.tree.map(jnp.zeros_like, params)))


@pytest.mark.parametrize(
    ("own", "optaxs"),
    [
        (wrapped(scale_by_adam()), wrapped(optax.scale_by_adam())),
        (wrapped(with_lambdas()), wrapped(optax.scale_by_adam())),
        (Trace({}), wrapped(optax.trace(0.9))),
    ],
    ids=["factory", "lambdas", "definition"],
)
def test_one_of_that_name_does_not_continue_as_optaxs_nor_the_other_way(
    own: OptimizerDef, optaxs: OptimizerDef
) -> None:
    for before, new in ((own, optaxs), (optaxs, own)):
        old = before.create(PARAMS)
        old = old.replace(state=jax.tree.map(lambda leaf: leaf + 1, old.state))
        assert not verdicts(old, new, ())[0].is_ok
        plan, _ = verdicts(old, new, EVERYTHING)
        assert not any(leaf.any() for leaf in jax.tree.leaves(plan.apply().state.param_states))
    names = {leaf.transformation for leaf in describe_state(Trace({}).create(PARAMS)).leaves}
    assert names == {f"{MINE}.trace"}
