"""Rules for types of state whose dimensions cannot be derived otherwise."""

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

    def sibling(self, field: str) -> jax.ShapeDtypeStruct | None:
        """Returns the leaf of another field of the state for the same parameter, or `None`."""
        for path in (self.parameter.key_path if self.parameter else (), self.key_path[1:]):
            for start in range(len(path) + 1):
                found = descend(getattr(self.state, field), path[start:])
                if isinstance(found, jax.ShapeDtypeStruct):
                    return found
        return None

    @property
    def field(self) -> str:
        """The name of the state field that contains the leaf."""
        return key_name(self.key_path[0])


# For each dimension of the leaf, the parameter dimension that it indexes, `None` for none, or `ASK`
# to leave it to the other sources; or a spec of names; or `None` to leave the whole leaf to the
# other sources.
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


def factored_dimensions(leaf: StateLeaf) -> Answer:
    """The rule for Adafactor: rows and columns lack the largest or second largest dimension.

    If these two sizes are equal, their order decides. Changing sizes makes them unequal, so only
    the types inferred by JAX >= 0.10.2 could distinguish them without this rule.
    """
    parameter = leaf.parameter
    if parameter is None or leaf.field not in ("v_row", "v_col", "v"):
        return None
    shape = parameter.shape
    full = leaf.sibling("v")
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
    """The rule for GaLore: the projector `[side, rank]` and the moments in the projected space.

    The rank indexes nothing, even if a small matrix caps it so that it equals a dimension.
    """
    parameter = leaf.parameter
    projector = leaf.sibling("projector")
    if parameter is None or projector is None or len(projector.shape) != 2:
        return None
    if 0 in projector.shape:  # the parameter is not projected
        same = leaf.shape == parameter.shape and leaf.field != "projector"
        return tuple(range(len(leaf.shape))) if same else (None,) * len(leaf.shape)
    side, rank = projector.shape
    other = math.prod(parameter.shape) // side  # the shorter of the two
    long: int | str = ASK
    short: int | str = ASK  # for rank 3 and above, several dimensions may be merged
    if len(parameter.shape) == 2:
        long, short = (0, 1) if parameter.shape[0] >= parameter.shape[1] else (1, 0)
    if leaf.field == "projector":
        return long, None
    if leaf.shape == (rank, other) != (other, rank):
        return None, short
    if leaf.shape == (other, rank) != (rank, other):
        return short, None
    if leaf.shape == (rank, other):  # the rank is capped: the rows are projected if they are longer
        return (short, None) if long == 1 else (None, short)
    return None


def _default_rules() -> Rules:
    rules: dict[type, Rule] = {
        # For equal sizes, only the order of the argsort determines which one is the largest.
        optax.FactoredState: factored_dimensions,
    }
    if (galore_state := vars(contrib).get("GaLoreState")) is not None:  # Optax >= 0.2.7
        # A capped rank has the size of a dimension without indexing it.
        rules[galore_state] = projected_dimensions
    return Rules(rules)


DEFAULT_RULES = _default_rules()
