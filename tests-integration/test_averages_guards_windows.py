"""Averages, guards and windows with the other packages: on a mesh and from checkpoints."""

import importlib
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import opt_partition as part
import opt_precision as precision
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from opt_accumulate import (
    MultiSteps,
    Spike,
    eval_params,
    guard,
    report,
    rollback,
    skip_not_finite,
    with_average,
)
from opt_adafactor import Adafactor
from opt_checkpoint import Map, Rename, named_state, plan_restore
from opt_core import MultiOptimizer, Optimizer, OptimizerDef, describe_state

contrib: Any = importlib.import_module("optax.contrib")  # much of it is not exported explicitly
SHAPES = {"w": (16, 8), "b": (8,)}
AXES = {"w": P("embed", "mlp"), "b": P("mlp")}
RULES = [("embed", "data"), ("mlp", "model")]
ADAMW = optax.adamw(1e-2)
NAN = float("nan")


def make_params() -> Any:
    return {
        name: jnp.linspace(-1.0, 1.0, int(np.prod(shape))).reshape(shape)
        for name, shape in SHAPES.items()
    }


def gradients(step: int = 0) -> Any:
    return jax.tree.map(lambda p: jnp.cos(3 * p + step), make_params())


def wrapped(tx: Any) -> OptimizerDef:
    return opt.OptaxWrapper(tx)


def trained(definition: OptimizerDef, steps: int = 3, **extra: Any) -> Optimizer:
    optimizer = definition.create(make_params())
    for step in range(steps):
        optimizer = optimizer.apply_gradient(gradients(step), **extra)
    return optimizer


def assert_same(found: Any, expected: Any) -> None:
    chex.assert_trees_all_close(found, expected, rtol=1e-6, atol=1e-7)


# On a mesh


def compiled(tx: Any, mesh: Mesh) -> tuple[Any, Any]:
    """The state, born sharded, and the compiled step of a transformation on a mesh."""
    abstract = jax.eval_shape(make_params)
    axes = part.explain(tx, abstract, AXES, strict=False).axes
    placed = part.logical_to_mesh(AXES, RULES, mesh, abstract)
    layout = part.logical_to_mesh(axes, RULES, mesh, jax.eval_shape(tx.init, abstract))
    params = jax.device_put(make_params(), placed.shardings)
    with jax.set_mesh(mesh):
        state = part.init_sharded(tx, params, layout)

        def step(params: Any, state: Any, grads: Any) -> Any:
            if hasattr(tx, "apply"):
                return tx.apply(params, state, grads)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        out = placed.shardings, layout.shardings
        jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=out)
        lowered = jitted.lower(params, state, params)
        asked = placed, layout
        found = part.verify(lowered, part.Expected(inputs=asked, outputs=asked))
        assert found.ok, str(found)
    return state, found


@pytest.mark.sample(1)
def test_an_average_lies_where_its_parameter_does_and_adds_no_collective(mesh: Mesh) -> None:
    bare = compiled(ADAMW, mesh)[1]
    state, found = compiled(with_average(ADAMW, 0.99), mesh)
    assert len(found.collectives) == len(bare.collectives) == 0
    for name, spec in (("w", P("data", "model")), ("b", P("model"))):
        assert state.average[name].sharding.spec == spec


@pytest.mark.sample(1)
def test_a_guard_adds_the_sum_of_the_norm(mesh: Mesh) -> None:
    state, found = compiled(guard(with_average(ADAMW, 0.99), loss=None), mesh)
    assert state.inner.average["w"].sharding.spec == P("data", "model")
    assert found.collectives
    assert all(c.kind == "all-reduce" and np.prod(c.shape) <= 2 for c in found.collectives)


