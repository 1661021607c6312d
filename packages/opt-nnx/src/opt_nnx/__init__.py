"""A drop-in for `flax.nnx.Optimizer` with sharded, type-stable state that can be saved by meaning.

`Optimizer(model, tx)` takes any Optax transformation and any definition of the `opt_*` packages.
Its state is made where the parameters lie and kept there; `update` can override the
hyper-parameters of a definition; `to_core` is the optimizer for the other packages' functions.

>>> import opt_optax_bridge as opt
>>> from flax import nnx
>>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
>>> optimizer = Optimizer(model, opt.adamw(1e-3))
>>> updates = optimizer.update(model, nnx.state(model), learning_rate=0.5)
>>> int(optimizer.step[...]), float(opt.resolve_hyper_params(optimizer.to_core(model)).b1)
(1, 0.9)
"""

from importlib.metadata import version as _version

from opt_nnx._optimizer import Optimizer

__version__ = _version("opt-nnx")

__all__ = ["Optimizer"]
