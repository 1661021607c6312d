"""Where accumulators lie: on Auto and Explicit meshes, inside `shard_map` and outside."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeAlias

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from opt_accumulate._trees import broadcast_prefix, path_str
from opt_accumulate.errors import OptionError

Shardings: TypeAlias = list[NamedSharding | None]


def leaf_shardings(out_shardings: Any, params: Any) -> Shardings:
    """Returns one sharding, or `None`, for every leaf of `params`.

    Raises:
      OptionError: `out_shardings` has something else, or does not fit; lists every path.
    """
    keyed = jax.tree_util.tree_leaves_with_path(out_shardings, is_leaf=_is_sharding)
    wrong = [f"  {path_str(path)}: {leaf!r}\n" for path, leaf in keyed if not _is_sharding(leaf)]
    if wrong:
        raise OptionError(
            "`out_shardings` must be a `jax.sharding.NamedSharding`, `None`, or a tree of them "
            "like the parameters; it has\n" + "".join(wrong)
        )
    return broadcast_prefix(out_shardings, params, "out_shardings", _is_sharding)


def _is_sharding(value: Any) -> bool:
    return value is None or isinstance(value, NamedSharding)


def place(tree: Any, shardings: Shardings, manual: Collection[str] = ()) -> Any:
    """Puts the leaves of a tree where they belong.

    Args:
      tree: of arrays.
      shardings: one for each leaf; `None` leaves it where it is.
      manual: mesh axes that are manual here, and are no longer to be spoken of.
    """
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
    target = NamedSharding(mesh, spec)
    if AxisType.Explicit in mesh.axis_types:
        return reshard(leaf, target)
    constrained: jax.Array = jax.lax.with_sharding_constraint(leaf, target)
    return constrained


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


def explicit_spec(leaf: Any) -> PartitionSpec | None:
    """Returns the spec in an array's type; `None` where no mesh axis of it is Explicit."""
    sharding = jax.typeof(leaf).sharding
    is_explicit = AxisType.Explicit in sharding.mesh.axis_types
    return sharding.spec if is_explicit else None
