"""Surgery on real Optax optimizers: what goes on, what does not, and what it does to training."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import optax
import optax.contrib
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from opt_checkpoint import named_state, plan_restore
from opt_core import (
    FROZEN,
    MultiOptimizer,
    Optimizer,
    OptimizerDef,
    describe_state,
    freeze,
    regroup,
    reset,
    unfreeze,
)
from opt_core.errors import GroupError, LeafError, SurgeryError

contrib: Any = optax.contrib  # it exports nothing explicitly
EVERYTHING = frozenset({"initialise", "drop", "cast", "reshape", "regroup", "optimizer"})
MINE = __name__.partition(".")[0]  # the package of what these tests define


def make_params() -> Any:
    return {"w": jnp.arange(64.0).reshape(8, 8) / 64, "b": jnp.ones(8)}


def gradients(step: int) -> Any:
    return jax.tree.map(lambda p: jnp.cos(p * 7 + step), make_params())


def trained(definition: OptimizerDef, steps: int = 3) -> Optimizer:
    return advanced(definition.create(make_params()), steps)


def advanced(optimizer: Optimizer, steps: int) -> Optimizer:
    update = jax.jit(lambda o, g: o.apply_gradient(g))
    for _ in range(steps):
        optimizer = update(optimizer, gradients(int(optimizer.state.step)))
    return optimizer


def wrapped(tx: Any) -> OptimizerDef:
    return opt.OptaxWrapper(tx)


def multi_steps(tx: Any, every_k: int) -> OptimizerDef:
    return wrapped(optax.MultiSteps(tx, every_k).gradient_transformation())


def schedule(value: float = 0.1) -> optax.Schedule:
    return optax.linear_schedule(value, 0.0, 100)


def counts(optimizer: Optimizer, role: str) -> list[int]:
    described = describe_state(optimizer).leaves
    leaves = jax.tree.leaves(optimizer.state.param_states)
    return [int(x) for x, leaf in zip(leaves, described, strict=True) if leaf.role == role]


# What acts on gradients before moments, and what the moments are.


def momentum(*before: Any, after: Any = None) -> OptimizerDef:
    return wrapped(optax.chain(*before, optax.trace(0.9), after or optax.scale(-0.01)))


def before_adam(*before: Any) -> OptimizerDef:
    return wrapped(optax.chain(*before, optax.adam(0.01)))


def doubled(factor: float) -> Any:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(lambda leaf: factor * leaf, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def partly(tx: Any, *names: str, how: str) -> Any:
    """A transformation of some parameters; built again, it is the same."""

    def mask(tree: Any) -> Any:
        return {name: name in names for name in tree}

    def labels(tree: Any) -> Any:
        return {name: "x" if name in names else "y" for name in tree}

    if "mask" in how:
        return optax.masked(tx, mask if "callable" in how else mask(make_params()))
    given = labels if "callable" in how else labels(make_params())
    return optax.partition({"x": tx, "y": optax.identity()}, given)


@dataclasses.dataclass(frozen=True)
class Config:
    decay: float = 0.9
    kind: str = "mean"


class Averages(NamedTuple):
    average: Any


def averages(config: Config) -> OptimizerDef:
    """A user's transformation whose state is a mean, or a sum."""

    def init(params: Any) -> Averages:
        return Averages(jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        new = 0.1 if config.kind == "mean" else 1.0
        average = jax.tree.map(lambda a, g: 0.9 * a + new * g, state.average, updates)
        return average, Averages(average)

    return wrapped(optax.GradientTransformation(init, update))


Pair = tuple[OptimizerDef, OptimizerDef]
# And what the change is called. `test_policy.py` of opt-checkpoint has those of Optax alone.
CHANGES: dict[str, tuple[Callable[[], Pair], str]] = {
    "function": (
        lambda: (momentum(doubled(2.0)), momentum(doubled(3.0))),
        f"`factor` of `{MINE}.doubled`, which acts before `trace`, was 2.0",
    ),
    "word in a record": (
        lambda: (averages(Config()), averages(Config(kind="sum"))),
        f"`config.kind` of `{MINE}.averages` was mean, is sum",
    ),
    "a schedule is gone": (
        lambda: (momentum(optax.scale_by_schedule(schedule())), momentum()),
        "`schedule`, which acts before `trace`, is gone",
    ),
    "a sign is new": (
        lambda: (before_adam(), before_adam(optax.scale_by_sign())),
        "`sign`, which acts before `adam`, is new",
    ),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_the_meaning_of_moments_has_to_be_admitted(name: str) -> None:
    """Carried over in silence, momentum would be twice of what it should be, or half."""
    make, words = CHANGES[name]
    source, target = make()
    optimizer = trained(source)
    with pytest.raises(SurgeryError, match=re.escape(words)):
        regroup(optimizer, target, allow=EVERYTHING - {"optimizer"})
    assert regroup(optimizer, target, allow={"optimizer", "drop"})[1].kept
    again, _ = make()
    assert regroup(optimizer, again)[1].is_exact


NO_CHANGE: dict[str, Callable[[], Pair]] = {
    "function behind": lambda: (momentum(after=doubled(2.0)), momentum(after=doubled(3.0))),
    "number in a record": lambda: (averages(Config()), averages(Config(decay=0.5))),
    "mask that hides nothing": lambda: (
        momentum(optax.scale(2.0)),
        momentum(partly(optax.scale(2.0), "w", "b", how="mask")),
    ),
}


@pytest.mark.parametrize("name", NO_CHANGE)
def test_what_does_not_change_the_meaning_of_moments_passes(name: str) -> None:
    source, target = NO_CHANGE[name]()
    optimizer = source.create(make_params())
    assert not regroup(optimizer, target)[1].dropped


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["mask", "callable mask", "labels", "callable labels"])
def test_a_vector_of_other_parameters_does_not_continue(how: str) -> None:
    """Vectors of one size: the momentum of one parameter would be that of the other."""
    params = {"w": jnp.ones(8), "b": jnp.ones(8)}
    one, again, other = (
        wrapped(partly(optax.flatten(optax.trace(0.9)), name, how=how)) for name in "wwb"
    )
    optimizer = one.create(params).apply_gradient(params)
    assert regroup(optimizer, again)[1].is_exact
    with pytest.raises(SurgeryError, match=r"allow=\{'drop', 'initialise'\}"):
        regroup(optimizer, other)


RATES: dict[str, Callable[[], Any]] = {
    "prodigy": lambda: contrib.prodigy(1.0),
    "dadapt_adamw": lambda: contrib.dadapt_adamw(1.0),
    "dog": lambda: contrib.dog(1.0),
    "dowg": lambda: contrib.dowg(1.0),
    "momo": lambda: contrib.momo(1.0),
    "mechanize": lambda: contrib.mechanize(optax.sgd(0.1)),
    "lbfgs": lambda: optax.lbfgs(1.0, linesearch=None),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", RATES)
def test_numbers_made_of_all_parameters_are_of_no_others(name: str) -> None:
    """They go on where the parameters are the same; otherwise somebody has to say so."""
    definition = wrapped(RATES[name]())
    optimizer = definition.create(make_params())
    extra = {"value": 1.0} if name == "momo" else {}
    for _ in range(2):
        optimizer = optimizer.apply_gradient(gradients(0), **extra)
    words = "made of all its parameters, of which 1 gone"
    with pytest.raises(SurgeryError, match=words):
        freeze(optimizer, "b")
    _, plan = freeze(optimizer, "b", allow={"optimizer"})
    statistics = {row.leaf.name for row in plan.target_rows if row.leaf.role == "statistic"}
    assert statistics <= {*plan.renamed}
    groups = MultiOptimizer.from_rules([("b", "b", definition), ("w", "w", definition)])
    with pytest.raises(SurgeryError, match=words):
        regroup(optimizer, groups, allow=EVERYTHING - {"optimizer"})
    assert regroup(optimizer, groups, allow=EVERYTHING)[1].is_ok
    _, plan = regroup(optimizer, MultiOptimizer.from_rules([("all", ".*", definition)]))
    assert not plan.initialised


# Schedules.


def test_of_two_transformations_of_one_name_each_has_the_state_of_its_settings() -> None:
    fast, slow, rate = optax.trace(0.5), optax.trace(0.9), optax.scale(-0.1)
    optimizer = trained(wrapped(optax.chain(fast, slow, rate)))
    swapped, _ = regroup(optimizer, wrapped(optax.chain(slow, fast, rate)), allow={"optimizer"})
    old, new = optimizer.state.param_states, swapped.state.param_states
    for found, expected in zip(new[:2], old[1::-1], strict=True):
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_schedules_continue() -> None:
    optimizer = trained(opt.adam(0.1), 5)
    found, plan = regroup(optimizer, opt.adam(schedule()))
    assert counts(found, "schedule_count") == [5]
    assert counts(found, "count") == [5]
    assert [row.note for row in plan.rows if row.leaf.role == "schedule_count"] == [
        "a new count, which continues from `state/step`"
    ]
    found, _ = regroup(optimizer, opt.adam(schedule()), schedules="restart")
    assert counts(found, "schedule_count") == [0]
    assert counts(found, "count") == [5]
    with pytest.raises(GroupError, match="'continue' or 'restart', found 'again'"):
        regroup(optimizer, opt.adam(0.1), schedules="again")  # type: ignore[arg-type]


def test_the_schedule_of_unfrozen_leaves() -> None:
    rules = [("w", "w", opt.adam(schedule())), ("b", "b", FROZEN)]
    optimizer = trained(MultiOptimizer.from_rules(rules), 5)
    found, _ = unfreeze(optimizer, "b", opt.adam(schedule()))
    assert counts(found, "schedule_count") == [5, 5]
    assert counts(found, "count") == [0, 5]
    found, _ = unfreeze(optimizer, "b", opt.adam(schedule()), schedules="restart")
    assert counts(found, "schedule_count") == [0, 5]
    found, _ = reset(optimizer, "w")
    assert counts(found, "schedule_count") == [5]
    assert counts(found, "count") == [0]


def test_a_key_continues_in_one_group() -> None:
    params = {"u": jnp.ones(3), "v": jnp.ones(3)}
    zeros = jax.tree.map(jnp.zeros_like, params)

    def noisy(seed: int) -> OptimizerDef:
        return wrapped(optax.chain(optax.add_noise(0.1, 0.5, seed), optax.scale(-1.0)))

    optimizer = noisy(0).create(params).apply_gradient(zeros)
    groups = MultiOptimizer.from_rules([("u", "u", noisy(1)), ("v", "v", noisy(2))])
    found, plan = regroup(optimizer, groups)
    keys = [row for row in plan.target_rows if row.leaf.role == "key"]
    assert [(row.action, row.note) for row in keys] == [
        ("renamed", ""),
        ("initialised", "its key continues in another group"),
    ]
    states, fresh = (o.state.param_states["v"] for o in (found, groups.create(params)))
    assert bool(states[0].rng_key == fresh[0].rng_key)
    moved = found.apply_gradient(zeros).target
    before = found.target
    assert not jnp.array_equal(moved["u"] - before["u"], moved["v"] - before["v"])
    back, plan = regroup(found, noisy(0))
    assert [r.action for r in plan.rows if r.leaf.role == "key"] == ["renamed", "dropped"]
    _, plan = freeze(back, "u")
    assert not plan.initialised


def test_reset_keeps_what_was_set_at_run_time() -> None:
    injected = wrapped(optax.inject_hyperparams(optax.adam)(learning_rate=0.1))
    optimizer = trained(MultiOptimizer.from_rules([("w", "w", injected)], rest=opt.adam(0.1)))
    optimizer.state.param_states["w"].hyperparams["learning_rate"] = jnp.float32(0.007)
    found, plan = reset(optimizer, "w")
    state = found.state.param_states["w"]
    assert float(state.hyperparams["learning_rate"]) == np.float32(0.007)
    assert "state/groups/w/inject_hyperparams/hyperparams/learning_rate" in plan.kept
    assert not state.inner_state[0].mu["w"].any()


def test_reset_keeps_the_updates_of_a_window() -> None:
    inner = multi_steps(optax.adam(schedule()), 4)
    optimizer = trained(MultiOptimizer.from_rules([("w", "w", inner)], rest=opt.adam(0.1)), 6)
    found, plan = reset(optimizer, "w")
    state = found.state.param_states["w"]
    assert (int(state.mini_step), int(state.gradient_step)) == (0, 1)
    assert counts(found, "schedule_count") == [1]
    assert "state/groups/w/multi_steps/gradient_step" in plan.kept
    assert not state.acc_grads["w"].any()


# Where leaves are placed.


KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)


def mesh_of(kind: AxisType) -> Any:
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)


