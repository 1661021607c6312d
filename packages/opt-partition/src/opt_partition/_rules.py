"""Rules by type, for states whose dimensions cannot be derived."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

import jax
from jax.sharding import PartitionSpec

from opt_partition._param_axes import Parameter
from opt_partition._trees import KeyPath, key_name, path_str


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
    key_path: tuple[Any, ...]
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


@dataclasses.dataclass(frozen=True)
class Rules:
    """Rules by the exact type of a state; immutable.

    A rule takes precedence over all other sources, and provides what they cannot derive. It is
    called with a `StateLeaf` and returns one of: for each dimension of the leaf, the parameter
    dimension that it indexes, `None` if it indexes none, or `ASK` to leave it to the other sources;
    a `PartitionSpec` of names; or `None`, to leave the leaf to the other sources.

    Args:
      by_type: a rule for each type.

    Examples:
      >>> from typing import NamedTuple
      >>> class Codebook(NamedTuple):
      ...   table: Any
      >>> rules = DEFAULT_RULES.extend({Codebook: lambda leaf: PartitionSpec('vocab', None)})
      >>> Codebook in rules.by_type, Codebook in DEFAULT_RULES.by_type
      (True, False)
    """

    by_type: Mapping[type, Rule] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_type", MappingProxyType(dict(self.by_type)))

    def __reduce__(self) -> tuple[type[Self], tuple[dict[type, Rule]]]:
        return type(self), (dict(self.by_type),)

    def extend(self, by_type: Mapping[type, Rule]) -> Self:
        """Returns a copy with additional rules, which replace existing ones for the same types."""
        return type(self)({**self.by_type, **by_type})


# None is needed for Optax: its states are derived.
DEFAULT_RULES = Rules()


def apply_rules(state: Any, owners: Sequence[Parameter | None], rules: Rules) -> list[Answer]:
    """Returns the answer of the rules for each leaf; the outermost type is asked first."""
    if not rules.by_type:
        return [None] * len(owners)
    answers: list[Answer] = []
    leaves = _typed_leaves(state, rules, ())
    for owner, (enclosing, path, struct) in zip(owners, leaves, strict=True):
        answer: Answer = None
        for node, depth in enclosing:
            leaf = StateLeaf(node, path[depth:], tuple(struct.shape), struct.dtype, owner)
            answer = rules.by_type[type(node)](leaf)
            if answer is not None:
                _check_answer(answer, leaf)
                answer = answer if isinstance(answer, PartitionSpec) else tuple(answer)
                break
        answers.append(answer)
    return answers


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
) -> Iterator[tuple[tuple[tuple[Any, int], ...], KeyPath, Any]]:
    """Yields, for every leaf, the enclosing nodes of registered types, its path, and itself."""
    inside = enclosing[-1][0] if enclosing else None

    def is_registered(node: Any) -> bool:
        return node is not inside and type(node) in rules.by_type

    for below, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_registered):
        here = (*path, *below)
        if is_registered(node):
            yield from _typed_leaves(node, rules, (*enclosing, (node, len(here))), here)
        else:
            yield enclosing, here, node
