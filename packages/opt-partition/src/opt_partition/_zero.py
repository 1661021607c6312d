"""ZeRO: sharding of states over mesh axes that their parameters do not use."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import jax
from jax.sharding import PartitionSpec

from opt_partition._display import human_bytes, listed
from opt_partition._explain import explain
from opt_partition._init import StateMaker
from opt_partition._layout import (
    AnyMesh,
    Layout,
    LeafLayout,
    distinct_axes,
    mesh_axes_of,
    named_sizes,
    shard_shape,
    spec_of,
)
from opt_partition._logical_to_mesh import (
    LogicalAxisRules,
    MemoryKinds,
    logical_to_mesh,
    rule_pairs,
)
from opt_partition._param_axes import unboxed
from opt_partition._rules import Rule
from opt_partition.errors import AxesError, IndivisibleError, ReplicatedWarning

_TOLERATED: Final = 0.01  # of the bytes on a device


def extend_over(
    specs: Any,
    shapes: Any,
    mesh: AnyMesh,
    axes: str | Sequence[str],
    *,
    min_bytes: int = 0,
    strict: bool = False,
) -> Layout:
    """Shards every leaf further over the given mesh axes, as far as it is divisible.

    Of the state only, this is ZeRO-1; if gradients are constrained to the same specs, ZeRO-2. One
    mesh axis after the other, the largest first, goes to the longest dimension of the shard that it
    divides: to one that got an axis already, so that a single collective gathers the leaf; else to
    one that was not sharded before. Of equally long ones the first is taken. New mesh axes are
    minor to those that a dimension has, so that gathering over them restores the shards of `specs`.

    Args:
      specs: per leaf a `PartitionSpec` of mesh axes, a `NamedSharding`, whose memory kind is kept,
        or `None` for a replicated leaf; or a `Layout`, whose notes and memory kinds are kept.
      shapes: a tree with the structure of `specs`, of arrays or `jax.ShapeDtypeStruct`s.
      mesh: a `Mesh` or `AbstractMesh`.
      axes: one or more mesh axes; those already used by a leaf are skipped.
      min_bytes: leaves with fewer global bytes are not changed.
      strict: whether to raise an error instead of warning that leaves stay replicated.

    Returns:
      The layout. The `notes` of a leaf list the mesh axes over which it stays replicated although
      it is neither a scalar nor empty nor below `min_bytes`, and why.

    Warns:
      ReplicatedWarning: `axes` have one device, or no dimension of leaves with more than 1 % of
        the bytes on a device is divisible. Scalars, leaves with fewer elements than devices and
        leaves below `min_bytes` do not count. If `strict`, an `AxesError` or `IndivisibleError`.

    References:
      Rajbhandari, Rasley, Ruwase and He,
      `ZeRO: Memory Optimizations Toward Training Trillion Parameter Models`, 2020,
      https://arxiv.org/abs/1910.02054.

    Examples:
      >>> from jax.sharding import AbstractMesh, PartitionSpec as P
      >>> layout = extend_over(
      ...     {'mu': P(None, 'model'), 'odd': P()},
      ...     {'mu': jax.ShapeDtypeStruct((16, 6), 'float32'),
      ...      'odd': jax.ShapeDtypeStruct((7,), 'float32')},
      ...     AbstractMesh((8, 2), ('data', 'model')),
      ...     'data',
      ... )
      >>> [(leaf.path, tuple(leaf.spec)) for leaf in layout.rows]
      [('mu', ('data', 'model')), ('odd', (None,))]
      >>> layout.notes
      ('odd: ZeRO: stays replicated over data=8: no dimension of (7,) is divisible',)
    """
    names = distinct_axes("`axes`", axes, mesh)
    layout = extended(Layout.from_specs(specs, shapes, mesh), names, min_bytes)
    report_replicated([layout], names, min_bytes, strict=strict)
    return layout


def extended(layout: Layout, axes: Sequence[str], min_bytes: int) -> Layout:
    """Returns a layout extended as by `extend_over`, without a warning."""
    if min_bytes < 0:
        raise ValueError(f"`min_bytes` must be non-negative; got {min_bytes}")
    mesh = layout.mesh
    extend = functools.cache(functools.partial(_extend, mesh=mesh, axes=axes))

    def extended_leaf(leaf: LeafLayout) -> LeafLayout:
        if leaf.bytes < min_bytes:
            return leaf
        spec, notes = extend(leaf.spec, leaf.shape)
        return dataclasses.replace(
            leaf,
            spec=spec,
            shard_shape=shard_shape(leaf.shape, spec, mesh),
            notes=tuple(dict.fromkeys((*leaf.notes, *notes))),
        )

    return Layout(mesh, jax.tree.map(extended_leaf, layout.leaves))


def _extend(
    spec: PartitionSpec, shape: tuple[int, ...], mesh: AnyMesh, axes: Sequence[str]
) -> tuple[PartitionSpec, list[str]]:
    """Returns the extended spec of one leaf, and why it stays replicated over some axes."""
    if not shape or 0 in shape:
        return spec, []
    before = [mesh_axes_of(entry) for entry in spec]
    held = {axis for names in before for axis in names}
    free = [axis for axis in axes if axis not in held]
    places: dict[str, int] = {}
    lengths = list(shard_shape(shape, spec, mesh))
    for axis in sorted(free, key=lambda axis: -mesh.shape[axis]):
        size = mesh.shape[axis]
        fitting = [dim for dim, length in enumerate(lengths) if length % size == 0]
        if fitting:
            again = [dim for dim in fitting if dim in places.values()]
            place = min(again or fitting, key=lambda dim: (bool(before[dim]), -lengths[dim]))
            places[axis], lengths[place] = place, lengths[place] // size
    added = [[axis for axis in free if places.get(axis) == dim] for dim in range(len(shape))]
    after = spec_of([*old, *new] for old, new in zip(before, added, strict=True))
    shard = tuple(lengths)
    what = str(shape) if shard == shape else f"its shard {shard}"
    return after, [
        f"ZeRO: stays replicated over {named_sizes(mesh, [axis])}: no dimension of {what} is "
        "divisible"
        for axis in free
        if axis not in places
    ]


def report_replicated(
    layouts: Sequence[Layout],
    axes: Sequence[str],
    min_bytes: int,
    *,
    strict: bool = False,
    other_bytes: int = 0,
) -> None:
    """Warns once of what `extended` layouts leave replicated; raises an error if `strict`.

    `other_bytes` are those that a device holds besides these layouts.
    """
    mesh = layouts[0].mesh
    leaves = [leaf for layout in layouts for leaf in layout.rows]
    counted = [leaf for leaf in leaves if leaf.shape and leaf.bytes >= max(1, min_bytes)]
    wastes = [(waste, leaf) for leaf in counted if (waste := _waste(leaf, axes, mesh))]
    wasted = sum(waste for waste, _ in wastes)
    has_one_device = math.prod(mesh.shape[axis] for axis in axes) == 1
    if counted and has_one_device:
        held = sum(leaf.bytes_per_device for leaf in counted)
        what = (
            f"has no effect: {human_bytes(held)} stay on each device; name mesh axes with more "
            "than one device"
        )
    elif wasted > _TOLERATED * (other_bytes + sum(leaf.bytes_per_device for leaf in leaves)):
        worst = sorted(wastes, key=lambda item: -item[0])
        few = listed([f"{leaf.path} {leaf.shard_shape}" for _, leaf in worst], 3)
        what = (
            f"leaves {len(wastes)} of {len(leaves)} leaves replicated, {human_bytes(wasted)} per "
            f"device beyond an equal share, as no dimension of their shards is divisible: {few}; "
            "pad these dimensions or name other mesh axes"
        )
    else:
        return
    message = f"ZeRO over {named_sizes(mesh, axes)} {what}"
    if strict:
        raise AxesError(message) if has_one_device else IndivisibleError(message)
    warnings.warn(message, ReplicatedWarning, stacklevel=3)


def _waste(leaf: LeafLayout, axes: Sequence[str], mesh: AnyMesh) -> int:
    """Returns the bytes that a device holds beyond an equal share over the axes not used."""
    used = {axis for entry in leaf.spec for axis in mesh_axes_of(entry)}
    ways = math.prod(mesh.shape[axis] for axis in axes if axis not in used)
    held = leaf.bytes_per_device
    return held - -(-held // ways) if math.prod(leaf.shard_shape) >= ways else 0


class ZeroLayouts(NamedTuple):
    """The layouts of a training step with ZeRO-1.

    Attributes:
      compute: the parameters as the rules shard them, for the forward and the backward pass.
      params: the parameters as they are stored between steps: sharded further, like the state.
      opt_state: the optimizer state, sharded further.
    """

    compute: Layout
    params: Layout
    opt_state: Layout


def shard_optimizer_state(
    tx: StateMaker,
    abstract_params: Any,
    rules: LogicalAxisRules,
    mesh: AnyMesh,
    zero_axes: str | Sequence[str],
    *,
    param_axes: Any = None,
    min_bytes: int = 0,
    memory_kinds: MemoryKinds = None,
    derivation_rules: Mapping[Any, Rule] | None = None,
    on_unknown: Literal["error", "replicate"] = "error",
) -> ZeroLayouts:
    """Lays out parameters and optimizer state for ZeRO-1, with any optimizer.

    Between steps, parameters and state are sharded over `zero_axes` too, so that an elementwise
    update needs no communication. Constrain the parameters to `compute` at the start of the step:
    they are gathered once, and their gradients are reduced.

    Args:
      tx: the transformation, its `init`, or a definition; see `explain`.
      abstract_params: arrays or `jax.ShapeDtypeStruct`s in Flax boxes, e.g. of
        `jax.eval_shape(model.init, ...)`, or in an `nnx.State` with sharding metadata.
      rules: rules from logical names to mesh axes; see `logical_to_mesh`.
      mesh: the mesh, concrete or abstract.
      zero_axes: one or more mesh axes; see `extend_over`.
      param_axes: logical axes of parameters that do not name their dimensions themselves.
      min_bytes: leaves with fewer global bytes stay as the rules shard them.
      memory_kinds: memory kinds of the state; see `logical_to_mesh`.
      derivation_rules: `rules` of `explain`.
      on_unknown: see `logical_to_mesh`.

    Returns:
      Three layouts. Their trees have the structure of the parameters without boxes.

    Warns:
      ReplicatedWarning: parameters or state stay replicated; see `extend_over`.

    Raises:
      AxesError: axes, rules and mesh do not match.

    Examples:
      >>> import jax, optax
      >>> layouts = shard_optimizer_state(
      ...     optax.adafactor(1e-3),
      ...     {'wi': jax.ShapeDtypeStruct((1024, 4096), 'float32')},
      ...     [('embed', 'fsdp'), ('mlp', 'tensor')],
      ...     jax.sharding.AbstractMesh((8, 4, 2), ('data', 'fsdp', 'tensor')),
      ...     'data',
      ...     param_axes={'wi': ('embed', 'mlp')},
      ... )
      >>> tuple(layouts.compute.specs['wi']), tuple(layouts.params.specs['wi'])
      (('fsdp', 'tensor'), ('fsdp', ('tensor', 'data')))
      >>> tuple(layouts.opt_state.specs[0].v_row['wi'])
      (('fsdp', 'data'),)
    """
    names = distinct_axes("`zero_axes`", zero_axes, mesh)
    params = unboxed(abstract_params)
    axes = abstract_params if param_axes is None else param_axes
    explanation = explain(tx, params, axes, rules=derivation_rules)
    pairs = rule_pairs(rules)
    lay = functools.partial(logical_to_mesh, rules=pairs, mesh=mesh, on_unknown=on_unknown)
    compute = lay(explanation.param_axes, shapes=params)
    state = lay(explanation.axes, shapes=explanation.state, memory_kinds=memory_kinds)
    stored, state = (extended(layout, names, min_bytes) for layout in (compute, state))
    gathered_and_grads = 2 * compute.bytes_per_device
    report_replicated([stored, state], names, min_bytes, other_bytes=gathered_and_grads)
    return ZeroLayouts(compute, stored, state)
