"""The arguments and results of a compiled step: how they lie, and how they should."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from opt_partition._mesh.layout import Layout
from opt_partition._mesh.specs import itemsize, mesh_axes_of, shard_shape
from opt_partition._trees import children, flatten_with_paths, key_name, path_str
from opt_partition._verify.hlo import Module
from opt_partition._verify.report import Finding, LeafReport, Role, Side
from opt_partition._verify.roles import Keys, find_arguments, find_results, role_of
from opt_partition.errors import AxesError


@dataclasses.dataclass(frozen=True)
class Expected:
    """What is asked of a compiled step.

    `inputs` and `outputs` are trees like the step's arguments and its result, or prefixes of them:
    in the place of a tree a `Layout` or a tree of shardings, one sharding for all leaves below it,
    or `None` where anything goes. Arguments and results at the end may be left out.

    Attributes:
      inputs: of the positional arguments, e.g. `(params_layout, state_layout)`.
      outputs: of the result, e.g. `(params_layout, state_layout)`.
      params: path of the parameters in the arguments; of `f(optimizer, batch)` it would be
        `'0/target'`, of `f(*, params, state)` `'params'`.
      state: path of the optimizer state in the arguments, e.g. `'0/state'`.
      keywords: of the keyword arguments, by name, e.g. `{'state': state_layout}`; what is left out
        is not checked, and noted.
    """

    inputs: Any
    outputs: Any
    params: str = "0"
    state: str = "1"
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An argument or result of a compiled step.

    Attributes:
      side: whether it goes in or comes out.
      path: `/`-joined keys.
      role: what it is.
      name: of a parameter or a leaf of the state, its keys from there.
      shape: the global shape.
      dtype: its dtype.
      asked: the sharding that was asked for, if any.
      found: the sharding compiled in; `None` for an argument that the step does not use.
      donated: it is an argument given away.
    """

    side: Side
    path: str
    role: Role
    name: Keys
    shape: tuple[int, ...]
    dtype: Any
    asked: Sharding | None
    found: Sharding | None
    donated: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.asked, NamedSharding) and len(self.asked.spec) > len(self.shape):
            raise AxesError(
                f"{self.side} {self.path} has shape {self.shape}; {self.asked.spec} was asked for, "
                "of more dimensions"
            )

    @property
    def size(self) -> int:
        """Number of elements of the whole."""
        return math.prod(self.shape)

    @property
    def shard_size(self) -> int:
        """Number of elements that one device holds."""
        return math.prod(_shard_shape(self.found, self.shape)) if self.found is not None else 0

    @property
    def bytes_found(self) -> int:
        """Bytes that one device holds."""
        return self.shard_size * itemsize(self.dtype)

    @property
    def bytes_asked(self) -> int | None:
        """Bytes that one device should hold."""
        if self.asked is None:
            return None
        return math.prod(_shard_shape(self.asked, self.shape)) * itemsize(self.dtype)

    @property
    def ok(self) -> bool:
        """Whether it lies as asked, in the memory asked for."""
        if self.asked is None or self.found is None:
            return True
        return _on_devices_of(self.asked, self.found, self.path).is_equivalent_to(
            self.found, len(self.shape)
        )

    @property
    def mesh_axes(self) -> tuple[tuple[str, ...], ...] | None:
        """The mesh axes of each dimension; `None` where the sharding has no mesh."""
        if not isinstance(self.found, NamedSharding):
            return None
        entries = [*self.found.spec, *[None] * (len(self.shape) - len(self.found.spec))]
        return tuple(map(mesh_axes_of, entries))


def input_leaves(compiled: jax.stages.Compiled, expected: Expected) -> list[Leaf]:
    """The flat arguments, in JAX's order."""
    args, kwargs = compiled.args_info
    asked = [
        *_broadcast(expected.inputs, args, "inputs"),
        *_keywords(expected.keywords, kwargs),
    ]
    arguments = {**{str(n): argument for n, argument in enumerate(args)}, **kwargs}
    places = find_arguments(arguments, expected.params, expected.state)
    infos = [*flatten_with_paths(args), *flatten_with_paths(kwargs)]
    found = _leaves_like(compiled.in_tree, compiled.input_shardings)
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
        )
        for (path, info), ask, find in zip(infos, asked, found, strict=True)
    ]