def sharded_params(mesh: Any) -> Any:
    specs = {"w": P(None, "model"), "b": P("model")}
    return {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in make_params().items()}


def spec_of(leaf: Any) -> tuple[Any, ...]:
    spec = tuple(leaf.sharding.spec)
    return (*spec, *(None,) * (leaf.ndim - len(spec)))


@pytest.mark.sample(1)
@KINDS
def test_new_leaves_are_placed_as_their_parameter(kind: AxisType) -> None:
    with jax.set_mesh(mesh := mesh_of(kind)):
        optimizer = opt.sgd(0.1).create(sharded_params(mesh))
        found, _ = regroup(optimizer, opt.adam(0.1), allow={"initialise"})
        state = found.state.param_states[0]
        assert spec_of(state.mu["w"]) == (None, "model")
        assert spec_of(state.mu["b"]) == ("model",)
        assert spec_of(state.count) == ()
        factors = opt.adafactor(0.1, min_dim_size_to_factor=4)
        factored, _ = regroup(optimizer, factors, allow={"initialise"})
        described = describe_state(factored).leaves
        leaves = jax.tree.leaves(factored.state.param_states)
        for leaf, value in zip(described, leaves, strict=True):
            if leaf.parameter == ("w",) and leaf.role == "factored":
                assert spec_of(value) == tuple(
                    {0: None, 1: "model"}[d or 0] for d in leaf.dimensions or ()
                )


