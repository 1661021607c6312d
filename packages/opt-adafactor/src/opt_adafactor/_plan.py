"""The static part of an update: the path and factoring of every parameter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from opt_core.errors import TreeMismatchError
from opt_core.extend import path_names, path_str

from opt_adafactor._axes import FactorMap, check_covers
from opt_adafactor._factor_rules import HEURISTIC_RULE, FactorRule
from opt_adafactor._factoring import (
    Factoring,
    FactoringOptions,
    convert_rule,
    is_ignored,
    parse_rule,
    show,
)
from opt_adafactor.errors import FactorRuleError, ParamAxesError

logger = logging.getLogger("opt_adafactor")

_LISTED = 5
_KEPT_PLANS = 32


class Plan(NamedTuple):
    """Paths and factorings of a tree of parameters, in JAX's order."""

    treedef: Any
    paths: tuple[str, ...]
    factorings: tuple[Factoring, ...]

    def arrays(self, tree: Any) -> list[jax.Array]:
        """Returns the leaves of a tree like the parameters, in the order of the plan."""
        return [jnp.asarray(leaf) for leaf in self.treedef.flatten_up_to(tree)]


class Planner:
    """Creates and caches the plans of trees of parameters.

    Rules are looked up, validated and warned about when a tree is first seen, not at every trace.
    Those derived from logical axes, one map per model, take precedence over `factor_map`.
    """

    def __init__(
        self, options: FactoringOptions, factor_map: Any, axis_rules: tuple[FactorMap, ...] = ()
    ) -> None:
        self.options = options
        self._factor_map = factor_map
        self._axis_rules = axis_rules
        self._plans: dict[Any, Plan] = {}

    def plan(self, params: Any) -> Plan:
        """Returns the plan of a tree, or raises where a rule is missing or does not fit."""
        leaves, treedef = jax.tree.flatten(params)
        key = treedef, tuple((np.shape(x), getattr(x, "dtype", type(x))) for x in leaves)
        if (plan := self._plans.get(key)) is None:
            plan = self._make(params)
            if len(self._plans) >= _KEPT_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan

    def _make(self, params: Any) -> Plan:
        keyed, treedef = jax.tree_util.tree_flatten_with_path(params)
        leaves: dict[str, Any] = {}
        for keys, leaf in keyed:
            path = path_str(path_names(keys))
            if path in leaves:
                raise TreeMismatchError(
                    f"`params`: two parameters have the path `{path}`, of shapes "
                    f"{np.shape(leaves[path])} and {np.shape(leaf)}. Rules and axes are looked up "
                    "by path: rename one of them."
                )
            leaves[path] = leaf
        for path, leaf in leaves.items():
            _check_dtype(path, leaf)
        shapes = {path: np.shape(leaf) for path, leaf in leaves.items()}
        raw = self._rules(shapes)
        rules = {path: convert_rule(raw[path], shape, path) for path, shape in shapes.items()}
        factorings = {p: parse_rule(rules[p], shapes[p], p, self.options) for p in shapes}
        self._warn(rules, shapes, factorings)
        return Plan(treedef, tuple(shapes), tuple(factorings.values()))

    def _rules(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, FactorRule]:
        if not self.options.factored:
            return dict.fromkeys(shapes, None)
        if self._axis_rules:
            rules = _select(self._axis_rules, shapes.keys())
            _check_axis_rules(rules, shapes)
            return rules
        if self._factor_map is not None:
            return {path: self._factor_map[path] for path in shapes}
        return dict.fromkeys(shapes, HEURISTIC_RULE)

    def _warn(
        self,
        rules: Mapping[str, FactorRule],
        shapes: Mapping[str, tuple[int, ...]],
        factorings: Mapping[str, Factoring],
    ) -> None:
        respecting = self.options._replace(respect_rank2_rules=True)
        lines = []
        for path, found in factorings.items():
            rule = rules[path]
            if not isinstance(rule, tuple) or not is_ignored(rule, self.options):
                continue
            if not parse_rule(rule, shapes[path], path, respecting).is_equivalent(found):
                lines.append(f"`{path}` {shapes[path]}: {_show(rule)}")
        if lines:
            more = [f"... and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
            logger.warning(
                "explicit factor rules of rank 2 and below are ignored, as in T5X. The heuristic "
                "decides differently for:\n%s\n`respect_rank2_rules=True` honours them.",
                "\n".join(f"  {line}" for line in lines[:_LISTED] + more),
            )


def _show(rule: FactorRule) -> str:
    return show(rule) if isinstance(rule, tuple) else str(rule)


def _select(axis_rules: tuple[FactorMap, ...], paths: Any) -> FactorMap:
    """Returns the rules of the model with exactly these parameters, else of one that has them."""
    tests: list[Callable[[FactorMap], bool]] = [
        lambda rules: rules.keys() == paths,
        lambda rules: rules.keys() >= paths,
    ]
    for fits in tests:
        for rules in reversed(axis_rules):
            if fits(rules):
                return rules
    return axis_rules[-1]


def _check_axis_rules(rules: FactorMap, shapes: Mapping[str, tuple[int, ...]]) -> None:
    known = {p: rule for p, rule in rules.items() if p in shapes or f"{p}/value" in shapes}
    sized = {path: rule if isinstance(rule, tuple) else None for path, rule in known.items()}
    try:
        check_covers(shapes, sized)
    except ParamAxesError as error:
        raise ParamAxesError(
            f"{error}\nThese axes were passed to `with_param_axes` or `set_param_axes`."
        ) from None


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


def missing_rule_hint(error: FactorRuleError, hyper_params: Any) -> FactorRuleError:
    """Adds advice to the error if logical rules were given but no axes."""
    if hyper_params.logical_factor_rules is None or isinstance(hyper_params.factor_map, FactorMap):
        return error
    return FactorRuleError(
        f"{error} `logical_factor_rules` were given, but no axes yet: call `with_param_axes` (or "
        "`set_param_axes`) before `create`."
    )
