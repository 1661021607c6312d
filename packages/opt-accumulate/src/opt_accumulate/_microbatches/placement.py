"""Where accumulators lie: on Auto and Explicit meshes, inside `shard_map` and outside."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeAlias

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from opt_accumulate._trees import broadcast_prefix, path_str
from opt_accumulate.errors import OptionError

Shardings: TypeAlias = list[NamedSharding | None]

_LIKE_PARAMS = object()


def leaf_shardings(out_shardings: Any, params: Any) -> Shardings:
    """Returns one sharding, or `None`, for every leaf of `params`, or raises an `OptionError`."""
    keyed = jax.tree_util.tree_leaves_with_path(out_shardings, is_leaf=_is_sharding)
    wrong = [f"  {path_str(path)}: {leaf!r}\n" for path, leaf in keyed if not _is_sharding(leaf)]
    if wrong:
        raise OptionError(
            "`out_shardings` must be a `jax.sharding.NamedSharding`, `None`, or a tree of them "
            "like the parameters; it has\n" + "".join(wrong)
        )
    mixed = [
        f"  {path_str(path)}: {_entries(leaf.spec)}\n"
        for path, leaf in keyed
        if leaf is not None and _has_mixed_entry(leaf)
    ]
    if mixed:
        raise OptionError(
            "`out_shardings` split one dimension over Auto and Explicit mesh axes together, which "
            "JAX cannot do:\n" + "".join(mixed) + "Split it over axes of one type."
        )
    marked = jax.tree.map(
        lambda leaf: leaf or _LIKE_PARAMS, out_shardings, is_leaf=lambda leaf: leaf is None
    )
    leaves = broadcast_prefix(marked, params, "out_shardings")
    return [None if leaf is _LIKE_PARAMS else leaf for leaf in leaves]


def like_params(shardings: Shardings, params: Any, mesh: Any = None) -> Shardings:
    """Returns the shardings with those of the parameters, where known, in the place of `None`.

    An array that is being traced has a sharding in its type on Explicit meshes only. `mesh` is the
    only one of interest; without, types are left to JAX, which gives gradients those of the
    parameters.
    """
    pairs = zip(shardings, jax.tree.leaves(params), strict=True)
    return [given or _sharding_of(leaf, mesh) for given, leaf in pairs]


def _sharding_of(leaf: Any, mesh: Any) -> NamedSharding | None:
    spec = explicit_spec(leaf)
    if spec is not None:
        whole = mesh is not None and explicit_axes(mesh).issuperset(mesh.axis_names)
        return NamedSharding(mesh, spec) if whole else None
    if isinstance(leaf, jax.core.Tracer) or not isinstance(leaf, jax.Array):
        return None
    sharding = leaf.sharding
    if not isinstance(sharding, NamedSharding):
        return None
    other = mesh is not None and dict(mesh.shape) != dict(sharding.mesh.shape)
    return None if other else NamedSharding(sharding.mesh, sharding.spec)


def _is_sharding(value: Any) -> bool:
    return value is None or isinstance(value, NamedSharding)


def place(tree: Any, shardings: Shardings, manual: Collection[str] = ()) -> Any:
    """Puts the leaves of a tree where they belong, but for mesh axes that are manual here."""
    leaves, treedef = jax.tree.flatten(tree)
    placed = [_place(*pair, manual) for pair in zip(leaves, shardings, strict=True)]
    return jax.tree.unflatten(treedef, placed)


def _place(leaf: jax.Array, sharding: NamedSharding | None, manual: Collection[str]) -> jax.Array:
    if sharding is None:
        return leaf
    mesh: Any = sharding.mesh
    spec = without(sharding.spec, manual)
    if manual:
        if not any(axes_of(entry) for entry in spec):
            return leaf
        mesh = jax.sharding.get_abstract_mesh()
    explicit = explicit_axes(mesh)
    if explicit:
        leaf = reshard(leaf, NamedSharding(mesh, only(spec, explicit)))
        if explicit.issuperset(mesh.axis_names):
            return leaf
    target = NamedSharding(mesh, without(spec, explicit))
    constrained: jax.Array = jax.lax.with_sharding_constraint(leaf, target)
    return constrained


def explicit_axes(mesh: Any) -> frozenset[str]:
    """Returns the names of a mesh's Explicit axes."""
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in pairs if kind == AxisType.Explicit)


def _entries(spec: PartitionSpec) -> str:
    return ", ".join(map(repr, tuple(spec)))


def _has_mixed_entry(sharding: NamedSharding) -> bool:
    explicit = explicit_axes(sharding.mesh)
    return any(len({axis in explicit for axis in axes_of(entry)}) > 1 for entry in sharding.spec)


def reshard(leaf: Any, sharding: NamedSharding | PartitionSpec) -> jax.Array:
    """Returns an array with another Explicit sharding."""
    resharded: jax.Array = jax.sharding.reshard(leaf, sharding)
    return resharded


def axes_of(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a spec.

    Examples:
      >>> axes_of(None), axes_of('data'), axes_of(('data', 'model'))
      ((), ('data',), ('data', 'model'))
    """
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, tuple | list) else (entry,)


def without(spec: PartitionSpec, names: Collection[str]) -> PartitionSpec:
    """Returns a spec that does not use some mesh axes.

    Examples:
      >>> tuple(without(PartitionSpec('model', ('data', 'expert')), {'data'}))
      ('model', 'expert')
    """
    kept = (tuple(name for name in axes_of(entry) if name not in names) for entry in tuple(spec))
    return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in kept))


def only(spec: PartitionSpec, names: Collection[str]) -> PartitionSpec:
    """Returns a spec that uses some mesh axes only.

    Examples:
      >>> tuple(only(PartitionSpec('model', ('data', 'expert')), {'data'}))
      (None, 'data')
    """
    used = {axis for entry in spec for axis in axes_of(entry)}
    return without(spec, used.difference(names))


def explicit_spec(leaf: Any) -> PartitionSpec | None:
    """Returns the spec in an array's type; `None` where no mesh axis of it is Explicit."""
    sharding = jax.typeof(leaf).sharding
    is_explicit = AxisType.Explicit in sharding.mesh.axis_types
    return sharding.spec if is_explicit else None
