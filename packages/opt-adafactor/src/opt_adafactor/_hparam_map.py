"""Per-parameter values, chosen by the first regular expression that matches the path."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from opt_core.extend import path_names, path_str

from opt_adafactor.errors import UnknownNameError


class HParamMap:
    """Maps parameter paths to values by an ordered table of regular expressions.

    Immutable; maps with the same table compare and hash equal. A map without rules is still true.

    Attributes:
      rules: the table, as pairs of pattern and value.

    Examples:
      >>> scaled = HParamMap([('norm', False), ('.*', True)])
      >>> scaled['decoder/norm/scale'], scaled({'mlp': {'kernel': 1.0}, 'norm': 1.0})
      (False, {'mlp': {'kernel': True}, 'norm': False})
    """

    __slots__ = ("_compiled", "rules")

    rules: tuple[tuple[str, Any], ...]
    _compiled: tuple[re.Pattern[str], ...]

    def __init__(self, rules: Iterable[tuple[str, Any]]) -> None:
        """Compiles the table.

        Args:
          rules: pairs of a regular expression and a value. The first pattern found anywhere in a
            path (`re.search`; anchor it with `^` and `$` if necessary) determines the value.

        Raises:
          ValueError: a pattern is not a valid regular expression.
        """
        table = tuple((pattern, _frozen(value)) for pattern, value in rules)
        object.__setattr__(self, "rules", table)
        object.__setattr__(self, "_compiled", tuple(_compile(pattern) for pattern, _ in table))

    def __getitem__(self, path: str) -> Any:
        """Returns the value of one parameter.

        Args:
          path: its `/`-joined keys.

        Raises:
          UnknownNameError: no pattern matches the path; a `KeyError`.
        """
        for pattern, (_, value) in zip(self._compiled, self.rules, strict=True):
            if pattern.search(path):
                return value
        patterns = ", ".join(f"`{pattern}`" for pattern, _ in self.rules) or "none"
        raise UnknownNameError(
            f"no rule found for parameter `{path}`; the patterns are {patterns}. End the table "
            "with `('.*', value)` to give every other parameter a value."
        )

    def __call__(self, params: Any) -> Any:
        """Returns a tree with the structure of `params` and the value of each parameter as leaf.

        Raises:
          TypeError: `params` is a step, i.e. the map is being called as a schedule.
        """
        if _is_step(params):
            raise TypeError(
                "`HParamMap` maps trees of parameters, but was called with a number, like a "
                "schedule. `optax.inject_hyperparams` does that with callable arguments: add the "
                "name of the argument to its `static_args` (`factor_map`, "
                "`multiply_by_parameter_scale`)."
            )
        return jax.tree_util.tree_map_with_path(
            lambda path, _: self[path_str(path_names(path))], params
        )

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"`HParamMap` is immutable; create a new one to change `{name}`")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HParamMap):
            return NotImplemented
        return self.rules == other.rules

    def __hash__(self) -> int:
        return hash(self.rules)

    def __repr__(self) -> str:
        return f"HParamMap({list(self.rules)!r})"

    def __reduce__(self) -> tuple[type[HParamMap], tuple[Any, ...]]:
        return HParamMap, (self.rules,)


def _is_step(params: Any) -> bool:
    if isinstance(params, jax.Array | np.ndarray | np.generic):
        return not params.shape and jnp.issubdtype(params.dtype, jnp.integer)
    return isinstance(params, int)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"`rules`: `{pattern}` is not a valid regular expression: {error}"
        ) from None
