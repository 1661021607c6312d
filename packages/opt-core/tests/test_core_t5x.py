"""What the facades of T5X share; what they do with it is tested with them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core_testing import assert_same
from jax.sharding import PartitionSpec as P
from jax.sharding import SingleDeviceSharding
from opt_core import OptimizerState
from opt_core.t5x import lenient_references

PARAMS: dict[str, Any] = {"w": jnp.ones((2, 3)), "b": [jnp.ones(3), jnp.arange(2)]}
STATE = OptimizerState(jnp.int32(4), (jnp.zeros(3), None))


def references(target: Any = None, state: Any = None) -> Any:
    return lenient_references(PARAMS, STATE, {"target": target, "state": state})


@pytest.mark.parametrize(
    "state_dict",
    [
        None,
        {},
        {"target": 1, "state": "text"},
        {"target": {"w": {}}, "state": {"param_states": {"0": {"x": 1}}}},
    ],
)
def test_nothing_to_restore_leaves_everything(state_dict: Any) -> None:
    assert_same(lenient_references(PARAMS, STATE, state_dict), (PARAMS, STATE))


def test_axes_and_none_stand_for_any_leaf() -> None:
    target, state = references(
        {"w": P("embed", "mlp"), "b": {"0": None, "1": np.arange(2)}},
        {"step": None, "param_states": {"0": P("mlp"), "1": P("embed")}},
    )
    assert (target["w"], target["b"][0]) == (P("embed", "mlp"), None)
    assert target["b"][1] is PARAMS["b"][1]
    assert state == OptimizerState(None, (P("mlp"), P("embed")))


def test_parameters_take_another_precision() -> None:
    for given, taken in (("bfloat16", "bfloat16"), ("float64", "float32"), ("int32", "float32")):
        value = np.ones(5, given)  # the shape is looked at later
        target, state = references({"w": value}, {"param_states": {"0": value}})
        assert (target["w"].shape, target["w"].dtype) == ((2, 3), taken)
        assert state.param_states[0].dtype == jnp.float32


def test_parameters_stay_where_they_are() -> None:
    device = jax.devices()[0]
    for params in (jax.device_put(PARAMS, device), jax.eval_shape(lambda: PARAMS)):
        given = {"target": {"w": jnp.ones((2, 3), jnp.bfloat16)}}
        target, _ = lenient_references(params, STATE, given)
        is_placed = isinstance(params["w"], jax.Array)
        assert target["w"].sharding == (SingleDeviceSharding(device) if is_placed else None)
