"""Surgery on real Optax optimizers: what goes on, what does not, and what it does to training."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import opt_precision
import optax
import optax.contrib
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from opt_checkpoint import NamedState, named_state, plan_restore
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


def make_params() -> Any:
    return {"w": jnp.arange(64.0).reshape(8, 8) / 64, "b": jnp.ones(8)}


def trained(definition: OptimizerDef, steps: int = 3) -> Optimizer:
    optimizer = definition.create(make_params())
    update = jax.jit(lambda o, g: o.apply_gradient(g))
    for step in range(steps):
        grads = jax.tree.map(lambda p, step=step: jnp.cos(p * 7 + step), make_params())
        optimizer = update(optimizer, grads)
    return optimizer


def wrapped(tx: Any) -> OptimizerDef:
    return opt.OptaxWrapper(tx)


def schedule(value: float = 0.1) -> optax.Schedule:
    return optax.linear_schedule(value, 0.0, 100)


def counts(optimizer: Optimizer, role: str) -> list[int]:
    described = describe_state(optimizer).leaves
    leaves = jax.tree.leaves(optimizer.state.param_states)
    return [int(x) for x, leaf in zip(leaves, described, strict=True) if leaf.role == role]


def test_numbers_made_of_all_parameters_are_of_no_others() -> None:
    """They go on where the parameters are the same; otherwise somebody has to say so."""
    definition = wrapped(contrib.prodigy(1.0))
    optimizer = trained(definition, 2)
    with pytest.raises(SurgeryError, match="made of all its parameters, of which 1 gone"):
        freeze(optimizer, "b")
    _, plan = freeze(optimizer, "b", allow={"optimizer"})
    statistics = {row.leaf.name for row in plan.target_rows if row.leaf.role == "statistic"}
    assert statistics <= {*plan.renamed}
    _, plan = regroup(optimizer, MultiOptimizer.from_rules([("all", ".*", definition)]))
    assert not plan.initialised


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
    def noisy(seed: int) -> OptimizerDef:
        return wrapped(optax.chain(optax.add_noise(0.1, 0.5, seed), optax.scale(-1.0)))

    optimizer = trained(noisy(0), 1)
    groups = MultiOptimizer.from_rules([("w", "w", noisy(1)), ("b", "b", noisy(2))])
    found, plan = regroup(optimizer, groups)
    keys = [row for row in plan.target_rows if row.leaf.role == "key"]
    assert {(row.action, row.note) for row in keys} == {
        ("renamed", ""),
        ("initialised", "its key continues in another group"),
    }
    one, other = (found.state.param_states[name][0].rng_key for name in "bw")
    assert not bool(one == other)
    _, plan = regroup(found, noisy(0))
    assert [r.action for r in plan.rows if r.leaf.role == "key"] == ["renamed", "dropped"]


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
    windows = optax.MultiSteps(optax.adam(schedule()), 4)
    inner = wrapped(windows.gradient_transformation())
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


@pytest.mark.parametrize("weights", ["f32", "remainder", "kahan"])
def test_parameters_with_digits_besides_them_are_frozen_reset_and_unfrozen(weights: Any) -> None:
    definition = opt.adam(0.01).with_precision(opt_precision.Precision(weights=weights))
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), make_params())
    params["norm"] = {"scale": jnp.ones(8), "bias": jnp.zeros(8)}  # of float32: nothing besides it
    grads = jax.tree.map(jnp.cos, params)
    optimizer = definition.create(params).apply_gradient(grads)

    frozen, _ = freeze(optimizer, "w")
    chex.assert_trees_all_equal(frozen.target, optimizer.target)
    stepped = frozen.apply_gradient({"b": grads["b"], "norm": grads["norm"]})
    chex.assert_trees_all_equal(stepped.target["b"], optimizer.apply_gradient(grads).target["b"])

    again, plan = reset(stepped, "rest")
    extras = [row for row in plan.rows if row.leaf.stored]
    assert [row.action for row in extras] == ["kept"]

    unfrozen, _ = unfreeze(again, "w", definition)
    chex.assert_trees_all_equal(unfrozen.target, again.target)
    fresh = definition.create(again.target).apply_gradient(grads)
    chex.assert_trees_all_equal(unfrozen.apply_gradient(grads).target["w"], fresh.target["w"])


@pytest.mark.parametrize("weights", ["f32", "remainder", "remainder8", "kahan"])
def test_a_parameter_that_is_frozen_is_not_rounded_again(weights: Any) -> None:
    definition = opt.sgd(1.0).with_precision(opt_precision.Precision(weights=weights))
    optimizer = definition.create({"w": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(1, jnp.bfloat16)})
    halfway = {"w": jnp.array([-(2.0**-8), -(2.0**-7) - 2.0**-8]), "b": jnp.zeros(1)}
    trained = optimizer.apply_gradient(halfway)
    frozen, _ = freeze(trained, "w")
    chex.assert_trees_all_equal(frozen.target, trained.target)


def test_digits_are_read_at_once() -> None:
    """A read of Orbax costs milliseconds, however little it reads."""

    class Counted(NamedState):
        def read(self, wanted: Any) -> Any:
            reads.append(len(wanted))
            return super().read(wanted)

    reads: list[int] = []
    params = {str(i): jnp.ones(2, jnp.bfloat16) for i in range(20)}
    definition = opt.sgd(1.0).with_precision(opt_precision.Precision(weights="f32"))
    saved = named_state(definition.create(params))
    plan_restore(
        Counted(saved.leaves, saved.schema), opt.sgd(1.0).create(params), allow={"cast"}
    ).apply()
    assert len(reads) == 2
