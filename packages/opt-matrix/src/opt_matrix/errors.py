"""The errors of opt-matrix; all but `PlanMismatchError` are raised while a program is traced."""

from __future__ import annotations

__all__ = ["MatrixError", "OptionError", "PlanError", "PlanMismatchError", "UndecidedError"]


class MatrixError(Exception):
    """The base of every error that this package raises on purpose."""


class OptionError(MatrixError, ValueError):
    """An argument has no such value, or does not go with another."""


class UndecidedError(MatrixError, ValueError):
    """No rule says whether a leaf holds matrices, or several rules do; lists every path."""


class PlanError(MatrixError, ValueError):
    """Parameters, shardings and a mesh do not fit together, or not the plan that was made."""


class PlanMismatchError(MatrixError, ValueError):
    """A compiled program has more collectives, or moves more bytes, than the plan says."""
