"""The errors of opt-legacy-stax.

```
StaxError
├── TreeMismatchError (TypeError)      gradients whose tree is not that of the parameters
├── StateChangedError (TypeError)      an update that changes the structure of a state, or a shape
├── StepError (TypeError)              a step that is no number
├── ScheduleError (TypeError)          a step size that is neither a number nor a schedule
├── BoundariesError (ValueError)       boundaries and values that are no piecewise constant
├── JoinPointError (AssertionError)    a tree to pack that is not marked with join points
├── LayoutError (ValueError)           a state of no known layout, or of another optimizer
├── NoEquivalentError (ValueError)     no transformation of Optax has the same mathematics
├── MissingExtraError (ImportError)    Optax or opt-core is not installed
├── SaveError (TypeError)              a state that cannot be written exactly
└── LoadError (ValueError)             a file that is not loaded; nothing of it is
    ├── DamagedFileError               truncated, altered, or never such a file
    ├── FormatVersionError             written by another version of the format
    ├── StateMismatchError             a sound file with another state than expected
    └── UnsafePickleError              a pickle that holds more than arrays and join points

UnnamedStateWarning (UserWarning)      a state that was loaded without knowing whose it is
```

Those that JAX's module raises too are the builtins that it raises.
"""

from __future__ import annotations

__all__ = [
    "BoundariesError",
    "DamagedFileError",
    "FormatVersionError",
    "JoinPointError",
    "LayoutError",
    "LoadError",
    "MissingExtraError",
    "NoEquivalentError",
    "SaveError",
    "ScheduleError",
    "StateChangedError",
    "StateMismatchError",
    "StaxError",
    "StepError",
    "TreeMismatchError",
    "UnnamedStateWarning",
    "UnsafePickleError",
]


class StaxError(Exception):
    """The base of every error that this package raises on purpose."""


class TreeMismatchError(StaxError, TypeError):
    """The tree of the gradients is not that of the parameters; names the first paths."""


class StateChangedError(StaxError, TypeError):
    """An update returned a state of another structure, or a parameter of another shape."""


class StepError(StaxError, TypeError):
    """The step given to an update is a function, an array with axes, or no number at all."""


class ScheduleError(StaxError, TypeError):
    """A step size is neither a number nor a function of the step."""


class BoundariesError(StaxError, ValueError):
    """`boundaries` and `values` do not describe a piecewise constant function."""


class JoinPointError(StaxError, AssertionError):
    """A tree to pack has leaves that are no `JoinPoint`."""


class LayoutError(StaxError, ValueError):
    """A state has no layout that this package, or an older JAX, ever wrote, or another's."""


class NoEquivalentError(StaxError, ValueError):
    """Optax has no transformation with the same mathematics, or not for these arguments."""


class MissingExtraError(StaxError, ImportError):
    """A function needs a package that only an extra of this one installs."""


class SaveError(StaxError, TypeError):
    """A state holds what cannot be written and read back exactly. Nothing has been written."""


class LoadError(StaxError, ValueError):
    """A file is not loaded. Never raised for a file that does not exist or cannot be opened."""


class DamagedFileError(LoadError):
    """A file is truncated, altered, or was never written by `save`."""


class FormatVersionError(LoadError):
    """A file is of a version of the format that this version of the package does not read."""


class StateMismatchError(LoadError):
    """A sound file holds a state of another optimizer, tree, shape or dtype than expected."""


class UnsafePickleError(LoadError):
    """A pickle holds something else than arrays, plain containers and join points."""


class UnnamedStateWarning(UserWarning):
    """A file was loaded, and whose state it holds was not compared: one of the two is not said."""
