"""Everyone's optimizer is saved, planned and restored, and given back as what it was."""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import optax
import pytest
from checkpoint_testing import Model, adamw, of_core, of_flax, of_nnx, of_optax, params, same
from flax import nnx
from flax.core import FrozenDict, freeze
from flax.training.train_state import TrainState
from opt_checkpoint import Checkpointer, TrainingState, named_state, plan_restore
from opt_core import OptimizerState

pytestmark = pytest.mark.usefixtures("optax_promotion")


class State(TrainState):
    batch_stats: Any = None


KINDS: dict[str, Callable[[], Any]] = {
    "core": of_core,
    "optax": of_optax,
    "flax": of_flax,
    "nnx": of_nnx,
}
_PARAMS = [f"params/{name}" for name in ("b", "layers/0/w", "layers/1/w")]
_MOMENTS = [
    f"state/adam/{moment}/{name.removeprefix('params/')}"
    for moment in ("mu", "nu")
    for name in _PARAMS
]
NAMES = [*_PARAMS, "state/step", "state/adam/count", *_MOMENTS, "state/schedule/count"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("is_abstract", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_comes_back_as_what_it_was(kind: str, is_abstract: bool, tmp_path: Path) -> None:
    saved = KINDS[kind]()
    target = nnx.eval_shape(KINDS[kind]) if is_abstract else KINDS[kind]()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, saved)
        checkpointer.wait()
        restored = plan_restore(checkpointer.at(2), target).apply()
    assert type(restored) is type(target) is type(plan_restore(named_state(saved), target).apply())
    assert same(named_state(restored), named_state(saved))


@pytest.mark.sample(2)
@pytest.mark.parametrize("new", KINDS)
@pytest.mark.parametrize("old", ["core", "optax", "flax"])
def test_one_kind_becomes_another(old: str, new: str) -> None:
    saved = named_state(KINDS[old]())
    target = KINDS[new]()
    plan = plan_restore(saved, target, allow={"initialise"} if new == "nnx" else ())
    restored = named_state(plan.apply())
    assert same({name: restored[name] for name in NAMES}, saved)


# TrainState


def test_a_train_state_keeps_what_is_not_its_optimizers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stats = {"mean": jnp.ones(3)}
    state = of_flax(State, freeze(params()), batch_stats=stats)
    assert list(named_state(state)) == NAMES
    restored = plan_restore(named_state(state), state).apply()
    assert type(restored) is State
    assert isinstance(restored.params, FrozenDict)
    assert restored.apply_fn is len
    assert restored.tx is state.tx
    assert restored.batch_stats is stats
    assert type(restored.step) is int  # as `TrainState.create` has it

    with Checkpointer(tmp_path) as checkpointer, caplog.at_level(logging.WARNING):
        checkpointer.save(1, state, extras={"batch_stats": stats})
        assert not caplog.records
        checkpointer.save(2, state)
    (record,) = caplog.records
    assert "State: `batch_stats` is not saved" in record.getMessage()
    assert "extras={'batch_stats': state.batch_stats}" in record.getMessage()


# NNX


def test_a_pair_is_new_and_goes_on_as_the_old_one() -> None:
    model, optimizer = of_nnx()
    b, step = model.b[...], optimizer.step[...]
    again, new = plan_restore(named_state((model, optimizer)), (model, optimizer)).apply()
    assert again is not model
    assert new is not optimizer
    assert new.tx == optimizer.tx  # the same functions; Flax 0.12.0 makes a new tuple of them
    assert new.step[...].dtype == jnp.uint32
    assert int(new.step[...]) == 2
    new.update(again, nnx.state(Model(), nnx.Param))
    assert int(new.step[...]) == 3
    assert model.b[...] is b
    assert optimizer.step[...] is step
    optimizer.update(model, nnx.state(Model(), nnx.Param))
    assert same(named_state((again, new)), named_state((model, optimizer)))


# Plain Optax


def test_a_training_state_is_a_pytree_whose_step_stays_what_it_was() -> None:
    state = of_optax()
    assert jax.tree.leaves(state)[:3] == jax.tree.leaves(state.params)
    moved = jax.jit(lambda state: state)(state)
    assert (moved.tx, int(moved.step)) == (state.tx, 2)
    assert type(plan_restore(named_state(state), state).apply().step) is int
    array = dataclasses.replace(state, step=jnp.uint32(2))
    assert plan_restore(named_state(state), array).apply().step.dtype == jnp.uint32
    with pytest.raises(AttributeError):
        state.step = 3


@pytest.mark.parametrize("step", [2.5, True, np.ones(2, np.int32)])
def test_a_step_is_one_integer(step: Any) -> None:
    with pytest.raises(TypeError, match="`step`: expected how many updates have been made, found"):
        named_state(dataclasses.replace(of_optax(), step=step))


def test_a_step_of_none_is_what_the_state_counts() -> None:
    state = dataclasses.replace(of_optax(), step=None)
    assert int(named_state(state)["state/step"]) == 2
    for target in (state, jax.eval_shape(lambda: state)):
        assert int(plan_restore(named_state(state), target).apply().step) == 2
    sgd = optax.sgd(0.1)
    counts_nothing = TrainingState(sgd, params(), sgd.init(params()), None)
    assert int(named_state(counts_nothing)["state/step"]) == 0
    windows = optax.MultiSteps(optax.adam(0.1), 2)
    with pytest.raises(ValueError, match="`step`: give the number of updates"):
        named_state(TrainingState(windows, params(), windows.init(params()), None))


@pytest.mark.parametrize(
    ("tx", "opt_state", "error", "words"),
    [
        (optax.adam(0.1), optax.sgd(0.1, momentum=0.9).init(params()), ValueError, "found nothing"),
        (optax.adam(0.1), optax.adam(0.1).init({"b": jnp.ones(4)}), ValueError, r"`0/mu/b`: .*4"),
        (optax.scale_by_adam(), optax.scale_by_belief().init(params()), ValueError, "containers"),
        (optax.adam, (), TypeError, "`tx`: expected an `optax"),
        (opt.adam(0.1), (), ValueError, "`0/nu/layers/0/w`: expected"),  # a definition may stand
    ],
)
def test_states_that_are_of_something_else(
    tx: Any, opt_state: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        named_state(TrainingState(tx, params(), opt_state))


def test_a_state_may_have_none_in_it() -> None:
    none = optax.GradientTransformation(lambda _: {"a": None}, lambda g, s, p=None: (g, s))
    tx = optax.chain(optax.adam(0.1), none)
    state = TrainingState(tx, params(), tx.init(params()))
    assert plan_restore(named_state(state), state).is_exact


# What is not taken


def test_anything_else_is_one_clear_error(tmp_path: Path) -> None:
    taken = r"expected an `opt_core.Optimizer`, a `TrainingState\(tx, params, opt_state\)`"
    wrong: list[Any] = [params(), (params(), adamw().init(params())), OptimizerState(0, {})]
    for target in wrong:
        with pytest.raises(TypeError, match=taken):
            named_state(target)
        with pytest.raises(TypeError, match=taken):
            plan_restore(named_state(of_optax()), target)
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(TypeError, match=taken):
        checkpointer.save(1, params())
    assert checkpointer.steps() == []


def test_what_belongs_to_a_target_says_what_else_to_give() -> None:
    saved = named_state(of_optax())
    for target, words in (
        (adamw(), r"found \w+: pass `TrainingState\(tx, params, tx\.init\("),
        (opt.OptaxWrapper(adamw()), "found OptaxWrapper: pass what `create\\(params\\)` of this"),
        (of_nnx()[1], r"holds no parameters: give the pair `\(model, optimizer\)`"),
    ):
        with pytest.raises(TypeError, match=words):
            plan_restore(saved, target)
