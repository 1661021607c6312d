"""Any Optax optimizer as an `opt_core.OptimizerDef`.

`OptaxWrapper(tx)` wraps a transformation; `opt_optax_bridge.adamw(...)` and every other
constructor that the installed Optax exports wrap the result and remember its arguments. An override
calls the constructor again with the new, possibly traced, value, and updates the same state:

>>> import jax.numpy as jnp, opt_optax_bridge as opt
>>> definition = opt.chain(opt.clip(1.0), opt.sgd(0.5))
>>> definition.hyper_params
chain_hyper_params(max_delta=1.0, learning_rate=0.5)
>>> optimizer = definition.create({'w': jnp.ones(1)})
>>> optimizer.apply_gradient({'w': jnp.ones(1)}, learning_rate=0.25).target['w'].tolist()
[0.75]
"""

from collections.abc import Callable
from importlib.metadata import version as _version
from typing import Any

from opt_optax_bridge._constructors import (
    building_block_names,
    chain,
    optimizer_names,
    wrap_optax_optimizer,
)
from opt_optax_bridge._constructors import wrapped_constructor as _wrapped_constructor
from opt_optax_bridge._hyper_params import (
    overridable_hyper_params,
    resolve_hyper_params,
    scale_learning_rate,
)
from opt_optax_bridge._transformation import as_transformation
from opt_optax_bridge._wrapper import OptaxWrapper

__version__ = _version("opt-optax-bridge")

__all__ = [
    "OptaxWrapper",
    "as_transformation",
    "building_block_names",
    "chain",
    "optimizer_names",
    "overridable_hyper_params",
    "resolve_hyper_params",
    "scale_learning_rate",
    "wrap_optax_optimizer",
]


def __getattr__(name: str) -> Callable[..., Any]:
    """Finds `adamw` and every other constructor in the installed Optax, on access."""
    return _wrapped_constructor(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *optimizer_names(), *building_block_names()})
