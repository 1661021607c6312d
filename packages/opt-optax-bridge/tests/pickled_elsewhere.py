"""What test_pickling.py makes in one process and unpickles in another."""

import warnings
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import opt_optax_bridge as opt
import optax
from bridge_testing import ARGUMENTS, definition
from opt_optax_bridge import OptaxWrapper, chain, t5x, wrap_optax_optimizer


@wrap_optax_optimizer
def decorated(learning_rate: Any, clip: float = 1.0) -> Any:
    return optax.chain(optax.clip(clip), optax.sgd(learning_rate))


class Constructors:
    @staticmethod
    @wrap_optax_optimizer
    def nested(learning_rate: Any) -> Any:
        return optax.sgd(learning_rate)


def plain(learning_rate: Any) -> Any:
    return optax.sgd(learning_rate)


def tabled(learning_rate: float, factors: Any) -> Any:
    return optax.sgd(lambda count: learning_rate * jnp.asarray(factors)[count])


def schedule(count: Any) -> Any:
    return 0.1 / (1 + count)


BY_ARGUMENTS: dict[str, Callable[[], OptaxWrapper]] = {
    "schedule of a module": lambda: opt.sgd(schedule),
    "JAX table": lambda: wrap_optax_optimizer(tabled)(0.1, jnp.array([0.3, 0.2])),
    "decorated, nested": lambda: Constructors.nested(0.1),
    "wrapped by hand": lambda: wrap_optax_optimizer(plain)(0.1),
    "chain": lambda: chain([opt.clip(1.0), opt.adam(0.1)], last=decorated(0.5)),
    "mechanize": lambda: opt.mechanize(opt.sgd(0.1)),
    "masked": lambda: opt.masked(opt.sgd(0.1), {"b": False, "w": True}),
    "t5x, decorated": lambda: t5x.wrap_optax_optimizer(plain)(0.1),
}


def built() -> dict[str, OptaxWrapper]:
    """Every definition, under a name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Optax's, about itself
        takes_others = {"mechanize", "sam", "schedule_free"}
        assert takes_others < ARGUMENTS.keys()
        constructors = {
            name: definition(name) for name in opt.optimizer_names() if name not in takes_others
        }
        return constructors | {f"by {name}": make() for name, make in BY_ARGUMENTS.items()}
