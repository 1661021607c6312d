"""What every dimension of a state is computed from, and which parameter a leaf belongs to.

Symbols tell what a dimension is; where `init` cannot be evaluated on them, as with `int(n)`, the
provenance of its values does, by JAX's sharding-in-types: every named dimension of the parameters
is tagged with a mesh axis of size 1, and a state dimension carries the tags of the dimensions whose
values it was computed from. No device is needed, as the mesh is abstract.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jax.tree_util import tree_leaves_with_path

from opt_partition._param_axes import Parameter, match_paths
from opt_partition._specs import mesh_axes_of, padded
from opt_partition._symbols import (
    SMALL,
    Evaluate,
    Key,
    Keys,
    Origin,
    Origins,
    first_line,
    symbolic_origins,
)
from opt_partition._trees import KeyPath


class Leaf(NamedTuple):
    """What is derived about one state leaf; `source` is `'symbols'` or `'provenance'`."""

    path: KeyPath
    struct: jax.ShapeDtypeStruct
    parameter: Parameter | None
    origins: Origins
    dims: tuple[int | None, ...]  # the dimension of the parameter that each dimension is
    source: str


class Derivation(NamedTuple):
    """What is derived about a state, and what could not be evaluated."""

    state: Any
    leaves: list[Leaf]
    evaluations: int
    notes: tuple[str, ...]


def derive(init: Callable[[Any], Any], params: Any, table: Sequence[Parameter]) -> Derivation:
    """Derives what every dimension of the state that `init` creates is computed from."""
    treedef: Any = jax.tree.structure(params)
    evaluations = 0

    def evaluate(shapes: Sequence[jax.ShapeDtypeStruct]) -> Any:
        nonlocal evaluations
        evaluations += 1
        # A new lambda each time, as JAX caches evaluations by function identity.
        return jax.eval_shape(lambda tree: init(tree), treedef.unflatten(shapes))

    state = _true_state(evaluate, table)
    keys = [_keys(parameter) for parameter in table]
    origins, sources, notes = _origins(evaluate, table, keys, state)
    paths = [path for path, _ in tree_leaves_with_path(state)]
    owners = _owners(evaluate, table, keys, state, match_paths(params, state, table), origins)
    dims_of = functools.cache(_dims)
    leaves = []
    for path, struct, owner, origin, source in zip(
        paths, jax.tree.leaves(state), owners, origins, sources, strict=True
    ):
        parameter = None if owner is None else table[owner]
        is_alike = parameter is not None and struct.shape == parameter.shape
        dims = dims_of(origin, () if owner is None else keys[owner], is_alike)
        leaves.append(Leaf(path, struct, parameter, origin, dims, source))
    return Derivation(state, leaves, evaluations, notes)


def _keys(parameter: Parameter) -> tuple[Key | None, ...]:
    """Returns name and size of each dimension that has a name."""
    pairs = zip(parameter.axes, parameter.shape, strict=True)
    return tuple(None if axis is None else (axis, size) for axis, size in pairs)


def _true_state(evaluate: Evaluate, table: Sequence[Parameter]) -> Any:
    try:
        return evaluate([jax.ShapeDtypeStruct(p.shape, p.dtype) for p in table])
    except Exception as error:
        error.add_note(
            "`init` must work under `jax.eval_shape`, on shapes without values. Make sure to "
            "pass a transformation or its `init`, not a constructor that has not been called."
        )
        raise


def _origins(
    evaluate: Evaluate, table: Sequence[Parameter], keys: Keys, state: Any
) -> tuple[list[Origins], list[str], tuple[str, ...]]:
    """Returns the origins of every leaf by symbols, else by provenance; the sources; notes."""
    symbolic, reason = symbolic_origins(evaluate, table, keys, state)
    sources = ["provenance" if origins is None else "symbols" for origins in symbolic]
    if "provenance" not in sources:
        return [origins for origins in symbolic if origins is not None], sources, ()
    why = "`init` creates another shape if sizes are symbols, which are never equal"
    notes = []
    if reason:
        why = f"`init` cannot be evaluated on symbols ({reason})"
        if "_DimExpr" in reason:
            why += ": make arrays by `jax.numpy`, from sizes that are not turned into numbers"
        notes.append(f"no symbols: {why}")
    tagged, failure = _provenance(evaluate, table, keys, state, why)
    origins = [b if a is None else a for a, b in zip(symbolic, tagged, strict=True)]
    return origins, sources, (*notes, *failure)


def _provenance(
    evaluate: Evaluate, table: Sequence[Parameter], keys: Keys, state: Any, note: str
) -> tuple[list[Origins], tuple[str, ...]]:
    """Returns the origin of every dimension of each leaf, `note` for those without tags; errors."""
    # A dimension of the same key within a parameter needs a mesh axis of its own.
    tags: dict[tuple[Key, int], str] = {}
    specs = []
    for row in keys:
        spec: list[str | None] = []
        for dim, key in enumerate(row):
            repeat = [*row[:dim]].count(key)
            spec.append(None if key is None else tags.setdefault((key, repeat), f"t{len(tags)}"))
        specs.append(PartitionSpec(*spec))
    by_tag = {tag: key for (key, _), tag in tags.items()}
    names = tuple(by_tag) or ("unused",)  # a mesh has at least one axis
    mesh = AbstractMesh((1,) * len(names), names, (AxisType.Explicit,) * len(names))

    @functools.cache
    def tagged(shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    shapes = [tagged(p.shape, p.dtype, spec) for p, spec in zip(table, specs, strict=True)]
    notes: tuple[str, ...] = ()
    try:
        with jax.sharding.use_abstract_mesh(mesh):
            state = evaluate(shapes)
    except Exception as error:  # it is a user's function: anything can happen
        says = f"`init` does not work on an Explicit mesh ({first_line(error)})"
        notes = (f"no provenance: {says}",)

    def origin(size: int, entry: Any) -> Origin:
        found = tuple(by_tag[tag] for tag in mesh_axes_of(entry))
        if not found:
            return SMALL if size < 2 else Origin(note=note, is_known=False)
        if len(found) > 1:
            return Origin(None, found, "computed from the parameter dimensions {}")
        return Origin(found[0], found) if found[0][1] == size else Origin(None, found, _PART)

    def entries(leaf: Any) -> list[Any]:
        has_spec = isinstance(leaf.sharding, NamedSharding)
        return padded(leaf.sharding.spec if has_spec else PartitionSpec(), len(leaf.shape))

    leaves = jax.tree.leaves(state)
    return [tuple(map(origin, leaf.shape, entries(leaf))) for leaf in leaves], notes


_PART = "a part of parameter dimension {}"


def _owners(
    evaluate: Evaluate,
    table: Sequence[Parameter],
    keys: Keys,
    state: Any,
    matches: Sequence[tuple[int, ...]],
    origins: Sequence[Origins],
) -> list[int | None]:
    """Returns the index of the parameter of every leaf: by its path, checked against its origins.

    If neither tells, `init` is evaluated with a symbol for each dimension of each parameter.
    """
    inside = [frozenset(row) for row in keys]
    by_key: dict[Key, list[int]] = defaultdict(list)
    by_unnamed_size: dict[int, list[int]] = defaultdict(list)
    for index, row in enumerate(keys):
        for key, size in {*zip(row, table[index].shape, strict=True)}:
            if key is not None:
                by_key[key].append(index)
            elif size > 1:
                by_unnamed_size[size].append(index)

    @functools.cache
    def keys_of(leaf: Origins) -> frozenset[Key]:
        return frozenset(key for origin in leaf for key in origin.keys)

    @functools.cache
    def anywhere(wanted: frozenset[Key], shape: tuple[int, ...]) -> tuple[int, ...]:
        if wanted:
            return tuple(sorted(set.intersection(*({*by_key[key]} for key in wanted))))
        return tuple(sorted({n for size in shape for n in by_unnamed_size.get(size, ())}))

    owners: list[int | None] = []
    unclear = {}
    structs = jax.tree.leaves(state)
    for number, (match, leaf, struct) in enumerate(zip(matches, origins, structs, strict=True)):
        wanted = keys_of(leaf)
        by_path = tuple(index for index in match if wanted <= inside[index])
        able = by_path or anywhere(wanted, struct.shape)
        is_same = len({table[index].axes for index in by_path}) == 1
        is_only = len(able) == 1 and bool(wanted or by_path)
        owners.append(able[0] if is_same or is_only else None)
        if owners[-1] is None or (len(able) > 1 and wanted):
            unclear[number] = able
    if any(unclear.values()):
        single = [
            tuple(((index, dim), size) for dim, size in enumerate(parameter.shape))
            for index, parameter in enumerate(table)
        ]
        shown, _ = symbolic_origins(evaluate, table, single, state)
        for number, able in unclear.items():
            indices = {key[0][0] for origin in shown[number] or () for key in origin.keys}
            if len(indices) == 1 and indices <= {*able}:
                [owners[number]] = indices
    return owners


def _dims(origins: Origins, keys: tuple[Key | None, ...], is_alike: bool) -> tuple[int | None, ...]:
    """Returns the dimension of a parameter with `keys` that each dimension of a leaf is."""
    if is_alike and all(map(_may_be, origins, keys)):
        return tuple(range(len(keys)))
    dims: list[int | None] = []
    for origin in origins:
        same = [dim for dim, key in enumerate(keys) if key is not None and key == origin.key]
        unused = [dim for dim in same if dim not in dims]
        dims.append(next(iter([*unused, *same]), None))
    return tuple(dims)


def _may_be(origin: Origin, key: Key | None) -> bool:
    """Whether a dimension may be that with a key; one without a name is a number."""
    if origin.keys:
        return origin.key == key
    return origin.is_known and (key is None or (key[1] < 2 and origin.is_small))
