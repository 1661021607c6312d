"""Restoring legacy state dicts: which layouts there are, what is refused, and with which words."""

import contextlib
import copy
from typing import Any

import flax.serialization
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opt_checkpoint import flax_optim_equivalent, restore_legacy
from opt_checkpoint.errors import EquivalenceError, LoadError, VersionError
from opt_core import MultiOptimizer, Optimizer
from opt_core.errors import OptimizerError
from opt_optax_bridge import OptaxWrapper

pytestmark = pytest.mark.usefixtures("optax_promotion")

STEP = 7


def params() -> Any:
    return {"layer": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}


def saved(*fields: str, head: str = "flax.optim") -> dict[str, Any]:
    """What an optimizer of `flax.optim` with these fields wrote, in one of the layouts."""

    def entry(shape: tuple[int, ...], start: int) -> dict[str, np.ndarray]:
        return {f: np.full(shape, start + i, np.float32) for i, f in enumerate(fields)}

    target = {"layer": {"kernel": np.full((2, 3), 5, np.float32), "bias": np.zeros(3, np.float32)}}
    states = {"layer": {"kernel": entry((2, 3), 1), "bias": entry((3,), 3)}}
    part = {"target": target, "state": {"step": np.int32(STEP), "param_states": states}}
    return {"version": 3, "optimizer": part} if head == "t5x" else part


def adam(**given: Any) -> Optimizer:
    return flax_optim_equivalent("Adam", learning_rate=0.1, **given).create(params())


EMAS = ("grad_ema", "grad_sq_ema")


@pytest.mark.parametrize("head", ["flax.optim", "t5x"])
def test_moments_and_counts_go_where_optax_keeps_them(head: str) -> None:
    restored = restore_legacy(adam(), flax.serialization.msgpack_serialize(saved(*EMAS, head=head)))
    state = restored.state.param_states[0]
    assert int(restored.state.step) == int(state.count) == STEP
    np.testing.assert_array_equal(restored.target["layer"]["kernel"], 5.0)
    np.testing.assert_array_equal(state.mu["layer"]["kernel"], 1.0)
    np.testing.assert_array_equal(state.nu["layer"]["bias"], 4.0)


