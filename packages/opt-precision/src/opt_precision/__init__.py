"""How weights and optimizer state are stored: bfloat16 that learns, moments in 8 bits.

For any Optax transformation: `quantize_state` stores its moments in fewer bits,
`stochastic_weights` and `master_weights` let bfloat16 parameters take small updates. Updates are
computed in float32, block by block.
"""

from importlib.metadata import version as _version

from opt_precision import errors
from opt_precision._codecs import Codec, bfloat16, dynamic8, float8, identity, log8
from opt_precision._explain import PrecisionReport, PrecisionRow, explain_precision
from opt_precision._formats import Encoded, Format, partition_rules
from opt_precision._precision import (
    Precision,
    master_weights,
    offload_state,
    quantize_state,
    stochastic_weights,
)
from opt_precision._select import by_field, by_path, moments
from opt_precision._states import (
    PrecisionState,
    decode,
    master_of,
    set_params,
)
from opt_precision._weights import read_storage
from opt_precision._wrapper import apply, apply_updates

__version__ = _version("opt-precision")

__all__ = [
    "Codec",
    "Encoded",
    "Format",
    "Precision",
    "PrecisionReport",
    "PrecisionRow",
    "PrecisionState",
    "apply",
    "apply_updates",
    "bfloat16",
    "by_field",
    "by_path",
    "decode",
    "dynamic8",
    "errors",
    "explain_precision",
    "float8",
    "identity",
    "log8",
    "master_of",
    "master_weights",
    "moments",
    "offload_state",
    "partition_rules",
    "quantize_state",
    "read_storage",
    "set_params",
    "stochastic_weights",
]