@pytest.mark.slow
def test_an_average_may_lie_on_the_host(mesh: Mesh) -> None:
    """Also inside of a guard that judges updates, and so chooses between two states."""
    tx = guard(with_average(ADAMW, 0.5), loss=None, update_norm=Spike())
    abstract = jax.eval_shape(make_params)
    placed = part.logical_to_mesh(AXES, RULES, mesh, abstract)
    layout = part.logical_to_mesh(
        part.explain(tx, abstract, AXES, strict=False).axes,
        RULES,
        mesh,
        jax.eval_shape(tx.init, abstract),
        memory_kinds=lambda path, _: "pinned_host" if "/average/" in path else None,
    )
    held, expected = rollback(keep=1), (make_params(), tx.init(make_params()))
    with jax.set_mesh(mesh):
        params = jax.device_put(make_params(), placed.shardings)
        found = params, part.init_sharded(tx, params, layout)
        found = jax.jit(tx.apply, donate_argnums=(0, 1))(*found, gradients())
        expected = jax.jit(tx.apply)(*expected, gradients())
        held.take(0, found)
        assert_same(jax.device_get(found), jax.device_get(expected))
        of_host = jax.jit(eval_params)(found[1], found[0])
        assert_same(jax.device_get(of_host), expected[1].inner.average)
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(of_host)} == {"device"}
        for state in (found[1], held.restore()[1][1]):
            lies = [leaf.sharding.memory_kind for leaf in jax.tree.leaves(state)]
            assert lies == [row.memory_kind or "device" for row in layout.rows]
            assert lies.count("pinned_host") == len(SHAPES)


AVERAGE = 4 * (16 * 8 // 8 + 8 // 2) + 4  # of a device: shards, and a count
WINDOWS = 2 * (4 * 128 + 2 * 4)  # losses and norms, with two counts


@pytest.mark.parametrize(
    ("tx", "added"),
    [(with_average(ADAMW, 0.9), AVERAGE), (guard(ADAMW), WINDOWS + 5 * 4 + 2)],
    ids=["average", "guard"],
)
def test_a_plan_counts_what_is_kept(tx: Any, added: int) -> None:
    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    abstract = jax.eval_shape(make_params)
    bare, kept = (
        part.memory_plan(one, abstract, AXES, RULES, mesh).state.bytes_per_device
        for one in (ADAMW, tx)
    )
    assert kept - bare == added


# With the other packages


@pytest.mark.sample(1)
@pytest.mark.parametrize("storage", ["f32", "kahan", "stochastic"])
def test_of_a_master_it_is_the_master_that_is_averaged(storage: Any) -> None:
    sgd = optax.sgd(1e-4)  # of which bfloat16 takes nothing
    tx: Any = (
        precision.stochastic_weights(sgd)
        if storage == "stochastic"
        else precision.master_weights(sgd, storage=storage)
    )
    averaged = with_average(tx, 0.75)
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), make_params())
    average = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    state, apply = averaged.init(params), jax.jit(averaged.apply)
    for number in range(3):
        params, state = apply(params, state, gradients(number))
        master = precision.master_of(state.inner, params)
        average = jax.tree.map(lambda a, m: 0.75 * a + 0.25 * m, average, master)
    assert_same(state.average, average)
    evaluated = eval_params(state, params)
    assert {leaf.dtype for leaf in jax.tree.leaves(evaluated)} == {jnp.dtype(jnp.bfloat16)}
    if storage != "kahan":  # whose sum may round to a neighbour of what the model has
        chex.assert_trees_all_equal(eval_params(state.inner, params), params)


def test_a_step_that_a_guard_inside_has_skipped_does_not_count() -> None:
    tx = with_average(guard(ADAMW, loss=None), 0.5)
    params, state = tx.apply(make_params(), tx.init(make_params()), gradients())
    _, after = tx.apply(params, state, jax.tree.map(lambda g: NAN * g, gradients()))
    assert int(after.count) == int(state.count) == 1
    chex.assert_trees_all_equal(after.average, state.average)


# With definitions


def make_guarded(learning_rate: Any) -> Any:
    return guard(with_average(optax.adamw(learning_rate), 0.9), loss=Spike(warmup=2))


