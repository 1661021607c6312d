"""What the state of an Optax transformation means: names, parameters, dimensions, roles.

Optax's containers say where they keep what. Elsewhere a nested transformation is found by what its
own `init` makes of the parameters, or of placeholders for them: the first part of the state around
it that has this structure is its state. Those of one structure are found in the order in which the
function around them reads them. Leaves that no placeholder comes through to are traced.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec
from opt_core import Bearing, LeafDescription, StateDescription, TransformationDescription
from opt_core.extend import (
    Names,
    StateLeaf,
    TransformationKey,
    around,
    children,
    is_placeholder,
    is_plain,
    leaves_of,
    named_leaves,
    on_placeholders,
    origin_of,
    path_str,
    placeholders,
    places,
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


class _Inputs(NamedTuple):
    """What is passed to `init`: the parameters, and a tree of placeholders for them."""

    params: Any
    placed: Any

    def selected(self, mask: Any) -> _Inputs:
        """What `optax.masked` passes on."""
        mask = mask(self.params) if callable(mask) else mask
        return _Inputs(*(_masked(mask, tree) for tree in self))

    def labelled(self, labels: Any, label: str) -> _Inputs:
        """What `optax.partition` passes on to one of its transformations."""
        labels = labels(self.params) if callable(labels) else labels
        return self.selected(jax.tree.map(lambda x: str(x) == label, labels))


def _masked(mask: Any, tree: Any) -> Any:
    return jax.tree.map(lambda is_kept, part: part if is_kept else optax.MaskedNode(), mask, tree)


class _Part(NamedTuple):
    """A part of a state: what is there, and what `init` made of placeholders, if it did."""

    at: Names
    state: Any
    placed: Any | None

    @property
    def is_record(self) -> bool:
        """Whether it is of a class of its own."""
        return not is_plain(type(self.state)) and children(self.state) is not None

    def inside(self, *names: str) -> _Part:
        """The part below; raises a `KeyError` if there is none."""
        placed = None if self.placed is None else _below(self.placed, names)
        return _Part((*self.at, *names), _below(self.state, names), placed)

    def walk(self) -> Iterator[_Part]:
        """Yields itself and everything inside, outermost first, down to the parameters."""
        yield self
        if is_placeholder(self.placed):
            return
        below = {} if self.placed is None else _children(self.placed)
        for name, child in _children(self.state).items():
            yield from _Part((*self.at, name), child, below.get(name)).walk()


def _children(tree: Any) -> dict[str, Any]:
    node = children(tree)
    return {} if node is None else dict(node.children)


def _below(tree: Any, names: Sequence[str]) -> Any:
    return functools.reduce(lambda node, name: _children(node)[name], names, tree)


class States:
    """Where the states of a transformation and of those nested in it are.

    Args:
      root: the transformation with everything nested in it; `is_stateless` of all of them is set.
      params: the parameters, as shapes.
      state: what its `init` made of them, as shapes.

    Attributes:
      nodes: by path the transformations that made what is there; the innermost of several.
      followed: see `opt_core.extend.places`.
      opaque: the paths of what no placeholder can be passed through.
      shown: by identity of a transformation the paths of the parameters that its `init` is given.
    """

    def __init__(self, root: Node, params: Any, state: Any) -> None:
        self.nodes: dict[Names, Node] = {}
        self.followed: dict[Names, tuple[Names, Names]] = {}
        self.opaque: list[Names] = []
        self.shown: dict[int, list[Names]] = {}
        self._names = [path for path, _ in named_leaves(params)]
        self._put(root, _Part((), state, None), _Inputs(params, placeholders(params)))

    def _put(self, node: Node, part: _Part, inputs: _Inputs) -> None:
        """Notes that a part of the state is that of a transformation, and looks into it."""
        if part.placed is None:
            part = part._replace(placed=on_placeholders(node.tx.init, inputs.placed))
            if part.placed is None:
                self.opaque.append(part.at)
            else:
                self.followed.update(places(part.placed, self._names, part.at))
        node.is_stateless = not jax.tree.leaves(part.state)
        numbers = jax.tree.leaves(inputs.placed, is_leaf=is_placeholder)
        self.shown[id(node)] = [self._names[x.number] for x in numbers if is_placeholder(x)]
        if not node.is_container:
            self.nodes[part.at] = node
        if node.shares_init:
            self._put(node.children[0], part, inputs)
            return
        try:
            contained = _contained(node, inputs)
            stated = [(child, part.inside(*names), kept) for child, names, kept in contained]
        except Exception:  # a mask or labels that do not fit, or a state of another release
            stated = []
        for child, below, kept in stated:
            self._put(child, below, kept)
        if node.children and not stated:
            node.children += self._look_for(node, part, inputs)

    def _look_for(self, node: Node, part: _Part, inputs: _Inputs) -> list[Node]:
        """Finds the states of nested transformations; returns those that have further ones."""
        free = [inner for inner in part.walk() if jax.tree.leaves(inner.state)]
        examples = [_Example(child, inputs) for child in node.children]
        unclear = _unclear(examples, free) if _is_users(node) else set[int]()
        left, placed = [x.node for x in examples if id(x.node) not in unclear], []
        while left:
            example = _Example(left.pop(0), inputs)
            place = next(itertools.chain(example.places(free), example.records(free)), None)
            if place is None:  # its `init` may be given other parameters, or not called at all
                example.node.is_stateless = example.is_empty
                left[:0] = example.node.children
                continue
            self._put(example.node, place, inputs)
            free = [inner for inner in free if not _is_inside(inner, place)]
            if not example.node.is_container:
                placed.append(example)
        copies = []
        for example in placed:  # what is called twice keeps two states
            while place := next((x for x in example.places(free) if x.is_record), None):
                copies.append(dataclasses.replace(example.node, children=[]))
                self._put(copies[-1], place, inputs)
                free = [inner for inner in free if not _is_inside(inner, place)]
        return copies


class _Example:
    """What the `init` of a transformation makes of placeholders and of the parameters."""

    def __init__(self, node: Node, inputs: _Inputs) -> None:
        self.node, self._inputs = node, inputs
        self._placed = on_placeholders(node.tx.init, inputs.placed)

    @functools.cached_property
    def _shapes(self) -> Any:
        try:
            return jax.eval_shape(self.node.tx.init, self._inputs.params)
        except Exception:  # it is made of other parameters than these
            return None

    @property
    def is_empty(self) -> bool:
        """Whether it is known to make a state without leaves."""
        return self._shapes is not None and not jax.tree.leaves(self._shapes)

    def places(self, parts: Sequence[_Part]) -> Iterator[_Part]:
        """Yields the parts of a state that are like it, by the most exact comparison first."""
        if jax.tree.leaves(self._placed, is_leaf=is_placeholder):
            placed = (x for x in parts if x.placed is not None)
            yield from (x for x in placed if _is_like(self._placed, x.placed))
            yield from (x for x in parts if _is_like(self._placed, x.state))
        if jax.tree.leaves(self._shapes):
            yield from (x for x in parts if _is_like(self._shapes, x.state))

    def records(self, parts: Sequence[_Part]) -> Iterator[_Part]:
        """Yields those of its class: what is inside may have been made of other parameters."""
        kinds = {type(self._placed), type(self._shapes)}
        yield from (x for x in parts if x.is_record and type(x.state) in kinds)


def _is_users(node: Node) -> bool:
    """Whether nobody knows in which order a transformation keeps the states of others."""
    return not node.is_optax and not node.package.startswith("opt_")


def _unclear(examples: Sequence[_Example], parts: Sequence[_Part]) -> set[int]:
    """The transformations whose states nothing tells apart: under keys, not in an order."""
    # These leaves stay with the transformation around them.
    unclear: set[int] = set()
    for example in examples:
        alike = list({place.at: place for place in example.places(parts)}.values())
        rivals = [x for x in examples if x is not example and next(x.places(alike), None)]
        if rivals and len(alike) > 1 and not all(place.at[-1].isdigit() for place in alike):
            unclear |= {id(x.node) for x in (example, *rivals)}
    return unclear


def _contained(node: Node, inputs: _Inputs) -> Iterator[tuple[Node, Names, _Inputs]]:
    """The paths at which Optax's containers keep the states of what they contain."""
    if node.injects:
        yield from ((child, ("inner_state",), inputs) for child in node.children)
    if not node.is_optax:
        return
    if node.factory == "chain":
        yield from ((child, (str(i),), inputs) for i, child in enumerate(node.children))
    elif node.factory == "named_chain":
        names = [name for name, _ in node.held["transforms"]]
        yield from ((x, (name,), inputs) for name, x in zip(names, node.children, strict=True))
    elif node.factory == "masked":
        mask = node.held["mask"]
        yield from ((x, ("inner_state",), inputs.selected(mask)) for x in node.children)
    elif node.factory in ("partition", "multi_transform"):
        for child in node.children:
            label = child.group[-1]
            kept = inputs.labelled(node.held["param_labels"], label)
            yield child, ("inner_states", label, "inner_state"), kept


