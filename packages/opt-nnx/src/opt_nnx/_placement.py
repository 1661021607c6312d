"""Shardings of parameters and state, and how an update keeps them."""

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

from opt_nnx._variables import metadata_of, names_in, pure, trimmed, variables_of

AnyMesh = Mesh | AbstractMesh


@dataclasses.dataclass(frozen=True)
class Placement:
    """Shardings of parameters and state, in leaf order; static in the graph of an optimizer.

    Attributes:
      mesh: the mesh.
      param_specs: a spec for each parameter, `None` where it is left alone.
      state_specs: a spec for each leaf of the state.
    """

    mesh: AnyMesh
    param_specs: tuple[PartitionSpec | None, ...]
    state_specs: tuple[PartitionSpec, ...]

    @property
    def params(self) -> list[NamedSharding | None]:
        """A sharding for each parameter; `None` where unknown."""
        return [None if spec is None else self._sharding(spec) for spec in self.param_specs]

    @property
    def state(self) -> list[NamedSharding]:
        """A sharding for each leaf of the state."""
        return [self._sharding(spec) for spec in self.state_specs]

    def _sharding(self, spec: PartitionSpec) -> NamedSharding:
        # On one device compiled functions drop the specs of their results: with specs, the next
        # call would compile again.
        is_alone = self.mesh.size == 1 and AxisType.Explicit not in self.mesh.axis_types
        return NamedSharding(self.mesh, PartitionSpec() if is_alone else spec)

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.mesh, self.param_specs, self.state_specs))

    def __hash__(self) -> int:
        return self._hash  # compiled functions need it on every call

    def keep(self, params: Any, state: Any) -> tuple[Any, Any]:
        """Constrains both to their shardings, which XLA would otherwise choose."""
        if AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types:
            return params, state  # these are shards, inside `shard_map`
        return self.put_params(params), self.put_state(state)

    def with_params(self, params: Any) -> Placement:
        """Fills in the specs of parameters from their arrays."""
        # An array on no mesh is to be replicated; one on another mesh is left alone.
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
        """Places parameters."""
        return self._put(params, self.param_specs)

    def put_state(self, state: Any) -> Any:
        """Places the state."""
        return self._put(state, self.state_specs)

    def put_scalar(self, scalar: Any) -> Any:
        """Replicates a scalar."""
        return put(scalar, NamedSharding(self.mesh, PartitionSpec()))

    def warn_if_replicated(self, params: Any, state: Any) -> None:
        """Warns if parameters and state are replicated over the mesh of `jax.set_mesh`."""
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
            f"Parameters without names are replicated on {self.mesh.size} devices, and so is their "
            f"state of {sum(leaf.nbytes for leaf in jax.tree.leaves(state))} bytes: "
            f"`{path_str(path)}`, {largest.nbytes} bytes, and {len(leaves) - 1} more. "
            "`flax.nnx.Optimizer` lets XLA move them after the first step; here they stay. "
            f'`opt_nnx.Optimizer(..., zero="{axis}")` shards the state; `zero=()` keeps it '
            "replicated without this warning.",
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
    """The spec of a parameter on a mesh; `None` if it is on another mesh."""
    if isinstance(leaf.sharding, NamedSharding):
        spec = array_spec(leaf, mesh)
        return None if spec is None else as_compiled(spec, mesh)
    return PartitionSpec()


def as_compiled(spec: PartitionSpec, mesh: AnyMesh) -> PartitionSpec:
    """Returns a spec as compiled functions return it; they compare specs by length, too."""
    is_explicit = AxisType.Explicit in mesh.axis_types
    return spec if is_explicit else PartitionSpec(*trimmed(tuple(spec)))


def is_concrete(leaf: Any) -> bool:
    """Whether a leaf is an array with a value."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)


def put(leaf: Any, sharding: NamedSharding) -> Any:
    """Places an array, traced or not; gives a shape the sharding."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    if not isinstance(leaf, jax.core.Tracer):
        is_there = isinstance(leaf, jax.Array) and leaf.sharding == sharding
        return leaf if is_there else jax.device_put(leaf, sharding)
    if AxisType.Explicit in sharding.mesh.axis_types:
        return jax.sharding.reshard(leaf, sharding)
    return jax.lax.with_sharding_constraint(leaf, sharding)


def array_spec(value: Any, mesh: AnyMesh) -> PartitionSpec | None:
    """Returns the spec of an array on a mesh, from its sharding or, if traced, its type."""
    sharding = sharding_of(value)
    if not isinstance(sharding, NamedSharding) or dict(sharding.mesh.shape) != dict(mesh.shape):
        return None
    if isinstance(value, jax.core.Tracer) and not sharding.mesh.are_all_axes_explicit:
        return None
    return sharding.spec


def sharding_of(value: Any) -> Any:
    """Returns the sharding of an array or, if it is traced, of its type."""
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
    """The concrete mesh of `jax.set_mesh`, unless under a trace."""
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
    """Returns an update that runs on Auto axes where the mesh is Explicit.

    Types with shardings forbid many operations of transformations, such as the sum of gradients
    and of state that ZeRO shards differently.
    """

    def step_on_auto_axes(
        before: Optimizer, grads: Any, overrides: dict[str, Any]
    ) -> tuple[Any, Any, Any]:
        is_explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
        if not is_explicit or any(map(callable, jax.tree.leaves(overrides))):
            return step(before, grads, overrides)  # such a function may expect these types
        params, state = jax.tree.map(
            lambda leaf: jax.typeof(leaf).sharding.spec, (before.target, before.state.param_states)
        )
        on_auto_axes: Step = jax.sharding.auto_axes(step, out_sharding=(params, params, state))
        return on_auto_axes(before, grads, overrides)

    return step_on_auto_axes
