"""Creates the sharded state of an optimizer in variables of Flax NNX."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import all_leaves
from opt_core import LeafDescription, OptimizerDef, OptimizerState, describe_state
from opt_core.extend import Names, flatten_with_paths, path_str, unalias
from opt_optax_bridge import OptaxWrapper
from opt_partition import Layout, extend_over, init_sharded, logical_to_mesh
from opt_partition.errors import AxesError

from opt_nnx._placement import (
    AnyMesh,
    Placement,
    array_spec,
    as_compiled,
    find_mesh,
)
from opt_nnx._variables import (
    Rules,
    is_variable,
    metadata_of,
    names_in,
    pure,
    rules_in,
    state_variable,
    variables_of,
)

Entry = Any  # of a spec: a name, several, or `None`


class Parameter(NamedTuple):
    """A parameter and the variable that holds it."""

    path: Names
    value: Any
    variable: Any
    metadata: Mapping[str, Any]  # of the variable, if it holds nothing else


class ParameterAxes(NamedTuple):
    """The dimensions of a parameter."""

    names: tuple[Entry, ...]  # of its state, logical axes
    spec: tuple[Entry, ...]  # of its state, in mesh axes
    own: PartitionSpec | None  # of the parameter itself, if known


def make_state(
    definition: OptimizerDef,
    params: Any,
    *,
    mesh: AnyMesh | None,
    rules: Rules,
    zero: tuple[str, ...],
    state: Any = None,
) -> tuple[Any, Placement | None]:
    """Returns the state, sharded, with a variable for each leaf, and the placement.

    `params` is what `nnx.state` returns, `state` the `param_states` to take over, if any. The mesh
    defaults to the parameters'; `zero` lists further mesh axes to shard the state over.
    """
    parameters = list(_parameters(params))
    if mesh is None:
        mesh = find_mesh([p.value for p in parameters], [p.metadata for p in parameters])
    if mesh is None and zero:
        raise AxesError(
            "`zero` needs a mesh: pass `mesh=`, or place the parameters on a mesh first"
        )
    values = pure(params)
    shapes = jax.tree.map(shape_of, values)
    like = jax.eval_shape(lambda p: definition.init_state(p).param_states, shapes)
    axes = read_axes(parameters, rules, mesh)
    step = jax.ShapeDtypeStruct((), jnp.int32)
    described = describe_state(definition, shapes, OptimizerState(step, like)).leaves
    of_state = list(state_axes(described, axes))
    layout = placement = None
    if mesh is not None:
        layout = _lay_out([spec for _, spec in of_state], like, mesh, zero)
        of_params = (param.own for param in axes.values())
        param_specs = tuple(None if x is None else as_compiled(x, mesh) for x in of_params)
        state_specs = tuple(as_compiled(row.spec, mesh) for row in layout.rows)
        placement = Placement(mesh, param_specs, state_specs)
    if state is None:
        state = _init(definition, values, like, layout)
    if placement is not None:
        state = placement.put_state(state)
    variables = {param.path: param.variable for param in parameters}
    leaves, structure = jax.tree.flatten(like)
    followed = [variables.get(x.parameter or (), y) for x, y in zip(described, leaves, strict=True)]
    slots = _slots(definition, params, like, followed)
    placed = [None] * len(leaves) if placement is None else placement.state_specs
    names = [names for names, _ in of_state]
    rows = jax.tree.unflatten(structure, list(zip(names, placed, strict=True)))
    containers: Any = jax.tree.structure(slots, is_leaf=is_variable)
    columns = (containers.flatten_up_to(tree) for tree in (state, rows))
    return containers.unflatten(map(state_variable, variables_of(slots), *columns)), placement


def _lay_out(
    specs: Sequence[PartitionSpec], like: Any, mesh: AnyMesh, zero: tuple[str, ...]
) -> Layout:
    """The layout of the state, of which a dimension may not divide where the parameter's does."""
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
    """Returns shape and dtype alone."""
    return jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.result_type(leaf))


def _parameters(state: Any) -> Iterator[Parameter]:
    """The parameters in JAX's order."""
    variables: list[Any] = []
    for variable in variables_of(state):
        variables += [variable] * len(jax.tree.leaves(pure(variable)))
    leaves = [(path, leaf) for path, leaf in flatten_with_paths(pure(state)) if leaf is not None]
    for (path, leaf), variable in zip(leaves, variables, strict=True):
        # Names apply to an array; for a tree in a variable they mean nothing.
        is_array = all_leaves([pure(variable)])
        yield Parameter(path, leaf, variable, metadata_of(variable) if is_array else {})


