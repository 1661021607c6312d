"""What spans the steps of a run: gradient accumulation, averages of parameters, and guards.

`MultiSteps` is Optax's, but for what a mini-step costs and what it survives: states move between
the two. `accumulate_gradients` is `jax.value_and_grad` over microbatches, weighted exactly.
`with_average` and `guard` wrap an optimizer; `eval_params` and `report` read their states.
"""

from importlib.metadata import version as _version

from optax import EmaState, MultiStepsState, ShouldSkipUpdateFunction, TraceState, ema, trace

from opt_accumulate import errors
from opt_accumulate._accumulate import AccumulationMetrics, accumulate_gradients
from opt_accumulate._average import AverageState, eval_params, with_average
from opt_accumulate._guard import GuardReport, GuardState, Reason, Spike, check_skips, guard, report
from opt_accumulate._inner import ParamsTransformation
from opt_accumulate._multi_steps import MultiSteps
from opt_accumulate._rollback import Rollback, rollback
from opt_accumulate._skip import skip_large_updates, skip_not_finite

__version__ = _version("opt-accumulate")

__all__ = [
    "AccumulationMetrics",
    "AverageState",
    "EmaState",
    "GuardReport",
    "GuardState",
    "MultiSteps",
    "MultiStepsState",
    "ParamsTransformation",
    "Reason",
    "Rollback",
    "ShouldSkipUpdateFunction",
    "Spike",
    "TraceState",
    "accumulate_gradients",
    "check_skips",
    "ema",
    "errors",
    "eval_params",
    "guard",
    "report",
    "rollback",
    "skip_large_updates",
    "skip_not_finite",
    "trace",
    "with_average",
]
