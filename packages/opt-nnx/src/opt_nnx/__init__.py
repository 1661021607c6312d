"""A drop-in for `flax.nnx.Optimizer` with sharded, type-stable state that can be saved by meaning.

`Optimizer(model, tx)` takes any Optax transformation and any definition of the `opt_*` packages;
`update` can override the hyper-parameters of a definition at run time.
"""

from importlib.metadata import version as _version

from opt_nnx._optimizer import Optimizer

__version__ = _version("opt-nnx")

__all__ = ["Optimizer"]
