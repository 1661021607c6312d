"""Acceptance, A: round trips and determinism of what is not a checkpoint file."""

import io
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import elastic_case
import jax
import jax.numpy as jnp
import numpy as np
import opt_legacy_stax as stax
import pytest
from every_definition import NAMES, bits, optimizer_structs, random_bits


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", NAMES)
def test_a1_state_dict_and_restore_state_are_bit_equal(name: str) -> None:
    """A state dict of every optimizer restores every leaf to the bit, and the same treedef."""
    structs = optimizer_structs(name)
    saved, other = random_bits(structs, 0), random_bits(structs, 1)
    state_dict = jax.tree.map(np.asarray, saved.state_dict())
    restored = other.restore_state(state_dict)
    treedef: Any = jax.tree.structure(saved)
    assert jax.tree.structure(restored) == treedef
    assert bits(restored) == bits(saved)


@pytest.mark.slow
def test_a6_a_run_has_one_hash() -> None:
    """With and without donation, again in one process and in three at a time: one hash."""

    def elsewhere(_: int) -> str:
        command = [sys.executable, elastic_case.__file__]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    run = elastic_case.compiled_run(donate=True)
    hashes = {run() for _ in range(10)}
    hashes.add(elastic_case.compiled_run(donate=False)())
    with ThreadPoolExecutor(3) as pool:
        hashes.update(pool.map(elsewhere, range(3)))
    assert len(hashes) == 1


MASSES: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(("adagrad", "adam", "adamax", "rmsprop", "rmsprop_momentum", "sgd", "sm3"), ()),
    **dict.fromkeys(("momentum", "nesterov"), (0.9,)),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MASSES)
def test_a7_a_legacy_triple_passes_through_the_safe_format(name: str) -> None:
    """`pack(unpack(s))`, written and read without pickle: bit-equal, the same parameters."""
    triple = getattr(stax, name)(0.1, *MASSES[name])
    params = {"w": jnp.arange(6.0).reshape(2, 3), "layers": [(jnp.ones(4, jnp.bfloat16),), ()]}
    state = triple.update_fn(0, jax.tree.map(jnp.ones_like, params), triple.init_fn(params))
    state = stax.pack_optimizer_state(stax.unpack_optimizer_state(state))
    file = io.BytesIO()
    stax.save(file, state, optimizer=triple)
    file.seek(0)
    loaded = stax.load(file, optimizer=triple, params=params)
    treedef: Any = jax.tree.structure(state)
    assert jax.tree.structure(loaded) == treedef
    assert bits(loaded) == bits(state)
    assert bits(triple.params_fn(loaded)) == bits(triple.params_fn(state))
    # The next step cannot tell them apart.
    grads = jax.tree.map(jnp.ones_like, params)
    assert bits(triple.update_fn(1, grads, loaded)) == bits(triple.update_fn(1, grads, state))
