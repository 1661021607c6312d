"""A drop-in for `flax.nnx.Optimizer` whose state is placed, typed and saved right.

`Optimizer(model, tx)` takes any Optax transformation, and any definition of the `opt_*` packages,
whose hyper-parameters `update` can override at run time.
"""

from importlib.metadata import version as _version

from opt_nnx._optimizer import Optimizer

__version__ = _version("opt-nnx")

__all__ = ["Optimizer"]
