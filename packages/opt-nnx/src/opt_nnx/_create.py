"""The state of an optimizer, made where it stays, in variables of Flax NNX."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import all_leaves
from opt_core import OptimizerDef, flatten_with_paths, unalias
from opt_optax_bridge import OptaxWrapper
from opt_partition import Layout, extend_over, init_sharded, logical_to_mesh
from opt_partition.errors import AxesError

from opt_nnx._axes import AnyMesh, Entry, Parameter, read_axes, state_axes
from opt_nnx._placement import Placement, as_compiled, find_mesh, trimmed
from opt_nnx._variables import (
    Rules,
    is_variable,
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
      shapes: the state as `jax.ShapeDtypeStruct`s.
      slots: the state with a variable of the parameter, or a leaf, where a variable is to be.
      names: of the dimensions of each leaf.
      layout: where each leaf lies; `None` without a mesh.
      placement: what the optimizer keeps of that.
    """

    shapes: Any
    slots: Any
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
    shapes = jax.tree.map(shape_of, pure(params))
    state = jax.eval_shape(lambda p: definition.init_state(p).param_states, shapes)
    slots = _slots(definition, params, read, state)
    axes = read_axes(read, request.rules, mesh)
    if mesh is None and not any(any(found.names) for found in axes):
        return Plan(state, slots, [()] * len(jax.tree.leaves(state)), None, None)
    found = state_axes(definition, shapes, state, axes)
    names = [names for names, _ in found]
    if mesh is None:
        return Plan(state, slots, names, None, None)
    axes_of_state = jax.tree.unflatten(jax.tree.structure(state), [spec for _, spec in found])
    # A dimension of the state may not divide where the parameter's does.
    layout = logical_to_mesh(axes_of_state, [(axis, axis) for axis in mesh.axis_names], mesh, state)
    if request.zero:
        layout = extend_over(layout, state, mesh, request.zero)
    places = tuple(None if x.place is None else as_compiled(x.place, mesh) for x in axes)
    specs = tuple(as_compiled(row.spec, mesh) for row in layout.rows)
    placement = Placement(mesh, places, specs)
    return Plan(state, slots, names, layout, placement)


def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns what is known of an array before there is one; shardings are left out."""
    return jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.result_type(leaf))


def _parameters(state: Any) -> Iterator[Parameter]:
    """The parameters in JAX's order."""
    variables: list[Any] = []
    for variable in variables_of(state):
        variables += [variable] * len(jax.tree.leaves(pure(variable)))
    leaves = [(path, leaf) for path, leaf in flatten_with_paths(pure(state)) if leaf is not None]
    for (path, leaf), variable in zip(leaves, variables, strict=True):
        # Names are of an array: of a tree in a variable they say nothing.
        is_array = all_leaves([pure(variable)])
        yield Parameter(path, leaf, variable, metadata_of(variable) if is_array else {})


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


def _slots(definition: OptimizerDef, params: Any, read: Sequence[Parameter], state: Any) -> Any:
    """Where `nnx.Optimizer` has variables: where `init` has those that it is given."""
    if isinstance(definition, OptaxWrapper):
        with contextlib.suppress(Exception):  # where `init` needs arrays, or looks at paths
            slots = jax.eval_shape(definition.optax_optimizer.init, jax.tree.map(shape_of, params))
            structure: Any = jax.tree.structure(slots, is_leaf=is_variable)
            structure.flatten_up_to(state)
            return slots
    # Of another definition every leaf is a variable, that of the parameter in whose place it is.
    by_path: dict[Sequence[str], Parameter] = {param.path: param for param in read}
    paths = [path for path, leaf in flatten_with_paths(state) if leaf is not None]
    leaves, structure = jax.tree.flatten(state)
    found = (_followed(path, by_path) for path in paths)
    slots = [
        leaf if param is None else param.variable for param, leaf in zip(found, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, slots)


def _followed(path: Sequence[str], params: Mapping[Sequence[str], Parameter]) -> Parameter | None:
    """The parameter whose path is in that of a leaf; of several the longest."""
    for length in range(len(path), 0, -1):
        for start in range(len(path) - length, -1, -1):
            if (found := params.get(tuple(path[start : start + length]))) is not None:
                return found
    return None


def in_variables(state: Any, plan: Plan) -> Any:
    """Returns a state with its leaves in variables."""
    leaves, structure = jax.tree.flatten(state)
    specs = plan.placement.state if plan.placement is not None else [None] * len(leaves)
    rows = jax.tree.unflatten(structure, list(zip(leaves, plan.names, specs, strict=True)))
    slots = variables_of(plan.slots)
    containers: Any = jax.tree.structure(plan.slots, is_leaf=is_variable)
    variables = [
        _variable(value, slot, row)
        for slot, value, row in zip(
            slots, containers.flatten_up_to(state), containers.flatten_up_to(rows), strict=True
        )
    ]
    return containers.unflatten(variables)


def _variable(value: Any, slot: Any, row: Any) -> Any:
    metadata = metadata_of(slot) if is_variable(slot) else None
    if not all_leaves([value]):
        return state_variable(value, metadata, None)  # several leaves, or none
    _, names, spec = row
    has_names = names and names_in(metadata or {}, of_optimizer=True) is not None
    variable = state_variable(value, metadata, names if has_names or any(names) else None)
    if spec is not None and trimmed(resolved_names(variable)) != trimmed(spec):
        # What Flax reads there is not where the leaf lies: ZeRO, or rules of the constructor.
        kept = {k: v for k, v in (metadata or {}).items() if k != "sharding_rules"}
        variable = state_variable(value, None if metadata is None else kept, tuple(spec))
    return variable