def test_the_count_of_a_schedule_is_the_step() -> None:
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    optimizer = flax_optim_equivalent("Adam", learning_rate=schedule).create(params())
    restored = restore_legacy(optimizer, saved(*EMAS))
    counts = [
        int(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(restored.state.param_states)
        if jax.tree_util.keystr(path).endswith(".count")
    ]
    assert counts == [STEP, STEP]


def test_lars_keeps_the_update_and_flax_its_negative() -> None:
    lars = flax_optim_equivalent("LARS", learning_rate=0.1).create(params())
    sgd = flax_optim_equivalent("Momentum", learning_rate=0.1).create(params())
    source = saved("momentum")
    traces = [
        next(t["layer"]["bias"].max() for t in _traces(restore_legacy(o, source)))
        for o in (lars, sgd)
    ]
    assert traces == [-3.0, 3.0]


def _traces(optimizer: Optimizer) -> list[Any]:
    states: list[Any] = jax.tree.leaves(
        optimizer.state.param_states, is_leaf=lambda s: isinstance(s, optax.TraceState)
    )
    return [s.trace for s in states if isinstance(s, optax.TraceState)]


def test_who_wrote_it_must_be_known() -> None:
    """Adam, LAMB and AdaBelief write the same fields; nothing in the file tells them apart."""
    plain = OptaxWrapper(optax.chain(optax.clip(1.0), optax.adamw(0.1))).create(params())
    with pytest.raises(EquivalenceError, match="does not say which optimizer wrote it"):
        restore_legacy(plain, saved(*EMAS))
    restored = restore_legacy(plain, saved(*EMAS), written_by="Adam")
    np.testing.assert_array_equal(restored.state.param_states[1][0].mu["layer"]["kernel"], 1.0)
    with pytest.raises(LoadError, match="grad_ema: has no place"):
        restore_legacy(plain, saved(*EMAS), written_by="AdaBelief")
    with pytest.raises(EquivalenceError, match=r"stands for `flax\.optim\.Adam`, and `written_by`"):
        restore_legacy(adam(), saved(*EMAS), written_by="LAMB")
    with pytest.raises(EquivalenceError, match="'Adamw' is not one of GradientDescent, "):
        restore_legacy(plain, saved(*EMAS), written_by="Adamw")


def test_nobody_needs_to_say_who_wrote_states_of_optax() -> None:
    plain = OptaxWrapper(optax.adam(0.1)).create(params())
    ours = plain.state_dict()
    train_state = {
        "params": ours["target"],
        "opt_state": ours["state"]["param_states"],
        "step": ours["state"]["step"],
    }
    for source in (ours, train_state, {"version": 3, "optimizer": ours}):
        restore_legacy(plain, source)
        with pytest.raises(EquivalenceError, match="'Foo' is not one of GradientDescent, "):
            restore_legacy(plain, source, written_by="Foo")
        with pytest.raises(
            EquivalenceError, match=r"is for files of `flax\.optim`.*states of Optax"
        ):
            restore_legacy(plain, source, written_by="Adam")
    with pytest.raises(EquivalenceError, match=r"is for files of `flax\.optim`"):
        restore_legacy(groups(), groups().state_dict(), written_by={"biases": "Adam"})


def test_state_without_a_place_and_places_without_state() -> None:
    averaged = OptaxWrapper(optax.chain(optax.adam(0.1), optax.ema(0.9))).create(params())
    with pytest.raises(LoadError, match="1/ema/layer/kernel: the file has nothing for this"):
        restore_legacy(averaged, saved(*EMAS), written_by="Adam")
    with pytest.raises(LoadError, match="has the fields momentum; expected grad_ema, grad_sq_ema"):
        restore_legacy(adam(), saved("momentum"))
    plain = OptaxWrapper(optax.adafactor(0.1, min_dim_size_to_factor=1000)).create(params())
    with pytest.raises(LoadError, match="kernel/m: has no place"):
        restore_legacy(plain, saved("v_row", "v_col", "v", "m"), written_by="Adafactor")
    kernels = optax.masked(optax.adam(0.1), {"layer": {"kernel": True, "bias": False}})
    with pytest.raises(LoadError, match="layer/bias/grad_ema: has no place"):
        restore_legacy(OptaxWrapper(kernels).create(params()), saved(*EMAS), written_by="Adam")
    source = saved(*EMAS)
    source["state"]["param_states"]["layer"]["bias"] = None
    with pytest.raises(LoadError, match="layer/bias: has no state: frozen when it was saved"):
        restore_legacy(adam(), source)


def groups() -> Optimizer:
    definition = MultiOptimizer(
        (".*kernel", flax_optim_equivalent("Momentum", learning_rate=0.1)),
        (".*bias", OptaxWrapper(optax.adam(0.1))),
        names=["kernels", "biases"],
    )
    return definition.create(params())


def saved_groups() -> dict[str, Any]:
    source = saved("momentum")
    source["state"]["param_states"]["layer"]["bias"] = saved(*EMAS)["state"]["param_states"][
        "layer"
    ]["bias"]
    return source


def test_each_group_gets_its_own() -> None:
    restored = restore_legacy(groups(), saved_groups(), written_by={"biases": "Adam"})
    state = restored.state.param_states
    np.testing.assert_array_equal(state["biases"][0].mu["layer"]["bias"], 3.0)
    assert int(state["biases"][0].count) == STEP
    with pytest.raises(EquivalenceError, match=r"wrote it \(group `biases`\)"):
        restore_legacy(groups(), saved_groups())
    with pytest.raises(EquivalenceError, match="others is not a group that trains"):
        restore_legacy(groups(), saved_groups(), written_by={"others": "Adam"})
    with pytest.raises(EquivalenceError, match="no groups; pass one name"):
        restore_legacy(adam(), saved(*EMAS), written_by={"kernels": "Adam"})


def test_a_state_of_what_is_frozen_here_is_not_dropped_silently() -> None:
    kernels = MultiOptimizer((".*kernel", flax_optim_equivalent("Momentum", learning_rate=0.1)))
    with pytest.raises(LoadError, match="parameters that are frozen here: layer/bias"):
        restore_legacy(kernels.create(params()), saved("momentum"))


def test_lists_of_states() -> None:
    """As Flax until 0.3.2 wrote groups; other groups, or other steps, are errors."""
    source = saved_groups()
    layer = source["state"]["param_states"]["layer"]
    states = [{"step": STEP, "param_states": {"0": layer[name]}} for name in ("kernel", "bias")]
    old = {"target": source["target"], "state": {"0": states[0], "1": states[1]}}
    restored = restore_legacy(groups(), old, written_by={"biases": "Adam"})
    assert int(restored.state.step) == STEP
    with pytest.raises(LoadError, match=r"`state`: 2 states.*this optimizer has 0 groups"):
        restore_legacy(adam(), old)
    other = {**old, "state": {"0": states[0], "1": {**states[1], "step": 3}}}
    with pytest.raises(LoadError, match="`state/1/step`: 3, and 7"):
        restore_legacy(groups(), other, written_by={"biases": "Adam"})
    fewer = {**old, "state": {"0": {**states[0], "param_states": {}}, "1": states[1]}}
    with pytest.raises(LoadError, match="`state/0/param_states`: expected one state for each"):
        restore_legacy(groups(), fewer, written_by={"biases": "Adam"})


def test_lists_of_states_are_in_the_order_of_the_components() -> None:
    """As `ModelParamTraversal` of Flax 0.3.2 sorted them: not as the joined paths sort."""
    names = ("block", "block-1", "block.2", "block 3", "block0", "10", "2")
    target = {name: {"kernel": np.full(2, i, np.float32)} for i, name in enumerate(names)}
    order = sorted(flax.traverse_util.flatten_dict(target))
    assert order != sorted(order, key="/".join)
    states = [{"momentum": 10 * target[a][b]} for a, b in order]
    source = {"target": target, "state": [{"step": STEP, "param_states": states}]}
    momentum = flax_optim_equivalent("Momentum", learning_rate=0.1)
    optimizer = MultiOptimizer((".*", momentum)).create(jax.tree.map(jnp.zeros_like, target))
    restored = restore_legacy(optimizer, source)
    (traces,) = _traces(restored)
    for name, layer in target.items():
        np.testing.assert_array_equal(traces[name]["kernel"], 10 * layer["kernel"])


@pytest.mark.parametrize(
    ("contents", "error", "match"),
    [
        ({"weights": 1}, LoadError, r"expected the keys `target` and `state`.*found weights"),
        ({"version": 4, "optimizer": {}}, VersionError, "this is version 4 of T5X"),
        ({"version": 3, "optimizer": 5}, LoadError, "`optimizer`: expected a dict"),
        (
            {"target": {}, "state": {}},
            LoadError,
            "`state/step`: expected a non-negative int32, found None",
        ),
        (
            {"target": {}, "state": {"step": 2**31}},
            LoadError,
            "expected a non-negative int32, found 2147483648",
        ),
        (
            {"target": {"w": "PLACEHOLDER://w"}, "state": {}},
            LoadError,
            "`target/w`: the array is not in this file",
        ),
        (
            {
                "params": {},
                "step": 1,
                "opt_state": {"name": "X", "fields": {"0": "a"}, "values": {}},
            },
            LoadError,
            "`state/param_states`: expected a named tuple",
        ),
    ],
)
def test_what_is_no_checkpoint(contents: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        restore_legacy(adam(), contents)


def _accumulating(every_k: Any) -> Optimizer:
    steps = optax.MultiSteps(optax.sgd(0.1), every_k)
    return OptaxWrapper(steps.gradient_transformation()).create(params())


def test_a_window_that_cannot_end_is_refused() -> None:
    state_dict = _accumulating(4).state_dict()
    states = {**state_dict["state"]["param_states"], "mini_step": np.int32(3)}
    source = {"params": state_dict["target"], "opt_state": states, "step": np.int32(3)}
    assert int(restore_legacy(_accumulating(4), source).state.param_states.mini_step) == 3
    for shorter in (2, 3):
        with pytest.raises(LoadError, match=r"mini_step`: 3 mini-steps.*window is [23]"):
            restore_legacy(_accumulating(shorter), source)
    by_step = restore_legacy(_accumulating(lambda step: 2), source)
    assert int(by_step.state.param_states.mini_step) == 3
    closed = {**source, "opt_state": {**states, "mini_step": np.int32(0)}}
    assert int(restore_legacy(_accumulating(2), closed).state.param_states.mini_step) == 0


@pytest.mark.parametrize(
    ("name", "given", "match"),
    [
        ("LARS", {"weight_decay": 1e-4}, "its trust ratio"),
        ("Adagrad", {"eps": 1e-3}, r"sqrt\(G\) \+ eps"),
        ("WeightNorm", {}, "no weight normalisation"),
        ("MultiOptimizer", {}, r"`opt_core\.MultiOptimizer`"),
        ("Adamax", {}, "`flax.optim` has no `Adamax`"),
        ("Adam", {"learning_rate": None}, "`learning_rate` is missing"),
        ("Adam", {"b1": 0.8}, r"`flax\.optim\.Adam` has no `b1`; it has `learning_rate`, `beta1`"),
    ],
)
def test_no_equal_and_why(name: str, given: dict[str, Any], match: str) -> None:
    with pytest.raises(EquivalenceError, match=match):
        flax_optim_equivalent(name, **{"learning_rate": 0.1, **given})


VALUES = st.one_of(
    st.none(),
    st.integers(-5, 5),
    st.text(max_size=3),
    st.just({}),
    st.just([]),
    st.sampled_from([np.ones(3, np.float32), np.ones((2, 3), np.float32), np.int32(3)]),
    st.just({"0": {"step": 1, "param_states": {}}, "1": {"step": 1}}),
    st.just({"name": "X", "fields": {"0": "a"}, "values": {"0": 1}}),
)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_mutated_state_dicts_raise_typed_errors_only(data: st.DataObject) -> None:
    source = saved(*EMAS, head=data.draw(st.sampled_from(["flax.optim", "t5x"])))
    for _ in range(data.draw(st.integers(1, 3))):
        node = source
        while True:
            key = data.draw(st.sampled_from(sorted(node))) if node else "new"
            inner = node.get(key)
            if not isinstance(inner, dict) or data.draw(st.booleans()):
                break
            node = inner
        match data.draw(st.sampled_from(["remove", "replace", "rename"])):
            case "remove":
                node.pop(key, None)
            case "replace":
                node[key] = copy.deepcopy(data.draw(VALUES))
            case "rename":
                node[key + "_"] = node.pop(key, 1)
    for optimizer in (adam(), OptaxWrapper(optax.adam(0.1)).create(params()), groups()):
        with contextlib.suppress(OptimizerError):
            restore_legacy(optimizer, source)
