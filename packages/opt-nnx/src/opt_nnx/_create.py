"""The state of an optimizer, made where it stays, in variables of Flax NNX."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import all_leaves
from opt_core import OptimizerDef
from opt_core.extend import flatten_with_paths, unalias
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


def make_state(
    definition: OptimizerDef,
    params: Any,
    *,
    mesh: AnyMesh | None,
    rules: Rules,
    zero: tuple[str, ...],
    state: Any = None,
) -> tuple[Any, Placement | None]:
    """Returns the state, each leaf where it stays in a variable of its own, and the placement.

    `params` is what `nnx.state` returns, `state` the `param_states`, if there are any already.
    Without `mesh` it is the parameters' own. `zero` are mesh axes to shard the state over besides.
    """
    parameters = list(_parameters(params))
    if mesh is None:
        mesh = find_mesh([p.value for p in parameters], [p.metadata for p in parameters])
    if mesh is None and zero:
        raise AxesError("`zero` needs a mesh: give `mesh=`, or put the parameters on one before")
    values = pure(params)
    shapes = jax.tree.map(shape_of, values)
    like = jax.eval_shape(lambda p: definition.init_state(p).param_states, shapes)
    axes = read_axes(parameters, rules, mesh)
    names: list[tuple[Entry, ...]] = [()] * len(jax.tree.leaves(like))
    layout = placement = None
    if mesh is not None or any(any(param.names) for param in axes):
        of_state = state_axes(definition, shapes, like, axes)
        names = [names_of_leaf for names_of_leaf, _ in of_state]
        if mesh is not None:
            layout = _lay_out([spec for _, spec in of_state], like, mesh, zero)
            places = tuple(None if x.place is None else as_compiled(x.place, mesh) for x in axes)
            specs = tuple(as_compiled(row.spec, mesh) for row in layout.rows)
            placement = Placement(mesh, places, specs)
    if state is None:
        state = _init(definition, values, like, layout)
    if placement is not None:
        state = placement.put_state(state)
    slots = _slots(definition, params, parameters, like)
    return _in_variables(state, slots, names, placement), placement


def _lay_out(
    specs: Sequence[PartitionSpec], like: Any, mesh: AnyMesh, zero: tuple[str, ...]
) -> Layout:
    """The layout of the state: a dimension may not divide where the parameter's does."""
    tree = jax.tree.unflatten(jax.tree.structure(like), specs)
    layout = logical_to_mesh(tree, [(axis, axis) for axis in mesh.axis_names], mesh, like)
    return extend_over(layout, like, mesh, zero) if zero else layout


def _init(definition: OptimizerDef, params: Any, like: Any, layout: Layout | None) -> Any:
    def init(params: Any) -> Any:
        return unalias(definition.init_state(params).param_states, apart_from=params)

    leaves = jax.tree.leaves(params)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        return like
    if layout is None or any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return init(params)
    return init_sharded(init, params, layout)


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


def _slots(
    definition: OptimizerDef, params: Any, parameters: Sequence[Parameter], like: Any
) -> Any:
    """The state with the variable of a parameter, or a leaf, where a variable is to be.

    `nnx.Optimizer` has variables where `init` has those that it is given.
    """
    if isinstance(definition, OptaxWrapper):
        with contextlib.suppress(Exception):  # where `init` needs arrays, or looks at paths
            slots = jax.eval_shape(definition.optax_optimizer.init, jax.tree.map(shape_of, params))
            structure: Any = jax.tree.structure(slots, is_leaf=is_variable)
            structure.flatten_up_to(like)
            return slots
    # Of another definition every leaf is a variable, that of the parameter in whose place it is.
    by_path: dict[Sequence[str], Parameter] = {param.path: param for param in parameters}
    paths = [path for path, leaf in flatten_with_paths(like) if leaf is not None]
    leaves, structure = jax.tree.flatten(like)
    followed = (_followed(path, by_path) for path in paths)
    slots = [
        leaf if param is None else param.variable
        for param, leaf in zip(followed, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, slots)


def _followed(path: Sequence[str], params: Mapping[Sequence[str], Parameter]) -> Parameter | None:
    """The parameter whose path is in that of a leaf; of several the longest."""
    for length in range(len(path), 0, -1):
        for start in range(len(path) - length, -1, -1):
            if (param := params.get(tuple(path[start : start + length]))) is not None:
                return param
    return None


def _in_variables(
    state: Any, slots: Any, names: Sequence[tuple[Entry, ...]], placement: Placement | None
) -> Any:
    """Returns a state with its leaves in variables where `slots` has them."""
    leaves, structure = jax.tree.flatten(state)
    specs = placement.state_specs if placement is not None else [None] * len(leaves)
    rows = jax.tree.unflatten(structure, list(zip(names, specs, strict=True)))
    containers: Any = jax.tree.structure(slots, is_leaf=is_variable)
    values, rows = containers.flatten_up_to(state), containers.flatten_up_to(rows)
    variables = map(_variable, values, variables_of(slots), rows)
    return containers.unflatten(variables)


def _variable(value: Any, slot: Any, row: Any) -> Any:
    metadata = metadata_of(slot) if is_variable(slot) else None
    if not all_leaves([value]):
        return state_variable(value, metadata, None)  # several leaves, or none
    names, spec = row
    has_names = names and names_in(metadata or {}, of_optimizer=True) is not None
    variable = state_variable(value, metadata, names if has_names or any(names) else None)
    if spec is not None and trimmed(resolved_names(variable)) != trimmed(spec):
        # What Flax reads there is not where the leaf lies: ZeRO, or rules of the constructor.
        kept = {k: v for k, v in (metadata or {}).items() if k != "sharding_rules"}
        variable = state_variable(value, None if metadata is None else kept, tuple(spec))
    return variable
