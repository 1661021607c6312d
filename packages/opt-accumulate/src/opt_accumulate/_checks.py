"""Checks of arguments that several functions take."""

from __future__ import annotations

from typing import Any

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
