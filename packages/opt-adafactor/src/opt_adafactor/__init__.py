"""T5X's generalized Adafactor: factor rules by name and by logical axis."""

from importlib.metadata import version as _version

from opt_adafactor import errors
from opt_adafactor._adafactor import Adafactor
from opt_adafactor._conversion import from_optax_state, to_optax_state
from opt_adafactor._hyper_params import _AdafactorHyperParams as _AdafactorHyperParams
from opt_adafactor._rules import (
    HEURISTIC_RULE,
    FactorDim,
    FactorRule,
    HeuristicRule,
    HParamMap,
    factor_name_to_factordim,
    standard_logical_factor_rules,
)
from opt_adafactor._state import _AdafactorParamState as _AdafactorParamState
from opt_adafactor._transformation import (
    AdafactorState,
    adafactor,
    scale_by_generalized_factored_rms,
)

__version__ = _version("opt-adafactor")

__all__ = [
    "HEURISTIC_RULE",
    "Adafactor",
    "AdafactorState",
    "FactorDim",
    "FactorRule",
    "HParamMap",
    "HeuristicRule",
    "adafactor",
    "errors",
    "factor_name_to_factordim",
    "from_optax_state",
    "scale_by_generalized_factored_rms",
    "standard_logical_factor_rules",
    "to_optax_state",
]
