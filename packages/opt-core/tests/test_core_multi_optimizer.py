"""Updates, overrides and state dicts of several groups."""

from typing import Any

import chex
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core_testing import Moments, Momentum, Whole, advanced, assert_same, structure, to_numpy
from flax.core import freeze
from flax_optim import Adam, GradientDescent
from jax.sharding import PartitionSpec as P
from opt_core import (
    FROZEN,
    GroupStates,
    MultiOptimizer,
    OptimizerDef,
    OptimizerState,
)
from opt_core.errors import (
    HyperParamError,
    RestoreError,
    TreeMismatchError,
)


def make_params() -> Any:
    return {
        "a": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3), "none": {}},
        "b": {"kernel": jnp.ones((3, 2)), "scale": 2 * jnp.ones(2)},
    }


GRADS: Any = {
    "a": {"kernel": jnp.full((2, 3), 0.5), "bias": jnp.full(3, 2.0), "none": {}},
    "b": {"kernel": jnp.full((3, 2), 0.25), "scale": jnp.ones(2)},
}


def both(rest: Any = FROZEN) -> MultiOptimizer:
    """Kernels and biases, an entry per parameter."""
    rules = [("kernels", ".*kernel", Momentum(0.5)), ("biases", ".*bias", Adam(0.1))]
    return MultiOptimizer.from_rules(rules, rest=rest)


def mixed(rest: Any = FROZEN) -> MultiOptimizer:
    """Kernels and biases, one of them with a state of the whole."""
    rules = [("kernels", ".*kernel", Momentum(0.5)), ("biases", ".*bias", Whole(0.1))]
    return MultiOptimizer.from_rules(rules, rest=rest)


def nested() -> MultiOptimizer:
    inner = MultiOptimizer.from_rules(
        [("kernels", ".*kernel", Momentum(0.25))], rest=GradientDescent(0.1)
    )
    return MultiOptimizer.from_rules(
        [("a", "a/.*", inner), ("b", "b/kernel", Whole())], rest=FROZEN
    )


@pytest.mark.parametrize("make", [nested, mixed])
def test_groups_do_what_their_definitions_do_alone(make: Any) -> None:
    """Each on a tree of its own leaves: the same bits."""
    optimizer = make().create(make_params())
    alone = optimizer.optimizer_def.split(optimizer)
    for _ in range(3):
        optimizer = optimizer.apply_gradient(GRADS)
        grads = make().split(optimizer.replace(target=GRADS))
        alone = {name: o.apply_gradient(grads[name].target) for name, o in alone.items()}
    found = optimizer.optimizer_def.split(optimizer)
    assert found.keys() == alone.keys()
    for name, own in alone.items():
        assert_same(found[name].target, own.target)
        assert_same(found[name].state.param_states, own.state.param_states)
    assert int(optimizer.state.step) == 3


def test_under_transformations_of_jax() -> None:
    optimizer = mixed().create(make_params())
    assert structure(mixed().create(jax.eval_shape(make_params))) == structure(optimizer)
    one = optimizer.apply_gradient(GRADS)
    looped = one.apply_gradient(GRADS).apply_gradient(GRADS)
    scanned, _ = jax.lax.scan(
        lambda o, _: (o.apply_gradient(GRADS), None), optimizer, None, length=3
    )
    chex.assert_trees_all_close(scanned, looped, rtol=1e-6)
    pair = jax.tree.map(lambda x: jnp.stack([x] * 2), (optimizer, GRADS))
    many = jax.vmap(lambda o, g: o.apply_gradient(g))(*pair)
    chex.assert_trees_all_close(jax.tree.map(lambda x: x[1], many), one, rtol=1e-6)
    step = chex.assert_max_traces(lambda o: o.apply_gradient(GRADS), n=1)
    compiled = jax.jit(step, donate_argnums=0)
    fresh = mixed().create(make_params())  # frozen leaves are in `looped` too
    found = compiled(compiled(compiled(fresh)))
    chex.assert_trees_all_close(found, looped, rtol=1e-6)


