"""The errors of opt-adafactor.

```
AdafactorError (opt_core.errors.OptimizerError)
├── FactorRuleError (ValueError)       a factor rule that does not fit its parameter
├── ParamAxesError (ValueError)        logical axes that do not fit the parameters
├── StateConversionError (ValueError)  a state that has no counterpart in the other form
└── UnknownNameError (KeyError)        an axis, parameter or `FactorDim` that no rule knows
```

Overrides that cannot be honoured are `opt_core.errors.HyperParamError`s, as everywhere.
"""

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
    """The base of every error that is this package's own."""


class ParamAxesError(AdafactorError, ValueError):
    """Logical axes are missing, are too many, or have another rank than their parameter."""


class FactorRuleError(AdafactorError, ValueError):
    """A parameter needs a factor rule and has none, or has one that does not fit it."""


class StateConversionError(AdafactorError, ValueError):
    """A state cannot be taken over: not one Adafactor in it, or other shapes than the other's."""


class UnknownNameError(AdafactorError, KeyError):
    """No rule knows the name of an axis or a parameter, or there is no such `FactorDim`."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # a `KeyError` would print its repr
