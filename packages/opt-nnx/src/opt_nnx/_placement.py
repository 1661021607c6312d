"""Where an optimizer's state lies: made there, and kept there."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from opt_core import Optimizer
from opt_core.extend import flatten_with_paths, path_str

from opt_nnx._variables import metadata_of, names_in, pure, variables_of

AnyMesh = Mesh | AbstractMesh


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where parameters and state lie, in JAX's order; static in the graph of an optimizer.

    Attributes:
      mesh: the mesh.
      param_specs: a spec of mesh axes for each parameter, `None` where it is left alone.
      state_specs: a spec for each leaf of the state.
    """

    mesh: AnyMesh
    param_specs: tuple[PartitionSpec | None, ...]
    state_specs: tuple[PartitionSpec, ...]

    @property
    def params(self) -> list[NamedSharding | None]:
        """A sharding for each parameter; `None` where it is not known."""
        return [None if spec is None else self._sharding(spec) for spec in self.param_specs]

    @property
    def state(self) -> list[NamedSharding]:
        """A sharding for each leaf of the state."""
        return [self._sharding(spec) for spec in self.state_specs]

    def _sharding(self, spec: PartitionSpec) -> NamedSharding:
        # On one device compiled functions drop the specs of their results, and would take the
        # next arguments for others.
        is_alone = self.mesh.size == 1 and AxisType.Explicit not in self.mesh.axis_types
        return NamedSharding(self.mesh, PartitionSpec() if is_alone else spec)

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.mesh, self.param_specs, self.state_specs))

    def __hash__(self) -> int:
        return self._hash  # compiled functions ask for it on every call

    def keep(self, params: Any, state: Any) -> tuple[Any, Any]:
        """Returns both where they lie; XLA would decide by what they are computed from."""
        if AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types:
            return params, state  # the shards of them, inside `shard_map`
        return self.put_params(params), self.put_state(state)

    def with_params(self, params: Any) -> Placement:
        """Returns the placement with a spec for each parameter that has devices."""
        # That of the array; one on no mesh is replicated, one on another mesh left alone.
        leaves = jax.tree.leaves(params)
        meshes = [x.sharding.mesh for x in leaves if isinstance(sharding_of(x), NamedSharding)]
        mesh = self.mesh
        if isinstance(mesh, AbstractMesh):
            alike = [other for other in meshes if dict(other.shape) == dict(mesh.shape)]
            mesh = next((other for other in alike if isinstance(other, Mesh)), mesh)
        if isinstance(mesh, AbstractMesh):
            return self  # there are no devices to put anything on
        specs = tuple(
            _spec_of(leaf, mesh) if spec is None else spec
            for leaf, spec in zip(leaves, self.param_specs, strict=True)
        )
        return dataclasses.replace(self, mesh=mesh, param_specs=specs)

    def put_params(self, params: Any) -> Any:
        """Returns parameters where they lie, or are to lie."""
        return self._put(params, self.param_specs)

    def put_state(self, state: Any) -> Any:
        """Returns the state where it lies."""
        return self._put(state, self.state_specs)

    def put_scalar(self, scalar: Any) -> Any:
        """Returns a scalar on every device."""
        return put(scalar, NamedSharding(self.mesh, PartitionSpec()))

    def warn_if_whole(self, params: Any, state: Any) -> None:
        """Warns where every device of `jax.set_mesh` holds all parameters and their state."""
        context = jax.sharding.get_abstract_mesh()
        names = (names_in(metadata_of(variable)) for variable in variables_of(params))
        leaves = [*flatten_with_paths(pure(params))]
        if (
            context.empty
            or self.mesh.size == 1
            or any(spec is None or trimmed(tuple(spec)) for spec in self.param_specs)
            or any(spec is not None for spec in names)
            or not all(is_concrete(leaf) for _, leaf in leaves)
        ):
            return
        path, largest = max(leaves, key=lambda item: item[1].nbytes)
        axes = self.mesh.shape
        axis = "fsdp" if "fsdp" in axes else max(axes, key=lambda name: axes[name])
        warnings.warn(
            f"Parameters without names lie whole on each of {self.mesh.size} devices, and so does "
            f"their state of {sum(leaf.nbytes for leaf in jax.tree.leaves(state))} bytes: "
            f"`{path_str(path)}`, {largest.nbytes} bytes, and {len(leaves) - 1} more. "
            "`flax.nnx.Optimizer` lets XLA move them after the first step; here they stay. "
            f'`opt_nnx.Optimizer(..., zero="{axis}")` shards the state; `zero=()` keeps it whole '
            "without this warning.",
            stacklevel=6,  # of the caller, above Flax's metaclass
        )

    def _put(self, tree: Any, specs: Sequence[PartitionSpec | None]) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        placed = [
            leaf if spec is None else put(leaf, self._sharding(spec))
            for leaf, spec in zip(leaves, specs, strict=True)
        ]
        return jax.tree.unflatten(structure, placed)