@pytest.mark.parametrize("make", [both, mixed, nested])
@pytest.mark.parametrize("container", [dict, freeze])
def test_state_dicts_come_back(make: Any, container: Any) -> None:
    optimizer = make().create(container(make_params()))
    grads = container(GRADS)
    optimizer = optimizer.apply_gradient(grads)
    written = to_numpy(optimizer.state_dict())
    data = flax.serialization.msgpack_serialize(written)
    restored = make().create(container(make_params()))
    restored = restored.restore_state(flax.serialization.msgpack_restore(data))
    assert_same(restored, optimizer)
    assert isinstance(restored.state.param_states, GroupStates)
    assert tuple(restored.state.param_states) == make().group_names
    whole = flax.serialization.to_bytes(optimizer)  # Flax's own way, not ours
    assert_same(flax.serialization.from_bytes(restored, whole), optimizer)


def test_a_state_of_the_whole_is_kept_by_group() -> None:
    """The goldens have the layout where every group has an entry per parameter."""
    states = mixed().create(make_params()).state_dict()["state"]["param_states"]
    assert list(states) == ["kernels", "biases"]
    assert states["kernels"].keys() == {"a", "b"}
    assert states["biases"]["0"]["mu"]["b"] == {"kernel": {}, "scale": {}}


def test_deviations_have_the_path_in_the_dict() -> None:
    for make, prefix in ((both, ""), (mixed, "kernels/")):
        optimizer = make().create(make_params())
        written = to_numpy(optimizer.state_dict())
        states = written["state"]["param_states"]
        kernels = states["kernels"] if prefix else states
        kernels["a"]["kernel"] = np.zeros((3, 2), np.float32)
        states["other"] = 1
        with pytest.raises(RestoreError) as caught:
            optimizer.restore_state(written)
        assert {(m.path, m.kind) for m in caught.value.mismatches} == {
            (f"state/param_states/{prefix}a/kernel", "shape"),
            ("state/param_states/other", "extra"),
        }
        with pytest.raises(RestoreError):
            optimizer.restore_state({"state": 1})


def test_a_single_array_is_a_tree_too() -> None:
    optimizer = advanced(MultiOptimizer((r"\.", Whole())).create(jnp.ones(3)), 1)
    assert_same(optimizer.restore_state(to_numpy(optimizer.state_dict())), optimizer)


class WritesUnderAName(Momentum):
    """Has a state dict that is not laid out as its state is, and a way back."""

    def state_dict(self, target: Any, state: OptimizerState) -> dict[str, Any]:
        written = super().state_dict(target, state)
        momenta = {"momenta": written["state"]["param_states"]}
        return {**written, "state": {**written["state"], "param_states": momenta}}

    def restore_state(self, opt_target: Any, opt_state: Any, state_dict: Any) -> Any:
        momenta = state_dict["state"]["param_states"]["momenta"]
        unnamed = {**state_dict, "state": {**state_dict["state"], "param_states": momenta}}
        return super().restore_state(opt_target, opt_state, unnamed)


def test_definitions_write_and_read_their_own_part() -> None:
    """In an entry of their group: a layout of their own is not merged with that of others."""
    inner = MultiOptimizer.from_rules([("kernels", ".*kernel", WritesUnderAName())], rest=Whole())
    outer = MultiOptimizer.from_rules([("a", "a/.*", inner)], rest=Momentum())
    for whole, path in ((inner, ()), (outer, ("a",))):
        optimizer = advanced(whole.create(make_params()), 1)
        written = to_numpy(optimizer.state_dict())
        states = written["state"]["param_states"]
        for name in (*path, "kernels"):
            states = states[name]
        assert states.keys() == {"momenta"}
        assert_same(whole.create(make_params()).restore_state(written), optimizer)
        del states["momenta"]
        with pytest.raises(RestoreError, match=r"kernels/momenta/a/kernel: missing"):
            optimizer.restore_state(written)


# Frozen leaves.


def test_frozen_leaves_cost_nothing_and_stay_the_same_arrays() -> None:
    params = make_params()
    optimizer = both().create(params)
    stepped = optimizer.apply_gradient(GRADS).apply_gradient(GRADS)
    assert stepped.target["b"]["scale"] is params["b"]["scale"]
    assert all(state["b"]["scale"] == () for state in stepped.state.param_states.values())
    everything = MultiOptimizer.from_rules([("all", ".*", FROZEN)]).create(params)
    assert jax.tree.leaves(everything.state.param_states) == []
    assert everything.apply_gradient(None).target["a"]["bias"] is params["a"]["bias"]
    with pytest.raises(HyperParamError, match="`learning_rate`: there is no group to override"):
        everything.apply_gradient({}, learning_rate=0.1)
    pointer = params["b"]["scale"].unsafe_buffer_pointer()
    stepped = jax.jit(lambda o: o.apply_gradient(GRADS), donate_argnums=0)(optimizer)
    assert stepped.target["b"]["scale"].unsafe_buffer_pointer() == pointer
    assert params["b"]["scale"].is_deleted()


