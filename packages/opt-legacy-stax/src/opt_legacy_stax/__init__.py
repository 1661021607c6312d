"""The classic `(init, update, get_params)` optimizers, and a migration path away from them.

Everything that `jax.example_libraries.optimizers` exports, under the same names; safe file I/O for
states; conversion to and from Optax, and to opt-core optimizer definitions.
"""

from importlib.metadata import version as _version

from opt_legacy_stax import errors
from opt_legacy_stax._extras import from_optax, optax_equivalent, to_optax, to_optimizer_def
from opt_legacy_stax._files import load, save
from opt_legacy_stax._joinpoint import (
    JoinPoint,
    convert_old_layout,
    pack_optimizer_state,
    unpack_optimizer_state,
)
from opt_legacy_stax._optimizers import (
    Array,
    InitFn,
    Optimizer,
    OptimizerState,
    Params,
    ParamsFn,
    State,
    Step,
    UpdateFn,
    Updates,
    optimizer,
)
from opt_legacy_stax._pickle import load_unpacked_pickle
from opt_legacy_stax._schedules import (
    Schedule,
    constant,
    exponential_decay,
    inverse_time_decay,
    make_schedule,
    piecewise_constant,
    polynomial_decay,
)
from opt_legacy_stax._triples import (
    adagrad,
    adam,
    adamax,
    clip_grads,
    l2_norm,
    momentum,
    nesterov,
    rmsprop,
    rmsprop_momentum,
    sgd,
    sm3,
)

__version__ = _version("opt-legacy-stax")

__all__ = [
    "Array",
    "InitFn",
    "JoinPoint",
    "Optimizer",
    "OptimizerState",
    "Params",
    "ParamsFn",
    "Schedule",
    "State",
    "Step",
    "UpdateFn",
    "Updates",
    "adagrad",
    "adam",
    "adamax",
    "clip_grads",
    "constant",
    "convert_old_layout",
    "errors",
    "exponential_decay",
    "from_optax",
    "inverse_time_decay",
    "l2_norm",
    "load",
    "load_unpacked_pickle",
    "make_schedule",
    "momentum",
    "nesterov",
    "optax_equivalent",
    "optimizer",
    "pack_optimizer_state",
    "piecewise_constant",
    "polynomial_decay",
    "rmsprop",
    "rmsprop_momentum",
    "save",
    "sgd",
    "sm3",
    "to_optax",
    "to_optimizer_def",
    "unpack_optimizer_state",
]
