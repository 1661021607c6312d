"""Resolution of a parameter's factor rule to the dimensions that are averaged and factored."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from opt_adafactor._factor_rules import (
    HEURISTIC_RULE,
    FactorDim,
    FactorRule,
    HeuristicRule,
    factor_name_to_factordim,
)
from opt_adafactor.errors import FactorRuleError


@dataclasses.dataclass(frozen=True)
class Factoring:
    """How one parameter is factored; static.

    Attributes:
      rank: rank of the parameter.
      averaged: dimensions averaged over for parameter scale and clipping: all but batch ones.
      rows: row dimensions, averaged over in `v_col`.
      cols: column dimensions, averaged over in `v_row`.
    """

    rank: int
    averaged: tuple[int, ...]
    rows: tuple[int, ...] = ()
    cols: tuple[int, ...] = ()

    @property
    def is_factored(self) -> bool:
        """Whether `v_row` and `v_col` are used instead of `v`."""
        return bool(self.rows or self.cols)

    def is_equivalent(self, other: Factoring) -> bool:
        """Whether both give the same updates; rows and columns of a matrix may be swapped."""
        same_dims = {self.rows, self.cols} == {other.rows, other.cols}
        return same_dims and self.averaged == other.averaged

    @property
    def row_dims(self) -> tuple[int, ...]:
        """The dimensions of the parameter that are kept in `v_row`."""
        return tuple(dim for dim in range(self.rank) if dim not in self.cols)

    @property
    def col_dims(self) -> tuple[int, ...]:
        """The dimensions of the parameter that are kept in `v_col`."""
        return tuple(dim for dim in range(self.rank) if dim not in self.rows)

    @property
    def rows_of_v_row(self) -> tuple[int, ...]:
        """The positions of the row dimensions in `v_row`."""
        return tuple(i for i, dim in enumerate(self.row_dims) if dim in self.rows)


class FactoringOptions(NamedTuple):
    """The options of `Adafactor` that affect factoring; see there."""

    factored: bool
    min_dim_size_to_factor: int
    respect_rank2_rules: bool


def heuristic_dims(shape: tuple[int, ...], options: FactoringOptions) -> tuple[int, int] | None:
    """Returns the second largest and the largest dimension, or `None` if that is too small."""
    if not options.factored or len(shape) < 2 or 0 in shape:
        return None
    by_size = np.argsort(shape, kind="stable")
    row, col = int(by_size[-2]), int(by_size[-1])
    return (row, col) if shape[row] >= options.min_dim_size_to_factor else None


def parse_rule(
    rule: Any, shape: tuple[int, ...], path: str, options: FactoringOptions
) -> Factoring:
    """Returns the factoring of one parameter, or raises a `FactorRuleError`."""
    rank = len(shape)
    everything = tuple(range(rank))
    if rule is None or not options.factored:
        return Factoring(rank, everything)
    dims = convert_rule(rule, shape, path)
    if not isinstance(dims, tuple) or is_ignored(dims, options):
        return _by_heuristic(shape, path, options)
    where = {role: tuple(i for i, d in enumerate(dims) if d is role) for role in FactorDim}
    averaged = tuple(i for i in everything if i not in where[FactorDim.BATCH])
    if 0 in shape:  # the mean of an empty array is NaN
        return Factoring(rank, averaged)
    return Factoring(rank, averaged, where[FactorDim.ROW], where[FactorDim.COLUMN])


def convert_rule(rule: Any, shape: tuple[int, ...], path: str) -> FactorRule:
    """Returns a rule with names converted to `FactorDim`s, or raises a `FactorRuleError`."""
    return rule if rule is None or isinstance(rule, HeuristicRule) else _dims(rule, shape, path)


def is_ignored(rule: FactorRule, options: FactoringOptions) -> bool:
    """Whether T5X ignores a rule: an explicit one of rank 2 or below without batch dimension."""
    if not isinstance(rule, tuple) or options.respect_rank2_rules:
        return False
    return len(rule) <= 2 and FactorDim.BATCH not in rule


def _by_heuristic(shape: tuple[int, ...], path: str, options: FactoringOptions) -> Factoring:
    rank = len(shape)
    if rank > 2:
        raise FactorRuleError(
            f"parameters of rank above 2 need an explicit factor rule: `{path}` has shape {shape} "
            f"and {HEURISTIC_RULE}. Give a role to each dimension, in `factor_map` or with "
            "`logical_factor_rules` and the logical axes of the parameters (`with_param_axes`), "
            "or use the rule `None` not to factor it."
        )
    found = heuristic_dims(shape, options)
    if found is None:
        return Factoring(rank, tuple(range(rank)))
    row, col = found
    return Factoring(rank, tuple(range(rank)), (row,), (col,))


def _dims(rule: Any, shape: tuple[int, ...], path: str) -> tuple[FactorDim, ...]:
    dims = tuple(map(factor_name_to_factordim, rule)) if isinstance(rule, tuple | list) else None
    if dims is None or not all(isinstance(dim, FactorDim) for dim in dims):
        raise FactorRuleError(
            f"the factor rule of `{path}` must be `None`, `HEURISTIC_RULE` or a tuple of "
            f"`FactorDim`s, found {rule!r}"
        )
    if len(dims) != len(shape):
        raise FactorRuleError(
            f"the factor rule of `{path}` has {len(dims)} dimensions, {show(dims)}, but its shape "
            f"{shape} has {len(shape)}. Give one `FactorDim` per dimension."
        )
    return dims


def show(dims: tuple[FactorDim, ...]) -> str:
    """Formats a rule as `(ROW, COLUMN)`."""
    return f"({', '.join(dim.name for dim in dims)})"
