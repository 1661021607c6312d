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
    """Returns the names and the mesh axes of all dimensions of the parameters.

    `rules` come before those of Flax. Without a mesh there are only names.

    Raises:
      AxesError: a name has neither a rule nor a mesh axis of its own; lists them all.
    """
    unknown: dict[str, list[str]] = {}
    axes = []
    for param in params:
        rank = np.ndim(param.value)
        names = names_in(param.metadata, of_optimizer=True)
        place = spec = None
        if mesh is not None:
            reader = _Reader(param, rules, mesh)
            lies = array_spec(param.value, mesh)
            place = reader.spec(names_in(param.metadata)) if lies is None else lies
            spec = reader.spec(names)
            if reader.unknown:
                unknown[path_str(param.path)] = list(dict.fromkeys(reader.unknown))
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


class _Reader:
    """What the names of one parameter mean on a mesh."""

    def __init__(self, param: Parameter, rules: Rules, mesh: AnyMesh) -> None:
        self.unknown: list[str] = []
        self._param, self._mesh = param, mesh
        mesh_axes = tuple((axis, axis) for axis in mesh.axis_names)
        self._sources = [rules, *rules_in(param.metadata), mesh_axes]

    def spec(self, names: Any) -> PartitionSpec | None:
        """Returns the mesh axes that names mean; without names, those of the array."""
        lies = array_spec(self._param.value, self._mesh)
        if names is None:
            return lies
        names = names.spec if isinstance(names, NamedSharding) else names
        table, unknown = self._table({*_flat(names)})
        if unknown:
            if lies is None:
                self.unknown += [name for name in _flat(names) if name in unknown]
            return lies  # names of another program, whose arrays are placed
        shape = jax.ShapeDtypeStruct(np.shape(self._param.value), jnp.float32)
        layout = logical_to_mesh([names], table, self._mesh, [shape])
        return layout.rows[0].spec

    def _table(self, names: set[str]) -> tuple[Rules, set[str]]:
        """The rules for some names, of each from the first source that has any; and the others."""
        table: list[tuple[str, Any]] = []
        for source in self._sources:
            table += [(name, axes) for name, axes in source if name in names]
            names = names - {name for name, _ in source}
        return tuple(table), names


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
