"""The errors of checkpoints: each is a `CheckpointError`, and what a caller already catches.

Only `LeafError`, which surgery in memory raises too, is that of `opt_core.errors`.

`CheckpointError` is an `opt_core.errors.OptimizerError`. Nothing raw from Orbax, TensorStore, JSON
or msgpack leaves this package.
"""

from __future__ import annotations

from opt_core.errors import LeafError, OptimizerError, SurgeryError

__all__ = [
    "CheckpointError",
    "DamagedError",
    "ForeignError",
    "LeafError",
    "LoadError",
    "LockError",
    "MissingError",
    "PlanError",
    "SaveError",
    "VersionError",
]


class CheckpointError(OptimizerError):
    """The base of every error about checkpoints."""


class DamagedError(CheckpointError, ValueError):
    """Bytes are not those that were written: a digest differs, or a file is cut or missing."""


class ForeignError(CheckpointError, ValueError):
    """Another program wrote a checkpoint: it is in the way, or does not match `written_by`.

    Not raised for an empty folder, nor for one that holds other files than checkpoints.
    """


class LoadError(CheckpointError, ValueError):
    """Bytes are not a checkpoint, or need more memory than is allowed."""


class LockError(CheckpointError, OSError):
    """Another writer has the folder; says who."""


class MissingError(CheckpointError, LookupError):
    """A step does not exist, or none is valid; lists what there is."""


class PlanError(CheckpointError, SurgeryError):
    """A checkpoint does not fit the target as it is. Nothing has been read in bulk.

    Attributes:
      plan: what would be kept, renamed, converted, initialised and dropped.
    """


class SaveError(CheckpointError, OSError):
    """A step was not saved; those saved before are unchanged."""


class VersionError(CheckpointError, ValueError):
    """A checkpoint was written by a newer version, or by one whose states meant something else."""
