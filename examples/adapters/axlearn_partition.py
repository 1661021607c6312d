"""Any Optax transformation as AXLearn's `PartitionedGradientTransformation`.

Copy this file. AXLearn asks an optimizer for the `mesh_axes` of its state; they are derived from
those of the parameters, for every transformation, factored and projected states included.
"""

from typing import Any

import jax
import opt_partition as part
from axlearn.common.optimizer_base import OptStateSpec, PartitionedGradientTransformation


def partitioned(tx: Any, memory_kind: str | None = None) -> Any:
    """Returns `tx` with AXLearn's `partition`; its state may be kept in `pinned_host` memory."""

    def partition(param_specs: Any) -> Any:
        def is_spec(node: Any) -> bool:
            return isinstance(node, OptStateSpec)

        def shape_of(spec: Any) -> Any:
            return jax.ShapeDtypeStruct(spec.shape, spec.dtype or "float32")

        shapes = jax.tree.map(shape_of, param_specs, is_leaf=is_spec)
        axes = jax.tree.map(lambda spec: spec.mesh_axes or jax.P(), param_specs, is_leaf=is_spec)
        found = part.explain(tx, shapes, axes, strict=True)
        return jax.tree.map(
            lambda leaf, spec: OptStateSpec(leaf.shape, leaf.dtype, spec, memory_kind),
            found.state,
            found.axes,
        )

    def values(params: Any) -> Any:  # `OptParam`s are leaves that hold an array
        return jax.tree.map(lambda param: getattr(param, "value", param), params)

    return PartitionedGradientTransformation(
        init=lambda params: tx.init(values(params)),
        update=lambda updates, state, params: tx.update(updates, state, values(params)),
        partition=partition,
    )
