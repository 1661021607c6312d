"""What spans the steps of a run: gradient accumulation, averages of parameters, and guards.

`MultiSteps` is Optax's, but for what a mini-step costs and what it survives: states move between
the two. `accumulate_gradients` is `jax.value_and_grad` over microbatches, weighted exactly.
`with_average` and `guard` wrap an optimizer; `eval_params` and `report` read their states.
"""

from importlib.metadata import version as _version

from optax import EmaState, MultiStepsState, ShouldSkipUpdateFunction, TraceState, ema, trace

from opt_accumulate import errors
from opt_accumulate._average.average import with_average
from opt_accumulate._average.evaluation import HoldsEvalParams, HoldsMasterParams, eval_params
from opt_accumulate._average.state import AverageState
from opt_accumulate._guard.guard import guard
from opt_accumulate._guard.rollback import Rollback, rollback
from opt_accumulate._guard.spike import Spike
from opt_accumulate._guard.state import GuardReport, GuardState, Reason, report
from opt_accumulate._microbatches.accumulate import AccumulationMetrics, accumulate_gradients
from opt_accumulate._multi_steps.multi_steps import MultiSteps
from opt_accumulate._skip.combined import all_of, any_of
from opt_accumulate._skip.functions import skip_large_updates, skip_not_finite
from opt_accumulate._skip.outliers import skip_outliers
from opt_accumulate._skip.state import StatefulSkipFunction
from opt_accumulate._skip.stuck import check_skips
from opt_accumulate._transformation import ParamsTransformation

__version__ = _version("opt-accumulate")

__all__ = [
    "AccumulationMetrics",
    "AverageState",
    "EmaState",
    "GuardReport",
    "GuardState",
    "HoldsEvalParams",
    "HoldsMasterParams",
    "MultiSteps",
    "MultiStepsState",
    "ParamsTransformation",
    "Reason",
    "Rollback",
    "ShouldSkipUpdateFunction",
    "Spike",
    "StatefulSkipFunction",
    "TraceState",
    "accumulate_gradients",
    "all_of",
    "any_of",
    "check_skips",
    "ema",
    "errors",
    "eval_params",
    "guard",
    "report",
    "rollback",
    "skip_large_updates",
    "skip_not_finite",
    "skip_outliers",
    "trace",
    "with_average",
]