@pytest.mark.sample(1)
@KINDS
def test_what_zero_has_sharded_stays_so(kind: AxisType) -> None:
    with jax.set_mesh(mesh := mesh_of(kind)):
        optimizer = opt.adam(0.1).create(sharded_params(mesh))
        further = NamedSharding(mesh, P("data", "model"))

        def place(leaf: Any) -> Any:
            return jax.device_put(leaf, further) if leaf.ndim == 2 else leaf

        states = jax.tree.map(place, optimizer.state.param_states)
        optimizer = optimizer.replace(state=optimizer.state.replace(param_states=states))
        for new in (opt.adamw(0.1), opt.adabelief(0.1)):
            found, _ = regroup(optimizer, new, allow={"drop", "initialise"})
            assert spec_of(found.state.param_states[0].mu["w"]) == ("data", "model")
        grouped, _ = regroup(optimizer, MultiOptimizer.from_rules([("all", ".*", opt.adam(0.1))]))
        again, _ = reset(grouped, "all")
        assert spec_of(again.state.param_states["all"][0].nu["w"]) == ("data", "model")
        fresh = opt.sgd(0.1).create(sharded_params(mesh))
        shapes = jax.eval_shape(opt.adam(0.1).create, fresh.target).state.param_states
        shardings = jax.tree.map(lambda x: further if x.ndim == 2 else None, shapes)
        allow = {"initialise"}
        found, _ = regroup(fresh, opt.adam(0.1), allow=allow, placement=shardings)
        assert spec_of(found.state.param_states[0].mu["w"]) == ("data", "model")
        assert spec_of(found.state.param_states[0].mu["b"]) == ("model",)
        with pytest.raises(LeafError, match="`placement` says nothing of"):
            regroup(fresh, opt.adam(0.1), allow=allow, placement={"w": further})