def test_hyper_parameters_of_a_guarded_optimizer_act_at_run_time() -> None:
    guarded = opt.wrap_optax_optimizer(make_guarded)
    step = jax.jit(
        chex.assert_max_traces(
            lambda o, grads, loss, rate: o.apply_gradient(grads, loss=loss, learning_rate=rate), 1
        )
    )
    optimizer = guarded(1e-2).create(make_params())
    for loss, rate in ((1.0, 0.5), (NAN, 0.5), (1.0, 0.25)):
        optimizer = step(optimizer, gradients(), loss, rate)
    expected = opt.adamw(1e-2).create(make_params())
    for rate in (0.5, 0.25):
        expected = expected.apply_gradient(gradients(), learning_rate=rate)
    assert_same(optimizer.target, expected.target)
    assert int(report(optimizer.state).skipped) == 1
    assert int(optimizer.state.step) == 3  # counts calls


def test_each_group_has_its_average_and_evaluating_finds_them_all() -> None:
    matrices = with_average(opt.as_transformation(Adafactor(1e-2)), 0.9)
    vectors = guard(with_average(ADAMW, 0.5))
    rules = [("matrices", "w", wrapped(matrices)), ("vectors", "b", wrapped(vectors))]
    optimizer = trained(MultiOptimizer.from_rules(rules), loss=1.0)
    found = jax.jit(lambda optimizer: optimizer.evaluating().target)(optimizer)
    assert_same(found, eval_params(optimizer.state, optimizer.target))
    alone = trained(wrapped(with_average(ADAMW, 0.5)))
    assert_same(found["b"], alone.state.param_states.average["b"])
    assert not np.allclose(found["w"], optimizer.target["w"])
    leaves = describe_state(optimizer).leaves
    assert {(leaf.transformation, leaf.field[0], leaf.role) for leaf in leaves} >= {
        ("with_average", "average", "params_copy"),
        ("with_average", "count", "count"),
        ("guard", "loss", "other"),
        ("guard", "grad_norm", "statistic"),
        ("adam", "mu", "moment"),
    }
    assert {leaf.source for leaf in leaves if leaf.group == ("vectors",)} == {"stated"}


# From checkpoints


def test_it_continues_bit_for_bit() -> None:
    definition = wrapped(guard(with_average(ADAMW, 0.9)))
    optimizer = trained(definition, loss=1.0)
    restored = plan_restore(named_state(optimizer), definition.create(make_params())).apply()
    chex.assert_trees_all_equal(restored, optimizer)


def test_an_average_that_is_added_starts_from_the_restored_parameters() -> None:
    saved = trained(wrapped(ADAMW))
    target = wrapped(with_average(ADAMW, 0.9)).create(make_params())
    source = named_state(saved)
    assert plan_restore(source, target).missing_words == {"initialise"}
    restored = plan_restore(source, target, allow={"initialise"}).apply()
    state = restored.state.param_states
    chex.assert_trees_all_equal(state.average, saved.target)
    chex.assert_trees_all_equal(state.inner, saved.state.param_states)
    assert int(state.count) == 0


def test_the_average_is_loaded_as_the_parameters_by_one_rule() -> None:
    saved = trained(wrapped(with_average(ADAMW, 0.9)))
    rule = (r"params/(.*)", Rename(r"state/with_average/average/\1"))
    target = wrapped(ADAMW).create(make_params())
    source, allow = named_state(saved), {"drop", "optimizer"}
    assert "the average" in str(plan_restore(source, target, allow=allow))
    # Moments belong to the parameters that were trained: they are reinitialised.
    allow = {*allow, "initialise"}
    restored = plan_restore(source, target, allow=allow, rules=[rule]).apply()
    chex.assert_trees_all_equal(restored.target, saved.state.param_states.average)
    assert not jax.tree.leaves(restored.state.param_states[0].mu)[0].any()


def test_dropping_schedule_free_says_which_parameters_are_kept() -> None:
    free = contrib.schedule_free(optax.sgd(0.1), 0.1)
    saved = trained(wrapped(free))
    target = wrapped(optax.sgd(0.1)).create(make_params())
    source, allow = named_state(saved), {"drop", "optimizer"}
    kept = plan_restore(source, target, allow=allow)
    assert "the parameters to evaluate are computed from it" in str(kept)
    state = "state/schedule_free"
    rule = (
        r"params/(.*)",
        Map(
            (r"params/\1", rf"{state}/z/\1", f"{state}/b1"),
            lambda y, z, b1: (y - (1 - b1) * z) / b1,
        ),
    )
    taken = plan_restore(source, target, allow=allow, rules=[rule])
    assert "the parameters to evaluate" not in str(taken)
    expected = contrib.schedule_free_eval_params(saved.state.param_states, saved.target)
    assert_same(taken.apply().target, expected)


