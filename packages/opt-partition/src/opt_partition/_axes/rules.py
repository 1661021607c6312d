"""Rules for the types of state whose dimensions nothing else can tell apart."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec
from optax import contrib

from opt_partition._axes.param_axes import Parameter
from opt_partition._trees import descend, key_name


@dataclasses.dataclass(frozen=True)
class StateLeaf:
    """What a rule is asked about.

    Attributes:
      state: the state of the registered type, its leaves `jax.ShapeDtypeStruct`s.
      key_path: JAX's key path of the leaf in `state`.
      shape: the shape of the leaf.
      dtype: its dtype.
      parameter: the parameter that it belongs to by its place; `None` if there is none.
    """

    state: Any
    key_path: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: Any
    parameter: Parameter | None

    def beside(self, field: str) -> jax.ShapeDtypeStruct | None:
        """The leaf that another field of the state has for the same parameter, if there is one."""
        for path in (self.parameter.key_path if self.parameter else (), self.key_path[1:]):
            for start in range(len(path) + 1):
                found = descend(getattr(self.state, field), path[start:])
                if isinstance(found, jax.ShapeDtypeStruct):
                    return found
        return None

    @property
    def field(self) -> str:
        """The field of the state that the leaf is in."""
        return key_name(self.key_path[0])


# For each dimension of the leaf the parameter dimension that it indexes, `None` for none, and
# `ASK` for one that the rule leaves to the other sources; or the names themselves; or `None` to
# leave the whole leaf to them.
ASK = "ask"
Answer = Sequence[int | str | None] | PartitionSpec | None
Rule = Callable[[StateLeaf], Answer]


@dataclasses.dataclass(frozen=True)
class Rules:
    """Rules by the exact type of a state; immutable.

    A rule is asked before anything else is looked at, so it is the place to say what cannot be
    found out. It gets a `StateLeaf` and returns, for each dimension of the leaf, the parameter
    dimension that it indexes, or `None` where it indexes none; or a `PartitionSpec` of names; or
    `None`, to leave the leaf to the other sources.

    Args:
      by_type: the rules.

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
        """Returns these rules and more; a type that has one gets the new one."""
        return type(self)({**self.by_type, **by_type})


def factored_dimensions(leaf: StateLeaf) -> Answer:
    """Adafactor's rows and columns: the parameter without its largest dimension, or the second.

    The order of two equal sizes decides between rows and columns. Sizes that are changed are not
    equal any more, so only the types that JAX >= 0.10.2 infers could tell otherwise.
    """
    parameter = leaf.parameter
    if parameter is None or leaf.field not in ("v_row", "v_col", "v"):
        return None
    shape = parameter.shape
    full = leaf.beside("v")
    if leaf.field == "v":
        return tuple(range(len(shape))) if leaf.shape == shape else _placeholder(leaf)
    if len(shape) < 2 or full is None or tuple(full.shape) == shape:
        return _placeholder(leaf)
    second, largest = np.argsort(shape)[-2:].tolist()
    removed = largest if leaf.field == "v_row" else second
    kept = tuple(dim for dim in range(len(shape)) if dim != removed)
    if leaf.shape == tuple(shape[dim] for dim in kept):
        return kept
    return _placeholder(leaf)


def _placeholder(leaf: StateLeaf) -> Answer:
    return (None,) if leaf.shape == (1,) else None


def projected_dimensions(leaf: StateLeaf) -> Answer:
    """GaLore's projector `[side, rank]` and the moments in the space that it projects to.

    The rank indexes nothing, even where a small matrix caps it and its size is that of a dimension.
    """
    parameter = leaf.parameter
    projector = leaf.beside("projector")
    if parameter is None or projector is None or len(projector.shape) != 2:
        return None
    if 0 in projector.shape:  # this parameter is not projected
        same = leaf.shape == parameter.shape and leaf.field != "projector"
        return tuple(range(len(leaf.shape))) if same else (None,) * len(leaf.shape)
    side, rank = projector.shape
    other = math.prod(parameter.shape) // side  # never the longer of the two
    long: int | str = ASK
    short: int | str = ASK  # unless it is a matrix, several dimensions may lie in one
    if len(parameter.shape) == 2:
        long, short = (0, 1) if parameter.shape[0] >= parameter.shape[1] else (1, 0)
    if leaf.field == "projector":
        return long, None
    if leaf.shape == (rank, other) != (other, rank):
        return None, short
    if leaf.shape == (other, rank) != (rank, other):
        return short, None
    if leaf.shape == (rank, other):  # the rank is capped: rows are projected if there are more
        return (short, None) if long == 1 else (None, short)
    return None


def _default_rules() -> Rules:
    rules: dict[type, Rule] = {
        # Which of two equal sizes is the largest is told by the order of an argsort alone.
        optax.FactoredState: factored_dimensions,
    }
    if (galore_state := vars(contrib).get("GaLoreState")) is not None:  # Optax >= 0.2.7
        # A rank that a matrix caps has, but does not index, the size of a dimension.
        rules[galore_state] = projected_dimensions
    return Rules(rules)


DEFAULT_RULES = _default_rules()
