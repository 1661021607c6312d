"""Rules by type, for states whose dimensions cannot be derived."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from opt_partition._param_axes import Parameter
from opt_partition._trees import KeyPath, children, key_name, path_str


@dataclasses.dataclass(frozen=True)
class StateLeaf:
    """The argument of a rule: a leaf inside a state of a registered type.

    Attributes:
      state: the state of the registered type, with `jax.ShapeDtypeStruct` leaves.
      key_path: JAX's key path of the leaf in `state`.
      shape: shape of the leaf.
      dtype: its dtype.
      parameter: the parameter that it belongs to according to its path, or `None`.
    """

    state: Any
    key_path: KeyPath
    shape: tuple[int, ...]
    dtype: Any
    parameter: Parameter | None

    @property
    def field(self) -> str:
        """The name of the state field that contains the leaf."""
        return key_name(self.key_path[0])


ASK = "ask"
Answer = Sequence[int | str | None] | PartitionSpec | None
Rule = Callable[[StateLeaf], Answer]
# A rule for each type, which must be the exact type of a state.
Rules = dict[Any, Rule]


def apply_rules(
    state: Any, owners: Sequence[Parameter | None], rules: Mapping[Any, Rule]
) -> list[Answer]:
    """Returns the answer of the rules for each leaf; the outermost type is asked first."""
    if not rules:
        return [None] * len(owners)
    answers: list[Answer] = []
    for owner, (enclosing, path, struct) in zip(owners, _typed_leaves(state, rules), strict=True):
        answer: Answer = None
        for node, depth in enclosing:
            leaf = StateLeaf(node, path[depth:], tuple(struct.shape), struct.dtype, owner)
            said: Any = rules[type(node)](leaf)
            if said is not None:
                _check_answer(said, leaf)
                # `numpy.argsort` returns other integers.
                dims = tuple(int(x) if isinstance(x, np.integer) else x for x in said)
                answer = said if isinstance(said, PartitionSpec) else dims
                break
        answers.append(answer)
    return answers


def _check_answer(answer: Sequence[Any] | PartitionSpec, leaf: StateLeaf) -> None:
    """Raises a `ValueError` if the answer of a rule is invalid."""
    wrong = None
    parameter = leaf.parameter.shape if leaf.parameter else ()
    if not isinstance(answer, PartitionSpec | tuple | list):
        wrong = "expected a tuple with one entry per dimension, a PartitionSpec or None"
    elif len(answer) != len(leaf.shape):
        wrong = "it must have one entry per dimension"
    elif not isinstance(answer, PartitionSpec):
        for dim, size in zip(answer, leaf.shape, strict=True):
            is_index = isinstance(dim, int | np.integer) and not isinstance(dim, bool) and dim >= 0
            if dim not in (None, ASK) and not (is_index and parameter[dim:][:1] == (size,)):
                of = f"the parameter has shape {parameter}" if leaf.parameter else "no parameter"
                wrong = f"no dimension of size {size} is parameter dimension {dim!r}: {of}"
    if wrong:
        where = f"{type(leaf.state).__name__}/{path_str(leaf.key_path)}"
        raise ValueError(f"the rule for {where} of shape {leaf.shape} returned {answer!r}: {wrong}")


def _typed_leaves(
    node: Any, rules: Mapping[Any, Rule], path: KeyPath = (), enclosing: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[tuple[Any, int], ...], KeyPath, Any]]:
    """Yields, for every leaf, the enclosing nodes of registered types, its path, and itself."""
    if type(node) in rules:
        enclosing = (*enclosing, (node, len(path)))
    below = children(node)
    if below is None and node is not None:
        yield enclosing, path, node
    for key, child in below or ():
        yield from _typed_leaves(child, rules, (*path, key), enclosing)