def output_leaves(
    compiled: jax.stages.Compiled, expected: Expected, inputs: Sequence[Leaf]
) -> list[Leaf]:
    """The flat results, in JAX's order; those like the parameters and the state are named so."""
    out = compiled.out_info
    asked = _broadcast(expected.outputs, out, "outputs")
    found = _leaves_like(compiled.out_tree, compiled.output_shardings)
    roles: tuple[Role, ...] = ("params", "state")
    places = find_results(
        out,
        {role: {leaf.name: leaf.shape for leaf in inputs if leaf.role == role} for role in roles},
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


def leaf_reports(leaves: Sequence[Leaf], module: Module) -> list[LeafReport]:
    """What the report says of each leaf."""
    used = [leaf for leaf in leaves if leaf.side == "input" and leaf.found is not None]
    aliased = {id(used[n]) for n in module.aliased_parameters if n < len(used)}
    return [
        LeafReport(
            side=leaf.side,
            path=leaf.path,
            role=leaf.role,
            shape=leaf.shape,
            dtype=str(leaf.dtype),
            asked=None if leaf.asked is None else sharding_str(leaf.asked, len(leaf.shape)),
            found=None if leaf.found is None else sharding_str(leaf.found, len(leaf.shape)),
            bytes_asked=leaf.bytes_asked,
            bytes_found=leaf.bytes_found,
            ok=leaf.ok,
            donated=leaf.donated,
            aliased=id(leaf) in aliased,
        )
        for leaf in leaves
    ]


def sharding_findings(reports: Sequence[LeafReport]) -> Iterator[Finding]:
    """An error for each leaf that does not lie as asked."""
    for leaf in reports:
        if not leaf.ok:
            elsewhere = ", on other devices or in another order" * (leaf.asked == leaf.found)
            yield Finding(
                "sharding",
                "error",
                leaf.path,
                f"{leaf}: asked {leaf.asked}, {leaf.bytes_asked:,} bytes a device; found "
                f"{leaf.found}, {leaf.bytes_found:,} bytes a device{elsewhere}",
            )


def keyword_findings(compiled: jax.stages.Compiled, expected: Expected) -> Iterator[Finding]:
    """A note for each keyword argument of which nothing was asked."""
    for name, argument in compiled.args_info[1].items():
        count = len(jax.tree.leaves(argument))
        if count and name not in expected.keywords:
            yield Finding(
                "keyword argument",
                "note",
                name,
                f"{name}: {count} array{'s' * (count > 1)} of which nothing was asked; give "
                f"`Expected(..., keywords={{{name!r}: ...}})`, or `None` there for anything",
            )


def donation_findings(reports: Sequence[LeafReport]) -> Iterator[Finding]:
    """A warning for each leaf given away whose memory nothing takes over."""
    for leaf in reports:
        if leaf.donated and not leaf.aliased and leaf.found and leaf.role != "other":
            yield Finding(
                "donation",
                "warning",
                leaf.path,
                f"{leaf}: donated, but no result takes over its {leaf.bytes_found:,} bytes: none "
                "has its shape, dtype, sharding and memory",
            )


def mesh_shape(leaves: Sequence[Leaf]) -> Mapping[str, int]:
    """The mesh that the step runs on; empty where no sharding has one."""
    meshes = [leaf.found.mesh for leaf in leaves if isinstance(leaf.found, NamedSharding)]
    return max(
        (mesh.shape for mesh in meshes), key=lambda shape: math.prod(shape.values()), default={}
    )


def platform(leaves: Sequence[Leaf]) -> str:
    """The platform of the devices that the step was compiled for."""
    for leaf in leaves:
        if leaf.found is not None:
            device: Any = next(iter(leaf.found.device_set))
            return str(device.platform)
    return jax.default_backend()


def sharding_str(sharding: Sharding, ndim: int) -> str:
    """A sharding in words.

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
    """The leaves of `tree`, where arguments that the step does not use have `None`."""
    leaves: list[Sharding | None] = treedef.flatten_up_to(tree)
    return leaves


def _broadcast(prefix: Any, tree: Any, where: str) -> list[Sharding | None]:
    """What `prefix` asks of each leaf of `tree`."""
    if isinstance(prefix, Layout):
        prefix = prefix.shardings
    if prefix is None or isinstance(prefix, Sharding):
        return [prefix] * len(jax.tree.leaves(tree))
    asked, given = children(prefix), children(tree)
    if asked is None:
        raise AxesError(
            f"`{where}`: expected a `Layout`, a sharding or `None` in each place; got "
            f"{type(prefix).__name__} ({prefix!r})"
        )
    if given is None:
        raise AxesError(f"`{where}`: the step has one leaf there; got {type(prefix).__name__}")
    wanted = {key_name(key): child for key, child in asked}
    names = [key_name(key) for key, _ in given]
    may_be_short = where in ("inputs", "outputs") and isinstance(tree, tuple)
    missing = [name for name in names if name not in wanted and not may_be_short]
    extra = [name for name in wanted if name not in names]
    if missing or extra:
        raise AxesError(
            f"`{where}`: not a prefix of the step's tree of {names}: missing {missing}, "
            f"unknown {extra}; `None` stands for anything"
        )
    return [
        leaf
        for name, (_, child) in zip(names, given, strict=True)
        for leaf in _broadcast(wanted.get(name), child, f"{where}/{name}")
    ]


def _keywords(asked: Mapping[str, Any], kwargs: Mapping[str, Any]) -> list[Sharding | None]:
    """What `asked` asks of each leaf of the keyword arguments, in JAX's order."""
    if not isinstance(asked, Mapping):
        raise AxesError(
            "`keywords`: expected a mapping from names of keyword arguments; got "
            f"{type(asked).__name__}"
        )
    return _broadcast({name: asked.get(name) for name in kwargs} | dict(asked), kwargs, "keywords")


def _on_devices_of(asked: Sharding, found: Sharding, path: str) -> Sharding:
    """`asked`, on `found`'s devices if its own mesh is abstract."""
    if not isinstance(asked, NamedSharding) or not isinstance(asked.mesh, AbstractMesh):
        return asked
    if not isinstance(found, NamedSharding) or dict(found.mesh.shape) != dict(asked.mesh.shape):
        raise AxesError(
            f"{path}: asked for on an abstract mesh of {dict(asked.mesh.shape)}, but compiled "
            f"with {found}: make the layout with the mesh that the step runs on"
        )
    assert isinstance(found.mesh, Mesh)
    return NamedSharding(found.mesh, asked.spec, memory_kind=asked.memory_kind)


def _shard_shape(sharding: Sharding, shape: tuple[int, ...]) -> tuple[int, ...]:
    if isinstance(sharding, NamedSharding):
        return shard_shape(shape, sharding.spec, sharding.mesh)
    return sharding.shard_shape(shape)
