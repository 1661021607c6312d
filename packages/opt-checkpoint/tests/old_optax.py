"""Optimizers whose states are kept as old Optax wrote them, and the run that leads there.

    PYTHONPATH=OLD_OPTAX python old_optax.py FOLDER

writes `FOLDER/<version of Optax>/<case>.msgpack`: the bytes of Flax's `TrainState` after `STEPS`
steps. It runs under any Optax since 0.1.7; a case that a version does not know is left out.
`optax_states/README.md` says which were written, and how.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

STEPS = 5
OPTAX: Any = optax  # which does not list all that it exports
CALLED_LOSS = ("0.2.0", "0.2.1")  # `reduce_on_plateau` called the value so


def params() -> Any:
    return {
        "dense": {"kernel": _numbers((3, 2), 1.0), "bias": _numbers((2,), 2.0)},
        "scale": _numbers((), 3.0),
    }


def _numbers(shape: tuple[int, ...], start: float) -> jax.Array:
    size = int(np.prod(shape))
    return jnp.asarray(np.sin(start + np.arange(size)).reshape(shape), jnp.float32)


def loss(tree: Any, **_: Any) -> Any:
    return sum(
        jnp.sum(jnp.square(leaf - 0.5) * (1.0 + 0.1 * leaf)) for leaf in jax.tree.leaves(tree)
    )


def _contrib(name: str) -> Any:
    import optax.contrib

    return getattr(optax.contrib, name)


def _kernels(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.ndim(leaf) > 1, tree)


CASES: Mapping[str, Callable[[], Any]] = {
    "adamw": lambda: optax.adamw(0.01),
    "adabelief": lambda: optax.adabelief(0.01),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(0.01), 3).gradient_transformation(),
    "masked": lambda: optax.masked(optax.adam(0.01), _kernels),
    "inject": lambda: optax.inject_hyperparams(optax.adamw)(0.01, weight_decay=0.1),
    "inject_schedule": lambda: optax.inject_hyperparams(optax.adamw)(
        optax.linear_schedule(0.1, 0.01, 10)
    ),
    "noisy_sgd": lambda: optax.noisy_sgd(0.01, seed=0),
    "prodigy": lambda: _contrib("prodigy")(),
    "plateau": lambda: optax.chain(optax.sgd(0.01), _contrib("reduce_on_plateau")(patience=2)),
    "backtracking": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5, store_grad=True)
    ),
    "lbfgs": lambda: optax.lbfgs(memory_size=3),
    "dog": lambda: _contrib("dog")(),
    "dowg": lambda: _contrib("dowg")(),
    "schedule_free": lambda: _contrib("schedule_free_adamw")(0.01),
}


def step(tx: Any) -> Callable[[Any, Any], tuple[Any, Any]]:
    """One step on parameters and state, as Optax's documentation says."""
    tx = OPTAX.with_extra_args_support(tx)

    def update(tree: Any, state: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss)(tree)
        extra = {"value": value, "grad": grads, "value_fn": loss}
        if optax.__version__ in CALLED_LOSS:
            extra["loss"] = value
        updates, state = tx.update(grads, state, tree, **extra)
        return optax.apply_updates(tree, updates), state

    return update


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, build in CASES.items():
        try:
            tx = build()
        except (AttributeError, TypeError, ImportError) as error:
            print(f"{name}: left out: {error}")
            continue
        tree, opt_state = params(), tx.init(params())
        for _ in range(STEPS):
            tree, opt_state = step(tx)(tree, opt_state)
        opt_state = jax.tree.map(_plain, opt_state)
        state = TrainState(step=STEPS, apply_fn=loss, params=tree, tx=tx, opt_state=opt_state)
        (folder / f"{name}.msgpack").write_bytes(flax.serialization.to_bytes(state))


def _plain(leaf: Any) -> Any:
    is_key = jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


if __name__ == "__main__":
    write(Path(sys.argv[1]) / optax.__version__)
