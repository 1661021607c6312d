"""Optimizer state that is born sharded."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from opt_partition._init import Init, StateMaker, init_of, params_of
from opt_partition._mesh.align import align, brief
from opt_partition._mesh.layout import Layout
from opt_partition._mesh.specs import shape_and_dtype
from opt_partition._trees import leaves_with_paths
from opt_partition.errors import AxesError


def init_sharded(tx: StateMaker, params: Any, state_shardings: Any) -> Any:
    """Makes an optimizer's state in place: each device makes its own shards, and only those.

    The whole of `init` is one compiled program whose outputs have the shardings asked for, so that
    zeros are made where they stay. `jax.jit(tx.init)` alone makes them on the first device.

    Args:
      tx: the transformation, its `init`, a definition or an optimizer, as for `explain`.
      params: the parameters; `None` for those of an optimizer. Arrays that `init` reads only the
        shapes of are not moved.
      state_shardings: a `NamedSharding` per leaf of the state, or a `Layout` of it, as
        `logical_to_mesh` and `extend_over` return. The mesh may be Auto or Explicit.

    Returns:
      The state, sharded as asked. No leaf shares a buffer with a parameter or with another leaf,
      so that both can be donated.

    Raises:
      AxesError: `state_shardings` has not the structure of the state, does not divide it or has no
        devices; lists every path.

    Examples:
      >>> import optax
      >>> mesh = jax.make_mesh((1,), ('data',), axis_types=(AxisType.Auto,))
      >>> params = {'w': jax.numpy.ones((4, 2))}
      >>> tx = optax.trace(0.9)
      >>> sharding = NamedSharding(mesh, jax.sharding.PartitionSpec('data', None))
      >>> state = init_sharded(tx, params, optax.TraceState({'w': sharding}))
      >>> state.trace['w'].sharding == sharding
      True
    """
    init, params = init_of(tx), params_of(tx, params)
    layout = _layout(init, params, state_shardings)
    return jit_init(init, params, layout)(params)


def jit_init(init: Init, params: Any, layout: Layout | None) -> jax.stages.Wrapped:
    """The compiled program of `init_sharded`."""
    if layout is None:
        return jax.jit(init)
    shardings = layout.shardings
    program = jax.jit(init, out_shardings=shardings)
    if AxisType.Explicit not in layout.mesh.axis_types:
        return program
    # Types with shardings forbid some operations, as the concatenation of `optax.flatten`; and what
    # `init` makes is then typed like the parameters, and is resharded from there: a second share.
    specs = jax.tree.map(lambda sharding: sharding.with_memory_kind(None), shardings)
    untyped: Any = jax.sharding.auto_axes(init, out_sharding=specs)
    untyped_program = jax.jit(untyped, out_shardings=shardings)
    try:
        untyped_program.trace(params)
    except Exception:  # anything; the program as it stands decides whether it is right
        return program
    return untyped_program


def _layout(init: Init, params: Any, state_shardings: Any) -> Layout | None:
    """The layout of the state; `None` where it has no leaves."""
    # Without the parameters' shardings, which `init` may not be able to work with.
    shapes = jax.eval_shape(
        init, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(*shape_and_dtype(leaf)), params)
    )
    if not jax.tree.leaves(shapes):
        return None
    if isinstance(state_shardings, Layout):
        mesh = state_shardings.mesh
    else:
        entries = align(state_shardings, shapes, "state_shardings")
        for (path, _), entry in zip(leaves_with_paths(shapes), entries, strict=True):
            if not isinstance(entry, NamedSharding):
                raise AxesError(
                    "`state_shardings` must be a NamedSharding per leaf or a Layout; found "
                    f"{brief(entry)} at {path}"
                )
        mesh = entries[0].mesh
    if isinstance(mesh, AbstractMesh):
        raise AxesError(
            "`state_shardings` is on an AbstractMesh, which has no devices: lay it out on a Mesh"
        )
    return Layout.from_specs(state_shardings, shapes, mesh, argument="state_shardings")
