"""What every leaf of a state means, said by its definition or by types and shapes.

Descriptions are values to print, compare, hash and write as JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import textwrap
import threading
import types
import typing
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict
from jax.sharding import PartitionSpec

from opt_core._closures import (
    attributes,
    closure_vars,
    factory_of,
    origin_of,
    qualified,
    snake_case,
    unwrapped,
)
from opt_core._optimizer import Optimizer, OptimizerDef, OptimizerState
from opt_core._trees import (
    Names,
    aligned,
    children,
    flatten_with_paths,
    named_leaves,
    path_names,
    path_str,
)
from opt_core.errors import DescriptionError, TreeMismatchError

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
        return path_str((*self.group, name))


@dataclasses.dataclass(frozen=True, slots=True)
class LeafDescription:
    """What one leaf of a state means.

    Attributes:
      path: where it is in `param_states`.
      group: the names of the groups around it, outermost first.
      transformation: the name of the transformation that keeps it, e.g. `'adam'`.
      number: its position among transformations of the same name, from 1, in the order in which
        states are created.
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
        created.
      group: the names of the groups around it.
      settings: its arguments, as JSON values.
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
        return next(x for x in self.transformations if x.key == leaf.kept_by)

    def __str__(self) -> str:
        rows = [_HEAD, *map(_cells, self.leaves)]
        widths = _widths(rows)
        short = [[_shortened(*pair) for pair in zip(row, widths, strict=True)] for row in rows]
        settings = [line for each in self.transformations for line in _settings(each)]
        return "\n".join([*aligned(short, "<<<<<<"), *([""] if settings else []), *settings])

    def to_data(self) -> dict[str, Any]:
        """Returns the description as JSON data: dicts, lists, strings, numbers and so on."""
        data: dict[str, Any] = record_data(self)
        return data

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
        return read_record(cls, data, "description", DescriptionError)


# The printed table, 80 columns wide.

_COLUMNS = 80
_HEAD = ("transformation", "field", "parameter", "dims", "role", "source")
_PATHS = (0, 1, 2)  # the columns that may be shortened, on the left: names differ on the right


def _cells(leaf: LeafDescription) -> tuple[str, ...]:
    return (
        str(leaf.kept_by),
        path_str(leaf.field) if leaf.field else "",
        "" if leaf.parameter is None else path_str(leaf.parameter),
        dimensions_text(leaf.dimensions),
        leaf.role,
        leaf.source,
    )


def dimensions_text(dimensions: tuple[int | None, ...] | None) -> str:
    """Returns the parameter dimensions that a leaf keeps as text: `'0,-'`; `'?'` if unknown."""
    if dimensions is None:
        return "?"
    return ",".join("-" if dim is None else str(dim) for dim in dimensions)


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
        f"{name}={setting_text(value)}" + (f" ({of.effect(name)})" if name in of.bearing else "")
        for name, value in of.settings.items()
    ]
    if of.parameters is not None:
        cells.append(f"acts on {', '.join(map(path_str, of.parameters)) or 'nothing'}")
    line = f"{of.key}: {', '.join(cells)}".rstrip(": ")
    yield from textwrap.wrap(line, _COLUMNS, subsequent_indent="    ")


def setting_text(value: Any) -> str:
    """Returns a setting as a short text."""
    text = str(value)
    if isinstance(value, Mapping):
        held = (f"{k}={setting_text(x)}" for k, x in value.items() if k != "function")
        text = f"{value.get('function', '')}({', '.join(held)})"
    elif isinstance(value, tuple):
        text = f"({', '.join(map(setting_text, value))})"
    return text if len(text) <= 60 else f"{text[:57]}..."


# Records and settings as JSON data, and records back, every field checked by its annotation.


_DEPTH = 5
_DIGITS = 16
_LARGE = 2**16
_MANY = 64

_Record = TypeVar("_Record")


