"""The errors of opt-legacy-stax.

Where JAX's module raises an error too, ours is a subclass of the builtin exception it raises.
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
    """Base class of all errors raised by this package."""


class TreeMismatchError(StaxError, TypeError):
    """The gradients do not have the tree structure of the parameters."""


class StateChangedError(StaxError, TypeError):
    """An update changed the tree structure of a state, or the shape of a parameter."""


class StepError(StaxError, TypeError):
    """The step passed to an update is not a scalar number."""


class ScheduleError(StaxError, TypeError):
    """A step size is neither a number nor a function of the step."""


class BoundariesError(StaxError, ValueError):
    """`boundaries` and `values` do not describe a piecewise constant schedule."""


class JoinPointError(StaxError, AssertionError):
    """A tree to pack has leaves that are not a `JoinPoint`."""


class LayoutError(StaxError, ValueError):
    """A state has an unknown layout, or that of a different optimizer."""


class NoEquivalentError(StaxError, ValueError):
    """Optax has no transformation with the same update rule, or not for these arguments."""


class MissingExtraError(StaxError, ImportError):
    """A function needs a package that is installed by an extra."""


class SaveError(StaxError, TypeError):
    """A state cannot be saved and restored exactly. Nothing has been written."""


class LoadError(StaxError, ValueError):
    """A file cannot be loaded. Not raised if it does not exist or cannot be opened (`OSError`)."""


class DamagedFileError(LoadError):
    """A file is truncated, altered, or was not written by `save`."""


class FormatVersionError(LoadError):
    """A file has a format version that this version of the package does not support."""


class StateMismatchError(LoadError):
    """A file holds a state of a different optimizer, tree structure, shape or dtype."""


class UnsafePickleError(LoadError):
    """A pickle contains anything other than arrays, plain containers and join points."""


class UnnamedStateWarning(UserWarning):
    """A state was loaded without comparing optimizers, as one of the two names is missing."""
