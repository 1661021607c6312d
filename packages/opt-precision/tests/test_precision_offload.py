"""State on the host: where it lies, what is fetched, and that no number changes."""

from typing import Any

import jax
import jax.numpy as jnp
import opt_precision as op
import optax
import pytest
from opt_precision.errors import OrderError, PrecisionError
from precision_testing import (
    bits,
    grads,
    params,
    quantize_state,
    stochastic_weights,
    structure,
)

offload_state: Any = op.offload_state
CHUNK = 20_000
IS_OLD = jax.__version_info__ < (0, 10, 2)
needs_new = pytest.mark.skipif(IS_OLD, reason="results of compiled programs lie on the device")


@pytest.mark.skipif(not IS_OLD, reason="of earlier versions")
def test_earlier_versions_of_jax_are_refused() -> None:
    with pytest.raises(PrecisionError, match=r"needs jax 0\.10\.2"):
        offload_state(optax.adamw(1e-3))


def kinds(tree: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf.sharding.memory_kind for path, leaf in leaves}


def run(tx: Any, start: Any) -> tuple[Any, Any]:
    state, step = tx.init(start), jax.jit(tx.apply, donate_argnums=(0, 1))
    first = kinds(state)
    start = jax.tree.map(jnp.copy, start)
    for number in range(3):
        start, state = step(start, state, grads(number, start))
    assert kinds(state) == first
    return start, state


@needs_new
def test_a_precision_keeps_moments_on_the_host() -> None:
    precision = op.Precision(weights="stochastic", state=op.dynamic8(), offload=True)
    assert str(precision) == "stochastic weights, dynamic8 state, moments on the host"
    by_hand = stochastic_weights(quantize_state(offload_state(optax.adamw(1e-3)), op.dynamic8()))
    state = precision(optax.adamw(1e-3)).init(params(jnp.bfloat16))
    assert kinds(state) == kinds(by_hand.init(params(jnp.bfloat16)))
    found = op.decode(state).inner[0].nu["kernel"]
    assert found.sharding.memory_kind == "device"
    assert str(op.Precision(offload=True)) == "moments on the host"


@pytest.mark.slow
@needs_new
@pytest.mark.parametrize(
    "codec", [op.identity(), pytest.param(op.dynamic8(), marks=pytest.mark.slow)], ids=str
)
def test_nothing_changes_but_the_memory(codec: op.Codec) -> None:
    start = params(jnp.bfloat16)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    hosted = offload_state(tx, chunk_bytes=CHUNK)
    ours = stochastic_weights(quantize_state(hosted, codec, chunk_bytes=CHUNK))
    theirs = stochastic_weights(quantize_state(tx, codec, chunk_bytes=CHUNK))
    one, other = run(ours, start), run(theirs, start)
    assert bits(one) == bits(other)
    found = kinds(one[1])
    moved = {path: kind for path, kind in found.items() if "mu" in path or "nu" in path}
    on_device = {path for path, kind in moved.items() if kind == "device"}
    assert all("scale']" in path for path in on_device)  # the parameter without dimensions
    assert {kind for path, kind in found.items() if path not in moved} == {"device"}
    is_coded = any(leaf.dtype != jnp.float32 for leaf in jax.tree.leaves(one[1]) if leaf.ndim)
    assert is_coded == (codec != op.identity())


@needs_new
def test_skipped_steps_keep_the_kinds_and_fetch_in_one_branch() -> None:
    start = params(jnp.bfloat16)
    tx = optax.MultiSteps(stochastic_weights(offload_state(optax.adamw(1e-3))), 2)
    state, update = tx.init(start), jax.jit(tx.update)
    before = bits(state.inner_opt_state)
    _, state = update(grads(0, start), state, start)
    assert bits(state.inner_opt_state) == before
    assert "pinned_host" in set(kinds(state.inner_opt_state).values())


@needs_new
def test_a_piece_is_fetched_ahead() -> None:
    start = {"w": jnp.ones((1024, 256), jnp.bfloat16)}
    tx = stochastic_weights(offload_state(optax.adam(1e-3), chunk_bytes=1 << 16))
    args = (start, tx.init(start), start)
    text = str(jax.make_jaxpr(tx.apply)(*args))
    assert text.count("device_put") == 2 + 2 + 2  # the first of each moment; next ones, and back


@needs_new
def test_wrappers_combine_in_any_order() -> None:
    parts: Any = [
        lambda tx: quantize_state(tx, op.dynamic8(), chunk_bytes=CHUNK, seed=1),
        lambda tx: offload_state(tx, op.by_path("nu/kernel")),
    ]
    one, other = (
        run(stochastic_weights(outer(inner(optax.adamw(1e-3)))), params(jnp.bfloat16))
        for outer, inner in (parts, parts[::-1])
    )
    assert structure(one) == structure(other)
    assert bits(one) == bits(other)
    assert kinds(one) == kinds(other)
    moved = [path for path, kind in kinds(one).items() if kind == "pinned_host"]
    assert [path.partition("nu")[2] for path in moved] == ["['kernel'].codes", "['kernel'].scale"]


@needs_new
def test_arguments() -> None:
    with pytest.raises(OrderError, match="`offload_state` is there twice"):
        offload_state(quantize_state(offload_state(optax.adam(1e-3)), op.dynamic8()))
