"""How each parameter is factored: its rule, and the dimensions that follow from it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from opt_core.errors import TreeMismatchError
from opt_core.extend import path_names, path_str

from opt_adafactor._rules import (
    HEURISTIC_RULE,
    FactorDim,
    FactorRule,
    HeuristicRule,
    HParamMap,
    factor_name_to_factordim,
    show,
)
from opt_adafactor.errors import FactorRuleError, ParamAxesError

logger = logging.getLogger("opt_adafactor")
_LISTED = 5


@dataclasses.dataclass(frozen=True)
class Factoring:
    """How one parameter is factored; static."""

    rank: int
    averaged: tuple[int, ...]  # over for parameter scale and clipping: all but batch dimensions
    rows: tuple[int, ...] = ()  # averaged over in `v_col`
    cols: tuple[int, ...] = ()  # averaged over in `v_row`
    has_momentum: bool = False

    @property
    def is_factored(self) -> bool:
        """Whether `v_row` and `v_col` are used instead of `v`."""
        return bool(self.rows or self.cols)

    @property
    def rows_of_v_row(self) -> tuple[int, ...]:
        """The positions of the row dimensions in `v_row`."""
        kept = [dim for dim in range(self.rank) if dim not in self.cols]
        return tuple(i for i, dim in enumerate(kept) if dim in self.rows)

    @property
    def kept(self) -> dict[str, tuple[int, ...] | None]:
        """The dimensions that each slot of the state keeps; `None` for unused slots."""
        everything = tuple(range(self.rank))
        without_cols = tuple(dim for dim in everything if dim not in self.cols)
        without_rows = tuple(dim for dim in everything if dim not in self.rows)
        return {
            "v_row": without_cols if self.is_factored else None,
            "v_col": without_rows if self.is_factored else None,
            "v": None if self.is_factored else everything,
            "m": everything if self.has_momentum else None,
        }


class Plan(NamedTuple):
    """What is static about a tree of parameters, in JAX's order."""

    treedef: Any
    paths: tuple[str, ...]
    factorings: tuple[Factoring, ...]

    def arrays(self, tree: Any) -> list[jax.Array]:
        """Returns the leaves of a tree like the parameters, in the order of the plan."""
        return [jnp.asarray(leaf) for leaf in self.treedef.flatten_up_to(tree)]


def make_plan(params: Any, hyper_params: Any) -> Plan:
    """Returns the plan of a tree, or raises where a rule is missing or does not fit."""
    keyed, treedef = jax.tree_util.tree_flatten_with_path(params)
    shapes: dict[str, tuple[int, ...]] = {}
    for keys, leaf in keyed:
        path = path_str(path_names(keys))
        _check_dtype(path, leaf)
        if path in shapes:
            raise TreeMismatchError(
                f"`params`: two parameters have the path `{path}`, of shapes {shapes[path]} and "
                f"{np.shape(leaf)}. Rules and axes are looked up by path: rename one of them."
            )
        shapes[path] = np.shape(leaf)
    rules: Mapping[str, FactorRule] = dict.fromkeys(shapes, HEURISTIC_RULE)
    factor_map = hyper_params.factor_map if hyper_params.factored else None
    if isinstance(factor_map, HParamMap):
        rules = {path: factor_map[path] for path in shapes}
    elif factor_map is not None:  # of logical axes, by path
        rules = factor_map
        _check_axis_rules(rules, shapes)
    factorings = [parse_rule(rules[p], shape, p, hyper_params) for p, shape in shapes.items()]
    return Plan(treedef, tuple(shapes), tuple(factorings))


