"""Any Optax optimizer as an `opt_core.OptimizerDef`.

`OptaxWrapper(tx)` wraps a transformation; `opt_optax_bridge.adamw(...)` and every other
constructor that the installed Optax exports wrap the result and remember its arguments, so that
`apply_gradient(grads, learning_rate=lr)` acts at run time. `chain` joins definitions to one.
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