def without(path: str, value: Any = ...) -> Any:
    outer, inner = path.split("/")
    layer = {k: v for k, v in GRADS[outer].items() if k != inner}
    return {**GRADS, outer: layer if value is ... else {**layer, inner: value}}


def test_frozen_leaves_need_no_gradient() -> None:
    optimizer = both().create(make_params())
    expected = optimizer.apply_gradient(GRADS)
    float0 = np.zeros(2, jax.dtypes.float0)
    for grads in (without("b/scale"), without("b/scale", None), without("b/scale", float0)):
        assert_same(optimizer.apply_gradient(grads), expected)
    layer = MultiOptimizer(("a/.*", Momentum())).create(make_params())
    only = layer.apply_gradient({"a": GRADS["a"]})
    assert_same(only, layer.apply_gradient(GRADS))
    frozen = freeze(make_params())
    assert_same(
        both().create(frozen).apply_gradient(freeze(without("b/scale"))).target,
        freeze(expected.target),
    )


def test_gradients_must_fit_where_they_are_needed_or_given() -> None:
    optimizer = MultiOptimizer(("a/.*", Momentum())).create(make_params())
    examples = {**GRADS["b"], "kernel": jnp.ones((5, 3, 2))}
    allowed: list[Any] = [None, {}, {"kernel": None}, GRADS["b"]]
    for rest in allowed:
        optimizer.apply_gradient({**GRADS, "b": rest})
    refused: list[tuple[Any, str]] = [
        ({"b": examples}, r"b/kernel: expected shape \(3, 2\), found \(5, 3, 2\)"),
        ({"b": {"typo": None}}, "b/typo: expected nothing, found None"),
        ({"b": jnp.ones(7)}, "b: expected a dict, found an array"),
        ({"a": {}}, r"a/kernel: expected an array of shape \(2, 3\), found nothing"),
        ({"a": {**GRADS["a"], "bias": jnp.ones(2)}}, r"a/bias: expected shape \(3,\), found \(2,"),
    ]
    for changed, words in refused:
        with pytest.raises(TreeMismatchError, match=words):
            optimizer.apply_gradient({**GRADS, **changed})


# Hyper-parameters.


def test_overrides_of_all_groups_and_of_one() -> None:
    optimizer = both().create(make_params())
    found = optimizer.apply_gradient(GRADS, learning_rate=0.0)
    assert_same(found.target, optimizer.target)
    kernels, biases = optimizer.optimizer_def.hyper_params
    given = [kernels.replace(learning_rate=1.0), biases.replace(learning_rate=0.0)]
    found = optimizer.apply_gradient(GRADS, hyper_params=given).target
    assert float(found["a"]["kernel"][0, 0]) == 0.5
    assert_same(found["a"]["bias"], optimizer.target["a"]["bias"])
    found = optimizer.apply_gradient(
        GRADS, learning_rate=0.0, group_overrides={"kernels": {"learning_rate": jnp.float32(1)}}
    ).target
    assert float(found["b"]["kernel"][0, 0]) == 0.75
    assert_same(found["a"]["bias"], optimizer.target["a"]["bias"])
    deeper = {"a": {"group_overrides": {"kernels": {"learning_rate": 0.0}}}}
    inner = nested().create(make_params())
    found = inner.apply_gradient(GRADS, group_overrides=deeper).target
    assert_same(found["a"]["kernel"], inner.target["a"]["kernel"])
    assert float(found["a"]["bias"][0]) == np.float32(0.8)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"hyper_params": [None] * 3}, "2 entries, one for each of `kernels`, `biases`; got 3"),
        (
            {"group_overrides": {"x": {}}},
            "`x` is not a group; the groups that are updated are `ker",
        ),
        ({"group_overrides": {"rest": {}}}, "`rest` is frozen; the groups that are updated are"),
        ({"group_overrides": {"biases": {"beta": 1}}}, "group `biases`: no such hyper-parameter"),
        (
            {
                "hyper_params": both().hyper_params,
                "group_overrides": {"kernels": {"hyper_params": both().hyper_params[0]}},
            },
            "group `kernels` is given `hyper_params` twice: in `hyper_params=` and in ",
        ),
    ],
)
def test_overrides_that_are_refused(overrides: Any, words: str) -> None:
    optimizer = both().create(make_params())
    with pytest.raises(HyperParamError) as caught:
        optimizer.apply_gradient(GRADS, **overrides)
    assert words in str(caught.value)


