"""The errors of opt-adafactor; overrides raise `opt_core.errors.HyperParamError`."""

from __future__ import annotations

from opt_core.errors import OptimizerError

__all__ = [
    "AdafactorError",
    "FactorRuleError",
    "ParamAxesError",
    "StateConversionError",
    "UnknownNameError",
]


class AdafactorError(OptimizerError):
    """Base class of the errors defined by this package."""


class ParamAxesError(AdafactorError, ValueError):
    """Logical axes are missing, superfluous, or have the wrong rank for their parameter."""


class FactorRuleError(AdafactorError, ValueError):
    """A parameter has no factor rule but needs one, or its rule does not fit."""


class StateConversionError(AdafactorError, ValueError):
    """A state cannot be converted: it lacks an Adafactor state, has several, or shapes differ."""


class UnknownNameError(AdafactorError, KeyError):
    """There is no rule for an axis or a parameter, or no `FactorDim` with a name."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # a `KeyError` would print its repr