def record_data(value: Any) -> Any:
    """Returns a dataclass as JSON data: dicts, lists, strings, numbers, booleans and `None`."""
    if dataclasses.is_dataclass(value):
        return {f.name: record_data(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: record_data(child) for name, child in value.items()}
    return list(map(record_data, value)) if isinstance(value, tuple) else value


def read_record(kind: type[_Record], data: Any, where: str, error: type[ValueError]) -> _Record:
    """Returns the dataclass that `record_data` was called on."""
    if not isinstance(data, Mapping):
        raise error(f"`{where}`: expected a mapping, found {_shown(data)}")
    hints = _hints(typing.cast(Any, kind))
    if unknown := sorted(map(str, data.keys() - hints.keys())):
        raise error(f"`{where}`: expected the fields {sorted(hints)}, found `{unknown[0]:.40}`")
    fields = {
        name: _value(hints[name], data[name], f"{where}/{name}", error)
        for name in hints
        if name in data
    }
    try:
        return kind(**fields)
    except (TypeError, ValueError) as wrong:
        raise error(f"`{where}`: {wrong}") from None


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _value(hint: Any, data: Any, where: str, error: type[ValueError]) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return _frozen(data)
    if origin is typing.Literal:
        if data in args:
            return data
        raise error(f"`{where}`: expected one of {', '.join(args)}, found {_shown(data)}")
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in args:
            return None
        (inner,) = (arg for arg in args if arg is not type(None))
        return _value(inner, data, where, error)
    if origin is tuple and isinstance(data, list | tuple):
        return tuple(_value(args[0], x, f"{where}/{i}", error) for i, x in enumerate(data))
    if origin is Mapping and isinstance(data, Mapping):
        keys = (_value(str, key, where, error) for key in data)
        return {key: _value(args[1], data[key], f"{where}/{key}", error) for key in keys}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return read_record(hint, data, where, error)
    if isinstance(hint, type) and type(data) is hint:
        return data
    names = {tuple: "a list", Mapping: "a mapping", int: "an integer", str: "a string"}
    expected = names.get(origin or hint, str(hint))
    raise error(f"`{where}`: expected {expected}, found {_shown(data)}")


def _frozen(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _frozen(child) for key, child in data.items()}
    return tuple(map(_frozen, data)) if isinstance(data, list) else data


def _shown(data: Any) -> str:
    return f"{data!r:.40}" if isinstance(data, bool | int | float | str) else type(data).__name__


def json_value(value: Any, where: str) -> Any:
    """Returns a value as hashable JSON: mappings are `FrozenDict`s, sequences tuples."""
    # Numbers that JSON lacks become the strings `'nan'`, `'inf'` and `'-inf'`.
    match value:
        case None | bool() | str() | int():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case np.bool_() | np.integer() | np.floating():
            return json_value(value.item(), where)
        case tuple() | list():
            return tuple(json_value(x, f"{where}/{i}") for i, x in enumerate(value))
        case Mapping():
            return FrozenDict({str(k): json_value(x, f"{where}/{k}") for k, x in value.items()})
    raise DescriptionError(f"`{where}`: expected a JSON value, found a {type(value).__name__}")


def json_settings(settings: Any, *, functions: bool = False) -> dict[str, Any]:
    """Returns settings as JSON values, by name."""
    # Numbers, booleans, strings, `None`, dtypes and containers of them are kept, and so are arrays
    # of one number. A function becomes its name, anything else the name of its type in angle
    # brackets.
    if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        settings = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    if not isinstance(settings, Mapping):
        return {}
    return {str(name): _setting(value, functions, 0) for name, value in settings.items()}


def _setting(value: Any, functions: bool, depth: int) -> Any:
    if depth > _DEPTH:
        return f"<{type(value).__name__}>"
    inner = functools.partial(_setting, functions=functions, depth=depth + 1)
    match value:
        case None | bool() | int() | float() | str():
            return value
        case jax.core.Tracer():
            return f"<{type(value).__name__}>"
        case np.dtype():
            return str(value.name)
        case np.generic() | np.ndarray() | jax.Array() if _is_number(value):
            return np.asarray(value).item()
        case np.ndarray() | jax.Array() if functions:
            return _array(value)
        case tuple() | list() | Mapping():
            if len(value) > _MANY:
                inner = functools.partial(inner, functions=False)
            if isinstance(value, Mapping):
                return {str(name): inner(child) for name, child in value.items()}
            return [inner(child) for child in value]
    if isinstance(value, type) and issubclass(value, np.generic):
        return str(np.dtype(value).name)
    is_record = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if is_record and not (functions and callable(value)):
        return inner({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    if functions and (contents := _function(value, depth)) is not None:
        return contents
    dtype = getattr(value, "dtype", None)
    if isinstance(dtype, np.dtype) and callable(value):
        return str(dtype.name)  # `jnp.float32`
    name = getattr(value, "__qualname__", None)
    if not callable(value) or not isinstance(name, str):
        return f"<{type(value).__name__}>"
    return {"function": name} if functions else name


def _function(value: Any, depth: int) -> Any:
    """A function by its factory and what it has captured; `None` for anything else."""
    plain = unwrapped(value)
    if isinstance(plain, types.FunctionType | types.MethodType):
        name, held = factory_of(plain), closure_vars(value)
    elif isinstance(value, functools.partial):
        name, held = _setting(plain, False, 0), closure_vars(value)
    elif isinstance(value, types.BuiltinMethodType):
        name, held = value.__qualname__, {"of": value.__self__}
        if isinstance(value.__self__, types.ModuleType):
            return None
    elif callable(value) and not isinstance(value, type) and (held := attributes(value)):
        name = type(value).__name__
    else:
        return None
    inner = {k: _setting(child, True, depth + 1) for k, child in held.items() if child is not value}
    return {"function": name} | inner


def _is_number(value: Any) -> bool:
    if np.shape(value) != () or not getattr(value, "is_fully_addressable", True):
        return False
    is_real = any(
        jnp.issubdtype(value.dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating)
    )
    return is_real and not (isinstance(value, jax.Array) and value.is_deleted())


def _array(value: Any) -> str:
    kind = f"{value.dtype}{list(value.shape)}"
    if isinstance(value, jax.Array):
        if value.is_deleted() or not value.is_fully_addressable:
            return kind
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
    if value.dtype == object or value.nbytes > _LARGE:
        return kind
    return f"{kind}:{hashlib.sha256(np.asarray(value).tobytes()).hexdigest()[:_DIGITS]}"


# The description of a state: the definition's own, or one by placeholders, types and shapes.

_KEPT = 64  # descriptions; one of 10,000 leaves is a few MB
_cache: OrderedDict[Any, StateDescription] = OrderedDict()
_lock = threading.Lock()


@overload
def describe_state(optimizer: Optimizer, /) -> StateDescription: ...
@overload
def describe_state(
    definition: OptimizerDef, params: Any, state: OptimizerState, /
) -> StateDescription: ...
def describe_state(
    optimizer: Optimizer | OptimizerDef, params: Any = None, state: OptimizerState | None = None, /
) -> StateDescription:
    """Returns what every leaf of a state means.

    A definition describes its own state (`OptimizerDef.describe_state`); by default as far as
    types and shapes allow: see `LeafDescription.source`. The result is
    cached for equal definitions and structures.

    Args:
      optimizer: an optimizer, or a definition followed by `params` and `state`.
      params: the parameters; arrays, tracers or `jax.ShapeDtypeStruct` leaves.
      state: the state that belongs to them; likewise.

    Returns:
      One description per leaf of `state.param_states`, in the order of JAX, and the
      transformations. The step belongs to the contract and is not included.

    Raises:
      DescriptionError: the definition describes a different number of leaves.

    Examples:
      >>> class Momentum(OptimizerDef):
      ...     def init_state(self, params):
      ...         return OptimizerState(0, {'velocity': params, 'seen': jnp.int32(0)})
      >>> print(describe_state(Momentum({'beta': 0.9}).create({'w': jnp.ones((2, 3))})))
      transformation  field     parameter  dims  role    source
      momentum        seen                       count   types
      momentum        velocity  w          0,1   moment  types
      <BLANKLINE>
      momentum: beta=0.9
    """
    if isinstance(optimizer, Optimizer):
        definition, params, state = optimizer.optimizer_def, optimizer.target, optimizer.state
    else:
        definition = optimizer
    if state is None:
        raise TypeError("`state`: pass an optimizer, or a definition, parameters and a state")
    key = _key(definition, params, state)
    with _lock:
        if key is not None and (cached := _cache.get(key)) is not None:
            _cache.move_to_end(key)
            return cached
    description = _describe(definition, params, state)
    if key is not None:
        with _lock:
            _cache[key] = description
            while len(_cache) > _KEPT:
                _cache.popitem(last=False)
    return description


def _key(definition: OptimizerDef, params: Any, state: OptimizerState) -> Any:
    """What the description depends on; `None` if that cannot be compared."""
    leaves, structure = jax.tree.flatten((params, state.param_states))
    key = definition, structure, _avals(leaves)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _avals(leaves: Sequence[Any]) -> tuple[Any, ...]:
    # The properties of an array take five times as long as those of its `aval`.
    avals = [getattr(leaf, "aval", leaf) for leaf in leaves]
    try:
        # Not a tuple per leaf: thousands of new objects set off the garbage collector.
        return tuple([x.shape for x in avals]), tuple([x.dtype for x in avals])
    except AttributeError:  # of a Python number
        kinds = [getattr(x, "dtype", type(x)) for x in avals]
        return tuple([np.shape(x) for x in avals]), tuple(kinds)


def _describe(definition: OptimizerDef, params: Any, state: OptimizerState) -> StateDescription:
    description = definition.describe_state(params, state)
    count = len(jax.tree.leaves(state.param_states))
    if len(description.leaves) != count:
        raise DescriptionError(
            f"`describe_state` of {type(definition).__name__}: expected {count} leaves, one per "
            f"leaf of `state.param_states`, found {len(description.leaves)}"
        )
    return description


def describe_by_types(
    definition: OptimizerDef, params: Any, state: OptimizerState
) -> StateDescription:
    """Returns a description by placeholders, types and shapes alone."""
    origin = origin_of(type(definition))
    outer = qualified(snake_case(type(definition).__name__), origin)
    shapes = {names: np.shape(x) for names, x in named_leaves(params)}
    followed = follow(
        lambda tree: definition.init_state(tree).param_states, params, state.param_states
    )
    leaves = jax.tree.leaves(state.param_states)
    axes = _derived_axes(definition, params, state)
    places: dict[str, list[Names]] = {}
    described = []
    for at, leaf, spec in zip(followed, leaves, axes, strict=True):
        # Records are their definition's, whichever package has their classes.
        depth = at.record
        place = () if depth is None else at.outer[:depth]
        name = outer if depth is None else qualified(snake_case(at.kinds[depth].__name__), origin)
        alike = places.setdefault(name, [])
        if place not in alike:
            alike.append(place)
        shape = None if at.parameter is None else shapes[at.parameter]
        dims = _dimensions(np.shape(leaf), shape, spec)
        described.append(
            LeafDescription(
                path=at.path,
                group=(),
                transformation=name,
                number=alike.index(place) + 1,
                field=at.field[len(place) :],
                parameter=at.parameter,
                dimensions=dims,
                role=role_by_type(leaf, shape, dims),
                source="types",
            )
        )
    records = [
        TransformationDescription(name, number)
        for name, alike in places.items()
        for number in range(1, len(alike) + 1)
        if (name, number) != (outer, 1)
    ]
    settings = json_settings(definition.hyper_params)
    transformations = TransformationDescription(outer, settings=settings), *records
    return StateDescription(tuple(described), transformations)


def role_by_type(
    leaf: Any, param_shape: tuple[int, ...] | None, dims: tuple[int | None, ...] | None
) -> LeafRole:
    """Returns the role of a leaf as far as its type and shape show."""
    dtype, shape = jnp.result_type(leaf), np.shape(leaf)
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return "key"
    if param_shape is None:
        return "count" if jnp.issubdtype(dtype, jnp.integer) and not shape else "other"
    if not jnp.issubdtype(dtype, jnp.inexact):
        return "other"
    if shape == param_shape:
        return "moment"
    has_some = any(d is not None for d in dims) if dims else _embeddings(shape, param_shape)
    return "factored" if 0 < len(shape) < len(param_shape) and has_some else "other"


def _derived_axes(definition: OptimizerDef, params: Any, state: OptimizerState) -> Sequence[Any]:
    """For each leaf the numbers of dimensions that the definition derives as its axes."""
    structure: Any = jax.tree.structure(state.param_states)
    if type(definition).derive_logical_axes is OptimizerDef.derive_logical_axes:
        return [None] * structure.num_leaves
    numbers = jax.tree.map(lambda x: PartitionSpec(*map(str, range(np.ndim(x)))), params)
    derived = definition.derive_logical_axes(Optimizer(definition, state, params), numbers)
    axes: Sequence[Any] = structure.flatten_up_to(derived.state.param_states)
    return axes


def _dimensions(
    shape: tuple[int, ...], param_shape: tuple[int, ...] | None, axes: Any
) -> tuple[int | None, ...] | None:
    """The dimensions that a leaf keeps: as derived, or if its sizes determine them."""
    if param_shape is None:
        return (None,) * len(shape)
    if isinstance(axes, PartitionSpec) and len(axes) == len(shape):
        return tuple(None if axis is None else int(str(axis)) for axis in axes)
    ways = _embeddings(shape, param_shape)
    return ways[0] if len(ways) == 1 else None


def _embeddings(shape: tuple[int, ...], param_shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The ways to find the sizes of a leaf among those of its parameter, in order."""
    ways = itertools.combinations(range(len(param_shape)), len(shape))
    return [dims for dims in ways if tuple(param_shape[dim] for dim in dims) == shape]


# Which parameter each leaf follows.


@functools.partial(jax.tree_util.register_dataclass, data_fields=(), meta_fields=("number",))
@dataclasses.dataclass(frozen=True)
class Placeholder:
    """A node without leaves in the place of a parameter, of which it has the number."""

    number: int


def is_placeholder(node: Any) -> bool:
    """Whether a node is in the place of a parameter."""
    return isinstance(node, Placeholder)


def placeholders(params: Any) -> Any:
    """Returns a tree with the containers of the parameters and a `Placeholder` for each."""
    structure: Any = jax.tree.structure(params)
    return structure.unflatten(map(Placeholder, range(structure.num_leaves)))


def on_placeholders(init: Callable[[Any], Any], tree: Any) -> Any | None:
    """Returns the state that `init` makes of placeholders; `None` if it needs the parameters."""
    try:
        return jax.eval_shape(init, tree)
    except Exception:  # whatever it raises where it expects an array
        return None


def places(
    placed: Any, names: Sequence[Names], at: Names = ()
) -> Iterator[tuple[Names, tuple[Names, Names]]]:
    """Yields the place of each parameter in what `init` returns for placeholders."""
    for path, node in jax.tree_util.tree_leaves_with_path(placed, is_leaf=is_placeholder):
        if is_placeholder(node):
            place, parameter = (*at, *path_names(path)), names[node.number]
            yield place, (parameter, around(place, parameter))


def around(place: Names, parameter: Names) -> Names:
    """Returns a path without the names at its end that are those of a parameter."""
    end = 0
    while end < min(len(place), len(parameter)) and place[-1 - end] == parameter[-1 - end]:
        end += 1
    return place[: len(place) - end]


class StateLeaf(NamedTuple):
    """A leaf of a state, and the parameter that it follows."""

    path: Names  # where it is
    kinds: Sequence[type]  # the types of the nodes above it
    parameter: Names | None  # the path of the parameter that it follows, if any
    outer: Names  # the path down to where the containers of the parameters begin
    inner: Names  # the path below the place of its parameter

    @property
    def field(self) -> Names:
        """Its path without that of the parameter."""
        return (*self.outer, *self.inner)

    @property
    def record(self) -> int | None:
        """The depth of the innermost node outside the parameters that is no plain container."""
        depths = reversed(range(len(self.outer)))
        return next((k for k in depths if not is_plain(self.kinds[k])), None)


def is_plain(kind: type) -> bool:
    """Whether nodes of a class are containers and not records."""
    return kind in (tuple, list, dict) or issubclass(kind, Mapping)


def leaves_of(state: Any, followed: Mapping[Names, tuple[Names, Names]]) -> list[StateLeaf]:
    """Returns the leaves of a state in the order of JAX; `followed` is a dict of `places`."""
    return [_leaf(path, kinds, followed) for path, kinds in _walk(state, (), ())]


def _leaf(
    path: Names, kinds: Sequence[type], followed: Mapping[Names, tuple[Names, Names]]
) -> StateLeaf:
    for end in range(len(path), -1, -1):
        if (at := followed.get(path[:end])) is not None:
            return StateLeaf(path, kinds, *at, path[end:])
    return StateLeaf(path, kinds, None, path, ())


def _walk(
    node: Any, path: Names, kinds: tuple[type, ...]
) -> Iterator[tuple[Names, Sequence[type]]]:
    opened = children(node)
    if opened is None:
        if node is not None:
            yield path, kinds
        return
    for name, child in opened.children:
        yield from _walk(child, (*path, name), (*kinds, type(node)))


def follow(init: Callable[[Any], Any], params: Any, state: Any) -> list[StateLeaf]:
    """Returns the leaves of a state that `init` returned, with the parameters that they follow."""
    names = [path for path, _ in named_leaves(params)]
    placed = on_placeholders(init, placeholders(params))
    return leaves_of(state, dict(places(placed, names)))


# Logical axes.


def axes_of_leaves(paths: Sequence[Names], param_axes: Any) -> list[Any]:
    """Returns the axes of every parameter, in order; lists the paths that are missing or extra."""
    axes = dict(flatten_with_paths(param_axes))
    problems = {
        path_str(names): "expected a `PartitionSpec`, found nothing"
        for names in paths
        if names not in axes
    }
    extra = [names for names, spec in axes.items() if spec is not None and names not in set(paths)]
    problems |= {path_str(names): "expected nothing, found axes" for names in extra}
    if problems:
        raise TreeMismatchError(
            "`param_axes` do not have the paths of the parameters:\n"
            + "\n".join(f"  {path}: {problem}" for path, problem in sorted(problems.items()))
            + "\nGive one `PartitionSpec`, or `None`, for every parameter."
        )
    return [axes[names] for names in paths]


def derive_by_description(optimizer: Optimizer, param_axes: Any) -> tuple[Any, Any]:
    """Returns the axes of the parameters and of `param_states`, in their own containers."""
    paths = [names for names, _ in named_leaves(optimizer.target)]
    axes = axes_of_leaves(paths, param_axes)
    by_path = dict(zip(paths, axes, strict=True))
    kept = [
        None if leaf.parameter is None else _kept(by_path[leaf.parameter], leaf.dimensions)
        for leaf in describe_state(optimizer).leaves
    ]
    trees: list[Any] = [optimizer.target, optimizer.state.param_states]
    target, states = map(jax.tree.structure, trees)
    return jax.tree.unflatten(target, axes), jax.tree.unflatten(states, kept)


def _kept(spec: Any, dimensions: tuple[int | None, ...] | None) -> Any:
    if spec is None or dimensions is None:
        return None
    if dimensions == tuple(range(len(dimensions))) and len(spec) <= len(dimensions):
        return spec  # all of them: as it was written
    names = [None if d is None or d >= len(spec) else spec[d] for d in dimensions]
    return PartitionSpec(*names) if any(names) else None
