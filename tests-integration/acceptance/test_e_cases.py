"""Acceptance, E: input that is not as simple as it looks."""

import io
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import opt_legacy_stax as stax
import opt_optax_bridge
import pytest

BASE = np.random.default_rng(0).standard_normal((6, 6)).astype(np.float32)
VIEWS: dict[str, Callable[[], np.ndarray]] = {
    "transpose": lambda: BASE.T,
    "slice of columns": lambda: BASE[:, 1:4],
    "every second": lambda: BASE[::2, ::3],
    "Fortran": lambda: np.asfortranarray(BASE),
    "reversed": lambda: BASE[::-1, ::-1],
    "reversed vector": lambda: BASE.reshape(-1)[::-1],
    "broadcast": lambda: np.broadcast_to(BASE[0], (4, 6)),
    "broadcast scalar": lambda: np.broadcast_to(BASE[0, 0], (3, 2)),
    "axes swapped": lambda: BASE.reshape(2, 3, 6).swapaxes(0, 2),
    "other byte order": lambda: BASE.astype(">f4"),
    "unaligned": lambda: np.frombuffer(b"x" + BASE.tobytes(), np.float32, offset=1),
    "read-only": lambda: np.frombuffer(BASE.tobytes(), np.float32).reshape(6, 6).T,
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("view", VIEWS)
def test_e11_arrays_that_are_not_contiguous_are_written_exactly(view: str) -> None:
    """Transposed, sliced, Fortran, reversed and broadcast arrays come out of every writer as is."""
    given = VIEWS[view]()
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
    triple = stax.momentum(0.1, 0.9)
    state = stax.OptimizerState(*triple.init_fn({"w": jnp.zeros(given.shape)}))
    _, tree_def, subtree_defs = state
    file = io.BytesIO()
    kept = stax.OptimizerState(((native, native),), tree_def, subtree_defs)
    stax.save(file, kept, optimizer=triple)
    file.seek(0)
    ((mass, velocity),) = stax.load(file, like=kept, optimizer=triple).packed_state
    np.testing.assert_array_equal(mass, expected)
    np.testing.assert_array_equal(velocity, expected)
