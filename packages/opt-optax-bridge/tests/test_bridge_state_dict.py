"""State dicts in T5X's layout, and logical axes."""

from typing import Any

import jax
import opt_optax_bridge
import optax
import pytest
from bridge_testing import (
    assert_same_bits,
    grads_of,
    make_params,
    structure,
    through_bytes,
)
from flax.core import FrozenDict, freeze
from flax.traverse_util import flatten_dict
from jax.sharding import PartitionSpec as P
from opt_optax_bridge import OptaxWrapper

pytestmark = pytest.mark.usefixtures("optax_promotion")


NAMED = optax.named_chain(("clip", optax.clip(1.0)), ("adam", optax.adam(0.1)))
NUMBERED = optax.partition({0: optax.trace(0.9), 7: optax.ema(0.9)}, {"b": 7, "w": 0})


def test_names_and_numbers_of_parts_are_in_the_paths() -> None:
    for tx, parts in ((NAMED, {"adam/0"}), (NUMBERED, {"inner_states/0", "inner_states/7"})):
        written = OptaxWrapper(tx).create(make_params()).state_dict()["state"]["param_states"]
        assert {"/".join(path[:2]) for path in flatten_dict(written)} == parts


def test_a_state_without_arrays_has_no_entry() -> None:
    optimizer = OptaxWrapper(optax.chain(optax.clip(1.0), optax.sgd(0.1))).create(make_params())
    assert optimizer.state_dict() == {"target": optimizer.target, "state": {"step": 0}}
    restored = optimizer.restore_state(through_bytes(optimizer.state_dict()))
    assert_same_bits(restored, optimizer)
    stepped = restored.apply_gradient(grads_of("sgd", restored.target))
    assert structure(stepped) == structure(optimizer)


@pytest.mark.parametrize("container", [dict, freeze], ids=["dict", "FrozenDict"])
def test_dicts_of_either_kind_come_back(container: Any) -> None:
    optimizer = OptaxWrapper(NAMED).create(container(make_params()))
    optimizer = optimizer.apply_gradient(container(make_params()))
    written = through_bytes(optimizer.state_dict())
    for given in (written, freeze(written)):
        restored = optimizer.restore_state(given)
        assert_same_bits(restored, optimizer)  # the order of names too
        assert isinstance(restored.target, FrozenDict if container is freeze else dict)


# Logical axes, as T5X asks for them.

AXES = {"b": P("mlp"), "w": P("embed", "mlp")}


def is_leaf(x: Any) -> bool:
    return x is None or isinstance(x, P)


def skeleton(tree: Any) -> Any:
    return jax.tree.structure(tree, is_leaf=is_leaf)


@pytest.mark.parametrize("axes", [AXES, freeze(AXES)], ids=["dict", "Frozen"])
def test_dicts_of_either_kind_stand_for_one_another(axes: Any) -> None:
    definition = opt_optax_bridge.adam(0.1)
    optimizer = definition.create(freeze(make_params()))
    derived = definition.derive_logical_axes(optimizer, axes)
    for tree in (derived.target, derived.state.param_states[0].mu):
        assert isinstance(tree, FrozenDict)
        assert dict(tree) == AXES
    assert skeleton(derived) == skeleton(optimizer)
