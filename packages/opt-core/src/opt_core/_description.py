"""What every leaf of an optimizer state means: values to print, compare, hash and write as JSON.

Leaves of two states are the same thing if transformation, number, field, parameter and dimensions
agree. Classes, positions and private functions do not matter.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from flax.core import FrozenDict

from opt_core._json import json_value, read_record, record_data
from opt_core._paths import Names, aligned, path_str
from opt_core.errors import DescriptionError

LeafRole: TypeAlias = Literal[
    "moment",
    "second_moment",
    "accumulator",
    "params_copy",
    "count",
    "schedule_count",
    "key",
    "factored",
    "statistic",
    "other",
]
"""The role of a leaf.

`moment` and `second_moment` are averages or sums of gradients and of their squares; `accumulator`
holds partial results until the end of a window; `params_copy` is in units of the parameters
(averages, earlier values, distances); `count` and `schedule_count` are numbers of steps, the latter
that of a schedule, which would restart with it; `key` is a PRNG key; `factored` keeps some of the
dimensions of its parameter; `statistic` is computed from all the parameters of its transformation,
such as a sum over them or an estimated rate.
"""

Effect: TypeAlias = Literal["nothing", "window", "refused", "initial"]
"""What a change of a setting does to saved state.

`nothing`: the state stays valid. `window`: it stays valid unless a window is open. `refused`: it
would be misread. `initial`: the state stays as the old value made it; the new value has no effect.
"""

Source: TypeAlias = Literal["stated", "derived", "types"]
"""The source of a description.

`stated`: the definition, or a table of known transformations; `derived`: the same, with dimensions
found by tracing `init`; `types`: functions, types and shapes.
"""


class TransformationKey(NamedTuple):
    """A transformation of an optimizer; as text `group/adam#2`.

    Attributes:
      group: the names of the groups around it.
      name: e.g. `'adam'`.
      number: its position among those of the same name, from 1.
    """

    group: Names
    name: str
    number: int

    def __str__(self) -> str:
        name = self.name if self.number == 1 else f"{self.name}#{self.number}"
        return "/".join([*self.group, name])


@dataclasses.dataclass(frozen=True, slots=True)
class LeafDescription:
    """What one leaf of a state means.

    Attributes:
      path: where it is in `param_states`.
      group: the names of the groups around it, outermost first.
      transformation: the name of the transformation that keeps it, e.g. `'adam'`.
      number: its position among transformations of the same name, from 1, in the order in which
        states are made.
      field: the names of the field, e.g. `('mu',)`.
      parameter: the path of the parameter that it follows; `None` if it follows none.
      dimensions: for each of its dimensions that of the parameter, or `None`; a single `None` if
        unknown.
      role: a moment, a copy of parameters, a count of steps, ...
      source: `'stated'` by the definition, `'derived'` if it states all but the dimensions,
        `'types'` if functions, types and shapes are all there is.
    """

    path: Names
    group: Names
    transformation: str
    number: int
    field: Names
    parameter: Names | None
    dimensions: tuple[int | None, ...] | None
    role: LeafRole
    source: Source

    @property
    def kept_by(self) -> TransformationKey:
        """The transformation that keeps it."""
        return TransformationKey(self.group, self.transformation, self.number)


@dataclasses.dataclass(frozen=True)
class Bearing:
    """What a change of one setting does to saved state.

    Attributes:
      effect: see `Effect`.
      count: for a window the field of the state that counts: it is open while that is not 0 (modulo
        `modulo`, if given).
      modulo: the setting by which to divide `count`, if the count is not reset at the end of a
        window.
    """

    effect: Effect
    count: Names = ()
    modulo: str | None = None

    def __post_init__(self) -> None:
        if (self.effect == "window") != bool(self.count):
            raise DescriptionError(
                f"`count`: a setting whose change is {self.effect!r} needs "
                f"{'no field' if self.count else 'the field that counts'}, found {self.count}"
            )


@dataclasses.dataclass(frozen=True)
class TransformationDescription:
    """One transformation of an optimizer.

    Attributes:
      name: e.g. `'adam'`.
      number: its position among those of the same name, from 1, in the order in which states are
        made.
      group: the names of the groups around it.
      settings: the arguments that it was made with, as JSON values.
      bearing: the settings that give the saved state its meaning, with the effect of a change; a
        change of any other has none.
      source: see `Source`.
      passes_on: whether it at most clips updates, averages them over a window or holds them back,
        so that later moments mean the same without it.
      parameters: the paths of the parameters whose state it keeps, if it concatenates some of them.
    """

    name: str
    number: int = 1
    group: Names = ()
    settings: Mapping[str, Any] = dataclasses.field(default_factory=FrozenDict)
    bearing: Mapping[str, Bearing] = dataclasses.field(default_factory=FrozenDict)
    source: Source = "types"
    passes_on: bool = False
    parameters: tuple[Names, ...] | None = None

    @property
    def key(self) -> TransformationKey:
        """Its group, name and number."""
        return TransformationKey(self.group, self.name, self.number)

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", json_value(dict(self.settings), "settings"))
        object.__setattr__(self, "bearing", FrozenDict(self.bearing))

    def effect(self, setting: str) -> Effect:
        """Returns the effect that a change of a setting has on saved state.

        Examples:
          >>> steps = Bearing('window', ('mini_step',))
          >>> window = TransformationDescription('multi_steps', bearing={'every_k_schedule': steps})
          >>> window.effect('every_k_schedule'), window.effect('use_grad_mean')
          ('window', 'nothing')
        """
        bearing = self.bearing.get(setting)
        return "nothing" if bearing is None else bearing.effect


@dataclasses.dataclass(frozen=True)
class StateDescription:
    """What a state means; `str` is a table of 80 columns.

    Attributes:
      leaves: one per leaf, in the order of `jax.tree.leaves(state.param_states)`.
      transformations: in the order in which they act, including stateless ones.

    Examples:
      >>> mu = LeafDescription(
      ...     ('0', 'mu', 'w'), (), 'adam', 1, ('mu',), ('w',), (0, 1), 'moment', 'stated')
      >>> adam = TransformationDescription('adam', settings={'b1': 0.9})
      >>> found = StateDescription((mu,), (adam,))
      >>> print(found)
      transformation  field  parameter  dims  role    source
      adam            mu     w          0,1   moment  stated
      <BLANKLINE>
      adam: b1=0.9
      >>> StateDescription.from_json(found.to_json()) == found
      True
    """

    leaves: tuple[LeafDescription, ...]
    transformations: tuple[TransformationDescription, ...]

    def of(self, leaf: LeafDescription) -> TransformationDescription:
        """Returns the transformation that a leaf belongs to."""
        return self.by_key[leaf.kept_by]

    @functools.cached_property
    def by_key(self) -> Mapping[TransformationKey, TransformationDescription]:
        """The transformations by group, name and number."""
        return {transformation.key: transformation for transformation in self.transformations}

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.leaves, self.transformations))

    def __getstate__(self) -> dict[str, Any]:
        return {"leaves": self.leaves, "transformations": self.transformations}

    def __str__(self) -> str:
        return table(self.leaves, self.transformations)

    def to_data(self) -> dict[str, Any]:
        """Returns the description as JSON data: dicts, lists, strings, numbers and so on."""
        data: dict[str, Any] = record_data(self)
        return data

    @classmethod
    def from_data(cls, data: Any) -> StateDescription:
        """Returns the description that `to_data` was called on.

        Raises:
          DescriptionError: the data are not a description; says where.
        """
        return read_record(cls, data, "description", DescriptionError)

    def to_json(self) -> str:
        """Returns the description as JSON; `from_json` is its exact inverse."""
        return json.dumps(self.to_data(), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> StateDescription:
        """Returns the description that `to_json` was called on.

        Raises:
          DescriptionError: the text is not JSON, or not a description; says where.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise DescriptionError(f"`text` is not JSON: {error}") from None
        return cls.from_data(data)


