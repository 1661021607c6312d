"""The newest step that is good for something, past those that are damaged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from opt_checkpoint._disk.processes import are_equal, together
from opt_checkpoint.errors import DamagedError, LoadError, MissingError

_log = logging.getLogger(__name__)
_Found = TypeVar("_Found")


def newest(
    directory: Path,
    steps: Callable[[], list[int]],
    use: Callable[[int], _Found],
    passed_over: set[int],
) -> _Found | None:
    """Returns what the newest step is used for; every process of a run calls it.

    Args:
      directory: of the steps, for messages.
      steps: lists them, the oldest first.
      use: raises a `DamagedError` or a `LoadError` in every process if a step is not good; then the
        one before is tried. Any other error is raised.
      passed_over: gets those that are not.

    Returns:
      What `use` returns; `None` where there is no step.

    Raises:
      MissingError: there are steps, and none is good.
    """
    tried: set[int] = set()
    while True:
        found = steps()
        if not are_equal(repr(found).encode()):
            raise DamagedError(f"`{directory}`: the processes do not see the same steps")
        left = [step for step in found if step not in tried]
        if not left:
            break
        latest = left[-1]
        try:
            return use(latest)
        except MissingError:
            # A writer may retire a step while it is looked at, and have saved others.
            with together():
                if latest in steps():
                    raise
        except (DamagedError, LoadError) as error:
            tried.add(latest)
            passed_over.add(latest)
            _log.warning("step %d is passed over: %s", latest, error)
    if found:
        raise MissingError(f"`{directory}`: none of the steps {found} is valid")
    return None
