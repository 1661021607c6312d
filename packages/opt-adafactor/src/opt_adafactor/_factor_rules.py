"""Factor rules, which assign a role to each dimension of a parameter."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from flax.core import FrozenDict

from opt_adafactor.errors import FactorRuleError, UnknownNameError


class FactorDim(enum.Enum):
    """The role of one dimension of a parameter in the second-moment statistics.

    Attributes:
      NONE: not factored; averaged over for parameter scale and clipping.
      BATCH: never averaged over; each index is treated as a separate tensor, e.g. the layers of a
        `scan`.
      ROW: a row dimension; kept in `v_row`, averaged over in `v_col`.
      COLUMN: a column dimension; kept in `v_col`, averaged over in `v_row`.
    """

    NONE = None
    BATCH = 1
    ROW = 2
    COLUMN = 3


class HeuristicRule(enum.Enum):
    """The type of `HEURISTIC_RULE`, the rule "decide by the sizes of the dimensions"."""

    token = 1


HEURISTIC_RULE = HeuristicRule.token

# The rule of a parameter: a role per dimension, the heuristic, or `None` (never factor).
FactorRule = HeuristicRule | tuple[FactorDim, ...] | None

_NAMES = {
    "row": FactorDim.ROW,
    "col": FactorDim.COLUMN,
    "column": FactorDim.COLUMN,
    "batch": FactorDim.BATCH,
    "none": FactorDim.NONE,
    "unfactorized": FactorDim.NONE,
}
_STANDARD = {
    FactorDim.ROW: ["embed"],
    FactorDim.BATCH: ["layers", "stack"],
    FactorDim.NONE: ["relpos_buckets", "layer_norm_scale"],
    FactorDim.COLUMN: [
        *("vocab", "mlp", "heads", "kv", "joined_kv", "q_wi_fused", "o_wo_fused"),
        *("multiquery_heads", "kv_fused", "mlp_activations"),
    ],
}


def factor_name_to_factordim(name: Any) -> FactorDim:
    """Returns the `FactorDim` with a name, ignoring case; non-strings are returned unchanged.

    Args:
      name: `'row'`, `'col'` or `'column'`, `'batch'`, `'none'` or `'unfactorized'`.

    Raises:
      UnknownNameError: the name is unknown; a `KeyError`.

    Examples:
      >>> factor_name_to_factordim('Column'), factor_name_to_factordim(FactorDim.ROW)
      (<FactorDim.COLUMN: 3>, <FactorDim.ROW: 2>)
    """
    if not isinstance(name, str):
        return name  # type: ignore[no-any-return]  # as in T5X
    if (dim := _NAMES.get(name.lower())) is None:
        known = ", ".join(f"`{n}`" for n in _NAMES)
        raise UnknownNameError(f"`{name}` is not a factor dimension; use one of {known}")
    return dim


def standard_logical_factor_rules() -> FrozenDict[str, FactorDim]:
    """Returns the factor dimensions of the logical axis names used by T5X's models.

    Examples:
      >>> standard_logical_factor_rules()['embed'], standard_logical_factor_rules()['mlp']
      (<FactorDim.ROW: 2>, <FactorDim.COLUMN: 3>)
    """
    return FrozenDict({name: dim for dim, names in _STANDARD.items() for name in names})


def convert_logical_rules(rules: Mapping[str, Any]) -> FrozenDict[str, FactorDim]:
    """Returns the rules of logical axes, with names converted to `FactorDim`s."""
    return FrozenDict({axis: _convert_logical_rule(axis, rule) for axis, rule in rules.items()})


def _convert_logical_rule(axis: str, rule: Any) -> FactorDim:
    try:
        dim = factor_name_to_factordim(rule)
    except UnknownNameError as error:
        raise UnknownNameError(f"`logical_factor_rules` of the axis `{axis}`: {error}") from None
    if not isinstance(dim, FactorDim):
        raise FactorRuleError(
            f"`logical_factor_rules` of the axis `{axis}` must be a `FactorDim` or its name, found "
            f"{rule!r}. Use `FactorDim.NONE` for an axis that is not factored."
        )
    return dim