def _slots(definition: OptimizerDef, params: Any, like: Any, followed: Sequence[Any]) -> Any:
    """The state's structure, with what each variable to create follows: a variable or a leaf."""
    if isinstance(definition, OptaxWrapper):  # as `nnx.Optimizer` does
        with contextlib.suppress(Exception):  # where `init` needs arrays, or looks at paths
            slots = jax.eval_shape(definition.optax_optimizer.init, jax.tree.map(shape_of, params))
            structure: Any = jax.tree.structure(slots, is_leaf=is_variable)
            structure.flatten_up_to(like)
            return slots
    # For any other definition each leaf is a variable, like that of the parameter it follows.
    return jax.tree.unflatten(jax.tree.structure(like), followed)


# From the logical axes of the parameters to those of the state, and to mesh axes.


def read_axes(
    params: Iterable[Parameter], rules: Rules, mesh: AnyMesh | None
) -> dict[Names, ParameterAxes]:
    """Returns logical axes and, given a mesh, mesh axes of every parameter, by path."""
    unknown: dict[str, list[str]] = {}
    axes = {}
    for param in params:
        rank = np.ndim(param.value)
        names = names_in(param.metadata, of_optimizer=True)
        own = spec = None
        if mesh is not None:
            missing: dict[str, None] = {}
            own = array_spec(param.value, mesh)
            if own is None:
                own = _spec(param, names_in(param.metadata), rules, mesh, missing)
            spec = _spec(param, names, rules, mesh, missing)
            if missing:
                unknown[path_str(param.path)] = list(missing)
        axes[param.path] = ParameterAxes(_padded(names, rank), _padded(spec, rank), own)
    if mesh is not None and unknown:
        first = next(iter(unknown.values()))[0]
        lines = [f"  {path}: {', '.join(map(repr, names))}" for path, names in unknown.items()]
        sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
        raise AxesError(
            "these logical axes have no rule, and are not axes of the mesh, which has "
            + "\n".join([sizes, *lines])
            + f"\nPass `rules=[({first!r}, None), ...]`, or use `nnx.logical_axis_rules`."
        )
    return axes


def _spec(
    param: Parameter, names: Any, rules: Rules, mesh: AnyMesh, missing: dict[str, None]
) -> PartitionSpec | None:
    """The mesh axes of a parameter's names; without names, those of its array."""
    # The first source that has a rule for a name decides.
    of_array = array_spec(param.value, mesh)
    if names is None:
        return of_array
    names = names.spec if isinstance(names, NamedSharding) else names
    table: list[tuple[str, Any]] = []
    left = {*_flat(names)}
    for source in (rules, *rules_in(param.metadata), [(axis, axis) for axis in mesh.axis_names]):
        table += [(name, axes) for name, axes in source if name in left]
        left -= {name for name, _ in source}
    if left:
        if of_array is None:
            missing |= dict.fromkeys(name for name in _flat(names) if name in left)
        return of_array  # names of another program, whose arrays are placed
    shape = jax.ShapeDtypeStruct(np.shape(param.value), jnp.float32)
    return logical_to_mesh([names], table, mesh, [shape]).rows[0].spec


def state_axes(
    described: Sequence[LeafDescription], axes: Mapping[Names, ParameterAxes]
) -> Iterator[tuple[tuple[Entry, ...], PartitionSpec]]:
    """Yields logical axes and mesh axes of every leaf, from the dimensions that it follows."""
    for leaf in described:
        dims = leaf.dimensions or ()
        if leaf.parameter is None:
            yield (None,) * len(dims), PartitionSpec()
            continue
        param = axes[leaf.parameter]
        names = tuple(None if dim is None else param.names[dim] for dim in dims)
        spec = (None if dim is None else param.spec[dim] for dim in dims)
        yield names, PartitionSpec(*spec)


def _padded(spec: Any, rank: int) -> tuple[Entry, ...]:
    """Returns one entry for each dimension."""
    entries = tuple(spec.spec if isinstance(spec, NamedSharding) else spec or ())
    return (*entries, *[None] * (rank - len(entries)))


def _flat(spec: Any) -> Iterator[str]:
    """The names in a spec, flattened."""
    for entry in spec:
        yield from (entry,) if isinstance(entry, str) else entry or ()
