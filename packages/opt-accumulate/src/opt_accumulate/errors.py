"""The errors of opt-accumulate.

All but those of `Rollback.restore` and `check_skips` are raised while a program is traced or built.
"""

from __future__ import annotations

__all__ = [
    "AccumulationError",
    "BatchError",
    "EvaluationError",
    "LossOutputError",
    "OptionError",
    "RollbackError",
    "StuckError",
]


class AccumulationError(Exception):
    """The base of every error that this package raises on purpose."""


class BatchError(AccumulationError, ValueError):
    """Leaves of a batch have no common number of rows, or it does not divide; lists every path."""


class EvaluationError(AccumulationError, ValueError):
    """Two averages in a state speak of one parameter, or one of a parameter that is not there."""


class LossOutputError(AccumulationError, TypeError):
    """A loss function returned something else than the arguments announced."""


class OptionError(AccumulationError, ValueError):
    """An argument has no such value, or does not go with another."""


class RollbackError(AccumulationError, RuntimeError):
    """No good state is held to go back to."""


class StuckError(AccumulationError, RuntimeError):
    """More steps in a row were skipped than a run should bear."""
