"""A vocabulary that grows: its new rows have the state that `init` makes for them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from opt_checkpoint import Checkpointer, Pad, Plan, errors, named_state, plan_restore
from opt_core import Optimizer
from opt_optax_bridge import OptaxWrapper

contrib: Any = optax.contrib
pytestmark = pytest.mark.usefixtures("optax_promotion")

OLD, NEW, WIDTH = 3, 5, 4

# Everything here treats the rows of a matrix apart, but for its counts.
ROWS: dict[str, Any] = {
    "rprop": optax.rprop(0.1),
    "cocob": contrib.cocob(),
    "adagrad": optax.adagrad(0.1, initial_accumulator_value=0.5),
    "yogi": optax.yogi(0.1),
    "rmsprop": optax.rmsprop(0.1, initial_scale=2.0),
    "rmsprop centered": optax.rmsprop(0.1, initial_scale=2.0, centered=True, momentum=0.9),
    "adam": optax.adam(0.1),
    "adafactor": optax.adafactor(0.1, multiply_by_parameter_scale=False, clipping_threshold=None),
    "several": optax.chain(optax.scale_by_rss(2.0), optax.masked(optax.trace(0.9), {"w": True})),
}


def wrapped(tx: Any, rows: int, value: float = 1.0) -> Optimizer:
    return OptaxWrapper(tx).create({"w": jnp.full((rows, WIDTH), value)})


def grads(rows: int, step: int) -> dict[str, jax.Array]:
    key = jax.random.fold_in(jax.random.key(0), step)
    return {"w": jax.random.normal(key, (NEW, WIDTH))[NEW - rows :]}


def stepped(optimizer: Optimizer, steps: int, first: int = 0) -> Optimizer:
    rows = len(optimizer.target["w"])
    for step in range(first, first + steps):
        optimizer = optimizer.apply_gradient(grads(rows, step))
    return optimizer


def grown(tx: Any, value: float = 0.25) -> tuple[Optimizer, Optimizer, Plan[Any]]:
    """A trained optimizer, what it becomes with more rows, and the plan."""
    saved = stepped(wrapped(tx, OLD), 4)
    plan = plan_restore(
        named_state(saved), wrapped(tx, NEW, 7.0), rules=[(".*/w", Pad(0, NEW, value))]
    )
    return saved, plan.apply(), plan


def rows_of_a_new_run(tx: Any, value: float, counts: Optimizer) -> Optimizer:
    """A fresh optimizer that has only the counts of another."""
    fresh = wrapped(tx, NEW, value)
    like = named_state(counts)
    leaves = [
        like[leaf.name] if leaf.parameter is None else named_state(fresh)[leaf.name]
        for leaf in like.schema.leaves
        if leaf.kind == "state"
    ]
    return fresh.replace(state=jax.tree.unflatten(jax.tree.structure(fresh.state), leaves))


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ROWS)
def test_old_rows_stay_and_new_rows_train_as_those_of_a_new_run(name: str) -> None:
    saved, found, plan = grown(ROWS[name])
    assert "params/w: 3 -> 5 along 0 with 0.25" in plan.diff()
    before, after = (named_state(x) for x in (saved, found))
    for leaf_name, leaf in before.items():
        now = np.asarray(after[leaf_name])
        np.testing.assert_array_equal(now[:OLD] if now.shape else now, leaf, err_msg=leaf_name)
    fresh = rows_of_a_new_run(ROWS[name], 0.25, found)
    found, fresh = (stepped(x, 3, first=4) for x in (found, fresh))
    assert np.isfinite(found.target["w"]).all()
    assert not np.array_equal(found.target["w"][OLD:], np.full((NEW - OLD, WIDTH), 0.25))
    for leaf in named_state(found).schema.leaves:
        if leaf.shape == (NEW, WIDTH):
            ours, theirs = (np.asarray(named_state(x)[leaf.name])[OLD:] for x in (found, fresh))
            np.testing.assert_array_equal(ours, theirs, err_msg=leaf.name)


def test_factors_grow_by_those_of_a_new_matrix() -> None:
    tx = optax.adafactor(0.1, min_dim_size_to_factor=2)
    saved, found, _ = grown(tx)
    names = [f"state/factored_rms/{field}/w" for field in ("v_row", "v_col")]
    (was,), (now,), (fresh,) = (
        [leaf for name in names if (leaf := named_state(x)[name]).shape == (rows,)]
        for x, rows in ((saved, OLD), (found, NEW), (wrapped(tx, NEW), NEW))
    )
    np.testing.assert_array_equal(now[:OLD], was)
    np.testing.assert_array_equal(now[OLD:], fresh[OLD:])
    assert np.isfinite(stepped(found, 3).target["w"]).all()


@pytest.mark.sample(1)
@pytest.mark.parametrize("make", [contrib.schedule_free_adamw, contrib.dog, optax.lbfgs])
def test_a_copy_of_a_parameter_grows_as_that_does(make: Any) -> None:
    tx = make(0.1)
    saved = OptaxWrapper(tx).create({"w": jnp.ones((OLD, 2)), "b": jnp.ones(2)})
    target = OptaxWrapper(tx).create({"w": jnp.full((NEW, 2), 7.0), "b": jnp.ones(2)})
    plan = plan_restore(named_state(saved), target, rules=[(".*/w", Pad(0, NEW, 0.25))])
    found = plan.apply()
    copies = {"z", "init_params", "params"} & {f for r in plan.rows for f in r.leaf.field}
    assert copies
    for name, leaf in named_state(found).items():
        if copies & {*name.split("/")[:-1]} and name.endswith("/w"):
            assert np.all(np.asarray(leaf)[OLD:] == 0.25), name
    assert "along 0 as its parameter" in str(plan)


def test_rows_of_a_moment_in_another_dtype_are_not_rounded_twice() -> None:
    def rss(dtype: Any) -> Any:
        return optax.chain(optax.scale_by_rss(0.1), optax.trace(0.9, accumulator_dtype=dtype))

    saved = stepped(wrapped(rss(jnp.bfloat16), OLD), 2)
    plan = plan_restore(
        named_state(saved),
        wrapped(rss(jnp.float32), NEW),
        allow={"cast"},
        rules=[(".*/w", Pad(-2, NEW))],
    )
    found = named_state(plan.apply())
    assert found["state/trace/trace/w"].dtype == jnp.float32
    assert (found["state/rss/sum_of_squares/w"][OLD:] == jnp.float32(0.1)).all()


def test_a_step_on_disk_and_an_abstract_target(tmp_path: Any) -> None:
    tx = optax.rprop(0.1)
    saved = stepped(wrapped(tx, OLD), 4)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(4, saved)
        checkpointer.wait()
        target = jax.eval_shape(lambda: wrapped(tx, NEW))
        found = checkpointer.restore(4, target, rules=[(".*/w", Pad(0, NEW))])
        plan = plan_restore(checkpointer.at(4), target, rules=[(".*/w", Pad(0, NEW))])
    assert (named_state(found)["state/rprop/step_sizes/w"][OLD:] == jnp.float32(0.1)).all()
    assert "state/rprop/step_sizes/w: 3 -> 5 along 0 as `init` makes it" in plan.diff()


def test_state_that_init_does_not_make_is_refused() -> None:
    def grows(is_late: bool) -> Any:
        def init(params: Any) -> Any:
            made = {"m": jax.tree.map(jnp.ones_like, params)}
            return {**made, "n": made["m"]} if is_late else made

        return optax.GradientTransformation(init, lambda u, s, p=None: (u, s))

    saved, later = wrapped(grows(False), OLD), wrapped(grows(True), NEW)
    target = later.replace(optimizer_def=OptaxWrapper(grows(False)))
    plan = plan_restore(
        named_state(saved), target, allow={"initialise"}, rules=[(".*/w", Pad(0, NEW))]
    )
    with pytest.raises(errors.PlanError, match="`init` makes 2 leaves, the target's state has 3"):
        plan.apply()
