"""The contract: updates, steps, state dicts, transformations, equality, overrides."""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core_testing import (
    KeepsParams,
    Momentum,
    MomentumHyperParams,
    advanced,
    any_target,
    assert_same,
    structure,
    to_numpy,
)
from flax import serialization
from flax.core import FrozenDict
from jax.sharding import PartitionSpec
from opt_core import (
    Optimizer,
    OptimizerDef,
    OptimizerState,
    describe_state,
    increment_step,
)
from opt_core.errors import HyperParamError, RestoreError, TreeMismatchError

Make = Callable[[], Any]
INT32_MAX = 2**31 - 1


def ones_like(tree: Any) -> Any:
    return jax.tree.map(jnp.ones_like, tree)


def avals(tree: Any) -> list[Any]:
    return [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(tree)]


def step(optimizer: Optimizer, grads: Any, **overrides: Any) -> Optimizer:
    return optimizer.apply_gradient(grads, **overrides)


# The contract.


def test_the_update_is_the_definitions() -> None:
    optimizer = Momentum(learning_rate=0.5, beta=0.5).create({"w": jnp.array([1.0, 2.0])})
    grads = {"w": jnp.array([2.0, -2.0])}
    first = optimizer.apply_gradient(grads)
    assert first.target["w"].tolist() == [0.0, 3.0]
    second = first.apply_gradient(grads, learning_rate=1.0)
    assert second.state.param_states["w"].tolist() == [3.0, -3.0]
    assert second.target["w"].tolist() == [-3.0, 6.0]
    assert [int(o.state.step) for o in (optimizer, first, second)] == [0, 1, 2]
    assert optimizer.target["w"].tolist() == [1.0, 2.0]
    assert second.optimizer_def is optimizer.optimizer_def


def test_what_a_definition_must_implement() -> None:
    with pytest.raises(NotImplementedError, match="`OptimizerDef` does not implement `init_state`"):
        OptimizerDef(None).create({"w": jnp.ones(2)})
    with pytest.raises(NotImplementedError, match="does not implement `apply_gradient`"):
        OptimizerDef(None).apply_gradient(None, None, OptimizerState(0, None), None)


def test_the_fields_are_those_of_t5x() -> None:
    def fields(cls: Any) -> list[str]:
        return [field.name for field in dataclasses.fields(cls)]

    assert fields(Optimizer) == ["optimizer_def", "state", "target"]
    assert fields(OptimizerState) == ["step", "param_states"]
    optimizer = Momentum().create({"w": jnp.ones(2)})
    paths = [
        jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(optimizer)
    ]
    assert paths == [".state.step", ".state.param_states['w']", ".target['w']"]
    for frozen in (optimizer, optimizer.state):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(frozen, fields(frozen)[0], None)
    assert optimizer.replace(target={}).state is optimizer.state


# The step.


@pytest.mark.parametrize("kind", [int, np.int64, jnp.int32], ids=lambda k: k.__name__)
def test_the_step_stops_at_the_largest_int32(kind: Any) -> None:
    steps = [increment_step(kind(step)) for step in (0, INT32_MAX - 1, INT32_MAX)]
    assert [int(step) for step in steps] == [1, INT32_MAX, INT32_MAX]
    assert all(step.dtype == jnp.int32 and not step.weak_type for step in steps)


def test_a_step_below_0_is_no_step() -> None:
    optimizer = Momentum().create({"w": jnp.ones(2)})
    state_dict = optimizer.state_dict()
    state_dict["state"]["step"] = np.int64(-1)
    with pytest.raises(RestoreError, match=r"state/step: value: .*, found -1"):
        optimizer.restore_state(state_dict)


# State dicts.


@any_target
def test_state_dict_round_trip(make: Make) -> None:
    definition = Momentum()
    optimizer = advanced(definition.create(make()))
    data = serialization.msgpack_serialize(optimizer.state_dict())
    fresh = definition.create(jax.tree.map(jnp.zeros_like, make()))
    given: list[Any] = [
        serialization.msgpack_restore(data),
        FrozenDict(serialization.msgpack_restore(data)),
        serialization.msgpack_restore(data) | {"flax_mutables": {"batch_stats": 1}},
    ]
    for found in given:
        assert_same(fresh.restore_state(found), optimizer)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(fresh))
    assert avals(optimizer) == avals(fresh)  # of a strong int32 step, too
    assert not any(weak for _, _, weak in avals(fresh))


