"""opt-legacy-stax with its neighbours: files, meshes, the wrapper, derived shardings."""

import io
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import opt_legacy_stax as ours
import opt_optax_bridge
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

PARAMS: dict[str, Any] = {"w": jnp.arange(32.0).reshape(8, 4), "b": jnp.ones(4, jnp.bfloat16)}
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


NAMES = [
    "sgd",
    "momentum",
    "nesterov",
    "adagrad",
    "rmsprop",
    "rmsprop_momentum",
    "adam",
    "adamax",
    "sm3",
]


def triple_of(name: str) -> ours.Optimizer:
    triple: ours.Optimizer = getattr(ours, name)(0.1, *[0.9] * (name in ("momentum", "nesterov")))
    return triple


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NAMES)
def test_a7_a_legacy_triple_passes_through_the_safe_format(name: str) -> None:
    """`pack(unpack(s))`, written and read without pickle: bit-equal, the same parameters."""
    triple = triple_of(name)
    params = {"w": jnp.arange(6.0).reshape(2, 3), "layers": [(jnp.ones(4, jnp.bfloat16),), ()]}
    state = triple.update_fn(0, jax.tree.map(jnp.ones_like, params), triple.init_fn(params))
    state = ours.pack_optimizer_state(ours.unpack_optimizer_state(state))
    file = io.BytesIO()
    ours.save(file, state, optimizer=triple)
    file.seek(0)
    loaded = ours.load(file, optimizer=triple, params=params)
    chex.assert_trees_all_equal(loaded, state, strict=True)
    params = triple.params_fn(state)
    chex.assert_trees_all_equal(triple.params_fn(loaded), params, strict=True)
    # The next step cannot tell them apart.
    grads = jax.tree.map(jnp.ones_like, params)
    after = (triple.update_fn(1, grads, either) for either in (loaded, state))
    chex.assert_trees_all_equal(*after, strict=True)


BASE = np.random.default_rng(0).standard_normal((6, 6)).astype(np.float32)
VIEWS: dict[str, np.ndarray] = {
    "transpose": BASE.T,
    "slice of columns": BASE[:, 1:4],
    "reversed": BASE[::-1, ::-2],
    "broadcast": np.broadcast_to(BASE[0], (4, 6)),
    "other byte order": BASE.astype(">f4"),
    "unaligned": np.frombuffer(b"x" + BASE.tobytes(), np.float32, offset=1),
}


@pytest.mark.parametrize("view", VIEWS)
def test_e11_arrays_that_are_not_contiguous_are_written_exactly(view: str) -> None:
    """Transposed, sliced, Fortran, reversed and broadcast arrays come out of every writer as is."""
    given = VIEWS[view]
    expected = np.array(given.tolist(), np.float32)
    # State dicts, with such arrays in the optimizer, and with such in the dict.
    definition = opt_optax_bridge.sgd(0.1, momentum=0.9)
    optimizer = definition.create({"w": jnp.zeros(given.shape)})
    native = given.astype(np.float32, copy=False)
    holding = optimizer.replace(target={"w": native})
    np.testing.assert_array_equal(holding.state_dict()["target"]["w"], expected)
    restored = optimizer.restore_state({**optimizer.state_dict(), "target": {"w": native}})
    assert isinstance(restored.target["w"], jax.Array)
    np.testing.assert_array_equal(restored.target["w"], expected)
    # Files of classic triples.
    triple = ours.momentum(0.1, 0.9)
    state = ours.OptimizerState(*triple.init_fn({"w": jnp.zeros(given.shape)}))
    _, tree_def, subtree_defs = state
    file = io.BytesIO()
    kept = ours.OptimizerState(((given, given),), tree_def, subtree_defs)
    ours.save(file, kept, optimizer=triple)
    file.seek(0)
    ((mass, velocity),) = ours.load(file, like=kept, optimizer=triple).packed_state
    np.testing.assert_array_equal(mass, expected)
    np.testing.assert_array_equal(velocity, expected)
