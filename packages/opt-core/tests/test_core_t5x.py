"""What the facades of T5X share; what they do with it is tested with them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from opt_core import OptimizerState
from opt_core.t5x import lenient_references

PARAMS: dict[str, Any] = {"w": jnp.ones((2, 3)), "b": [jnp.ones(3), jnp.arange(2)]}
STATE = OptimizerState(jnp.int32(4), (jnp.zeros(3), None))


def references(target: Any = None, state: Any = None) -> Any:
    return lenient_references(PARAMS, STATE, {"target": target, "state": state})


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