def test_what_deviates_leaves_everything_as_it_was() -> None:
    reference = Momentum().create({"a": jnp.ones(2), "b": [jnp.ones(2)]})
    before = jax.tree.map(np.array, reference)
    state_dict = to_numpy(advanced(reference).state_dict())
    state_dict["target"]["a"] = np.ones((2, 1), np.float32)
    with pytest.raises(RestoreError):
        reference.restore_state(state_dict)
    assert_same(jax.tree.map(np.array, reference), before)


# Memory.


def distinct_buffers(tree: Any) -> bool:
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)]
    return len(set(pointers)) == len(pointers)


@pytest.mark.parametrize("create", [KeepsParams().create, jax.jit(KeepsParams().create)])
def test_a_new_optimizer_can_be_donated(create: Callable[[Any], Optimizer]) -> None:
    optimizer = create({"w": jnp.ones((2, 3)), "b": jnp.ones((2, 1))})
    assert distinct_buffers(optimizer)
    donating = jax.jit(step, donate_argnums=0)
    grads = ones_like(optimizer.target)
    after = donating(donating(optimizer, grads), grads)
    assert optimizer.target["w"].is_deleted()
    assert after.target["w"].tolist() == [[-1.0] * 3] * 2
    assert after.state.param_states["again"]["w"].tolist() == [[1.0] * 3] * 2


def test_parameters_that_are_one_array_become_two() -> None:
    shared = jnp.ones(3)
    optimizer = KeepsParams().create({"a": shared, "b": shared, "c": jnp.ones(2)})
    assert distinct_buffers(optimizer)
    assert optimizer.target["a"] is shared
    state = {"step": 0, "param_states": {"first": optimizer.target, "again": optimizer.target}}
    restored = optimizer.restore_state({"target": optimizer.target, "state": state})
    assert distinct_buffers(restored)


# Transformations.


@pytest.mark.sample(2)
@any_target
def test_eval_shape_tells_the_truth_and_jit_does_it(make: Make) -> None:
    definition = Momentum()
    optimizer = definition.create(make())
    grads = ones_like(optimizer.target)

    def there_and_back(optimizer: Optimizer) -> Optimizer:
        return optimizer.restore_state(optimizer.state_dict())

    for function, arguments in (
        (definition.create, (make(),)),
        (step, (optimizer, grads)),
        (there_and_back, (optimizer,)),
        (lambda o: o.state_dict(), (optimizer,)),
    ):
        real, abstract = function(*arguments), jax.eval_shape(function, *arguments)
        assert structure(abstract) == structure(real)
        assert avals(abstract) == avals(real)
        assert_same(jax.jit(function)(*arguments), real)
    # Outside of a transformation too.
    assert avals(there_and_back(jax.eval_shape(lambda: optimizer))) == avals(optimizer)


# Nothing changes between steps, nothing compiles twice.


def test_one_compilation_serves_equal_definitions_and_all_steps() -> None:
    counted = jax.jit(chex.assert_max_traces(step, n=1))
    grads = {"w": jnp.ones(2), "weak": jnp.ones(())}
    for _ in range(2):
        optimizer = Momentum().create({"w": jnp.ones(2), "weak": jnp.asarray(1.0)})
        optimizer = counted(counted(optimizer, grads), grads)
        optimizer = optimizer.restore_state(to_numpy(optimizer.state_dict()))
        counted(optimizer, grads)
    with pytest.raises(AssertionError, match="traced"):
        counted(optimizer.replace(optimizer_def=Momentum(beta=0.25)), grads)


# Equality of definitions.


def test_definitions_are_compared_by_how_they_were_built() -> None:
    one, same, other = Momentum(0.1), Momentum(0.1), Momentum(0.2)
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one != object()

    class Nesterov(Momentum):
        pass

    assert Nesterov() != Momentum()
    assert Momentum() != Nesterov()
    assert Momentum(-1) != Momentum(-2)  # though their hashes are equal
    params = {"w": jnp.ones(2)}
    trees = [structure(d.create(params)) for d in (one, same, other)]
    assert trees[0] == trees[1]
    assert hash(trees[0]) == hash(trees[1])
    assert trees[0] != trees[2]
    jax.tree.map(lambda a, b: None, one.create(params), same.create(params))


@pytest.mark.parametrize("clone", [lambda d: pickle.loads(pickle.dumps(d)), copy.deepcopy])
def test_clones_are_equal(clone: Callable[[Any], Any]) -> None:
    definition = Momentum(jnp.arange(3.0), beta=np.float32(0.9))
    fresh = pickle.dumps(definition)
    hash(definition)
    assert pickle.dumps(definition) == fresh  # nothing of this process is in it
    cloned = clone(definition)
    assert cloned is not definition
    assert cloned == definition
    assert hash(cloned) == hash(definition)
    optimizer = advanced(Momentum().create({"w": jnp.ones(2)}))
    assert_same(clone(optimizer), optimizer)


