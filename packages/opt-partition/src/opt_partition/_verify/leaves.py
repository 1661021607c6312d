"""The arguments and results of a compiled step: expected and found shardings, and their roles."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from opt_partition._specs import itemsize, mesh_axes_of, shard_shape
from opt_partition._trees import children, flatten_with_paths, key_name, path_str
from opt_partition._verify.expected import (
    Asked,
    Expected,
    Keys,
    Role,
    argument_places,
    broadcast,
    broadcast_keywords,
    is_in,
)
from opt_partition._verify.flow import Deps, trace
from opt_partition._verify.hlo import Module
from opt_partition.errors import AxesError

Side = Literal["input", "output"]


@dataclasses.dataclass(frozen=True, eq=False)
class Leaf:
    """An argument or result of a compiled step."""

    side: Side
    path: str
    role: Role
    name: Keys  # its keys relative to the parameters or the state
    shape: tuple[int, ...]
    dtype: Any
    asked: Asked
    found: Sharding | None  # `None` for an argument that the step does not use
    donated: bool = False
    muon: bool = False  # whether it belongs to the state of Optax's Muon

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
    def size(self) -> int:
        """Global number of elements."""
        return math.prod(self.shape)

    @functools.cached_property
    def shard_size(self) -> int:
        """Number of elements per device; 0 if it is not used."""
        return _shard_size(self.found, self.shape) if self.found is not None else 0

    @property
    def bytes_found(self) -> int:
        """Bytes per device."""
        return self.shard_size * itemsize(self.dtype)

    @property
    def bytes_asked(self) -> int | None:
        """Expected bytes per device."""
        if self.asked.sharding is None:
            return None
        dtype = self.dtype if self.dtype_ok else self.asked.dtype
        return _shard_size(self.asked.sharding, self.shape) * itemsize(dtype)

    @functools.cached_property
    def ok(self) -> bool:
        """Whether it has the expected sharding and memory kind."""
        if self.asked.sharding is None or self.found is None:
            return True
        asked = _on_devices_of(self.asked.sharding, self.found, self.path)
        return asked.is_equivalent_to(self.found, len(self.shape))

    @property
    def dtype_ok(self) -> bool:
        """Whether it has the expected dtype, canonicalized as by JAX: float64 may be float32."""
        asked = self.asked.dtype
        return asked is None or self.dtype == jax.dtypes.canonicalize_dtype(
            asked, allow_extended_dtype=True
        )

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
        *broadcast_keywords(expected.keywords, kwargs),
    ]
    arguments = {**{str(n): argument for n, argument in enumerate(args)}, **kwargs}
    places = argument_places(arguments, expected)
    infos = [*flatten_with_paths(args), *flatten_with_paths(kwargs)]
    found = _shardings(compiled.in_tree, compiled.input_shardings)
    muon = [*_is_of_muon(args), *_is_of_muon(kwargs)]
    return [
        _leaf("input", path, info, places, ask, find, info.donated, of_muon)
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
    found = _shardings(compiled.out_tree, compiled.output_shardings)
    infos = list(flatten_with_paths(out))

    @functools.cache
    def origins() -> Sequence[Deps]:
        """The roles that each result depends on; none if program and arguments do not match."""
        used = [_BITS[leaf.role] for leaf in inputs if leaf.found is not None]
        if len(used) != len(module.computations[module.entry].parameters):
            return []
        return trace(module, [Deps(bit, bit) for bit in used], {}).outputs

    def rank(role: Role, place: Keys) -> tuple[int, bool]:
        paths = [tuple(map(key_name, path)) for path, _ in infos]
        deps = [d for d, path in zip(origins(), paths, strict=False) if is_in(path, place)]
        bits = functools.reduce(operator.or_, (d.any for d in deps), 0)
        return bits.bit_count(), any(d.direct & _BITS[role] for d in deps)

    places = _find_results(out, inputs, rank)
    return [
        _leaf("output", path, info, places, ask, find)
        for (path, info), ask, find in zip(infos, asked, found, strict=True)
    ]


_BITS: Mapping[Role, int] = {"params": 1, "state": 2, "other": 4}


def mesh_shape(leaves: Sequence[Leaf]) -> Mapping[str, int]:
    """Returns the shape of the mesh of the step; empty if no sharding has a mesh."""
    shapes = [leaf.found.mesh.shape for leaf in leaves if isinstance(leaf.found, NamedSharding)]
    return max(shapes, key=lambda shape: math.prod(shape.values()), default={})


def platform_of(leaves: Sequence[Leaf]) -> str:
    """Returns the platform of the devices that the step was compiled for."""
    for leaf in leaves:
        if leaf.found is not None:
            device: Any = next(iter(leaf.found.device_set))
            return str(device.platform)
    return jax.default_backend()


class Owners:
    """Finds the parameter of a state leaf: the one whose path is contained in its own.

    Usually it is a suffix, but `sm3` keeps a tuple per parameter, so that indices follow.
    """

    def __init__(self, params: Sequence[Leaf]) -> None:
        self.params = {leaf.name: leaf for leaf in params}

    def of(self, leaf: Leaf) -> Leaf | None:
        keys = leaf.name
        for end in range(len(keys), 0, -1):
            for start in range(end):
                if param := self.params.get(keys[start:end]):
                    return param
        return self.params.get(())


def check_roles(inputs: Sequence[Leaf], outputs: Sequence[Leaf], expected: Expected) -> str | None:
    """Checks `Expected.params` and `Expected.state`; returns what could not be determined."""
    params = [leaf for leaf in inputs if leaf.role == "params"]
    state = [leaf for leaf in inputs if leaf.role == "state"]
    if not params:
        raise AxesError(f"`params`: found no arrays at {expected.params!r}; {_REMEDY}")
    for role, path, leaves, words in (
        ("params", expected.params, params, "parameters"),
        ("state", expected.state, state, "state"),
    ):
        if leaves and not any(leaf.role == role for leaf in outputs):
            raise AxesError(
                f"`{role}`: found {_described(leaves)} at {path!r}, but nothing with the same "
                f"paths and shapes in the result, which should contain the new {words}; {_REMEDY}"
            )
    if not state or _belongs(params, state):
        return None
    both = (
        f"found {_described(state)} at {expected.state!r}, which does not belong to the parameters "
        f"at {expected.params!r}, {_described(params)}"
    )
    if _swapped(params, state):
        raise AxesError(f"`params` and `state` are swapped: {both}; {_REMEDY}")
    return (
        f"`state`: {both}, according to its paths: state is checked only where it is gathered by "
        f"itself; if these are not the optimizer state and the parameters, {_REMEDY}"
    )


_REMEDY = (
    "pass the paths of the parameters and of the optimizer state in the arguments, e.g. "
    "`Expected(..., params='0/params', state='0/opt_state')`, or `state='state'` for a keyword "
    "argument"
)


def _belongs(params: Sequence[Leaf], state: Sequence[Leaf]) -> bool:
    """Whether the state may belong to the parameters.

    Counters say nothing, unless a scalar is the whole state, which no optimizer has.
    `optax.flatten` creates a single vector of all parameters.
    """
    telling = [leaf for leaf in state if leaf.shape or not leaf.name]
    total = (sum(leaf.size for leaf in params),)
    owners = Owners(params)
    return not telling or any(owners.of(leaf) or leaf.shape == total for leaf in telling)


def _swapped(params: Sequence[Leaf], state: Sequence[Leaf]) -> bool:
    """Whether the parameters look like state of the state."""
    owners = Owners([leaf for leaf in state if leaf.name])
    owned = [(leaf, owners.of(leaf)) for leaf in params if leaf.shape]
    alike = {owner.name for leaf, owner in owned if owner and owner.shape == leaf.shape}
    arrays = {leaf.name for leaf in state if leaf.shape}
    return bool(owned) and all(owner for _, owner in owned) and alike == arrays


def _described(leaves: Sequence[Leaf], most: int = 4) -> str:
    words = [f"{'/'.join(x.name)} {x.dtype}{list(x.shape)}".strip() for x in leaves[:most]]
    return ", ".join(words) + f" and {len(leaves) - most} more" * (len(leaves) > most)


def _shardings(treedef: Any, shardings: Any) -> list[Sharding | None]:
    """Returns the sharding of each leaf; `None` for arguments that the step does not use."""
    leaves: list[Sharding | None] = treedef.flatten_up_to(shardings)
    return leaves


def _leaf(
    side: Side,
    path: Sequence[Any],
    info: Any,
    places: Mapping[Role, Keys],
    asked: Asked,
    found: Sharding | None,
    donated: bool = False,
    muon: bool = False,
) -> Leaf:
    names = tuple(map(key_name, path))
    role: Role = next((role for role, place in places.items() if is_in(names, place)), "other")
    name = names[len(places.get(role, ())) :]
    shape = tuple(info.shape)
    return Leaf(side, path_str(path), role, name, shape, info.dtype, asked, found, donated, muon)


def _find_results(
    out: Any, inputs: Sequence[Leaf], rank: Callable[[Role, Keys], Any]
) -> dict[Role, Keys]:
    """Finds the trees in the result with the same paths and shapes as parameters and state.

    The state is searched first, as it often contains trees with the structure of the parameters,
    but not vice versa. Of several matching trees the first one with the highest rank is chosen.
    """
    places: dict[Role, Keys] = {}
    roles: tuple[Role, ...] = ("state", "params")
    for role in roles:
        like = {leaf.name: leaf.shape for leaf in inputs if leaf.role == role}
        matching = [
            place
            for place, tree in _subtrees(out, ())
            if like
            and not any(is_in(place, other) for other in places.values())
            and len(jax.tree.leaves(tree)) == len(like)  # cheaper than the names
            and like
            == {
                tuple(map(key_name, path)): tuple(leaf.shape)
                for path, leaf in flatten_with_paths(tree)
            }
        ]
        if matching:
            several = len(matching) > 1
            places[role] = (
                max(matching, key=functools.partial(rank, role)) if several else matching[0]
            )
    return places


def _subtrees(tree: Any, place: Keys) -> Iterator[tuple[Keys, Any]]:
    yield place, tree
    for key, child in children(tree) or ():
        yield from _subtrees(child, (*place, key_name(key)))


def _is_of_muon(tree: Any) -> Iterator[bool]:
    """Yields for each leaf whether it is in a `MuonState`."""

    def is_muon(node: Any) -> bool:
        return type(node).__name__ == "MuonState"

    for node in jax.tree.leaves(tree, is_leaf=is_muon):
        yield from [is_muon(node)] * len(jax.tree.leaves(node))


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


def _shard_size(sharding: Sharding, shape: tuple[int, ...]) -> int:
    if isinstance(sharding, NamedSharding):
        return math.prod(shard_shape(shape, sharding.spec, sharding.mesh))
    return math.prod(sharding.shard_shape(shape))
