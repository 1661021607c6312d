"""From the names of the parameters' dimensions to the names and the mesh axes of the state's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from opt_core import Optimizer, OptimizerDef, OptimizerState
from opt_core.extend import path_str
from opt_partition import logical_to_mesh
from opt_partition.errors import AxesError

from opt_nnx._variables import Rules, names_in, rules_in

AnyMesh = Mesh | AbstractMesh
Entry = Any  # of a spec: a name, several, or `None`


class Parameter(NamedTuple):
    """A parameter: the names of its keys, its array, and the variable that holds it.

    `metadata` are those of the variable, if it holds nothing else.
    """

    path: tuple[str, ...]
    value: Any
    variable: Any
    metadata: Mapping[str, Any]


class ParameterAxes(NamedTuple):
    """The dimensions of a parameter.

    Attributes:
      names: for its state, as Flax has them.
      spec: the mesh axes for its state.
      place: the mesh axes where it lies itself, or is to lie; `None` where that is not known.
    """

    names: tuple[Entry, ...]
    spec: tuple[Entry, ...]
    place: PartitionSpec | None


def read_axes(
    params: Iterable[Parameter], rules: Rules, mesh: AnyMesh | None
) -> list[ParameterAxes]:
    """Returns the names and the mesh axes of all dimensions; without a mesh there are only names.

    `rules` come before those of Flax. An `AxesError` lists the names without a rule or a mesh axis.
    """
    unknown: dict[str, list[str]] = {}
    axes = []
    for param in params:
        rank = np.ndim(param.value)
        names = names_in(param.metadata, of_optimizer=True)
        place = spec = None
        if mesh is not None:
            missing: dict[str, None] = {}
            place = array_spec(param.value, mesh)
            if place is None:
                place = _spec(param, names_in(param.metadata), rules, mesh, missing)
            spec = _spec(param, names, rules, mesh, missing)
            if missing:
                unknown[path_str(param.path)] = list(missing)
        axes.append(ParameterAxes(_padded(names, rank), _padded(spec, rank), place))
    if mesh is not None and unknown:
        first = next(iter(unknown.values()))[0]
        lines = [f"  {path}: {', '.join(map(repr, names))}" for path, names in unknown.items()]
        sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
        raise AxesError(
            "these names of dimensions have no rule, and `mesh` has no such axis: it has "
            + "\n".join([sizes, *lines])
            + f"\nGive `rules=[({first!r}, None), ...]`, or use `nnx.logical_axis_rules`."
        )
    return axes


def _spec(
    param: Parameter, names: Any, rules: Rules, mesh: AnyMesh, missing: dict[str, None]
) -> PartitionSpec | None:
    """The mesh axes that names mean; without names, those of the array.

    Of each name the first source that has any rules counts. `missing` takes names without any.
    """
    lies = array_spec(param.value, mesh)
    if names is None:
        return lies
    names = names.spec if isinstance(names, NamedSharding) else names
    table: list[tuple[str, Any]] = []
    left = {*_flat(names)}
    for source in (rules, *rules_in(param.metadata), [(axis, axis) for axis in mesh.axis_names]):
        table += [(name, axes) for name, axes in source if name in left]
        left -= {name for name, _ in source}
    if left:
        if lies is None:
            missing |= dict.fromkeys(name for name in _flat(names) if name in left)
        return lies  # names of another program, whose arrays are placed
    shape = jax.ShapeDtypeStruct(np.shape(param.value), jnp.float32)
    return logical_to_mesh([names], table, mesh, [shape]).rows[0].spec


def array_spec(value: Any, mesh: AnyMesh) -> PartitionSpec | None:
    """Returns where an array lies on a mesh; `None` where it is not known to lie there.

    Of an array that is traced only a type with shardings says.
    """
    sharding = sharding_of(value)
    if not isinstance(sharding, NamedSharding) or dict(sharding.mesh.shape) != dict(mesh.shape):
        return None
    if isinstance(value, jax.core.Tracer) and not sharding.mesh.are_all_axes_explicit:
        return None
    return sharding.spec


def sharding_of(value: Any) -> Any:
    """Returns the sharding of an array; of one that is traced, what its type says."""
    if isinstance(value, jax.core.Tracer):
        return jax.typeof(value).sharding
    return getattr(value, "sharding", None)


def state_axes(
    definition: OptimizerDef,
    params: Any,
    state: Any,
    axes: Sequence[ParameterAxes],
) -> list[tuple[tuple[Entry, ...], PartitionSpec]]:
    """Returns the names and the mesh axes of the dimensions of every leaf of the state.

    Each pair of a name and mesh axes gets a label of its own, and the labels are followed through
    `init`: the state need not have the names of one tree and the mesh axes of another. `params` and
    `state` are `jax.ShapeDtypeStruct`s, `axes` those of the parameters in JAX's order.
    """
    labels: dict[tuple[Entry, Entry], str] = {(None, None): ""}
    specs = [
        PartitionSpec(
            *(
                labels.setdefault(pair, str(len(labels))) or None
                for pair in zip(param.names, param.spec, strict=True)
            )
        )
        for param in axes
    ]
    pairs = {label: pair for pair, label in labels.items()}
    labelled = _derive(
        definition, params, state, jax.tree.unflatten(jax.tree.structure(params), specs)
    )
    leaves = jax.tree.leaves(state)
    structure: Any = jax.tree.structure(state)
    result = []
    for leaf, labels_of_leaf in zip(leaves, structure.flatten_up_to(labelled), strict=True):
        entries = [[pairs[label] for label in _several(entry)] for entry in labels_of_leaf or ()]
        entries += [[]] * (len(leaf.shape) - len(entries))
        names = tuple(_joined(name for name, _ in entry) for entry in entries)
        spec = PartitionSpec(*(_joined(mesh_axes for _, mesh_axes in entry) for entry in entries))
        result.append((names, spec))
    return result


def _derive(definition: OptimizerDef, params: Any, state: Any, axes: Any) -> Any:
    step = jax.ShapeDtypeStruct((), jnp.int32)
    optimizer = Optimizer(definition, OptimizerState(step, state), params)
    return definition.derive_logical_axes(optimizer, axes).state.param_states


def _padded(spec: Any, rank: int) -> tuple[Entry, ...]:
    """Returns the entries of a spec, one for each dimension."""
    entries = tuple(spec.spec if isinstance(spec, NamedSharding) else spec or ())
    return (*entries, *[None] * (rank - len(entries)))


def _several(entry: Entry) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _flat(spec: Any) -> Iterator[str]:
    return (name for entry in spec for name in _several(entry))


def _joined(entries: Iterable[Entry]) -> Entry:
    flat = tuple(name for entry in entries for name in _several(entry))
    return flat[0] if len(flat) == 1 else flat or None