def test_in_a_shard_map_each_device_makes_steps_of_its_own() -> None:
    tx = guard(ADAMW, loss=Spike(warmup=2), update_norm=Spike())
    grads = jnp.cos(jnp.arange(96.0)).reshape(8, 3, 4).at[5, 1].set(NAN)

    def run(grads: jax.Array) -> jax.Array:
        params: Any = jnp.ones(4)
        state = tx.init(params)
        for grad in grads:
            params, state = tx.apply(params, state, grad, loss=grad.sum())
        return jnp.append(params, report(state).skipped)

    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs: Any = {"mesh": mesh, "in_specs": P("data"), "out_specs": P("data")}
    found = jax.jit(jax.shard_map(lambda grads: run(grads[0])[None], **specs))(grads)
    chex.assert_trees_all_close(found, jnp.stack(list(map(run, grads))), rtol=1e-6)
    assert (int(found[0, -1]), int(found[5, -1])) == (0, 1)


# Windows of `MultiSteps`: where the state lies, and when devices talk to one another.

SPECS = {"w": P("data", "model"), "b": P("model")}
INNER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
_COLLECTIVE = re.compile(r" (all-reduce|all-gather|all-to-all|collective-permute)(-start)?\(")


def tree_at(mesh: Mesh, index: int) -> dict[str, jax.Array]:
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    tree: dict[str, jax.Array] = jax.device_put(gradients(index), shardings)
    return tree


def assert_sharded(tree: Any, mesh: Mesh) -> None:
    for name, spec in SPECS.items():
        leaf = tree[name]
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), leaf.ndim), name


def collectives(program: Any) -> tuple[int, int]:
    """Returns how many there are in the entry computation, and how many in all."""
    text = program.as_text()
    entry = text[text.index("\nENTRY ") :]
    entry = entry[: entry.index("\n}")]
    return len(_COLLECTIVE.findall(entry)), len(_COLLECTIVE.findall(text))


@pytest.mark.sample(1)
def test_leaves_stay_where_their_parameters_are_with_the_numbers_of_optax(mesh: Mesh) -> None:
    theirs = optax.MultiSteps(INNER, 2, should_skip_update_fn=optax.skip_not_finite)
    expected: Any = gradients()
    their_state: Any = theirs.init(expected)
    with jax.set_mesh(mesh):
        steps: Any = MultiSteps(INNER, 2, should_skip_update_fn=skip_not_finite)
        params = tree_at(mesh, 0)
        state = steps.init(params)
        apply = jax.jit(steps.apply)
        for index in range(1, 6):
            grads, plain = tree_at(mesh, index), gradients(index)
            if index == 2:
                grads["b"], plain["b"] = grads["b"] * jnp.inf, plain["b"] * jnp.inf
            params, state = apply(params, state, grads)
            updates, their_state = jax.jit(theirs.update)(plain, their_state, expected)
            expected = optax.apply_updates(expected, updates)
            adam = state.inner_opt_state[1][0]
            for tree in (params, state.acc_grads, adam.mu, adam.nu):
                assert_sharded(tree, mesh)
        flushed, _ = jax.jit(steps.flush)(state, params)
        assert_sharded(flushed, mesh)
    # A global norm is summed in another order over 8 devices.
    chex.assert_trees_all_close(jax.device_get(params), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.sample(1)
def test_devices_talk_only_to_emit(mesh: Mesh) -> None:
    def optax_step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = theirs.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    ours, theirs = MultiSteps(INNER, 2), optax.MultiSteps(INNER, 2)
    with jax.set_mesh(mesh):
        params = tree_at(mesh, 0)
        lowered = jax.jit(ours.apply).lower(params, ours.init(params), params)
        always, ever = collectives(lowered.compile())
        assert always == 0
        assert ever > 0  # the norm, in the loop
        lowered = jax.jit(optax_step).lower(params, theirs.init(params), params)
        assert collectives(lowered.compile())[0] > 0