# The printed table, 80 columns wide.

_COLUMNS = 80
_HEAD = ("transformation", "field", "parameter", "dims", "role", "source")
_PATHS = (0, 1, 2)  # the columns that may be shortened, on the left: names differ on the right


def table(
    leaves: Sequence[LeafDescription], transformations: Sequence[TransformationDescription]
) -> str:
    """Returns a line per leaf, then a line or more per transformation."""
    rows = [_HEAD, *map(_cells, leaves)]
    widths = _widths(rows)
    short = [[_shortened(*pair) for pair in zip(row, widths, strict=True)] for row in rows]
    settings = [line for transformation in transformations for line in _settings(transformation)]
    return "\n".join([*aligned(short, "<<<<<<"), *([""] if settings else []), *settings])


def _cells(leaf: LeafDescription) -> tuple[str, ...]:
    dimensions = "?" if leaf.dimensions is None else ",".join(map(_dim, leaf.dimensions))
    return (
        _name(leaf.group, leaf.transformation, leaf.number),
        path_str(leaf.field) if leaf.field else "",
        "" if leaf.parameter is None else path_str(leaf.parameter),
        dimensions,
        leaf.role,
        leaf.source,
    )


def _dim(dimension: int | None) -> str:
    return "-" if dimension is None else str(dimension)


def _name(group: Sequence[str], name: str, number: int) -> str:
    numbered = name if number == 1 else f"{name}#{number}"
    return path_str((*group, numbered)) if group else numbered


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    free = _COLUMNS - 2 * (len(_HEAD) - 1)
    while sum(widths) > free:
        wide = [i for i in _PATHS if widths[i] > len(_HEAD[i])]
        if not wide:
            break
        widths[max(wide, key=lambda i: widths[i])] -= 1
    return widths


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else "..." + text[len(text) - width + 3 :]


def _settings(of: TransformationDescription) -> Iterator[str]:
    cells = [
        f"{name}={_value(value)}" + (f" ({of.effect(name)})" if name in of.bearing else "")
        for name, value in of.settings.items()
    ]
    if of.parameters is not None:
        cells.append(f"acts on {', '.join(map(path_str, of.parameters)) or 'nothing'}")
    line = f"{_name(of.group, of.name, of.number)}: {', '.join(cells)}".rstrip(": ")
    yield from textwrap.wrap(line, _COLUMNS, subsequent_indent="    ")


def _value(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, default=lambda x: dict(x) if isinstance(x, Mapping) else str(x))
