"""The collectives of any compiled program, with nothing asked of it."""

from __future__ import annotations

import jax
from jax.sharding import AbstractMesh, Mesh

from opt_partition._verify.collectives import Collective, collectives
from opt_partition._verify.concatenated_sums import parse_program


def read_collectives(
    step: jax.stages.Compiled | jax.stages.Lowered, mesh: Mesh | AbstractMesh | None = None
) -> tuple[Collective, ...]:
    """Returns every array that a collective of a compiled program moves, in program order.

    For programs that are not training steps; `verify` judges those.

    Args:
      step: `jax.jit(f, ...).lower(...)`, compiled or not yet.
      mesh: names the axes that each collective runs over.

    Examples:
      >>> import jax.numpy as jnp
      >>> read_collectives(jax.jit(jnp.sum).lower(jnp.ones(3)))
      ()
    """
    compiled = step.compile() if isinstance(step, jax.stages.Lowered) else step
    if not isinstance(compiled, jax.stages.Compiled):
        raise TypeError(
            "`step` must be what `jax.jit(f).lower(...)` returns, compiled or not; got "
            f"{type(step).__name__}"
        )
    mesh_shape = None if mesh is None else dict(mesh.shape)
    return tuple(collectives(parse_program(compiled.as_text() or ""), mesh_shape))
