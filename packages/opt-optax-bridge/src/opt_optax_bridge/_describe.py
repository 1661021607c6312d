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
from jax.sharding import PartitionSpec
from opt_core import Bearing, LeafDescription, StateDescription, TransformationDescription
from opt_core.extend import (
    Names,
    StateLeaf,
    TransformationKey,
    leaves_of,
    named_leaves,
    origin_of,
    path_str,
    qualified,
    role_by_type,
)

from opt_optax_bridge._known import (
    KNOWN,
    PASS_ON,
    VARIANTS,
    Dims,
    Known,
    Shape,
)
from opt_optax_bridge._nodes import (
    UPDATED_BY,
    Node,
    open_transformation,
    settings_of,
    transformation_name,
)
from opt_optax_bridge._states import States, traced_places

if TYPE_CHECKING:
    from opt_partition import Row  # the import takes 0.1 s

Source: TypeAlias = Literal["stated", "derived", "types"]

_WHOLE = "optax_wrapper"


class _Slot(NamedTuple):
    """A leaf of a state, and the transformation that it belongs to."""

    at: StateLeaf  # where it is, and which parameter it follows
    leaf: jax.ShapeDtypeStruct  # its shape and dtype
    place: Names  # the path of the state that the transformation made
    group: Names  # the labels of `optax.partition` around it.
    name: str  # the name of the transformation
    node: Node | None  # the transformation itself, if known

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
    """Returns what every leaf of a state means, and the transformations that keep them."""
    params, state = (jax.tree.map(_abstract, tree) for tree in (params, param_states))
    shapes = {path: leaf.shape for path, leaf in named_leaves(params)}
    root = open_transformation(tx)
    states = States(root, params, state)
    leaves = jax.tree.leaves(state)
    explain = functools.cache(functools.partial(_explained, tx, params, leaves))

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
    keepers = {id(slot.node) for slot in slots}
    for node in root.walk():
        # One whose `init` is a lambda around another's keeps nothing, and is named by its update.
        node.is_stateless |= id(node) not in keepers
    numbers = _numbered(root, slots)
    described = tuple(_described_leaves(root, slots, numbers, shapes, explain))
    parameters = _concatenated(described, numbers, states.shown, len(shapes))
    transformations = (
        dataclasses.replace(x, parameters=parameters.get(x.key))
        for x in _transformations(root, slots, numbers)
    )
    return StateDescription(described, tuple(transformations))


def _concatenated(
    described: Sequence[LeafDescription],
    numbers: Mapping[Any, TransformationKey],
    shown: Mapping[int, Sequence[Names]],
    count: int,
) -> dict[TransformationKey, tuple[Names, ...]]:
    """The parameters of transformations whose arrays do not say them, if these are not all."""
    arrays = {leaf.kept_by for leaf in described if leaf.dimensions}
    arrays -= {leaf.kept_by for leaf in described if leaf.parameter is not None}
    return {
        numbers[key]: tuple(paths)
        for key, paths in shown.items()
        if numbers.get(key) in arrays and len(paths) < count
    }


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return jax.ShapeDtypeStruct(np.shape(leaf), dtype)


def _explained(tx: Any, params: Any, leaves: Sequence[Any]) -> Sequence[Row] | None:
    """The provenance of leaves in `init`; `None` if the state has grown since."""
    from opt_partition import explain

    numbers = jax.tree.map(lambda leaf: PartitionSpec(*map(str, range(len(leaf.shape)))), params)
    rows = explain(tx, params, numbers).rows
    return rows if [row.shape for row in rows] == [leaf.shape for leaf in leaves] else None


def _slot(at: StateLeaf, leaf: jax.ShapeDtypeStruct, nodes: Mapping[Names, Node]) -> _Slot:
    """The innermost state made by a named transformation, or else the innermost record."""
    above = [at.outer[:k] for k in range(len(at.outer), -1, -1)]
    enclosing = [(place, nodes[place]) for place in above if place in nodes]
    for place, named in enclosing:
        if named.name:
            return _Slot(at, leaf, place, named.group, named.name, named)
    node = enclosing[0][1] if enclosing else None
    if (depth := at.record) is None:
        return _Slot(at, leaf, (), (), _WHOLE, node)
    kind = at.kinds[depth]
    origin = origin_of(kind if node is None else node.tx.init)
    name = qualified(transformation_name(kind.__name__), origin)
    return _Slot(at, leaf, at.outer[:depth], () if node is None else node.group, name, node)


def _kind(slot: _Slot) -> type | None:
    """The class of the state that a leaf is in; `None` if that is the leaf."""
    depth = len(slot.place)
    return slot.at.kinds[depth] if depth < len(slot.at.outer) else None


def _is_unclear(slot: _Slot, opaque: Sequence[Names]) -> bool:
    """Whether an array may follow a parameter although no placeholder came through to it."""
    if slot.at.parameter is not None or not slot.leaf.shape:
        return False
    return _known(slot.node) is None or any(slot.place[: len(at)] == at for at in opaque)


