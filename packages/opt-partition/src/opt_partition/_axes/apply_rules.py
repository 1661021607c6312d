"""Application of rules by type to the leaves of a state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from opt_partition._axes.cases import Case
from opt_partition._axes.param_axes import Parameter
from opt_partition._axes.rules import ASK, Rules, StateLeaf
from opt_partition._trees import KeyPath, path_str


def apply_rules(
    cases: Sequence[Case], state: Any, table: Sequence[Parameter], rules: Rules
) -> None:
    """Calls the rules of the types that enclose each leaf, outermost first."""
    for case, (enclosing, path) in zip(cases, _typed_leaves(state, rules, ()), strict=True):
        owner = table[case.owner] if case.owner is not None else None
        for node, depth in enclosing:
            shape, dtype = case.leaf.shape, case.leaf.dtype
            leaf = StateLeaf(node, path[depth:], shape, dtype, owner)
            case.answer = rules.by_type[type(node)](leaf)
            if case.answer is not None:
                _check_answer(case.answer, leaf)
                break


def _check_answer(answer: Sequence[Any] | PartitionSpec, leaf: StateLeaf) -> None:
    """Raises a `ValueError` if the answer of a rule is invalid."""
    wrong = None
    parameter = leaf.parameter.shape if leaf.parameter else None
    if not isinstance(answer, PartitionSpec | tuple | list):
        wrong = "expected a tuple with one entry per dimension, a PartitionSpec or None"
    elif len(answer) != len(leaf.shape):
        wrong = "it must have one entry per dimension"
    elif not isinstance(answer, PartitionSpec):
        for dim, size in zip(answer, leaf.shape, strict=True):
            if dim is None or dim == ASK:
                continue
            is_index = isinstance(dim, int) and not isinstance(dim, bool) and dim >= 0
            if not is_index or not parameter or parameter[dim:][:1] != (size,):
                of = f"the parameter has shape {parameter}" if parameter else "it has no parameter"
                wrong = f"no dimension of size {size} is parameter dimension {dim!r}: {of}"
    if wrong:
        where = f"{type(leaf.state).__name__}/{path_str(leaf.key_path)}"
        raise ValueError(f"the rule for {where} of shape {leaf.shape} returned {answer!r}: {wrong}")


def _typed_leaves(
    tree: Any, rules: Rules, enclosing: tuple[tuple[Any, int], ...], path: KeyPath = ()
) -> Iterator[tuple[tuple[tuple[Any, int], ...], KeyPath]]:
    """Yields, for every leaf, the enclosing nodes of registered types, and its path."""
    inside = enclosing[-1][0] if enclosing else None

    def is_registered(node: Any) -> bool:
        return node is not inside and type(node) in rules.by_type

    for below, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_registered):
        here = (*path, *below)
        if is_registered(node):
            yield from _typed_leaves(node, rules, (*enclosing, (node, len(here))), here)
        else:
            yield enclosing, here
