"""The optimizer as an item of checkpoints that a program writes with its own Orbax."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from checkpoint_testing import of_core, of_flax, of_nnx, same
from flax import nnx, struct
from flax.training.train_state import TrainState
from opt_checkpoint import (
    Checkpointer,
    OptimizerHandler,
    OptimizerRestore,
    OptimizerSave,
    Rename,
    SavedStep,
    TrainingState,
    errors,
    named_state,
    open_foreign,
    open_step,
    plan_restore,
)

pytestmark = pytest.mark.usefixtures("optax_promotion")


def params() -> dict[str, Any]:
    return {"w": jnp.arange(8.0).reshape(4, 2), "b.x": jnp.ones(2)}


def of_optax(tx: Any = None, steps: int = 1) -> TrainingState:
    tx = tx or optax.adam(0.1)
    state = TrainingState(tx, params(), tx.init(params()))
    for _ in range(steps):
        updates, opt_state = tx.update(params(), state.opt_state, state.params)
        weights: Any = optax.apply_updates(state.params, updates)
        state = TrainingState(tx, weights, opt_state, state.step + 1)
    return state


def save(root: Path, *steps: int, target: Any = None, **options: Any) -> None:
    with ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(**options)) as manager:
        for step in steps:
            items = {
                "optimizer": OptimizerSave(target or of_optax(steps=step)),
                "data": ocp.args.JsonSave({"position": step}),
            }
            assert manager.save(step, args=ocp.args.Composite(**items))


def restore(manager: Any, step: int, target: Any, **admitted: Any) -> Any:
    given = OptimizerRestore(target, **admitted)
    return manager.restore(step, args=ocp.args.Composite(optimizer=given))["optimizer"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("make", [of_optax, of_core, of_flax, of_nnx])
def test_every_kind_of_target(make: Any, tmp_path: Path) -> None:
    is_async = make is not of_core
    save(tmp_path, 4, 5, target=make(), enable_async_checkpointing=is_async, max_to_keep=1)
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [5]
        restored = restore(manager, 5, nnx.eval_shape(make))
        assert manager.restore(5)["data"] == {"position": 5}
    assert type(restored) is type(make())
    assert same(named_state(restored), named_state(make()))


def test_into_another_optimizer(tmp_path: Path) -> None:
    save(tmp_path, 1)
    target = jax.eval_shape(lambda: of_optax(optax.adamw(optax.constant_schedule(0.1))))
    rules = [("state/schedule/count", Rename("state/adam/count"))]
    with ocp.CheckpointManager(tmp_path) as manager:
        with pytest.raises(errors.PlanError, match=r"allow=\{'drop'\}"):
            restore(manager, 1, jax.eval_shape(lambda: of_optax(optax.sgd(0.1))))
        adam, _, schedule = restore(manager, 1, target, rules=rules).opt_state
    assert (adam.mu["w"] == of_optax().opt_state[0].mu["w"]).all()
    assert int(schedule.count) == 1


def test_any_reader_of_orbax_has_the_parameters(tmp_path: Path) -> None:
    save(tmp_path, 1)
    item = {"params": {"w": jnp.zeros((4, 2))}}
    how = ocp.checkpoint_utils.construct_restore_args(item)
    place = ocp.args.PyTreeRestore(item, restore_args=how, partial_restore=True)
    with ocp.CheckpointManager(tmp_path) as manager:
        found = manager.restore(1, args=ocp.args.Composite(optimizer=place))["optimizer"]
    assert (found["params"]["w"] == of_optax().params["w"]).all()


def test_it_is_ours_without_written_by(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for path in (tmp_path / "1", tmp_path / "1/optimizer"):
        for found in (open_foreign(path), open_step(path)):
            plan = plan_restore(found, jax.eval_shape(of_optax))
            assert plan.is_exact, str(plan)
            assert same(named_state(plan.apply()), named_state(of_optax()))
    with pytest.raises(errors.ForeignError, match=r"open_foreign\('.*/1'\), target"):
        Checkpointer(tmp_path, read_only=True).latest_valid()


def test_two_optimizers_and_a_manager_that_knows_the_handler(tmp_path: Path) -> None:
    handlers: Any = {"actor": OptimizerHandler(), "critic": OptimizerHandler()}
    with ocp.CheckpointManager(tmp_path, item_handlers=handlers) as manager:
        given = {"actor": OptimizerSave(of_core()), "critic": OptimizerSave(of_optax())}
        manager.save(1, args=ocp.args.Composite(**given))
        manager.wait_until_finished()
        found = manager.item_metadata(1)["critic"]
        assert isinstance(found, SavedStep)
        assert plan_restore(found, jax.eval_shape(of_optax)).is_exact
        found.validate()
        assert found.step == 1
    with pytest.raises(errors.ForeignError, match=r"holds several optimizers: .*`actor`, `critic`"):
        open_foreign(tmp_path / "1")
    assert plan_restore(open_foreign(tmp_path / "1/actor"), of_core()).is_exact


def test_what_cannot_be_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class WithStats(TrainState):
        stats: Any = struct.field(default=None)

    with ocp.CheckpointManager(tmp_path) as manager:
        for wrong, error in ((params(), TypeError), (jax.eval_shape(of_optax), errors.LeafError)):
            items = {"data": ocp.args.JsonSave({}), "optimizer": OptimizerSave(wrong)}
            with pytest.raises(error):
                manager.save(1, args=ocp.args.Composite(**items))
    create: Any = WithStats.create
    state = create(apply_fn=len, params=params(), tx=optax.sgd(0.1), stats=jnp.ones(2))
    with caplog.at_level(logging.WARNING, "opt_checkpoint"):
        save(tmp_path / "stats", 1, target=state)
    assert "`stats` is not saved" in caplog.text
