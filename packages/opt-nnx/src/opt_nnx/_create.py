"""The state of an optimizer, made where it stays, in variables of Flax NNX."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import all_leaves
from opt_core import OptimizerDef, flatten_with_paths, unalias
from opt_partition import Layout, extend_over, init_sharded, logical_to_mesh
from opt_partition.errors import AxesError

from opt_nnx._axes import AnyMesh, Entry, Parameter, read_axes, state_axes
from opt_nnx._placement import Placement, find_mesh
from opt_nnx._variables import (
    Rules,
    metadata_of,
    names_in,
    pure,
    resolved_names,
    state_variable,
    variables_of,
)


@dataclasses.dataclass(frozen=True)
class Request:
    """What the constructor of an optimizer was asked for.

    Attributes:
      mesh: the mesh; `None` for the parameters' own.
      rules: from names to mesh axes.
      zero: mesh axes to shard the state over besides.
    """

    mesh: AnyMesh | None
    rules: Rules
    zero: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is known of a state before it is made.

    Attributes:
      params: the parameters, in JAX's order.
      shapes: the state as `jax.ShapeDtypeStruct`s.
      names: of the dimensions of each leaf.
      layout: where each leaf lies; `None` without a mesh.
      placement: what the optimizer keeps of that.
    """

    params: list[Parameter]
    shapes: Any
    names: list[tuple[Entry, ...]]
    layout: Layout | None
    placement: Placement | None


def plan_state(definition: OptimizerDef, params: Any, request: Request) -> Plan:
    """Returns the plan of the state.

    Args:
      definition: of the optimizer.
      params: what `nnx.state` returns.
      request: the constructor's.

    Raises:
      AxesError: the names of the dimensions have no meaning on the mesh.
    """
    read = list(_parameters(params))
    mesh = request.mesh
    if mesh is None:
        mesh = find_mesh([p.value for p in read], [p.metadata for p in read])
    if mesh is None and request.zero:
        raise AxesError("`zero` needs a mesh: give `mesh=`, or put the parameters on one before")
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.result_type(x)), pure(params)
    )
    state = jax.eval_shape(lambda p: definition.init_state(p).param_states, shapes)
    axes = read_axes(read, request.rules, mesh)
    if mesh is None and not any(any(found.names) for found in axes):
        return Plan(read, state, [()] * len(jax.tree.leaves(state)), None, None)
    found = state_axes(definition, shapes, state, axes)
    names = [names for names, _ in found]
    if mesh is None:
        return Plan(read, state, names, None, None)
    specs = jax.tree.unflatten(jax.tree.structure(state), [spec for _, spec in found])
    # Dimensions of the state may not divide where the parameter's do.
    own = [(axis, axis) for axis in mesh.axis_names]
    layout = logical_to_mesh(specs, own, mesh, state)
    if request.zero:
        layout = extend_over(layout, state, mesh, request.zero)
    moves = bool(request.zero) or any(a.place is not None and a.spec != (*a.place,) for a in axes)
    return Plan(
        read,
        state,
        names,
        layout,
        Placement(
            mesh,
            tuple(found.place if moves else None for found in axes),
            tuple(row.spec for row in layout.rows),
        ),
    )


def _parameters(state: Any) -> Iterator[Parameter]:
    """The parameters in JAX's order, each with the metadata of its variable."""
    metadata: list[Mapping[str, Any]] = []
    for variable in variables_of(state):
        value = pure(variable)
        # Names are of an array: of a tree in a variable they say nothing.
        known = metadata_of(variable) if all_leaves([value]) else {}
        metadata += [known] * len(jax.tree.leaves(value))
    leaves = [(path, leaf) for path, leaf in flatten_with_paths(pure(state)) if leaf is not None]
    for (path, leaf), known in zip(leaves, metadata, strict=True):
        yield Parameter(path, leaf, known)


def make_state(definition: OptimizerDef, params: Any, plan: Plan) -> Any:
    """Returns the state, each leaf where the plan says, in variables of its own.

    Args:
      definition: of the optimizer.
      params: the values of the parameters.
      plan: of the state.
    """

    def init(params: Any) -> Any:
        return unalias(definition.init_state(params).param_states, apart_from=params)

    leaves = jax.tree.leaves(params)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        state = plan.shapes
    elif plan.layout is None or any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        state = init(params)
    else:
        state = init_sharded(init, params, plan.layout)
    return in_variables(state if plan.placement is None else plan.placement.put_state(state), plan)


def in_variables(state: Any, plan: Plan) -> Any:
    """Returns a state with a variable in the place of every leaf."""
    by_path = {param.path: param for param in plan.params}
    paths = [path for path, leaf in flatten_with_paths(state) if leaf is not None]
    specs = [None] * len(paths) if plan.placement is None else plan.placement.state
    leaves, structure = jax.tree.flatten(state)
    return structure.unflatten(
        _variable(leaf, _followed(path, by_path), names, spec)
        for leaf, path, names, spec in zip(leaves, paths, plan.names, specs, strict=True)
    )


def _followed(path: Sequence[str], params: Mapping[Sequence[str], Parameter]) -> Parameter | None:
    """The parameter whose path is in that of a leaf; of several the longest."""
    for length in range(len(path), 0, -1):
        for start in range(len(path) - length, -1, -1):
            if (found := params.get(tuple(path[start : start + length]))) is not None:
                return found
    return None


def _variable(
    value: Any, param: Parameter | None, names: Sequence[Entry], spec: PartitionSpec | None
) -> Any:
    metadata = None if param is None else param.metadata
    is_named = any(names) or (names and names_in(metadata or {}, of_optimizer=True) is not None)
    variable = state_variable(value, metadata, names if is_named else None)
    if spec is not None and _trimmed(resolved_names(variable)) != _trimmed(spec):
        # What Flax reads there is not where the leaf lies: ZeRO, or rules of the constructor.
        kept = {k: v for k, v in (metadata or {}).items() if k != "sharding_rules"}
        variable = state_variable(value, metadata and kept, tuple(spec))
    return variable


def _trimmed(spec: Sequence[Entry]) -> tuple[Entry, ...]:
    entries = [
        entry[0] if isinstance(entry, tuple) and len(entry) == 1 else entry for entry in spec
    ]
    while entries and not entries[-1]:
        entries.pop()
    return tuple(entries)