def init_plan(params: Any, hyper_params: Any) -> Plan:
    """Returns the plan, and logs which explicit rules are ignored where it makes a difference."""
    plan = make_plan(params, hyper_params)
    respecting = make_plan(params, hyper_params.replace(respect_rank2_rules=True))
    pairs = zip(plan.paths, plan.factorings, respecting.factorings, strict=True)
    # Rows and columns of a matrix may be swapped.
    paths = [path for path, a, b in pairs if {a.rows, a.cols} != {b.rows, b.cols}]
    if paths:
        more = f", and {len(paths) - _LISTED} more" if len(paths) > _LISTED else ""
        logger.warning(
            "explicit factor rules of rank 2 and below are ignored, as in T5X. The heuristic "
            "decides differently for: %s. `respect_rank2_rules=True` honours them.",
            ", ".join(f"`{path}`" for path in paths[:_LISTED]) + more,
        )
    return plan


def heuristic_dims(shape: tuple[int, ...], hyper_params: Any) -> tuple[int, int] | None:
    """Returns the second largest and the largest dimension, or `None` if that is too small."""
    if not hyper_params.factored or len(shape) < 2 or 0 in shape:
        return None
    by_size = np.argsort(shape, kind="stable")
    row, col = int(by_size[-2]), int(by_size[-1])
    return (row, col) if shape[row] >= hyper_params.min_dim_size_to_factor else None


def parse_rule(rule: Any, shape: tuple[int, ...], path: str, hyper_params: Any) -> Factoring:
    """Returns the factoring of one parameter, or raises a `FactorRuleError`."""
    everything = tuple(range(len(shape)))
    factoring = Factoring(len(shape), everything, has_momentum=hyper_params.beta1 is not None)
    if rule is None or not hyper_params.factored:
        return factoring
    if not isinstance(rule, HeuristicRule):
        dims = _dims(rule, shape, path)
        where = {role: tuple(i for i in everything if dims[i] is role) for role in FactorDim}
        is_explicit = len(shape) > 2 or where[FactorDim.BATCH] or hyper_params.respect_rank2_rules
        if is_explicit:  # T5X ignores the others
            averaged = tuple(i for i in everything if i not in where[FactorDim.BATCH])
            factoring = dataclasses.replace(factoring, averaged=averaged)
            if 0 in shape:  # the mean of an empty array is NaN
                return factoring
            rows, cols = where[FactorDim.ROW], where[FactorDim.COLUMN]
            return dataclasses.replace(factoring, rows=rows, cols=cols)
    if len(shape) > 2:
        raise FactorRuleError(
            f"parameters of rank above 2 need an explicit factor rule: `{path}` has shape {shape} "
            f"and {HEURISTIC_RULE}. Give a role to each dimension, in `factor_map` or with "
            "`logical_factor_rules` and the logical axes of the parameters (`with_param_axes`), "
            "or use the rule `None` not to factor it."
        )
    if (found := heuristic_dims(shape, hyper_params)) is None:
        return factoring
    return dataclasses.replace(factoring, rows=found[:1], cols=found[1:])


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


def _check_axis_rules(
    rules: Mapping[str, FactorRule], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises a `ParamAxesError` unless each parameter has a rule of its rank."""
    lines = [f"{path}: no axes given" for path in shapes if path not in rules]
    for path, shape in shapes.items():
        rule = rules.get(path)
        if isinstance(rule, tuple) and len(rule) != len(shape):
            lines.append(
                f"{path}: expected {len(shape)} axes, one per dimension of {shape}, found "
                f"{len(rule)}: {show(rule)}"
            )
    if any(path.endswith("/value") and path.removesuffix("/value") in rules for path in shapes):
        lines.append("the parameters are in Flax boxes: unbox them with `flax.linen.unbox`")
    if lines:
        raise ParamAxesError(
            "`param_axes` of `with_param_axes` or `set_param_axes` do not match the parameters:\n  "
            + "\n  ".join(lines)
        )


def _check_dtype(path: str, leaf: Any) -> None:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None and isinstance(leaf, float):
        return
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        found = f"a {type(leaf).__name__}" if dtype is None else str(dtype)
        raise TypeError(
            f"`params`: Adafactor updates real floating-point arrays only, but `{path}` is "
            f"{found}. Assign it to another optimizer, or remove it from the tree."
        )
