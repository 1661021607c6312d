"""FlashOptim's 8-bit AdamW (arXiv 2602.23349) and ours, beside exact AdamW.

    hatch run peers:python tools/bench/_flashoptim.py

Three tables. The ratchet: the second moment after gradients of 0.5 for 2,000 steps and of 0.005 for
6,000, over the exact one, with one large element per block. The hazard: gradients whose sizes are
spread over some decades; the largest step over the learning rate, and the mean cosine with exact
steps. The master: how far weights of 1 move where they ought to move by 0.05, in updates of 1e-5
and 1e-6. Nothing of FlashOptim is changed: it runs as `flash_adamw(fused=False)`, and its functions
encode the second moment of the ratchet. Runs on a CPU in about two minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_precision as op
import optax

SHAPE = (16, 256)
LOUD, QUIET = 2_000, 6_000


def second_moment(b2: float, stored: str) -> float:
    """Mean of the second moment of all but the large elements."""
    large = jnp.arange(SHAPE[1]) % 32 == 0
    tx: Any = optax.scale_by_rms(b2, eps=1e-30)
    if stored == "ours":
        tx = op.quantize_state(tx, op.dynamic8())

    def gradient(i: Any) -> Any:
        return jnp.broadcast_to(jnp.where(large | (i < LOUD), 0.5, 0.005), SHAPE)

    def step(state: Any, i: Any) -> Any:
        return tx.update({"w": gradient(i)}, state)[1], None

    def flash(v: Any, i: Any) -> Any:
        from flashoptim_jax import quantization

        v = b2 * v + (1 - b2) * gradient(i) ** 2
        return quantization.dequantize_variance(quantization.quantize_variance(v)), None

    steps = jnp.arange(LOUD + QUIET)
    if stored == "FlashOptim":
        v = jax.jit(lambda: jax.lax.scan(flash, jnp.zeros(SHAPE), steps)[0])()
    else:
        first = tx.init({"w": jnp.zeros(SHAPE)})
        state = op.decode(jax.jit(lambda: jax.lax.scan(step, first, steps)[0])())
        v = (state.inner if stored == "ours" else state).nu["w"]
    return float(v[:, ~np.asarray(large)].mean())


def steps_of(name: str, sizes: Any, rate: float = 1e-3, number: int = 200) -> list[Any]:
    """The steps of AdamW over the learning rate, from the 50th on."""
    params: Any = {"w": jnp.zeros(sizes.shape)}
    apply: Callable[..., Any]
    if name == "FlashOptim":
        import flashoptim_jax

        flash = flashoptim_jax.flash_adamw(
            learning_rate=rate, b2=0.95, weight_decay=0.0, fused=False, master_weight_bits=None
        )
        state, apply = flash.init(params), flash.step
    else:
        tx: Any = optax.adamw(rate, b2=0.95, weight_decay=0.0)
        tx = op.quantize_state(tx, op.dynamic8()) if name == "ours" else tx
        state, apply = tx.init(params), lambda p, s, g: op.apply(tx, p, s, g)
    step, made = jax.jit(apply), []
    for i in range(number):
        g = sizes * jax.random.normal(jax.random.fold_in(jax.random.key(1), i), sizes.shape)
        new, state = step(params, state, {"w": g})
        made.append(np.asarray(new["w"] - params["w"], np.float64) / rate)
        params = new
    return made[50:]


def moved(name: str, rate: float) -> float:
    """How far masters of 1 move when they ought to move by 0.05, on average."""
    params: Any = {"w": jnp.ones(SHAPE, jnp.bfloat16)}
    g = {"w": jnp.ones(SHAPE)}
    apply: Callable[..., Any]
    if name == "FlashOptim":
        import flashoptim_jax

        flash = flashoptim_jax.flash_sgd(learning_rate=rate, fused=False, master_weight_bits=24)
        state, apply = flash.init(params), flash.step
    else:
        storage: Any = name
        tx = op.master_weights(optax.sgd(rate), storage=storage)
        state, apply = tx.init(params), tx.apply

    def step(carry: Any, _: Any) -> Any:
        return apply(*carry, g), None

    number = round(0.05 / rate)
    params, state = jax.jit(lambda: jax.lax.scan(step, (params, state), length=number)[0])()
    if name == "FlashOptim":
        from flashoptim_jax import compression

        master = compression.reconstruct_weights(params, state.ecc)
    else:
        master = op.master_of(state, params)
    return 1 - float(master["w"].mean())


def main() -> None:
    """Prints the tables."""
    for b2 in (0.999, 0.99, 0.95):
        exact, ours, flash = (second_moment(b2, name) for name in ("exact", "ours", "FlashOptim"))
        print(
            f"b2 = {b2}: ours {ours / exact:.3f}, FlashOptim {flash / exact:,.0f} times the exact"
        )
    for decades in (2, 3, 4):
        sizes = 10.0 ** (-decades * jax.random.uniform(jax.random.key(0), (64, 64)))
        exact_steps = steps_of("exact", sizes)
        print(f"{decades} decades: exact {max(np.abs(x).max() for x in exact_steps):.2f}")
        for name in ("ours", "FlashOptim"):
            made = steps_of(name, sizes)
            rows = zip(made, exact_steps, strict=True)
            cosine = np.mean(
                [(a * b).sum() / np.sqrt((a**2).sum() * (b**2).sum()) for a, b in rows]
            )
            largest = max(np.abs(x).max() for x in made)
            print(f"  {name}: largest {largest:,.2f} learning rates, cosine {cosine:.3f}")
    for rate in (1e-5, 1e-6):
        for name in ("remainder", "remainder8", "FlashOptim"):
            print(f"{round(0.05 / rate):,} updates of {rate}: {name} moved {moved(name, rate):.4f}")


if __name__ == "__main__":
    main()
