"""State dicts in T5X's layout, and logical axes."""

from typing import Any

import jax
import opt_optax_bridge
import optax
import pytest
from bridge_testing import (
    assert_same_bits,
    definition,
    grads_of,
    labels,
    make_params,
    structure,
    through_bytes,
    trained,
)
from flax.core import FrozenDict, freeze
from flax.traverse_util import flatten_dict
from jax.sharding import PartitionSpec as P
from opt_core import Optimizer
from opt_optax_bridge import OptaxWrapper

pytestmark = pytest.mark.usefixtures("optax_promotion")

PARAMS = {"b", "w"}
SCHEDULE = optax.linear_schedule(0.1, 0.0, 10)


def state_paths(tx: Any, params: Any = None) -> set[str]:
    """The paths below `state/param_states`."""
    optimizer = OptaxWrapper(tx).create(make_params() if params is None else params)
    state_dict = optimizer.state_dict()["state"]
    assert state_dict.keys() <= {"step", "param_states"}
    flat = flatten_dict(state_dict.get("param_states", {}), keep_empty_nodes=True)
    return {"/".join(path) for path in flat}


def each(*prefixes: str) -> set[str]:
    return {f"{prefix}/{name}" for prefix in prefixes for name in PARAMS}


def adam_at(prefix: str) -> set[str]:
    return {f"{prefix}count", *each(f"{prefix}mu", f"{prefix}nu")}


LAYOUTS: dict[str, tuple[Any, set[str]]] = {
    "adam": (optax.adam(0.1), adam_at("0/")),
    "named_chain": (
        optax.named_chain(("clip", optax.clip(1.0)), ("adam", optax.adam(0.1))),
        adam_at("adam/0/"),
    ),
    "masked": (
        optax.masked(optax.trace(0.9), labels()),
        {"inner_state/trace/w"},
    ),
    "partition by numbers": (
        optax.partition({0: optax.trace(0.9), 7: optax.ema(0.9)}, {"b": 7, "w": 0}),
        {
            "inner_states/0/inner_state/trace/w",
            "inner_states/7/inner_state/count",
            "inner_states/7/inner_state/ema/b",
        },
    ),
    "MultiSteps": (
        optax.MultiSteps(optax.sgd(SCHEDULE), 2, should_skip_update_fn=optax.skip_not_finite),
        {
            "mini_step",
            "gradient_step",
            "inner_opt_state/1/count",
            "skip_state/num_not_finite",
            "skip_state/should_skip",
            *each("acc_grads"),
        },
    ),
    "apply_if_finite": (
        optax.apply_if_finite(optax.trace(0.9), 3),
        {"notfinite_count", "last_finite", "total_notfinite", *each("inner_state/trace")},
    ),
    "inject_hyperparams": (
        optax.inject_hyperparams(optax.sgd)(learning_rate=SCHEDULE),
        {"count", "hyperparams/learning_rate", "hyperparams_states/learning_rate/count"},
    ),
    "noise": (optax.add_noise(0.1, 0.5, jax.random.key(3)), {"count", "rng_key"}),
}


@pytest.mark.parametrize(("tx", "paths"), LAYOUTS.values(), ids=list(LAYOUTS))
def test_the_layout_is_that_of_t5x(tx: Any, paths: set[str]) -> None:
    assert state_paths(tx) == paths


def test_a_state_without_arrays_has_no_entry() -> None:
    optimizer = OptaxWrapper(optax.chain(optax.clip(1.0), optax.sgd(0.1))).create(make_params())
    assert optimizer.state_dict() == {"target": optimizer.target, "state": {"step": 0}}
    restored = optimizer.restore_state(through_bytes(optimizer.state_dict()))
    assert_same_bits(restored, optimizer)
    stepped = restored.apply_gradient(grads_of("sgd", restored.target))
    assert structure(stepped) == structure(optimizer)


@pytest.mark.parametrize("container", [dict, freeze], ids=["dict", "FrozenDict"])
def test_dicts_of_either_kind_come_back(container: Any) -> None:
    optimizer = OptaxWrapper(LAYOUTS["named_chain"][0]).create(container(make_params()))
    optimizer = optimizer.apply_gradient(container(make_params()))
    written = through_bytes(optimizer.state_dict())
    for given in (written, freeze(written)):
        restored = optimizer.restore_state(given)
        assert_same_bits(restored, optimizer)  # the order of names too
        assert isinstance(restored.target, FrozenDict if container is freeze else dict)


def test_restoring_under_jit_and_into_shapes() -> None:
    optimizer = trained("adamw")
    written = optimizer.state_dict()
    assert_same_bits(jax.jit(optimizer.restore_state)(written), optimizer)
    abstract = jax.eval_shape(definition("adamw").create, make_params())
    assert_same_bits(abstract.restore_state(through_bytes(written)), optimizer)


# Logical axes, as T5X asks for them.

AXES = {"b": P("mlp"), "w": P("embed", "mlp")}


def is_leaf(x: Any) -> bool:
    return x is None or isinstance(x, P)


def skeleton(tree: Any) -> Any:
    return jax.tree.structure(tree, is_leaf=is_leaf)


def derive(tx: Any, params: Any = None, axes: Any = None) -> Any:
    """The axes of the state, in its own containers."""
    optimizer = OptaxWrapper(tx).create(make_params() if params is None else params)
    derived = optimizer.optimizer_def.derive_logical_axes(optimizer, AXES if axes is None else axes)
    assert isinstance(derived, Optimizer)
    assert derived.state.step is None
    assert derived.optimizer_def is optimizer.optimizer_def
    assert skeleton(derived) == skeleton(optimizer), "other containers than the optimizer's own"
    return derived.state.param_states


@pytest.mark.parametrize("axes", [AXES, freeze(AXES)], ids=["dict", "Frozen"])
def test_dicts_of_either_kind_stand_for_one_another(axes: Any) -> None:
    definition = opt_optax_bridge.adam(0.1)
    optimizer = definition.create(freeze(make_params()))
    derived = definition.derive_logical_axes(optimizer, axes)
    for tree in (derived.target, derived.state.param_states[0].mu):
        assert isinstance(tree, FrozenDict)
        assert dict(tree) == AXES
    assert skeleton(derived) == skeleton(optimizer)


def test_moments_have_the_axes_of_their_parameters_and_counts_none() -> None:
    clip, (adam, decay, schedule) = derive(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE))
    )
    assert clip == decay == optax.EmptyState()
    assert adam.mu == adam.nu == AXES
    assert adam.count is schedule.count is None
    assert derive(optax.trace(0.9), axes={"b": None, "w": P("embed", None)}).trace == {
        "b": None,
        "w": P("embed", None),
    }


def test_states_that_no_name_gives_away() -> None:
    """`apply_every`'s is called `ApplyEvery`; dicts and users' own are in nobody's list."""
    assert derive(optax.apply_every(2)).grad_acc == AXES
    tx = optax.GradientTransformation(lambda p: {"mine": [p, p]}, lambda u, s, p=None: (u, s))
    assert derive(tx) == {"mine": [AXES, AXES]}
