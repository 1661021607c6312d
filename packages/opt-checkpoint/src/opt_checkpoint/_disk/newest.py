"""The steps of a folder, and the newest that is good for something, past those that are damaged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from opt_checkpoint._disk import orbax as _orbax
from opt_checkpoint._disk.foreign_steps import check_own
from opt_checkpoint._disk.processes import are_equal, together
from opt_checkpoint.errors import DamagedError, LoadError, MissingError

_log = logging.getLogger(__name__)
_Found = TypeVar("_Found")


def list_own(directory: Path) -> list[int]:
    """Returns the steps, the oldest first; a `ForeignError` where another program wrote some."""
    check_own(directory)
    return _orbax.list_steps(directory)


def check_equal(directory: Path, found: Sequence[object]) -> None:
    """Raises a `DamagedError` unless all processes have found the same."""
    if not are_equal(repr(found).encode()):
        raise DamagedError(f"`{directory}`: the processes do not see the same steps")


def newest(
    directory: Path, use: Callable[[int], _Found], pass_over: Callable[[int], None]
) -> _Found | None:
    """Returns what `use` does of the newest step, `None` if there is none; all processes call it.

    Where `use` raises a `DamagedError` or a `LoadError` in every process, `pass_over` is told, and
    the step before is tried; a `MissingError` says that none of those that there are is good.
    """
    tried: set[int] = set()
    while True:
        found = list_own(directory)
        check_equal(directory, found)
        left = [step for step in found if step not in tried]
        if not left:
            break
        try:
            return use(left[-1])
        except MissingError:
            # A writer may retire a step while it is looked at, and have saved others.
            with together():
                if left[-1] in list_own(directory):
                    raise
        except (DamagedError, LoadError) as error:
            tried.add(left[-1])
            pass_over(left[-1])
            _log.warning("step %d is passed over: %s", left[-1], error)
    if found:
        raise MissingError(f"`{directory}`: none of the steps {found} is valid")
    return None
