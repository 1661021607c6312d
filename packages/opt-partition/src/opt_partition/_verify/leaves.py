"""The arguments and results of a compiled step, with found and expected shardings."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from opt_partition._mesh.specs import itemsize, mesh_axes_of, shard_shape
from opt_partition._trees import flatten_with_paths, path_str
from opt_partition._verify.expected import Asked, Expected, broadcast, keywords
from opt_partition._verify.hlo import Module
from opt_partition._verify.hlo_flow import Deps, trace
from opt_partition._verify.report import Role, Side
from opt_partition._verify.roles import Keys, find_arguments, find_results, key_names, role_of
from opt_partition.errors import AxesError


@dataclasses.dataclass(frozen=True, eq=False)
class Leaf:
    """An argument or result of a compiled step.

    Attributes:
      side: `'input'` or `'output'`.
      path: `/`-joined keys.
      role: parameter, state or other.
      name: its keys relative to the parameters or the state.
      shape: global shape.
      dtype: its dtype.
      asked: the expectation.
      found: the compiled sharding; `None` for an argument that the step does not use.
      donated: whether it is a donated argument.
      muon: whether it belongs to the state of Optax's Muon.
    """

    side: Side
    path: str
    role: Role
    name: Keys
    shape: tuple[int, ...]
    dtype: Any
    asked: Asked
    found: Sharding | None
    donated: bool = False
    muon: bool = False

    def __post_init__(self) -> None:
        asked = self.asked.sharding
        if isinstance(asked, NamedSharding) and len(asked.spec) > len(self.shape):
            raise AxesError(
                f"{self.side} {self.path} has shape {self.shape}, but the expected {asked.spec} "
                "has more dimensions"
            )

    def __str__(self) -> str:
        return f"{self.side} {self.path} {self.dtype}{list(self.shape)}"

    @property
    def argument(self) -> str:
        """Number or name of the argument, or index of the result, that contains it."""
        return self.path.split("/", 1)[0]

    @property
    def size(self) -> int:
        """Global number of elements."""
        return math.prod(self.shape)

    @functools.cached_property
    def shard_size(self) -> int:
        """Number of elements per device."""
        return math.prod(_shard_shape(self.found, self.shape)) if self.found is not None else 0

    @property
    def bytes_found(self) -> int:
        """Bytes per device."""
        return self.shard_size * itemsize(self.dtype)

    @property
    def bytes_asked(self) -> int | None:
        """Expected bytes per device."""
        if self.asked.sharding is None:
            return None
        shape = _shard_shape(self.asked.sharding, self.shape)
        return math.prod(shape) * itemsize(self.dtype if self.dtype_ok else self.asked.dtype)

    @functools.cached_property
    def ok(self) -> bool:
        """Whether it has the expected sharding and memory kind."""
        if self.asked.sharding is None or self.found is None:
            return True
        return _on_devices_of(self.asked.sharding, self.found, self.path).is_equivalent_to(
            self.found, len(self.shape)
        )

    @property
    def dtype_ok(self) -> bool:
        """Whether it has the expected dtype, canonicalized as by JAX."""
        asked = self.asked.dtype
        return asked is None or _canonical(asked) == self.dtype

    @property
    def mesh_axes(self) -> tuple[tuple[str, ...], ...] | None:
        """The mesh axes of each dimension; `None` if the sharding has no mesh."""
        if not isinstance(self.found, NamedSharding):
            return None
        entries = [*self.found.spec, *[None] * (len(self.shape) - len(self.found.spec))]
        return tuple(map(mesh_axes_of, entries))


def input_leaves(compiled: jax.stages.Compiled, expected: Expected) -> list[Leaf]:
    """Returns the flattened arguments, in JAX's order."""
    args, kwargs = compiled.args_info
    asked = [
        *broadcast(expected.inputs, args, "inputs"),
        *keywords(expected.keywords, kwargs),
    ]
    arguments = {**{str(n): argument for n, argument in enumerate(args)}, **kwargs}
    places = find_arguments(arguments, expected.params, expected.state)
    infos = [*flatten_with_paths(args), *flatten_with_paths(kwargs)]
    found = _leaves_like(compiled.in_tree, compiled.input_shardings)
    muon = [of_muon for tree in (args, kwargs) for of_muon in _of_muon(tree)]
    return [
        Leaf(
            "input",
            path_str(path),
            *role_of(path, places),
            tuple(info.shape),
            info.dtype,
            ask,
            find,
            info.donated,
            of_muon,
        )
        for (path, info), ask, find, of_muon in zip(infos, asked, found, muon, strict=True)
    ]


