"""Factor rules: a role for each dimension of a parameter, by path or from logical axes."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict
from flax.core.meta import Partitioned
from flax.linen.partitioning import AxisMetadata
from jax.sharding import PartitionSpec
from opt_core.extend import path_names, path_str

from opt_adafactor.errors import FactorRuleError, ParamAxesError, UnknownNameError


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
    dims: dict[str, FactorDim] = {}
    for axis, rule in rules.items():
        where = f"`logical_factor_rules` of the axis `{axis}`"
        try:
            dims[axis] = factor_name_to_factordim(rule)
        except UnknownNameError as error:
            raise UnknownNameError(f"{where}: {error}") from None
        if not isinstance(dims[axis], FactorDim):
            raise FactorRuleError(
                f"{where} must be a `FactorDim` or its name, found {rule!r}. Use `FactorDim.NONE` "
                "for an axis that is not factored."
            )
    return FrozenDict(dims)


def show(dims: tuple[FactorDim, ...]) -> str:
    """Formats a rule as `(ROW, COLUMN)`."""
    return f"({', '.join(dim.name for dim in dims)})"


@dataclasses.dataclass(frozen=True)
class HParamMap:
    """Maps parameter paths to values by an ordered table of regular expressions.

    Immutable; maps with the same table compare and hash equal. A map without rules is still true.

    Args:
      rules: pairs of a regular expression and a value. The first pattern found anywhere in a
        path (`re.search`; anchor it with `^` and `$` if necessary) determines the value.

    Raises:
      ValueError: a pattern is not a valid regular expression.

    Examples:
      >>> scaled = HParamMap([('norm', False), ('.*', True)])
      >>> scaled['decoder/norm/scale'], scaled({'mlp': {'kernel': 1.0}, 'norm': 1.0})
      (False, {'mlp': {'kernel': True}, 'norm': False})
    """

    rules: Iterable[tuple[str, Any]]

    def __post_init__(self) -> None:
        table = tuple((p, tuple(v) if isinstance(v, list) else v) for p, v in self.rules)
        object.__setattr__(self, "rules", table)
        for pattern, _ in table:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"`rules`: `{pattern}` is not a valid regular expression: {error}"
                ) from None

    def __getitem__(self, path: str) -> Any:
        """Returns the value of one parameter.

        Args:
          path: its `/`-joined keys.

        Raises:
          UnknownNameError: no pattern matches the path; a `KeyError`.
        """
        for pattern, value in self.rules:
            if re.search(pattern, path):
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
        is_number = isinstance(params, int | np.generic | np.ndarray | jax.Array)
        if is_number and jnp.issubdtype(jnp.result_type(params), jnp.integer):
            raise TypeError(
                "`HParamMap` maps trees of parameters, but was called with a number, like a "
                "schedule. `optax.inject_hyperparams` does that with callable arguments: add the "
                "name of the argument to its `static_args` (`factor_map`, "
                "`multiply_by_parameter_scale`)."
            )
        return jax.tree_util.tree_map_with_path(
            lambda path, _: self[path_str(path_names(path))], params
        )


def factor_rules_from_axes(param_axes: Any, dims: Mapping[str, FactorDim]) -> dict[str, FactorRule]:
    """Returns the factor rule of every parameter; of those without axes the heuristic."""
    rules: dict[str, FactorRule] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(param_axes, is_leaf=_is_axes)[0]:
        path = path_str(path_names(keys))
        if path in rules:
            raise ParamAxesError(f"`param_axes`: two entries have the path `{path}`; rename one")
        rules[path] = _rule(path, _spec(leaf, path), dims)
    return rules


def show_spec(spec: Any) -> str:
    """Formats axes as `(embed, -, mlp)`, independently of the JAX version."""
    names = ("-" if axis is None else axis if isinstance(axis, str) else str(axis) for axis in spec)
    return f"({', '.join(names)})"


def _is_axes(node: Any) -> bool:
    """Whether a node is the axes of one parameter; tuples of other things are containers."""
    # Flax's `AxisMetadata` has no leaves and looks empty to JAX.
    if node is None or isinstance(node, PartitionSpec | Partitioned | AxisMetadata):
        return True
    return type(node) is tuple and all(_is_axis(axis) for axis in node)


def _is_axis(axis: Any) -> bool:
    if isinstance(axis, tuple | list):
        return all(isinstance(name, str) for name in axis)
    return axis is None or isinstance(axis, str)


def _spec(leaf: Any, path: str) -> PartitionSpec | None:
    if isinstance(leaf, Partitioned):
        leaf = leaf.get_partition_spec()
    elif isinstance(leaf, AxisMetadata):
        leaf = leaf.names
    if leaf is None or isinstance(leaf, PartitionSpec):
        return leaf
    if isinstance(leaf, tuple):
        return PartitionSpec(*leaf)
    raise ParamAxesError(
        f"`param_axes` of `{path}` must be a `PartitionSpec`, a tuple of names or None, found a "
        f"{type(leaf).__name__}. Extract the specs of Flax boxes with "
        "`flax.linen.get_partition_spec`."
    )


def _rule(path: str, spec: PartitionSpec | None, dims: Mapping[str, FactorDim]) -> FactorRule:
    if spec is None:
        return HEURISTIC_RULE
    rule = tuple(_dim(path, spec, axis, dims) for axis in spec)
    if FactorDim.ROW in rule and FactorDim.COLUMN in rule:
        if FactorDim.NONE in rule:
            raise FactorRuleError(
                f"`{path}` with axes {show_spec(spec)} would be {show(rule)}: NONE cannot be "
                "combined with ROW and COLUMN. Make those dimensions BATCH, ROW or COLUMN."
            )
        return rule
    return tuple(d if d is FactorDim.BATCH else FactorDim.NONE for d in rule)


def _dim(path: str, spec: PartitionSpec, axis: Any, dims: Mapping[str, FactorDim]) -> FactorDim:
    names = (axis,) if isinstance(axis, str) else tuple(axis or ())
    for name in names:
        if name not in dims:
            known = ", ".join(f"`{known}`" for known in dims)
            raise UnknownNameError(
                f"`logical_factor_rules` have no rule for the axis `{name}` of `{path}`, whose "
                f"axes are {show_spec(spec)}; known axes are {known}. Add a rule for `{name}`."
            )
    roles = list(dict.fromkeys(dims[name] for name in names)) or [FactorDim.NONE]
    if len(roles) > 1:
        raise FactorRuleError(
            f"the names {names} share one dimension of `{path}`, whose axes are {show_spec(spec)}, "
            f"but `logical_factor_rules` map them to {show(tuple(roles))}. Map them to the same "
            "factor dimension."
        )
    return roles[0]
