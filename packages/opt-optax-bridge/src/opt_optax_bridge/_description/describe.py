"""What the state of an Optax transformation means: names, parameters, dimensions, roles."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from opt_core import (
    Bearing,
    LeafDescription,
    Role,
    StateDescription,
    TransformationDescription,
    flatten_with_paths,
    roles,
)
from opt_core.closures import origin_of, qualified

from opt_optax_bridge._description.dimensions import (
    Dimensions,
    Dims,
    Shape,
    dimensions,
    explained,
    followed,
    shapes_of,
    stated_dimensions,
)
from opt_optax_bridge._description.known import FACTORS, KNOWN, PASS_ON, VARIANTS, Known
from opt_optax_bridge._description.made import make
from opt_optax_bridge._description.nodes import (
    Names,
    Node,
    before,
    open_transformation,
    transformation_name,
)
from opt_optax_bridge._description.settings import UPDATED_BY, settings_of

Source: TypeAlias = Literal["stated", "derived", "types"]

_PLAIN = (tuple, list, dict)
_PARTITION_STATES = frozenset({"PartitionState", "MultiTransformState"})
_WHOLE = "optax_wrapper"
_IN_UNITS = frozenset({"moment", "second_moment", "factored"})


class _Slot(NamedTuple):
    """The transformation that a leaf belongs to.

    Attributes:
      place: the path of the state that it made.
      group: the labels of `optax.partition` around it.
      name: its name.
      field: the path of the leaf within its state.
      node: the transformation itself, if known.
      kind: the class of its state; `None` if the state is a single leaf.
    """

    place: Names
    group: Names
    name: str
    field: Names
    node: Node | None
    kind: type | None = None


def describe_optax(tx: Any, params: Any, param_states: Any) -> StateDescription:
    """Returns what every leaf of a state means, and the transformations that keep them.

    Args:
      tx: the transformation.
      params: the parameters; arrays, tracers or `jax.ShapeDtypeStruct`s.
      param_states: the state that belongs to them; likewise.
    """
    params, states = (jax.tree.map(_abstract, tree) for tree in (params, param_states))
    root = open_transformation(tx)
    made = make(root, params)
    given = roles(params, states, whole_tree=True)
    slots = [_slot(role, made.places) for role in given]
    for slot in slots:
        if slot.node is not None and not slot.node.declared:
            slot.node.declared = _declared(slot.kind)
    leaves, shapes = jax.tree.leaves(states), shapes_of(params)
    shown = functools.cache(functools.partial(explained, tx, params, leaves))
    # In a user's own state, arrays outside a tree of parameters may be a list, one per parameter.
    listed = {
        i: len(slot.place)
        for i, (role, leaf, slot) in enumerate(zip(given, leaves, slots, strict=True))
        if role.param is None and leaf.shape and _known(slot.node) is None
    }
    if listed and (seen := shown()) is not None:
        given = followed(given, seen, listed, list(shapes))
        slots = [_slot(role, made.places) for role in given]
    names = _Names(root, made.nodes, slots)
    rows = list(zip(given, leaves, slots, strict=True))
    reshapes = any(known.reshapes for node in root.walk() if (known := _known(node)) is not None)
    stated = [None if reshapes else _stated(*row, shapes) for row in rows]
    dims = dimensions(leaves, given, stated, shown)
    paths = [path for path, leaf in flatten_with_paths(states) if leaf is not None]
    described = tuple(
        _leaf(_Row(path, leaf, role, slot, kept), names, shapes)
        for path, (role, leaf, slot), kept in zip(paths, rows, dims, strict=True)
    )
    kept = list(zip(slots, described, strict=True))
    keepers = {id(slot.node) for slot, leaf in kept if leaf.role in _IN_UNITS}
    earlier = {id(one): one for one, other in before(root) if id(other) in keepers}
    factors = {key for key, one in earlier.items() if _factor(one)}
    given_to = dict(_given(root, jax.tree.structure(params)))
    acting = {key: _paths(given_to[key]) for key in _unsaid(root, kept, earlier)}
    acting = {key: some for key, some in acting.items() if shapes.keys() > {*some}}
    return StateDescription(described, tuple(names.transformations(factors, acting)))


def _unsaid(
    root: Node, kept: Sequence[tuple[_Slot, LeafDescription]], earlier: Collection[int]
) -> set[int]:
    """The transformations whose parameters matter but cannot be read off their leaves.

    These act, or may act, before moments, or concatenate parameters as `optax.flatten` does.
    """
    users = (node for node in root.walk() if not node.is_own and len(node.children) > 1)
    composed = {id(inner) for node in users for inner in node.walk()}
    ordered = {id(slot.node) for slot, leaf in kept if slot.node is not None and leaf.dimensions}
    following = {id(slot.node) for slot, leaf in kept if leaf.parameter is not None}
    return {*earlier, *composed, *ordered} - following


def _given(node: Node, outer: Any, is_flat: bool = False) -> Iterator[tuple[int, Any]]:
    """The structure of the parameters that each transformation acts on.

    Inside of `optax.flatten` a transformation is given one vector of all of them.
    """
    given = outer if is_flat or node.given is None else node.given
    yield id(node), given
    known = _known(node)
    is_flat |= known is not None and known.reshapes
    for child in node.children:
        yield from _given(child, given, is_flat)


def _paths(structure: Any) -> tuple[Names, ...]:
    places = jax.tree.unflatten(structure, range(structure.num_leaves))
    return tuple(path for path, place in flatten_with_paths(places) if place is not None)


class _Row(NamedTuple):
    """One leaf, with everything known about it."""

    path: Names
    leaf: jax.ShapeDtypeStruct
    role: Role
    slot: _Slot
    dims: Dimensions


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return jax.ShapeDtypeStruct(np.shape(leaf), dtype)


def _slot(role: Role, places: Mapping[Names, Node]) -> _Slot:
    """The innermost state made by a named transformation, or else the innermost record."""
    outer = role.outer
    names = tuple(name for _, name in outer)
    inner = tuple(name for _, name in role.inner)
    above = [names[:k] for k in range(len(outer), -1, -1)]
    for place in above:
        node = places.get(place)
        if node is not None and node.name:
            field = (*names[len(place) :], *inner)
            kind = outer[len(place)][0] if len(place) < len(outer) else None
            return _Slot(place, node.group, node.name, field, node, kind)
    node = next((places[place] for place in above if place in places), None)
    for k in range(len(outer) - 1, -1, -1):
        kind = outer[k][0]
        if kind not in _PLAIN and not issubclass(kind, Mapping):
            maker = kind if node is None else node.tx.init
            name = qualified(transformation_name(kind.__name__), origin_of(maker))
            return _Slot(names[:k], _labels(role, k), name, (*names[k:], *inner), node, kind)
    return _Slot((), (), _WHOLE, (*names, *inner), node)


def _labels(role: Role, depth: int) -> Names:
    """The groups of `optax.partition` around a place, by the path to it."""
    names = [name for _, name in role.outer]
    return tuple(
        names[k + 1]
        for k, (kind, name) in enumerate(role.outer[:depth])
        if kind.__name__ in _PARTITION_STATES and name == "inner_states" and k + 1 < depth
    )


class _Names:
    """The names and numbers of all transformations.

    Args:
      root: the transformation with everything nested in it.
      nodes: the transformations that made a state, in order.
      slots: one per leaf, in order.
    """

    def __init__(
        self,
        root: Node,
        nodes: Sequence[Node],
        slots: Sequence[_Slot],
    ) -> None:
        self._root = root
        self._numbers: dict[Any, tuple[Names, str, int]] = {}
        self._counts: dict[tuple[Names, str], int] = {}
        self._by_type: dict[tuple[Names, str, Names], Node | None] = {}
        kept = [node for node in (*nodes, *root.walk()) if not node.is_container and node.name]
        for node in kept:
            self._number(id(node), node.group, _base(node))
        for slot in slots:
            if slot.node is None or id(slot.node) not in self._numbers:
                self._by_type.setdefault((slot.group, slot.name, slot.place), slot.node)
        for key in self._by_type:
            self._number(key, key[0], key[1])

    def _number(self, key: Any, group: Names, name: str) -> None:
        if key in self._numbers:
            return
        count = self._counts[group, name] = self._counts.get((group, name), 0) + 1
        self._numbers[key] = group, name, count

    def of(self, slot: _Slot) -> tuple[Names, str, int]:
        """Returns the group, the name and the number of the transformation of a leaf."""
        if slot.node is not None and id(slot.node) in self._numbers:
            return self._numbers[id(slot.node)]
        return self._numbers[slot.group, slot.name, slot.place]

    def transformations(
        self, factors: Collection[int], acting: Mapping[int, tuple[Names, ...]]
    ) -> Iterator[TransformationDescription]:
        """Yields them in the order in which they act, those known only by type last.

        Args:
          factors: the identities of those that scale updates before moments.
          acting: by identity, the parameters of those that act on a subset that leaves do not show.
        """
        for node in self._root.walk():
            if id(node) in self._numbers:
                made = _described(node, self._numbers[id(node)])
                made = dataclasses.replace(made, parameters=acting.get(id(node)))
                if id(node) in factors:
                    bearing = {**made.bearing, _factor(node): Bearing("refused")}
                    made = dataclasses.replace(made, bearing=bearing)
                yield made
        yielded: set[int] = set()
        for key, maker in self._by_type.items():
            if maker is None or id(maker) in yielded:
                group, name, number = self._numbers[key]
                yield TransformationDescription(name, number, group)
                continue
            # The record has no name of its own; its settings are those of the transformation.
            yielded.add(id(maker))
            yield _described(maker, self._numbers[key])


def _described(node: Node, name: tuple[Names, str, int]) -> TransformationDescription:
    settings = settings_of(node)
    if node.is_own:
        switches = {v: v == node.name for v, of in VARIANTS.items() if node.name in (v, of)}
        settings = switches | settings
    known = _known(node)
    bearing = {} if known is None else {k: v for k, v in known.bearing.items() if k in settings}
    if UPDATED_BY in settings:
        bearing[UPDATED_BY] = Bearing("refused")
    source: Source = "types" if known is None else "stated"
    group, own, number = name
    is_definition = (node.package, node.factory) == ("opt_optax_bridge", "as_transformation")
    passes_on = is_definition or (node.is_own and node.name in PASS_ON)
    return TransformationDescription(own, number, group, settings, bearing, source, passes_on)


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


def _factor(node: Node) -> str:
    """The setting that scales updates; empty if there is none."""
    return FACTORS.get(node.name, "") if node.is_own else ""


def _declared(kind: type | None) -> Mapping[str, Any]:
    """The description that the class of a state gives of its fields."""
    describe = getattr(kind, "describe_fields", None)
    return dict(describe()) if callable(describe) else {}


def _stated(
    role: Role, leaf: jax.ShapeDtypeStruct, slot: _Slot, shapes: Mapping[Names, Shape]
) -> Dims | None:
    """The dimensions of a leaf of a known transformation."""
    if role.param is None or slot.node is None or _known(slot.node) is None:
        return None
    return stated_dimensions(slot.node, slot.field, leaf.shape, shapes[role.param])


def _leaf(row: _Row, names: _Names, shapes: Mapping[Names, Shape]) -> LeafDescription:
    group, name, number = names.of(row.slot)
    known = _known(row.slot.node)
    param = row.role.param
    role = _role(row, None if param is None else shapes[param])
    source: Source = "types"
    if known is not None and (said := _said(row, known)) is not None:
        role = said
        source = "derived" if row.dims.is_derived else "stated"
    return LeafDescription(
        path=row.path,
        group=group,
        transformation=name,
        number=number,
        field=row.slot.field,
        parameter=row.role.param,
        dimensions=row.dims.dims,
        role=role,
        source=source,
    )


def _said(row: _Row, known: Known) -> Any:
    """The role in the table; a schedule's own state is a count, a placeholder is `'other'`."""
    field = row.slot.field
    role = known.roles.get(field[0]) if field else None
    if role == "other" and field[0] == "hyperparams_states" and field[-1] == "count":
        return "schedule_count"
    is_filler = row.slot.name == "factored_rms" and row.dims.dims == (None,)
    return "other" if is_filler else role


def _role(row: _Row, param_shape: Shape | None) -> Any:
    """The role of a leaf as far as its type and shape tell."""
    dtype, shape = row.leaf.dtype, row.leaf.shape
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return "key"
    if param_shape is None:
        return "count" if jnp.issubdtype(dtype, jnp.integer) and not shape else "other"
    if not jnp.issubdtype(dtype, jnp.inexact):
        return "other"
    if shape == param_shape:
        return "moment"
    kept = [dim for dim in row.dims.dims or () if dim is not None]
    return "factored" if kept and len(shape) < len(param_shape) else "other"
