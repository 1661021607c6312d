"""What test_pickling.py makes in one process and unpickles in another."""

import warnings
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import opt_optax_bridge
import optax
from bridge_testing import block, block_names, definition, labels, transformation
from opt_optax_bridge import OptaxWrapper, chain, t5x, wrap_optax_optimizer


@wrap_optax_optimizer
def decorated(learning_rate: Any, clip: float = 1.0) -> Any:
    return optax.chain(optax.clip(clip), optax.sgd(learning_rate))


def plain(learning_rate: Any) -> Any:
    return optax.sgd(learning_rate)


def table(rates: Any) -> Callable[[Any], Any]:
    """A schedule that captures an array."""
    return lambda count: jnp.asarray(rates)[jnp.minimum(count, len(rates) - 1)]


def recursive(depth: int) -> Callable[[Any], Any]:
    """A schedule that captures itself."""

    def schedule(count: Any, left: int = depth) -> Any:
        return schedule(count, left - 1) * 0.5 if left else 1.0 + 0.0 * count

    return schedule


def with_keyword_default(factor: float) -> Callable[[Any], Any]:
    def schedule(count: Any, *, by: float = factor) -> Any:
        return by * count

    return schedule


CLOSURES: dict[str, Callable[[], OptaxWrapper]] = {
    "cosine": lambda: opt_optax_bridge.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 9)),
    "lambda": lambda: opt_optax_bridge.sgd(lambda count: 0.1 / (1 + count)),
    "NumPy table": lambda: opt_optax_bridge.sgd(table(np.array([0.3, 0.2, 0.1], np.float32))),
    "JAX table": lambda: opt_optax_bridge.sgd(table(jnp.array([0.3, 0.2, 0.1]))),
    "recursive": lambda: opt_optax_bridge.sgd(recursive(3)),
    "keyword default": lambda: opt_optax_bridge.sgd(with_keyword_default(0.25)),
    "mask function": lambda: opt_optax_bridge.adamw(0.1, mask=lambda params: labels()),
    "decorated": lambda: decorated(0.1, clip=2.0),
    "wrapped by hand": lambda: wrap_optax_optimizer(plain)(0.1),
    "wrapped lambda": lambda: wrap_optax_optimizer(lambda learning_rate: optax.sgd(learning_rate))(
        0.1
    ),
    "chain": lambda: chain([optax.clip(1.0), optax.adam(0.1)]),
    "t5x": lambda: t5x.adamw(0.1),
    "t5x chain": lambda: t5x.chain([optax.clip(1.0), optax.adam(0.1)]),
}


def built() -> dict[str, OptaxWrapper]:
    """Every definition, under a name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Optax's, about itself
        constructors = {name: definition(name) for name in opt_optax_bridge.optimizer_names()}
        raw = {f"{name}, opaque": OptaxWrapper(transformation(name)) for name in constructors}
        blocks = {f"{name}, block": OptaxWrapper(block(name)) for name in block_names()}
        closures = {f"{name}, closure": make() for name, make in CLOSURES.items()}
    return {**constructors, **raw, **blocks, **closures}