def _spec_of(leaf: Any, mesh: AnyMesh) -> PartitionSpec | None:
    """The spec for a parameter on a mesh; `None` where it is on another one."""
    if isinstance(leaf.sharding, NamedSharding):
        spec = array_spec(leaf, mesh)
        return None if spec is None else as_compiled(spec, mesh)
    return PartitionSpec()


def as_compiled(spec: PartitionSpec, mesh: AnyMesh) -> PartitionSpec:
    """Returns a spec as compiled functions return it: to them, one of another length is another."""
    is_explicit = AxisType.Explicit in mesh.axis_types
    return spec if is_explicit else PartitionSpec(*trimmed(tuple(spec)))


def trimmed(spec: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the entries of a spec up to the last that says something."""
    entries = [
        entry[0] if isinstance(entry, tuple) and len(entry) == 1 else entry for entry in spec
    ]
    while entries and not entries[-1]:
        entries.pop()
    return tuple(entries)


def is_concrete(leaf: Any) -> bool:
    """Whether a leaf is an array that has a value."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)


def put(leaf: Any, sharding: NamedSharding) -> Any:
    """Returns an array where a sharding says, traced or not; a shape with the sharding."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    if not isinstance(leaf, jax.core.Tracer):
        is_there = isinstance(leaf, jax.Array) and leaf.sharding == sharding
        return leaf if is_there else jax.device_put(leaf, sharding)
    if AxisType.Explicit in sharding.mesh.axis_types:
        return jax.sharding.reshard(leaf, sharding)
    return jax.lax.with_sharding_constraint(leaf, sharding)


def array_spec(value: Any, mesh: AnyMesh) -> PartitionSpec | None:
    """Returns where an array lies on a mesh, if its sharding, or its type if traced, says it."""
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


def find_mesh(values: Sequence[Any], metadata: Sequence[Mapping[str, Any]]) -> AnyMesh | None:
    """Returns the mesh of the parameters' `values`, of their metadata, or of `jax.set_mesh`."""
    shardings = [*map(sharding_of, values), *map(names_in, metadata)]
    meshes: list[Any] = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
    meshes += [of_variable.get("mesh") for of_variable in metadata]
    meshes.append(jax.sharding.get_abstract_mesh())
    mesh = next((mesh for mesh in meshes if mesh is not None and not mesh.empty), None)
    if mesh is None or AxisType.Manual in mesh.axis_types:
        return None
    return _with_devices(mesh)


def _with_devices(mesh: AnyMesh) -> AnyMesh:
    """The mesh that `jax.set_mesh` was given, unless something is being traced."""
    if isinstance(mesh, AbstractMesh) and mesh == jax.sharding.get_abstract_mesh():
        array = _replicated()
        if not isinstance(array, jax.core.Tracer) and isinstance(array.sharding, NamedSharding):
            return array.sharding.mesh
    return mesh


@functools.partial(jax.jit, out_shardings=PartitionSpec())
def _replicated() -> jax.Array:
    return jnp.zeros(())


Step = Callable[[Optimizer, Any, dict[str, Any]], tuple[Any, Any, Any]]


def untyped(step: Step) -> Step:
    """Returns an update whose arrays have no shardings in their types, where the mesh is Explicit.

    Many transformations have operations that such types forbid, as sums of what lies differently:
    of state that ZeRO has sharded and gradients, for one.
    """

    def step_on_auto_axes(
        before: Optimizer, grads: Any, overrides: dict[str, Any]
    ) -> tuple[Any, Any, Any]:
        is_explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
        if not is_explicit or any(map(callable, jax.tree.leaves(overrides))):
            return step(before, grads, overrides)  # a function may itself have types in mind
        params, state = jax.tree.map(
            lambda leaf: jax.typeof(leaf).sharding.spec, (before.target, before.state.param_states)
        )
        on_auto_axes: Step = jax.sharding.auto_axes(step, out_sharding=(params, params, state))
        return on_auto_axes(before, grads, overrides)

    return step_on_auto_axes
