"""What the state of an Optax transformation means: names, parameters, dimensions, roles."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from opt_core import Bearing, LeafDescription, StateDescription, TransformationDescription
from opt_core.extend import StateLeaf, flatten_with_paths, leaves_of, origin_of, path_str, qualified

from opt_optax_bridge._description.known import KNOWN, PASS_ON, VARIANTS, Known
from opt_optax_bridge._description.makers import find_states
from opt_optax_bridge._description.nodes import (
    Names,
    Node,
    open_transformation,
    transformation_name,
)
from opt_optax_bridge._description.settings import UPDATED_BY, settings_of
from opt_optax_bridge._description.tracing import (
    Dims,
    Shape,
    explained,
    stated_dimensions,
    traced_places,
)

if TYPE_CHECKING:
    from opt_partition import Row  # the import takes 0.1 s

Source: TypeAlias = Literal["stated", "derived", "types"]
Numbered: TypeAlias = tuple[Names, str, int]
"""The group, the name and the number of a transformation."""

_PLAIN = (tuple, list, dict)
_PARTITION_STATES = frozenset({"PartitionState", "MultiTransformState"})
_WHOLE = "optax_wrapper"
_IN_UNITS = frozenset({"moment", "second_moment", "factored"})


class _Slot(NamedTuple):
    """A leaf of a state, and the transformation that it belongs to.

    Attributes:
      at: where it is, and which parameter it follows.
      leaf: its shape and dtype.
      place: the path of the state that the transformation made.
      group: the labels of `optax.partition` around it.
      name: the name of the transformation.
      node: the transformation itself, if known.
    """

    at: StateLeaf
    leaf: jax.ShapeDtypeStruct
    place: Names
    group: Names
    name: str
    node: Node | None

    @property
    def is_named(self) -> bool:
        """Whether the transformation is known by its function, not by the class of its state."""
        return self.node is not None and bool(self.node.name)

    @property
    def key(self) -> Any:
        """The same for leaves of one transformation."""
        return id(self.node) if self.is_named else (self.group, self.name, self.place)

    @property
    def field(self) -> Names:
        """The path of the leaf within the state of its transformation."""
        return self.at.field[len(self.place) :]


def describe_optax(tx: Any, params: Any, param_states: Any) -> StateDescription:
    """Returns what every leaf of a state means, and the transformations that keep them.

    Args:
      tx: the transformation.
      params: the parameters; arrays, tracers or `jax.ShapeDtypeStruct`s.
      param_states: the state that belongs to them; likewise.
    """
    params, state = (jax.tree.map(_abstract, tree) for tree in (params, param_states))
    shapes = {path: leaf.shape for path, leaf in flatten_with_paths(params) if leaf is not None}
    root = open_transformation(tx)
    states = find_states(root, params, state)
    leaves = jax.tree.leaves(state)
    explain = functools.cache(functools.partial(explained, tx, params, leaves))

    def slots_of(followed: Mapping[Names, tuple[Names, Names]]) -> list[_Slot]:
        pairs = zip(leaves_of(state, followed), leaves, strict=True)
        return [_slot(at, leaf, states.nodes) for at, leaf in pairs]

    slots = slots_of(states.followed)
    unclear = {i for i, slot in enumerate(slots) if _is_unclear(slot, states.opaque)}
    if unclear and (rows := explain()) is not None:
        placed = [(slot.at, len(slot.place)) for slot in slots]
        slots = slots_of(states.followed | traced_places(placed, unclear, rows, list(shapes)))
    for slot in slots:
        if slot.node is not None and not slot.node.declared:
            slot.node.declared = _declared(_kind(slot))
    numbers = _numbered(root, slots)
    described = tuple(_described_leaves(root, slots, numbers, shapes, explain))
    parameters = _concatenated(described, numbers, states.shown, len(shapes))
    transformations = (
        dataclasses.replace(x, parameters=parameters.get((x.group, x.name, x.number)))
        for x in _transformations(root, slots, numbers)
    )
    return StateDescription(described, tuple(transformations))


def _concatenated(
    described: Sequence[LeafDescription],
    numbers: Mapping[Any, Numbered],
    shown: Mapping[int, Sequence[Names]],
    count: int,
) -> dict[Numbered, tuple[Names, ...]]:
    """The parameters of transformations whose arrays do not say them, if these are not all."""
    arrays = {(x.group, x.transformation, x.number) for x in described if x.dimensions}
    arrays -= {(x.group, x.transformation, x.number) for x in described if x.parameter is not None}
    return {
        numbers[key]: tuple(paths)
        for key, paths in shown.items()
        if numbers.get(key) in arrays and len(paths) < count
    }


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return jax.ShapeDtypeStruct(np.shape(leaf), dtype)


def _slot(at: StateLeaf, leaf: jax.ShapeDtypeStruct, nodes: Mapping[Names, Node]) -> _Slot:
    """The innermost state made by a named transformation, or else the innermost record."""
    outer = at.outer
    above = [outer[:k] for k in range(len(outer), -1, -1)]
    for place in above:
        node = nodes.get(place)
        if node is not None and node.name:
            return _Slot(at, leaf, place, node.group, node.name, node)
    node = next((nodes[place] for place in above if place in nodes), None)
    for k in range(len(outer) - 1, -1, -1):
        kind = at.kinds[k]
        if kind not in _PLAIN and not issubclass(kind, Mapping):
            maker = kind if node is None else node.tx.init
            name = qualified(transformation_name(kind.__name__), origin_of(maker))
            return _Slot(at, leaf, outer[:k], _labels(at, k), name, node)
    return _Slot(at, leaf, (), (), _WHOLE, node)


def _labels(at: StateLeaf, depth: int) -> Names:
    """The groups of `optax.partition` around a place, by the path to it."""
    return tuple(
        at.path[k + 1]
        for k in range(depth - 1)
        if at.kinds[k].__name__ in _PARTITION_STATES and at.path[k] == "inner_states"
    )


def _kind(slot: _Slot) -> type | None:
    """The class of the state that a leaf is in; `None` if that is the leaf."""
    depth = len(slot.place)
    return slot.at.kinds[depth] if depth < len(slot.at.outer) else None


def _is_unclear(slot: _Slot, opaque: Sequence[Names]) -> bool:
    """Whether an array may follow a parameter although no placeholder came through to it."""
    if slot.at.parameter is not None or not slot.leaf.shape:
        return False
    return _known(slot.node) is None or any(slot.place[: len(at)] == at for at in opaque)


def _numbered(root: Node, slots: Sequence[_Slot]) -> dict[Any, Numbered]:
    """The names of all transformations, by `_Slot.key`, numbered as states are made."""
    named = (x for x in root.made_in_order() if not x.is_container and x.name)
    keys = [(id(node), node.group, _base(node)) for node in named]
    keys += [(slot.key, slot.group, slot.name) for slot in slots]
    counts: Counter[tuple[Names, str]] = Counter()
    numbers: dict[Any, Numbered] = {}
    for key, group, name in keys:
        if key not in numbers:
            counts[group, name] += 1
            numbers[key] = group, name, counts[group, name]
    return numbers


def _transformations(
    root: Node, slots: Sequence[_Slot], numbers: Mapping[Any, Numbered]
) -> Iterator[TransformationDescription]:
    """Yields them in the order in which they act, those known only by type last."""
    for node in root.walk():
        if id(node) in numbers:
            yield _described(node, numbers[id(node)])
    described: set[int] = set()
    for key, maker in {slot.key: slot.node for slot in slots if not slot.is_named}.items():
        if maker is None or id(maker) in described:
            group, name, number = numbers[key]
            yield TransformationDescription(name, number, group)
        else:
            # The record has no name of its own; its settings are those of the transformation.
            described.add(id(maker))
            yield _described(maker, numbers[key])


def _described(node: Node, numbered: Numbered) -> TransformationDescription:
    settings = settings_of(node)
    if node.is_own:
        switches = {v: v == node.name for v, of in VARIANTS.items() if node.name in (v, of)}
        settings = switches | settings
    known = _known(node)
    is_definition = (node.package, node.factory) == ("opt_optax_bridge", "as_transformation")
    bearing = {} if known is None else {k: v for k, v in known.bearing.items() if k in settings}
    if UPDATED_BY in settings:
        bearing[UPDATED_BY] = Bearing("refused")
    if is_definition and str(settings.get("definition", "")).startswith("<"):
        bearing["definition"] = Bearing("refused")  # nothing else says what it keeps
    source: Source = "types" if known is None else "stated"
    group, name, number = numbered
    is_listed = node.is_own and node.name in PASS_ON
    passes_on = is_definition or is_listed or bool(node.declared.get("passes_on"))
    return TransformationDescription(name, number, group, settings, bearing, source, passes_on)


def _base(node: Node) -> str:
    """The name of a transformation; that of the base for a variant (`amsgrad` is `adam`)."""
    return VARIANTS.get(node.name, node.name) if node.is_own else node.name


def _known(node: Node | None) -> Known | None:
    if node is None:
        return None
    if node.declared:
        bearing = {name: Bearing(**made) for name, made in node.declared.get("bearing", {}).items()}
        return Known(node.declared.get("roles", {}), bearing)
    return KNOWN.get(node.name) if node.is_own else None


def _declared(kind: type | None) -> Mapping[str, Any]:
    """The description that the class of a state gives of its fields."""
    describe = getattr(kind, "describe_fields", None)
    return dict(describe()) if callable(describe) else {}


def _described_leaves(
    root: Node,
    slots: Sequence[_Slot],
    numbers: Mapping[Any, Numbered],
    shapes: Mapping[Names, Shape],
    explain: Callable[[], Sequence[Row] | None],
) -> Iterator[LeafDescription]:
    """Describes leaves; `init` is traced only if the dimensions of some are not stated."""
    reshapes = any(known.reshapes for node in root.walk() if (known := _known(node)) is not None)
    stated = [None if reshapes else _stated(slot, shapes) for slot in slots]
    rows: Sequence[Row | None] | None = None
    if any(s.at.parameter is not None and d is None for s, d in zip(slots, stated, strict=True)):
        rows = explain()
    for slot, dims, row in zip(slots, stated, rows or [None] * len(slots), strict=True):
        parameter, is_derived = slot.at.parameter, False
        if parameter is None:
            dims = (None,) * len(slot.leaf.shape)
        elif dims is None and row is not None and row.parameter in (None, path_str(parameter)):
            dims, is_derived = row.dims, True
        known, (group, name, number) = _known(slot.node), numbers[slot.key]
        said = None if known is None else _said(slot, known, dims)
        shape = None if parameter is None else shapes[parameter]
        source: Source = "types" if said is None else "derived" if is_derived else "stated"
        yield LeafDescription(
            path=slot.at.path,
            group=group,
            transformation=name,
            number=number,
            field=slot.field,
            parameter=parameter,
            dimensions=dims,
            role=_role(slot.leaf, shape, dims) if said is None else said,
            source=source,
        )


def _stated(slot: _Slot, shapes: Mapping[Names, Shape]) -> Dims | None:
    """The dimensions of a leaf of a known transformation."""
    if slot.at.parameter is None or slot.node is None or _known(slot.node) is None:
        return None
    return stated_dimensions(slot.node, slot.field, slot.leaf.shape, shapes[slot.at.parameter])


def _said(slot: _Slot, known: Known, dims: Dims | None) -> Any:
    """The role in the table; a schedule's own state is a count, a placeholder is `'other'`."""
    field = slot.field
    role = known.roles.get(field[0]) if field else None
    if role == "other" and field[0] == "hyperparams_states" and field[-1] == "count":
        return "schedule_count"
    is_filler = slot.name == "factored_rms" and dims == (None,)
    return "other" if is_filler else role


def _role(leaf: jax.ShapeDtypeStruct, param_shape: Shape | None, dims: Dims | None) -> Any:
    """The role of a leaf as far as its type and shape tell."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return "key"
    if param_shape is None:
        is_count = jnp.issubdtype(leaf.dtype, jnp.integer) and not leaf.shape
        return "count" if is_count else "other"
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return "other"
    if leaf.shape == param_shape:
        return "moment"
    kept = [dim for dim in dims or () if dim is not None]
    return "factored" if kept and len(leaf.shape) < len(param_shape) else "other"