def _numbered(root: Node, slots: Sequence[_Slot]) -> dict[Any, TransformationKey]:
    """The names of all transformations, by `_Slot.key`, numbered as states are made."""
    named = (x for x in root.made_in_order() if not x.is_container and x.name)
    keys = [(id(node), node.group, _base(node)) for node in named]
    keys += [(slot.key, slot.group, slot.name) for slot in slots]
    counts: Counter[tuple[Names, str]] = Counter()
    numbers: dict[Any, TransformationKey] = {}
    for key, group, name in keys:
        if key not in numbers:
            counts[group, name] += 1
            numbers[key] = TransformationKey(group, name, counts[group, name])
    return numbers


def _transformations(
    root: Node, slots: Sequence[_Slot], numbers: Mapping[Any, TransformationKey]
) -> Iterator[TransformationDescription]:
    """Yields them in the order in which they act, those known only by type last."""
    for node in root.walk():
        if id(node) in numbers:
            yield _described(node, numbers[id(node)])
    described: set[int] = set()
    for slot_key, maker in {slot.key: slot.node for slot in slots if not slot.is_named}.items():
        key = numbers[slot_key]
        if maker is None or id(maker) in described:
            yield TransformationDescription(key.name, key.number, key.group)
        else:
            # The record has no name of its own; its settings are those of the transformation.
            described.add(id(maker))
            yield _described(maker, key)


def _described(node: Node, key: TransformationKey) -> TransformationDescription:
    settings = settings_of(node)
    if node.is_optax:
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
    is_listed = node.is_optax and node.name in PASS_ON
    passes_on = is_definition or is_listed or bool(node.declared.get("passes_on"))
    return TransformationDescription(
        key.name, key.number, key.group, settings, bearing, source, passes_on
    )


def _base(node: Node) -> str:
    """The name of a transformation; that of the base for a variant (`amsgrad` is `adam`)."""
    return VARIANTS.get(node.name, node.name) if node.is_optax else node.name


def _known(node: Node | None) -> Known | None:
    if node is None:
        return None
    if node.declared:
        declared = node.declared.get("bearing", {})
        bearing = {name: Bearing(**effect) for name, effect in declared.items()}
        return Known(node.declared.get("roles", {}), bearing)
    return KNOWN.get(node.name) if node.is_optax else None


def _declared(kind: type | None) -> Mapping[str, Any]:
    """The description that the class of a state gives of its fields."""
    describe = getattr(kind, "describe_fields", None)
    return dict(describe()) if callable(describe) else {}


def _described_leaves(
    root: Node,
    slots: Sequence[_Slot],
    numbers: Mapping[Any, TransformationKey],
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
        known, key = _known(slot.node), numbers[slot.key]
        said = None if known is None else _said(slot, known, dims)
        shape = None if parameter is None else shapes[parameter]
        source: Source = "types" if said is None else "derived" if is_derived else "stated"
        yield LeafDescription(
            path=slot.at.path,
            group=key.group,
            transformation=key.name,
            number=key.number,
            field=slot.field,
            parameter=parameter,
            dimensions=dims,
            role=role_by_type(slot.leaf, shape, dims) if said is None else said,
            source=source,
        )


def _stated(slot: _Slot, shapes: Mapping[Names, Shape]) -> Dims | None:
    """The dimensions that a leaf of a known transformation keeps; `None` if not stated."""
    # Assumes that enclosing transformations do not reshape parameters.
    if slot.at.parameter is None or slot.node is None or _known(slot.node) is None:
        return None
    shape, param_shape, field = slot.leaf.shape, shapes[slot.at.parameter], slot.field
    match slot.node.name, field[0] if field else "":
        case "factored_rms", ("v_row" | "v_col" | "v") as statistic:
            averaged = _averaged(slot.node.held, param_shape)
            if (statistic == "v") == bool(averaged):
                return (None,) * len(shape)  # a placeholder
            return tuple(i for i in range(len(param_shape)) if i != averaged.get(statistic))
        case "sm3", "mu":
            return (int(field[-1]),)  # one vector per dimension
        case "lbfgs", "diff_params_memory" | "diff_updates_memory":
            return None, *range(len(param_shape))
        case "distance_over_gradients", "grad_sum_of_squares":
            return (None,)
    return tuple(range(len(shape))) if shape in (param_shape, ()) else None


def _averaged(settings: Mapping[str, Any], param_shape: Shape) -> dict[str, int]:
    """The dimension over which each factor is a mean: columns the largest, rows the second."""
    if not settings.get("factored", True) or len(param_shape) < 2:
        return {}
    row, column = (int(dim) for dim in np.argsort(param_shape)[-2:])  # ties as in Optax
    is_large = param_shape[row] >= settings["min_dim_size_to_factor"]
    return {"v_row": column, "v_col": row} if is_large else {}


def _said(slot: _Slot, known: Known, dims: Dims | None) -> Any:
    """The role in the table; a schedule's own state is a count, a placeholder is `'other'`."""
    field = slot.field
    role = known.roles.get(field[0]) if field else None
    if role == "other" and field[0] == "hyperparams_states" and field[-1] == "count":
        return "schedule_count"
    is_filler = slot.name == "factored_rms" and dims == (None,)
    return "other" if is_filler else role