def test_a_group_inside_a_chain() -> None:
    """A chain around groups has an `adam` for each; surgery knows them by their parameters."""
    params = {"a": {"w": jnp.ones(2), "b": jnp.ones(1)}, "c": {"b": jnp.ones(3)}}

    def chained(*rules: Any, rest: Any = None) -> Any:
        return opt.chain(opt.clip(1.0), MultiOptimizer.from_rules(rules, rest=rest))

    plain = ("plain", ".*/b", opt.adam(0.1))
    optimizer = chained(("decayed", ".*/w", opt.adam(0.1)), plain).create(params)
    optimizer = optimizer.apply_gradient(params)
    with pytest.raises(GroupError, match=r"would leave it.*\n  `decayed` \('\.\*/w'\) matches no"):
        freeze(optimizer, ".*/w")
    found, plan = regroup(optimizer, chained(plain, rest=FROZEN), allow={"drop", "optimizer"})
    assert not plan.initialised
    kept = {leaf.parameter for leaf in describe_state(found).leaves if leaf.role == "moment"}
    assert kept == {("a", "b"), ("c", "b")}
    moments = [x for x in jax.tree.leaves(found.state.param_states) if x.shape == (3,)]
    assert all(x.any() for x in moments)


def test_as_transformation_is_not_a_change() -> None:
    """It computes what it wraps: nothing is said where it is added or removed."""
    plain = opt.chain(opt.clip(1.0), opt.adam(0.1)).create(make_params())
    wrapped = opt.chain(opt.clip(1.0), opt.as_transformation(opt.adam(0.1)))
    assert regroup(plain, wrapped)[1].initialised == ()
    assert plan_restore(named_state(plain), wrapped.create(make_params())).notes == ()
    assert plan_restore(named_state(wrapped.create(make_params())), plain).notes == ()
