"""Where accumulators lie and what they vary over: on Auto and Explicit meshes, in `shard_map`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from opt_accumulate._trees import broadcast_prefix, described
from opt_accumulate.errors import OptionError


def leaf_shardings(out_shardings: Any, params: Any) -> Any:
    """Returns a tree like `params` of shardings, or `None`, or raises an `OptionError`."""
    if wrong := described(out_shardings, _unfit, _is_sharding):
        raise OptionError(
            "`out_shardings` must be a `jax.sharding.NamedSharding`, with each dimension over mesh "
            "axes of one type, Auto or Explicit, `None`, or a tree of them like the parameters; it "
            "has\n" + "\n".join(wrong)
        )
    return broadcast_prefix(out_shardings, params, "out_shardings", _is_sharding)


def like_params(shardings: Any, params: Any, mesh: Any = None) -> Any:
    """Returns the shardings with those of the parameters, where known, in the place of `None`."""
    # Of an array that is traced the type has a sharding on Explicit meshes only.
    return jax.tree.map(lambda leaf, given: given or _sharding_of(leaf, mesh), params, shardings)


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


def _unfit(value: Any) -> str:
    if not _is_sharding(value):
        return repr(value)
    explicit = frozenset() if value is None else explicit_axes(value.mesh)
    entries = () if value is None else tuple(value.spec)
    is_mixed = any(len({axis in explicit for axis in axes_of(entry)}) > 1 for entry in entries)
    return ", ".join(map(repr, entries)) if is_mixed else ""


def place(tree: Any, shardings: Any, manual: Collection[str] = ()) -> Any:
    """Puts the leaves of a tree where they belong, but for mesh axes that are manual here."""
    return jax.tree.map(lambda leaf, own: _place(leaf, own, manual), tree, shardings)


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
        others = explicit.symmetric_difference(mesh.axis_names)
        leaf = jax.sharding.reshard(leaf, NamedSharding(mesh, without(spec, others)))
        if explicit.issuperset(mesh.axis_names):
            return leaf
    target = NamedSharding(mesh, without(spec, explicit))
    constrained: jax.Array = jax.lax.with_sharding_constraint(leaf, target)
    return constrained


def explicit_axes(mesh: Any) -> frozenset[str]:
    """Returns the names of a mesh's Explicit axes."""
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in pairs if kind == AxisType.Explicit)


def axes_of(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a spec."""
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, tuple | list) else (entry,)


def without(spec: PartitionSpec, names: Collection[str]) -> PartitionSpec:
    """Returns a spec that does not use some mesh axes."""
    kept = (tuple(name for name in axes_of(entry) if name not in names) for entry in tuple(spec))
    return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in kept))


def explicit_spec(leaf: Any) -> PartitionSpec | None:
    """Returns the spec in an array's type; `None` where no mesh axis of it is Explicit."""
    sharding = jax.typeof(leaf).sharding
    is_explicit = AxisType.Explicit in sharding.mesh.axis_types
    return sharding.spec if is_explicit else None


# Inside `jax.shard_map` a type says which manual axes a value varies over. The cotangent of
# parameters that are the same on all devices is summed over the devices wherever it arises, thus in
# every microbatch, and would then be divided by one device's weight. Parameters that vary have a
# gradient on each device; it is divided there and summed once: `jax.value_and_grad` of the quotient
# of sums, exactly. Outside of `shard_map`, and with `check_vma=False`, nothing varies.


def axes_of_types(tree: Any) -> frozenset[str]:
    """Returns the manual mesh axes that any leaf of a tree, abstract or not, varies over."""
    return frozenset().union(*map(_axes_of_type, jax.tree.leaves(tree)))


def _axes_of_type(value: Any) -> frozenset[str]:
    described: Any = value if isinstance(value, jax.ShapeDtypeStruct) else jax.typeof(value)
    try:
        manual = described.manual_axis_type
    except AttributeError:  # before jax 0.10
        return frozenset(described.vma or ())
    return frozenset(manual.varying) if manual is not None else frozenset()


def vary(tree: Any, axes: Collection[str]) -> Any:
    """Returns the same values, of types that vary over `axes` too."""
    return jax.tree.map(lambda leaf: _vary(leaf, axes), tree) if axes else tree


def _vary(leaf: Any, axes: Collection[str]) -> Any:
    missing = tuple(sorted(frozenset(axes) - _axes_of_type(leaf)))
    if not missing:
        return leaf
    lax: Any = jax.lax
    try:
        cast = lax.pcast
    except AttributeError:  # jax 0.8.0
        return lax.pvary(leaf, missing)
    return cast(leaf, missing, to="varying")


def sum_as_like(tree: Any, like: Any) -> Any:
    """Sums each leaf over the axes that it varies over and the same leaf of `like` does not."""

    def sum_leaf(leaf: Any, like: Any) -> Any:
        extra = tuple(sorted(_axes_of_type(leaf) - _axes_of_type(like)))
        return jax.lax.psum(leaf, extra) if extra else leaf

    return jax.tree.map(sum_leaf, tree, like)


def any_over(value: jax.Array, kept: Collection[str]) -> jax.Array:
    """Returns whether a bool is true anywhere on the axes that it varies over but for `kept`."""
    extra = tuple(sorted(_axes_of_type(value) - frozenset(kept)))
    return jax.lax.psum(value.astype("int32"), extra) > 0 if extra else value