def output_leaves(
    compiled: jax.stages.Compiled, expected: Expected, inputs: Sequence[Leaf], module: Module
) -> list[Leaf]:
    """Returns the flattened results, in JAX's order, with parameters and state identified.

    If several results have the structure of the parameters, e.g. gradients and updates, the new
    parameters are those with the most dependencies: on parameters (elementwise), state and batch.
    """
    out = compiled.out_info
    asked = broadcast(expected.outputs, out, "outputs")
    found = _leaves_like(compiled.out_tree, compiled.output_shardings)
    roles: tuple[Role, ...] = ("params", "state")
    made_of = functools.cache(lambda: _made_of(inputs, module))

    def rank(role: Role, place: Keys) -> tuple[int, bool]:
        paths = [key_names(path) for path, _ in flatten_with_paths(out)]
        deps = [d for d, path in zip(made_of(), paths, strict=False) if path[: len(place)] == place]
        bits = functools.reduce(operator.or_, (d.any for d in deps), 0)
        return bits.bit_count(), any(d.direct & _BITS[role] for d in deps)

    places = find_results(
        out,
        {role: {leaf.name: leaf.shape for leaf in inputs if leaf.role == role} for role in roles},
        rank,
    )
    return [
        Leaf(
            "output",
            path_str(path),
            *role_of(path, places),
            tuple(info.shape),
            info.dtype,
            ask,
            find,
        )
        for (path, info), ask, find in zip(flatten_with_paths(out), asked, found, strict=True)
    ]


def _of_muon(tree: Any) -> Iterator[bool]:
    """Yields for each leaf whether it is in a `MuonState`."""

    def is_muon(node: Any) -> bool:
        return type(node).__name__ == "MuonState"

    for node in jax.tree.leaves(tree, is_leaf=is_muon):
        yield from [is_muon(node)] * len(jax.tree.leaves(node))


def _made_of(inputs: Sequence[Leaf], module: Module) -> Sequence[Deps]:
    """Returns the roles each result depends on; empty if program and arguments do not match."""
    used = [leaf for leaf in inputs if leaf.found is not None]
    if len(used) != len(module.computations[module.entry].parameters):
        return []
    return trace(module, [Deps(_BITS[leaf.role], _BITS[leaf.role]) for leaf in used], {}).outputs


_BITS: Mapping[Role, int] = {"params": 1, "state": 2, "other": 4}


def mesh_shape(leaves: Sequence[Leaf]) -> Mapping[str, int]:
    """Returns the shape of the mesh of the step; empty if no sharding has a mesh."""
    meshes = [leaf.found.mesh for leaf in leaves if isinstance(leaf.found, NamedSharding)]
    return max(
        (mesh.shape for mesh in meshes), key=lambda shape: math.prod(shape.values()), default={}
    )


def platform(leaves: Sequence[Leaf]) -> str:
    """Returns the platform of the devices that the step was compiled for."""
    for leaf in leaves:
        if leaf.found is not None:
            device: Any = next(iter(leaf.found.device_set))
            return str(device.platform)
    return jax.default_backend()


def sharding_str(sharding: Sharding, ndim: int) -> str:
    """Formats a sharding.

    Examples:
      >>> mesh = AbstractMesh((8,), ('data',))
      >>> sharding_str(NamedSharding(mesh, jax.sharding.PartitionSpec('data')), 2)
      "P('data', None)"
    """
    if not isinstance(sharding, NamedSharding):
        return repr(sharding)
    entries = [*sharding.spec, *[None] * (ndim - len(sharding.spec))]
    where = f" in {sharding.memory_kind}" * (sharding.memory_kind not in (None, "device"))
    return f"P({', '.join(map(repr, entries)) if any(entries) else ''}){where}"


def _leaves_like(treedef: Any, tree: Any) -> list[Sharding | None]:
    """Returns the leaves of `tree`, with `None` for arguments that the step does not use."""
    leaves: list[Sharding | None] = treedef.flatten_up_to(tree)
    return leaves


def _on_devices_of(asked: Sharding, found: Sharding, path: str) -> Sharding:
    """Returns `asked`, on the devices of `found` if its own mesh is abstract."""
    if not isinstance(asked, NamedSharding) or not isinstance(asked.mesh, AbstractMesh):
        return asked
    if not isinstance(found, NamedSharding) or dict(found.mesh.shape) != dict(asked.mesh.shape):
        raise AxesError(
            f"{path}: expected on an abstract mesh of {dict(asked.mesh.shape)}, but compiled with "
            f"{found}: create the layout with the mesh that the step runs on"
        )
    assert isinstance(found.mesh, Mesh)
    return NamedSharding(found.mesh, asked.spec, memory_kind=asked.memory_kind)


def _shard_shape(sharding: Sharding, shape: tuple[int, ...]) -> tuple[int, ...]:
    if isinstance(sharding, NamedSharding):
        return shard_shape(shape, sharding.spec, sharding.mesh)
    return sharding.shard_shape(shape)


def _canonical(dtype: Any) -> Any:
    """Returns the canonical dtype: without x64, float64 becomes float32."""
    return jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
