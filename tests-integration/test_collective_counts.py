"""How many collectives a planned step has on four devices and on eight; bytes of its arguments."""

from typing import Any

import jax
import numpy as np
import opt_adafactor
import optax
import pytest
from jax.sharding import AxisType, Mesh
from opt_partition import memory_plan, read_collectives

PARAMS = {f"w{i}": jax.ShapeDtypeStruct((64, 256), np.float32) for i in range(3)}
AXES = dict.fromkeys(PARAMS, ("embed", "mlp"))
JOBS: dict[str, tuple[Any, str | None, int]] = {  # the last: limit of collectives
    "AdamW with ZeRO-1": (optax.adamw(1e-3), "data", len(PARAMS)),  # one gather a leaf
    "Adafactor": (opt_adafactor.adafactor(1e-3), None, 8 * len(PARAMS)),
}


@pytest.mark.parametrize("name", JOBS)
def test_more_devices_have_no_more_collectives(name: str) -> None:
    tx, zero, limit = JOBS[name]
    rules = (("embed", None if zero else "data"), ("mlp", "model"))

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    found = []
    for shape in ((2, 2), (4, 2)):
        devices = np.array(jax.devices()[: shape[0] * 2]).reshape(shape)
        mesh = Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        plan = memory_plan(tx, PARAMS, AXES, rules, mesh, zero=zero)
        places = (plan.params.shardings, plan.state.shardings)
        jitted = jax.jit(step, in_shardings=(*places, plan.grads.shardings), out_shardings=places)
        state = jax.eval_shape(tx.init, PARAMS)
        program: Any = jitted.lower(PARAMS, state, PARAMS).compile()
        found.append(sum(row.count for row in read_collectives(program)))
        planned = sum(p.bytes_per_device for p in (plan.params, plan.grads, plan.state))
        assert program.memory_analysis().argument_size_in_bytes <= 1.001 * planned
    assert 0 < found[0] == found[1] <= limit
