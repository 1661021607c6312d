"""What makes a state, e.g. a transformation or its `init`; creation of sharded states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, cast

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from opt_partition._layout import Layout
from opt_partition.errors import AxesError

Init: TypeAlias = Callable[[Any], Any]


class HasInit(Protocol):
    """An Optax transformation, or anything else with an `init`."""

    @property
    def init(self) -> Init:
        """A function from parameters to state."""


class HasInitState(Protocol):
    """An `opt_core.OptimizerDef`."""

    @property
    def init_state(self) -> Init:
        """A function from parameters to state."""


StateMaker: TypeAlias = HasInit | HasInitState | Init


def init_of(maker: StateMaker) -> Init:
    """Returns the function from parameters to state, of the argument `tx` of a public function."""
    # Definitions are recognised by their method, as this package does not depend on opt-core.
    init: Any = getattr(maker, "init_state", getattr(maker, "init", maker))
    if not callable(init):
        raise TypeError(
            "`tx` must be an Optax transformation, its `init`, or a definition of opt-core; got "
            f"{type(maker).__name__}. Call the constructor first."
        )
    return cast(Init, init)


def init_sharded(tx: StateMaker, params: Any, state_shardings: Any) -> Any:
    """Creates an optimizer state in which each device allocates only its own shards.

    `init` is compiled to a single program whose outputs have the given shardings, so that each
    shard is created in place. With `jax.jit(tx.init)` alone, everything is created on the first
    device.

    Args:
      tx: the transformation, its `init`, or a definition; see `explain`.
      params: the parameters. Arrays of which `init` uses only the shape are not moved.
      state_shardings: a `Layout` as returned by `logical_to_mesh` or `extend_over`, or a tree of
        `NamedSharding`s for the state or a prefix of it. The mesh may be Auto or Explicit.

    Returns:
      The sharded state. No leaf shares a buffer with a parameter or with another leaf, so that
      parameters and state can be donated.

    Raises:
      AxesError: the shardings are on an `AbstractMesh`, which has no devices.

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
    if isinstance(state_shardings, Layout):
        state_shardings = state_shardings.shardings
    return jit_init(init_of(tx), params, state_shardings)(params)


def jit_init(init: Init, params: Any, shardings: Any) -> jax.stages.Wrapped:
    """Returns the jitted program of `init_sharded`."""
    meshes = {leaf.mesh for leaf in jax.tree.leaves(shardings) if isinstance(leaf, NamedSharding)}
    if any(isinstance(mesh, AbstractMesh) for mesh in meshes):
        raise AxesError("`state_shardings` is on an AbstractMesh, which has no devices: use a Mesh")
    program = jax.jit(init, out_shardings=shardings)
    if not any(AxisType.Explicit in mesh.axis_types for mesh in meshes):
        return program
    # Explicit shardings forbid some operations, e.g. the concatenation in `optax.flatten`; and the
    # state would first be sharded like the parameters and then resharded, which takes extra memory.
    specs = jax.tree.map(lambda sharding: sharding.with_memory_kind(None), shardings)
    untyped: Any = jax.sharding.auto_axes(init, out_sharding=specs)
    untyped_program = jax.jit(untyped, out_shardings=shardings)
    try:
        untyped_program.trace(params)
    except Exception:  # whatever it is, the plain program will raise it if it is a real error
        return program
    return untyped_program
