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
from jax.sharding import (
    AbstractMesh,
    AxisType,
    NamedSharding,
    PartitionSpec,
    use_abstract_mesh,
)
from jax.tree_util import tree_leaves_with_path

from opt_partition._layout import mesh_axes_of, padded
from opt_partition._param_axes import Parameter
from opt_partition._symbols import (
    COMPUTED,
    CONSTANT,
    Evaluate,
    Key,
    Keys,
    Origin,
    Origins,
    first_line,
    keys_of,
    symbolic_origins,
)
from opt_partition._trees import names_of, owner_of


class Derivation(NamedTuple):
    """What is derived about a state, and what could not be evaluated."""

    state: Any
    origins: list[Origins]  # of the dimensions of each leaf
    sources: list[str]  # of each leaf, `'symbols'` or `'provenance'`
    owners: list[Parameter | None]  # of each leaf
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

    try:
        state = evaluate([jax.ShapeDtypeStruct(p.shape, p.dtype) for p in table])
    except Exception as error:
        error.add_note(
            "`init` must work under `jax.eval_shape`, on shapes without values. Make sure to "
            "pass a transformation or its `init`, not a constructor that has not been called."
        )
        raise
    keys = [keys_of(parameter.axes, parameter.shape) for parameter in table]
    symbolic, reason = symbolic_origins(evaluate, table, keys, state)
    notes: list[str] = []
    tagged: list[Origins] = []
    if None in symbolic:
        why = "`init` creates another shape if sizes are symbols, which are never equal"
        if reason:
            why = f"`init` cannot be evaluated on symbols ({reason})"
            if "_DimExpr" in reason:
                why += ": make arrays by `jax.numpy`, from sizes that are not turned into numbers"
            notes.append(f"no symbols: {why}")
        tagged, failure = _provenance(evaluate, table, keys, state, why)
        notes += failure
    sources = ["provenance" if known is None else "symbols" for known in symbolic]
    origins = [tagged[n] if known is None else known for n, known in enumerate(symbolic)]
    owners = _owners(evaluate, table, keys, state, origins)
    return Derivation(state, origins, sources, owners, evaluations, tuple(notes))


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

    shapes = [
        jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=NamedSharding(mesh, spec))
        for p, spec in zip(table, specs, strict=True)
    ]
    notes: tuple[str, ...] = ()
    try:
        # By way of none: JAX refuses a mesh of another size inside of `jax.set_mesh`.
        with use_abstract_mesh(AbstractMesh((), ())), use_abstract_mesh(mesh):
            state = evaluate(shapes)
    except Exception as error:  # it is a user's function: anything can happen
        says = f"no provenance: `init` does not work on an Explicit mesh ({first_line(error)})"
        notes = (says,)

    def origin(size: int, entry: Any) -> Origin:
        found = tuple(by_tag[tag] for tag in mesh_axes_of(entry))
        if not found:
            return CONSTANT if size < 2 else Origin(note=note, is_known=False)
        if len(found) > 1 or found[0][1] != size:
            return Origin(None, found, COMPUTED)
        return Origin(found[0], found)

    def entries(leaf: Any) -> list[Any]:
        has_spec = isinstance(leaf.sharding, NamedSharding)
        return padded(leaf.sharding.spec if has_spec else PartitionSpec(), len(leaf.shape))

    leaves = jax.tree.leaves(state)
    return [tuple(map(origin, leaf.shape, entries(leaf))) for leaf in leaves], notes


def _owners(
    evaluate: Evaluate,
    table: Sequence[Parameter],
    keys: Keys,
    state: Any,
    origins: Sequence[Origins],
) -> list[Parameter | None]:
    """Returns the parameter of every leaf: by its path, checked against its origins.

    If neither tells, `init` is evaluated with a symbol for each dimension of each parameter.
    """
    by_path = {names_of(parameter.key_path): index for index, parameter in enumerate(table)}
    inside = [frozenset(row) for row in keys]
    with_key: defaultdict[Key, set[int]] = defaultdict(set)
    for number, row in enumerate(inside):
        for key in filter(None, row):
            with_key[key].add(number)

    @functools.cache
    def with_all(leaf: Origins) -> tuple[frozenset[Key], set[int]]:
        wanted = frozenset(key for origin in leaf for key in origin.keys)
        return wanted, set.intersection(*(with_key[key] for key in wanted)) if wanted else set()

    has_unnamed = any(None in row for row in inside)
    owners: list[int | None] = []
    unclear: dict[int, set[int]] = {}
    for number, ((path, leaf), origin) in enumerate(
        zip(tree_leaves_with_path(state), origins, strict=True)
    ):
        wanted, able = with_all(origin)
        index, is_listed = owner_of(names_of(path), by_path)
        if index is not None and wanted <= inside[index] and not is_listed:
            owners.append(index)
            continue
        owners.append(next(iter(able)) if len(able) == 1 else None)
        has_dims = any(size > 1 for size in leaf.shape)
        if len(able) > 1 or (has_dims and not wanted and has_unnamed):
            unclear[number] = able or {*range(len(table))}
    if unclear:
        single: Keys = [
            tuple(((index, dim), size) for dim, size in enumerate(parameter.shape))
            for index, parameter in enumerate(table)
        ]
        shown, _ = symbolic_origins(evaluate, table, single, state)
        for number, able in unclear.items():
            indices = {key[0][0] for origin in shown[number] or () for key in origin.keys}
            if len(indices) == 1 and indices <= able:
                [owners[number]] = indices
    return [None if owner is None else table[owner] for owner in owners]
