"""ZeRO-1 from abstract parameters that name their own dimensions, in one call."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from opt_partition._init import StateMaker
from opt_partition._layout import Layout
from opt_partition._logical_to_mesh import LogicalAxisRules, MemoryKinds
from opt_partition._memory_plan import memory_plan
from opt_partition._param_axes import unboxed
from opt_partition._specs import AnyMesh
from opt_partition._zero import extended, report_replicated
from opt_partition.errors import ReplicatedWarning


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
    on_unknown: Literal["error", "replicate"] = "error",
) -> ZeroLayouts:
    """Lays out parameters and optimizer state for ZeRO-1, with any optimizer.

    Between steps, parameters and state are sharded over `zero_axes` too, so that an elementwise
    update needs no communication. Constrain the parameters to `compute` at the start of the step:
    they are gathered once, and their gradients are reduced.

    Args:
      tx: the transformation, its `init`, a definition or an optimizer; see `explain`.
      abstract_params: arrays or `jax.ShapeDtypeStruct`s in Flax boxes, e.g. of
        `jax.eval_shape(model.init, ...)`, or in an `nnx.State` with sharding metadata.
      rules: rules from logical names to mesh axes; see `logical_to_mesh`.
      mesh: the mesh, concrete or abstract.
      zero_axes: one or more mesh axes; see `extend_over`.
      param_axes: logical axes of parameters that do not name their dimensions themselves.
      min_bytes: leaves with fewer global bytes stay as the rules shard them.
      memory_kinds: memory kinds of the state; see `logical_to_mesh`.
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
    params = unboxed(abstract_params)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReplicatedWarning)  # once, of parameters and state
        plan = memory_plan(
            tx,
            params,
            abstract_params if param_axes is None else param_axes,
            rules,
            mesh,
            zero=zero_axes,
            zero_min_bytes=min_bytes,
            memory_kinds=memory_kinds,
            on_unknown=on_unknown,
        )
    stored = extended(plan.params, zero_axes, min_bytes)
    beside = plan.total_bytes_per_device - plan.state_bytes_per_device
    report_replicated([stored, plan.state], zero_axes, min_bytes, beside=beside)
    return ZeroLayouts(plan.params, stored, plan.state)
