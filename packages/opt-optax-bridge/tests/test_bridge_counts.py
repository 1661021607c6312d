"""What a compiled step of a wrapped optimizer accesses and reuses, next to raw Optax's."""

from typing import Any

import jax
import jax.numpy as jnp
import opt_optax_bridge as opt
import optax
import pytest

PARAMS = {f"w{i}": jnp.ones((16, 16)) for i in range(5)}


def raw(params: Any, state: Any, grads: Any) -> Any:
    updates, state = optax.adamw(1e-3).update(grads, state, params)
    return optax.apply_updates(params, updates), state


def counts(step: Any, donated: Any, *operands: Any) -> tuple[float, int]:
    """Bytes that XLA says are accessed, and bytes of arguments whose memory results take."""
    with jax.numpy_dtype_promotion("standard"):  # as Optax needs
        lowered = jax.jit(step, donate_argnums=donated).lower(*operands)
    program: Any = lowered.compile()
    cost: Any = program.cost_analysis()
    return float(cost["bytes accessed"]), program.memory_analysis().alias_size_in_bytes


@pytest.mark.parametrize("overrides", [{}, {"learning_rate": 1e-3}], ids=["as made", "overridden"])
def test_a_step_accesses_what_optax_does_and_reuses_all_of_it(overrides: dict[str, Any]) -> None:
    optimizer = opt.adamw(1e-3).create(PARAMS)
    theirs, reused = counts(raw, (0, 1), PARAMS, optax.adamw(1e-3).init(PARAMS), PARAMS)
    ours, kept = counts(lambda o, g: o.apply_gradient(g, **overrides), 0, optimizer, PARAMS)
    assert ours <= theirs + 32  # the counter of steps
    assert kept >= reused