def test_a_changed_definition_is_another() -> None:
    definition = Momentum(0.1)
    before = hash(definition)
    definition.hyper_params = MomentumHyperParams(0.2)
    assert definition == Momentum(0.2, beta=0.9)
    assert definition != Momentum(0.1)
    assert hash(definition) != before
    assert repr(definition) == "Momentum(MomentumHyperParams(learning_rate=0.2, beta=0.9))"


# What definitions may offer besides.


def test_the_defaults_of_what_a_definition_may_say() -> None:
    definition = Momentum()
    optimizer = definition.create({"w": jnp.ones((2, 3)), "b": jnp.ones(3)})
    assert optimizer.params is optimizer.target
    assert optimizer.step is optimizer.state.step
    assert definition.extra_arg_names(["value"]) == frozenset()
    hyper_params = definition.update_hyper_params(learning_rate=0.5)
    parts = optimizer.target, optimizer.state
    assert definition.resolve_hyper_params(hyper_params, *parts) is hyper_params
    assert not hasattr(definition, "set_param_axes")  # T5X would ask the model for axes
    axes = {"w": PartitionSpec("embed", "mlp"), "b": None}
    derived = definition.derive_logical_axes(optimizer, axes)
    assert (derived.target, derived.state.param_states) == (axes, axes)
    assert definition.describe_state(*parts) == describe_state(optimizer)
    assert definition.precision is None


class RowsAndColumns(OptimizerDef):
    """Keeps sums of rows and columns, a step of each array and the parameter."""

    def init_state(self, params: Any) -> OptimizerState:
        states = jax.tree.map(lambda p: (p.sum(-1), p.sum(0), jnp.int32(0), p), params)
        return OptimizerState(jnp.zeros((), jnp.int32), states)


def test_axes_of_a_leaf_are_those_of_the_dimensions_that_it_keeps() -> None:
    optimizer = RowsAndColumns(None).create({"w": jnp.ones((2, 3)), "v": jnp.ones((3, 3))})
    axes = {"w": PartitionSpec("embed", "mlp"), "v": PartitionSpec(("a", "b"))}
    states = RowsAndColumns(None).derive_logical_axes(optimizer, axes).state.param_states
    rows, columns = PartitionSpec("embed"), PartitionSpec("mlp")
    assert states["w"] == (rows, columns, None, axes["w"])
    assert states["v"] == (None, None, None, axes["v"])  # either of two dimensions
    with pytest.raises(TreeMismatchError, match="v: expected a `PartitionSpec`, found nothing"):
        RowsAndColumns(None).derive_logical_axes(optimizer, {"w": None})


@dataclasses.dataclass(frozen=True)
class Plain:
    learning_rate: float
    beta: float = 0.9


@pytest.mark.parametrize(
    ("hyper_params", "words"),
    [
        (Plain(0.1), "this optimizer has `learning_rate`, `beta`"),
        ({"lr": 1}, "this optimizer has none to override"),
    ],
    ids=repr,
)
def test_unknown_names_are_errors(hyper_params: Any, words: str) -> None:
    definition = OptimizerDef(hyper_params)
    assert definition.update_hyper_params() is hyper_params
    with pytest.raises(HyperParamError) as caught:
        definition.update_hyper_params(lr=0.2, eps=1e-8)
    assert str(caught.value) == f"no such hyper-parameter: `lr`, `eps`; {words}"


def test_overrides_hold_for_one_update() -> None:
    optimizer = Momentum(learning_rate=1.0, beta=0.0).create({"w": jnp.zeros(1)})
    grads = {"w": jnp.ones(1)}
    other = MomentumHyperParams(learning_rate=4.0)
    for overrides, moved in [
        ({}, -1.0),
        ({"learning_rate": 2.0}, -2.0),
        ({"hyper_params": other}, -4.0),
        ({"hyper_params": other, "learning_rate": 8.0}, -8.0),
        ({"learning_rate": jnp.float32(2)}, -2.0),
    ]:
        first = jax.jit(lambda o, kw: o.apply_gradient(grads, **kw))(optimizer, overrides)
        assert first.target["w"].tolist() == [moved]
        assert first.optimizer_def == optimizer.optimizer_def