def _is_inside(part: _Part, outer: _Part) -> bool:
    return part.at[: len(outer.at)] == outer.at


def _is_like(example: Any, part: Any) -> bool:
    """Whether a part of a state has the structure, the shapes and the parameters of another."""
    structure: Any = jax.tree.structure(example, is_leaf=is_placeholder)
    try:
        parts = structure.flatten_up_to(part)
    except (ValueError, TypeError, KeyError):
        return False
    leaves = jax.tree.leaves(example, is_leaf=is_placeholder)
    return all(map(_is_like_leaf, leaves, parts))


def _is_like_leaf(example: Any, part: Any) -> bool:
    if is_placeholder(example):
        return not is_placeholder(part) or example.number == part.number
    is_leaf = isinstance(part, type(example))
    return is_leaf and (part.shape, part.dtype) == (example.shape, example.dtype)


def traced_places(
    leaves: Sequence[tuple[StateLeaf, int]],
    unclear: Collection[int],
    rows: Sequence[Row],
    params: Sequence[Names],
) -> dict[Names, tuple[Names, Names]]:
    """Returns the places of parameters that tracing shows, of the leaves that are unclear."""
    by_name = {path_str(path): path for path in params}
    owners = [
        by_name.get(row.parameter or "") if i in unclear else leaf.parameter
        for i, ((leaf, _), row) in enumerate(zip(leaves, rows, strict=True))
    ]
    entries = _entries(leaves, owners)
    by_place = {}
    for i in unclear:
        path, owner = leaves[i][0].path, owners[i]
        if owner is None:
            continue
        named = [k for k in range(len(path)) if owner and path[k : k + len(owner)] == owner]
        entry = [k for k in range(len(path)) if path[:k] in entries]
        if named:
            by_place[path[: named[0] + len(owner)]] = owner, path[: named[0]]
        elif entry:
            by_place[path[: entry[0] + 1]] = owner, path[: entry[0]]
        elif rows[i].source in ("symbols", "provenance"):
            by_place[path] = owner, around(path, owner)
    return by_place


def _entries(leaves: Sequence[tuple[StateLeaf, int]], owners: Sequence[Names | None]) -> set[Names]:
    """The paths of lists and dicts that have one entry for each of some parameters."""
    inside: dict[Names, dict[str, set[Names]]] = {}
    lists: set[Names] = set()
    for (leaf, start), owner in zip(leaves, owners, strict=True):
        path, kinds = leaf.path, leaf.kinds
        for k in range(start, len(path)):
            if kinds[k] in (tuple, list, dict):
                entry = inside.setdefault(path[:k], {}).setdefault(path[k], set())
                entry |= set() if owner is None else {owner}
            if kinds[k] in (tuple, list):
                lists.add(path[:k])
    return {
        path
        for path, entries in inside.items()
        if all(len(each) == 1 for each in entries.values())
        and len(set().union(*entries.values())) == len(entries)
        and (len(entries) > 1 or path in lists)
    }