def test_extra_arguments_go_where_they_are_used() -> None:
    alone = Whole(0.5).create(jnp.zeros(2)).apply_gradient(jnp.ones(2), value=4.0)
    assert alone.target.tolist() == [-2.0, -2.0]
    optimizer = mixed().create(make_params())
    found = optimizer.apply_gradient(GRADS, value=2.0).target
    plain = optimizer.apply_gradient(GRADS).target
    assert float(found["a"]["bias"][0]) == np.float32(1 - 0.1 * 2 * 2)
    assert_same(found["a"]["kernel"], plain["a"]["kernel"])
    definition = mixed()
    with pytest.raises(HyperParamError, match="`other`: neither a hyper-parameter nor"):
        definition.compute_updates(
            definition.hyper_params, optimizer.target, optimizer.state, GRADS, other=2.0
        )
    with pytest.raises(HyperParamError, match="group `kernels`: no such hyper-parameter: `value`"):
        both().create(make_params()).apply_gradient(GRADS, value=1.0)


# Logical axes.

AXES: Any = {
    "a": {"kernel": P("embed", "mlp"), "bias": P("mlp"), "none": {}},
    "b": {"kernel": P("mlp", None), "scale": None},
}


def test_the_axes_themselves() -> None:
    frozen = mixed().create(jax.eval_shape(lambda: freeze(make_params())))
    derived = mixed().derive_logical_axes(frozen, AXES)
    assert derived.target == freeze(AXES)
    found = derived.state.param_states
    layer = {"bias": P("mlp"), "kernel": (), "none": {}}
    mu = freeze({"a": layer, "b": {"kernel": (), "scale": ()}})
    assert found["biases"] == (Moments(None, mu), ())
    assert found["kernels"]["b"] == freeze({"kernel": P("mlp", None), "scale": ()})


def test_axes_of_other_paths_are_listed() -> None:
    optimizer = both().create(make_params())
    wrong = {"a": {**AXES["a"], "more": P()}, "b": {"scale": None}}
    with pytest.raises(TreeMismatchError, match=r"a/more: .*\n  b/kernel: expected a `Partition"):
        both().derive_logical_axes(optimizer, wrong)


def groups_of(first: OptimizerDef, second: OptimizerDef) -> Any:
    groups = MultiOptimizer(("a", first), ("b", second), names=["first", "second"])
    return groups.create({"a": jnp.ones(1), "b": jnp.ones(1)})


def test_an_override_that_one_group_lacks() -> None:
    optimizer = groups_of(Momentum(), GradientDescent(0.5))
    grads = {"a": jnp.ones(1), "b": jnp.ones(1)}
    with pytest.raises(HyperParamError, match="group `second`: no such hyper-parameter: `beta`"):
        optimizer.apply_gradient(grads, beta=0.25)
    stepped = optimizer.apply_gradient(grads, beta=0.25, learning_rate=0.25, missing="ignore")
    expected = groups_of(Momentum(0.25, 0.25), GradientDescent(0.25)).apply_gradient(grads)
    assert jax.tree.leaves(stepped) == jax.tree.leaves(expected)
    with pytest.raises(HyperParamError) as caught:
        optimizer.apply_gradient(grads, bata=0.25, missing="ignore")
    assert str(caught.value) == (
        "no group has a hyper-parameter `bata`; the groups have `learning_rate`, `beta`, "
        "`weight_decay`"
    )
    with pytest.raises(HyperParamError, match="no such hyper-parameter: `bata`"):
        Momentum().create(grads).apply_gradient(grads, bata=0.25, missing="ignore")
    with pytest.raises(HyperParamError, match="`missing` must be 'error' or 'ignore'; got 'no'"):
        optimizer.apply_gradient(grads, missing="no")
