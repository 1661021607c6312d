"""opt-legacy-stax with its neighbours: other readers, meshes, the wrapper, derived shardings."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_legacy_stax as ours
import opt_partition as part
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

PARAMS: dict[str, Any] = {"w": jnp.arange(32.0).reshape(8, 4), "b": jnp.ones(4, jnp.bfloat16)}
AXES = {"w": P("embed", "mlp"), "b": P("mlp")}
GRADS = [jax.tree.map(lambda p, t=t: jnp.cos(p * t), PARAMS) for t in range(4)]


def mesh_of(kind: AxisType) -> Any:
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_states_are_saved_and_come_back_where_they_were(tmp_path: Path, kind: Any) -> None:
    mesh = mesh_of(kind)
    shardings = {"w": NamedSharding(mesh, P("x", "y")), "b": NamedSharding(mesh, P("y"))}
    params = jax.device_put(PARAMS, shardings)
    triple = ours.momentum(0.1, 0.9)
    with jax.set_mesh(mesh):
        state = triple.init_fn(params)
        for i in range(2):
            grads = jax.device_put(GRADS[i], shardings)
            state = jax.jit(triple.update_fn)(i, grads, state)
    ours.save(tmp_path / "state", state, optimizer=triple)
    found = ours.load(tmp_path / "state", like=state, optimizer=triple)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        assert a.sharding == b.sharding
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["momentum", "adam", "sm3"])
def test_both_ways_to_the_axes_of_the_state_agree(name: str) -> None:
    triple = getattr(ours, name)(0.1, **({"mass": 0.9} if name == "momentum" else {}))
    definition = ours.to_optimizer_def(triple)
    derived = definition.derive_logical_axes(definition.create(PARAMS), AXES)
    by_partition = part.derive_logical_axes(ours.to_optax(triple), PARAMS, AXES)
    mine, other = (
        jax.tree.leaves(tree, is_leaf=lambda x: x is None or isinstance(x, P))
        for tree in (derived.state.param_states, by_partition.slots)
    )
    assert [spec or P() for spec in mine] == [spec or P() for spec in other]
