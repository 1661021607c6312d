"""Checks of arguments that several functions take."""

from __future__ import annotations

from typing import Any

from opt_accumulate._trees import differences, not_numbers
from opt_accumulate.errors import OptionError


def check_integer(name: str, value: Any, least: int) -> None:
    """Raises an `OptionError` unless `value` is an integer of at least `least`.

    Examples:
      >>> check_integer('keep', 0, 1)
      Traceback (most recent call last):
      ...
      opt_accumulate.errors.OptionError: `keep` must be an integer of at least 1, found 0.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"`{name}` must be an integer of at least {least}, found {value!r}.")


def check_like(tree: Any, accumulator: Any, argument: str = "updates") -> None:
    """Raises unless gradients or parameters have the structure and shapes of the accumulator.

    Raises:
      ValueError: they have not; lists every path.
      TypeError: leaves are not arrays or numbers.
    """
    check_numbers(tree, argument)
    wrong = differences(accumulator, tree)
    if wrong:
        raise ValueError(
            f"`{argument}` do not look like the accumulator, which looks like the parameters that "
            "`init` got:\n" + "\n".join(wrong) + "\nPass those parameters and gradients with "
            "respect to them, or make a new state with `init`."
        )


def check_numbers(tree: Any, argument: str) -> None:
    """Raises unless all leaves are arrays or numbers; lists every path."""
    wrong = not_numbers(tree)
    if wrong:
        raise TypeError(f"`{argument}` must be a tree of arrays; it has\n" + "\n".join(wrong))
