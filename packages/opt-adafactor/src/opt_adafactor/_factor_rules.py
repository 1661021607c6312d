"""The vocabulary of factor rules: what each dimension of a parameter is to Adafactor."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from flax.core import FrozenDict

from opt_adafactor.errors import FactorRuleError, UnknownNameError


class FactorDim(enum.Enum):
    """What one dimension of a parameter is to the second-moment statistics.

    Attributes:
      NONE: not factored; averaged over for parameter scale and clipping.
      BATCH: kept in everything: each index is a tensor of its own, as the layers of a scan are.
      ROW: a row dimension: kept in `v_row`, averaged away in `v_col`.
      COLUMN: a column dimension: kept in `v_col`, averaged away in `v_row`.
    """

    NONE = None
    BATCH = 1
    ROW = 2
    COLUMN = 3


class HeuristicRule(enum.Enum):
    """The type of `HEURISTIC_RULE`, which stands for "decide by the sizes"."""

    token = 1


HEURISTIC_RULE = HeuristicRule.token

# A rule of one parameter: a role per dimension, the heuristic, or `None`: never factor.
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
    """Returns the `FactorDim` of a name, in any case; what is no string is returned as it is.

    Args:
      name: `'row'`, `'col'` or `'column'`, `'batch'`, `'none'` or `'unfactorized'`.

    Raises:
      UnknownNameError: there is no such name; a `KeyError`.

    Examples:
      >>> factor_name_to_factordim('Column'), factor_name_to_factordim(FactorDim.ROW)
      (<FactorDim.COLUMN: 3>, <FactorDim.ROW: 2>)
    """
    if not isinstance(name, str):
        return name  # type: ignore[no-any-return]  # T5X passes whatever it is
    if (dim := _NAMES.get(name.lower())) is None:
        known = ", ".join(f"`{n}`" for n in _NAMES)
        raise UnknownNameError(f"no factor dimension is called `{name}`; write one of {known}")
    return dim


def standard_logical_factor_rules() -> FrozenDict[str, FactorDim]:
    """Returns the factor dimension of each logical axis name that T5X's models use.

    Examples:
      >>> standard_logical_factor_rules()['embed'], standard_logical_factor_rules()['mlp']
      (<FactorDim.ROW: 2>, <FactorDim.COLUMN: 3>)
    """
    return FrozenDict({name: dim for dim, names in _STANDARD.items() for name in names})


def convert_logical_rules(rules: Mapping[str, Any]) -> FrozenDict[str, FactorDim]:
    """Returns the rules of logical axes, with `FactorDim`s for names.

    Raises:
      UnknownNameError: no `FactorDim` has such a name.
      FactorRuleError: the rule of an axis is neither a `FactorDim` nor a name.

    Examples:
      >>> convert_logical_rules({'embed': 'row'})['embed']
      <FactorDim.ROW: 2>
    """
    return FrozenDict({axis: _convert_logical_rule(axis, rule) for axis, rule in rules.items()})


def _convert_logical_rule(axis: str, rule: Any) -> FactorDim:
    try:
        dim = factor_name_to_factordim(rule)
    except UnknownNameError as error:
        raise UnknownNameError(f"`logical_factor_rules` of the axis `{axis}`: {error}") from None
    if not isinstance(dim, FactorDim):
        raise FactorRuleError(
            f"`logical_factor_rules` of the axis `{axis}` must be a `FactorDim` or its name, found "
            f"{rule!r}. Where there is nothing to factor, write `FactorDim.NONE`."
        )
    return dim
