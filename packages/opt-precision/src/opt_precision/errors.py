"""What this package raises; every class is also the builtin that callers already catch."""

__all__ = ["OrderError", "PrecisionError", "SelectionError", "StateError"]


class PrecisionError(Exception):
    """Everything that this package raises on purpose."""


class OrderError(PrecisionError, ValueError):
    """Two wrappers are in an order in which one would undo what the other does.

    Raised by a constructor where it can see both, otherwise by `init`; never by `update`.
    """


class SelectionError(PrecisionError, ValueError):
    """A selection matches nothing, or asks for what a leaf cannot be stored as."""


class StateError(PrecisionError, ValueError):
    """A state, parameters or gradients that do not belong together."""
