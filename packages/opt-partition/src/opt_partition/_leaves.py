"""The arguments and results of a compiled step: their roles, expected and compiled shardings."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import AbstractMesh, NamedSharding, Sharding
from jax.tree_util import tree_leaves_with_path

from opt_partition._display import dtype_name
from opt_partition._flow import Deps, Flow, trace
from opt_partition._hlo import Module
from opt_partition._layout import Layout, itemsize, mesh_axes_of, padded, shard_shape
from opt_partition._trees import (
    KeyPath,
    children,
    key_name,
    leaves_with_paths,
    names_of,
    owner_of,
    path_str,
    split_path,
)
from opt_partition.errors import AxesError

Role = Literal["params", "state", "other"]
Side = Literal["input", "output"]
# One string per key, as keys may contain the `/` that joins them in messages.
Keys = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Expected:
    """The expected sharding of a compiled step.

    `inputs` and `outputs` have the structure of the step's arguments and result, or are prefixes of
    it. In place of a tree they contain a `Layout`, a tree of shardings, a tree of (abstract)
    arrays, a single sharding for all leaves, or `None` for any sharding. Layouts and arrays also
    specify dtypes. Trailing arguments and results can be omitted. Static arguments are not part of
    a compiled step and are not counted.

    Attributes:
      inputs: expected positional arguments, e.g. `(params_layout, state_layout)`.
      outputs: expected result, e.g. `(params_layout, state_layout)`.
      params: path of the parameters in the arguments, e.g. `'0/target'` for `f(optimizer, batch)`,
        or `'params'` for `f(*, params, state)`.
      state: path of the optimizer state in the arguments, e.g. `'0/state'`.
      keywords: expected keyword arguments by name, e.g. `{'state': state_layout}`; omitted ones are
        not checked, which is noted in the report.
    """

    inputs: Any
    outputs: Any
    params: str = "0"
    state: str = "1"
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class LeafReport:
    """The found and expected sharding of one argument or result of the step.

    Attributes:
      side: `'input'` or `'output'`.
      path: `/`-joined keys in the arguments or the result.
      role: its role according to `Expected`.
      name: its keys relative to the parameters or the state.
      shape: global shape.
      dtype: name of the dtype.
      found: the compiled sharding, as text; `None` for an argument that the step does not use.
      shard_size: number of elements per device; `0` for an argument that is not used.
      bytes_found: bytes per device.
      mesh_axes: the mesh axes of each dimension; `None` if the sharding has no mesh.
      asked: the expected sharding, as text; `None` for any.
      dtype_asked: the expected dtype, as JAX canonicalizes it; `None` for any.
      bytes_asked: expected bytes per device; `None` for any sharding.
      sharding_ok: whether it has the expected sharding and memory kind.
      donated: whether it is a donated argument.
      aliased: whether a result reuses its memory.
    """

    side: Side
    path: str
    role: Role
    name: Keys
    shape: tuple[int, ...]
    dtype: str
    found: str | None
    shard_size: int
    bytes_found: int
    mesh_axes: tuple[tuple[str, ...], ...] | None
    asked: str | None = None
    dtype_asked: str | None = None
    bytes_asked: int | None = None
    sharding_ok: bool = True
    donated: bool = False
    aliased: bool = False

    def __hash__(self) -> int:
        return hash((self.side, self.path))

    def __str__(self) -> str:
        return f"{self.side} {self.path} {self.dtype}{list(self.shape)}"

    @property
    def ok(self) -> bool:
        """Whether it has the expected sharding, memory kind and dtype."""
        return self.sharding_ok and self.dtype_asked in (None, self.dtype)

    @property
    def size(self) -> int:
        """Global number of elements."""
        return math.prod(self.shape)


def leaf_report(
    side: Side,
    path: str,
    role: Role,
    name: Keys,
    leaf: Any,
    found: Sharding | None,
    asked: Sharding | None = None,
    dtype_asked: Any = None,
    *,
    donated: bool = False,
) -> LeafReport:
    """Compares the compiled sharding of a leaf with the expected one; `None` for any."""
    shape, dtype = tuple(leaf.shape), leaf.dtype
    if isinstance(asked, NamedSharding) and len(asked.spec) > len(shape):
        raise AxesError(
            f"{side} {path} has shape {shape}, but the expected {asked.spec} has more dimensions"
        )
    if dtype_asked is not None:
        dtype_asked = jax.dtypes.canonicalize_dtype(dtype_asked, allow_extended_dtype=True)
    axes, sharding_ok, bytes_asked = None, True, None
    shard_size = 0 if found is None else math.prod(found.shard_shape(shape))
    if isinstance(found, NamedSharding):
        axes = tuple(map(mesh_axes_of, padded(found.spec, len(shape))))
    if asked is not None:
        if isinstance(asked, NamedSharding):  # it may not divide an argument that is not used
            shard = shard_shape(shape, asked.spec, asked.mesh)
        else:
            shard = asked.shard_shape(shape)
        bytes_asked = math.prod(shard) * itemsize(dtype_asked or dtype)
        if found is not None:
            on_devices = _on_devices_of(asked, found, path)
            sharding_ok = on_devices.is_equivalent_to(found, len(shape))
    return LeafReport(
        side=side,
        path=path,
        role=role,
        name=name,
        shape=shape,
        dtype=dtype_name(dtype),
        found=_in_words(found, shape),
        shard_size=shard_size,
        bytes_found=shard_size * itemsize(dtype),
        mesh_axes=axes,
        asked=_in_words(asked, shape),
        dtype_asked=None if dtype_asked is None else dtype_name(dtype_asked),
        bytes_asked=bytes_asked,
        sharding_ok=sharding_ok,
        donated=donated,
    )


def input_leaves(
    compiled: jax.stages.Compiled, expected: Expected, module: Module
) -> list[LeafReport]:
    """Returns the flattened arguments, in JAX's order."""
    args, kwargs = compiled.args_info
    keywords = expected.keywords
    asked = [
        *_expectations(expected.inputs, args, "inputs"),
        *_expectations(dict.fromkeys(kwargs) | dict(keywords), kwargs, "keywords"),
    ]
    places = _places({**{str(n): argument for n, argument in enumerate(args)}, **kwargs}, expected)
    infos = [*tree_leaves_with_path(args), *tree_leaves_with_path(kwargs)]
    treedef: Any = compiled.in_tree
    found = treedef.flatten_up_to(compiled.input_shardings)
    leaves = map(functools.partial(_leaf, "input", places), infos, found, asked)
    return with_aliased(list(leaves), module)


class Traced(NamedTuple):
    """A program that is traced from the arguments of a step."""

    flow: Flow  # the dependencies of its values
    roles: Mapping[Role, int]  # the bits of the arguments of each role
    state: list[LeafReport]  # the sharded leaves of the state; each has a bit, from `FIRST_LEAF`


FIRST_LEAF = 3


def trace_step(module: Module, inputs: Sequence[LeafReport]) -> Traced:
    """Traces a program from its arguments."""
    used = [leaf for leaf in inputs if leaf.found is not None]
    roles: dict[Role, int] = {"params": 1, "other": 2, "state": 4}
    state = [leaf for leaf in used if leaf.role == "state" and leaf.shard_size < leaf.size]
    bits = {leaf: 1 << n for n, leaf in enumerate(state, FIRST_LEAF)}
    seeds = [0] * _hidden(used, module) + [bits.get(leaf, roles[leaf.role]) for leaf in used]
    sharded = sum(bits.values())
    flow = trace(
        module,
        [Deps(bit, bit) for bit in seeds],
        FIRST_LEAF + len(state),
        (roles["params"], sharded),
    )
    roles["state"] |= sharded
    return Traced(flow, roles, state)


def output_leaves(
    compiled: jax.stages.Compiled,
    expected: Expected,
    inputs: Sequence[LeafReport],
    traced: Traced,
) -> list[LeafReport]:
    """Returns the flattened results, in JAX's order, with parameters and state identified."""
    out = compiled.out_info
    infos = list(tree_leaves_with_path(out))
    names = [names_of(path) for path, _ in infos]

    # Of gradients, updates and new parameters, the last depend on the most roles.
    def rank(role: Role, place: Keys) -> tuple[int, bool]:
        outputs = zip(traced.flow.outputs, names, strict=True)
        deps = [d for d, name in outputs if _is_in(name, place)]
        roles = sum(any(d.any & bits for d in deps) for bits in traced.roles.values())
        return roles, any(d.direct & traced.roles[role] for d in deps)

    shapes = {name: tuple(info.shape) for name, (_, info) in zip(names, infos, strict=True)}
    places = _find_results(shapes, inputs, rank)
    asked = _expectations(expected.outputs, out, "outputs")
    treedef: Any = compiled.out_tree
    found = treedef.flatten_up_to(compiled.output_shardings)
    return list(map(functools.partial(_leaf, "output", places), infos, found, asked))


def _leaf(
    side: Side,
    places: Mapping[Role, Keys],
    named: tuple[KeyPath, Any],
    found: Sharding | None,
    asked: tuple[Sharding | None, Any],
) -> LeafReport:
    path, info = named
    names = names_of(path)
    role: Role = next((role for role, place in places.items() if _is_in(names, place)), "other")
    name, donated = names[len(places.get(role, ())) :], getattr(info, "donated", False)
    return leaf_report(side, path_str(path), role, name, info, found, *asked, donated=donated)


def _expectations(prefix: Any, tree: Any, where: str) -> list[tuple[Sharding | None, Any]]:
    """Returns sharding and dtype that a prefix of the step's tree expects of each leaf."""
    if isinstance(prefix, tuple | list) and isinstance(tree, tuple):
        prefix = (*prefix, *[None] * (len(tree) - len(prefix)))

    def shapes_of(node: Any) -> Any:
        return _ANYTHING if node is None else node.shapes if isinstance(node, Layout) else node

    shapes = jax.tree.map(shapes_of, prefix, is_leaf=lambda x: x is None or isinstance(x, Layout))
    try:
        entries = jax.tree.leaves(jax.tree.broadcast(shapes, tree))
    except ValueError as error:
        raise AxesError(f"`{where}`: {error}\nUse `None` for what is not checked.") from None
    leaves = leaves_with_paths(tree)
    return [
        _expectation(entry, leaf, f"{where}/{path}")
        for entry, (path, leaf) in zip(entries, leaves, strict=True)
    ]


_ANYTHING = object()  # stands for `None`, which is no leaf to JAX


def _expectation(entry: Any, leaf: Any, path: str) -> tuple[Sharding | None, Any]:
    """Returns sharding and dtype of an entry; an array has a sharding if it has a mesh."""
    if entry is _ANYTHING:
        return None, None
    if isinstance(entry, Sharding):
        return entry, None
    if not hasattr(entry, "shape") or not hasattr(entry, "dtype"):
        raise AxesError(
            f"`{path}`: expected a `Layout`, a sharding, an array or `None`; got "
            f"{type(entry).__name__} ({entry!r})"
        )
    if tuple(entry.shape) != tuple(leaf.shape):
        raise AxesError(
            f"`{path}`: expected {leaf.dtype}{list(leaf.shape)}, as in the step; got "
            f"{entry.dtype}{list(entry.shape)}"
        )
    sharding = getattr(entry, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None, entry.dtype


def _places(arguments: Mapping[str, Any], expected: Expected) -> dict[Role, Keys]:
    """Returns the keys of the parameters and of the state; checks that they are apart."""
    params = _keys(arguments, expected.params, "params")
    state = _keys(arguments, expected.state, "state")
    if _is_in(params, state) or _is_in(state, params):
        raise AxesError(
            f"`params` and `state`: {expected.params!r} and {expected.state!r} overlap; pass the "
            "path of only the parameters as `params`, and of only the optimizer state as `state`"
        )
    return {"params": params, "state": state}


def _is_in(names: Keys, place: Keys) -> bool:
    """Whether the keys of a leaf start with those of a place."""
    return names[: len(place)] == place


def _keys(arguments: Any, path: str, field: str) -> Keys:
    """Returns the keys of a path; checks that it exists."""
    keys = split_path(path)
    tree = arguments
    for depth, key in enumerate(keys):
        named = {key_name(k): child for k, child in children(tree) or ()}
        if key not in named:
            raise AxesError(
                f"`{field}`: the step has no argument at {path!r}; "
                f"{'/'.join(keys[:depth]) or 'the top level'} has {list(named)}"
            )
        tree = named[key]
    return keys


def _find_results(
    shapes: Mapping[Keys, tuple[int, ...]],
    inputs: Sequence[LeafReport],
    rank: Callable[[Role, Keys], Any],
) -> dict[Role, Keys]:
    """Finds the trees in the result with the same paths and shapes as parameters and state."""
    places: dict[Role, Keys] = {}
    counts = Counter(name[:end] for name in shapes for end in range(len(name) + 1))
    roles: tuple[Role, ...] = ("state", "params")  # state often contains trees like the parameters
    for role in roles:
        like = {leaf.name: leaf.shape for leaf in inputs if leaf.role == role}
        matching = [
            place
            for place, count in counts.items()
            if count == len(like)  # cheaper than the names
            and not any(_is_in(place, other) for other in places.values())
            and like == {name[len(place) :]: shapes[name] for name in shapes if _is_in(name, place)}
        ]
        if len(matching) > 1:
            places[role] = max(matching, key=functools.partial(rank, role))
        elif matching:
            [places[role]] = matching
    return places


def with_aliased(inputs: Sequence[LeafReport], module: Module) -> list[LeafReport]:
    """Returns the arguments, with those marked whose memory a result reuses."""
    used = [leaf for leaf in inputs if leaf.found is not None]
    hidden = _hidden(used, module)
    aliased = {used[n - hidden].path for n in module.aliased_parameters if n >= hidden}
    return [dataclasses.replace(leaf, aliased=leaf.path in aliased) for leaf in inputs]


def _hidden(used: Sequence[LeafReport], module: Module) -> int:
    """Returns the number of parameters before the arguments: tokens and constants."""
    if (hidden := module.num_parameters - len(used)) < 0:
        raise AxesError(
            f"the compiled program has {module.num_parameters} parameters for {len(used)} arrays"
        )
    return hidden


def owners(params: Sequence[LeafReport]) -> Callable[[LeafReport], LeafReport | None]:
    """Returns a function to the parameter of a state leaf."""
    by_name = {leaf.name: leaf for leaf in params}
    return functools.cache(lambda leaf: owner_of(leaf.name, by_name)[0])


def _in_words(sharding: Sharding | None, shape: Sequence[int]) -> str | None:
    """Formats a sharding, e.g. as `P('data', None)`."""
    if not isinstance(sharding, NamedSharding):
        return None if sharding is None else repr(sharding)
    entries = padded(sharding.spec, len(shape))
    where = f" in {sharding.memory_kind}" * (sharding.memory_kind not in (None, "device"))
    return f"P({', '.join(map(repr, entries)) if any(entries) else ''}){where}"


def _on_devices_of(asked: Sharding, found: Sharding, path: str) -> Sharding:
    """Returns `asked`, on the devices of `found` if its own mesh is abstract."""
    if not isinstance(asked, NamedSharding) or not isinstance(asked.mesh, AbstractMesh):
        return asked
    if not isinstance(found, NamedSharding) or dict(found.mesh.shape) != dict(asked.mesh.shape):
        raise AxesError(
            f"{path}: expected on an abstract mesh of {dict(asked.mesh.shape)}, but compiled with "
            f"{found}: create the layout with the mesh that the step runs on"
        )
    return NamedSharding(found.mesh, asked.spec, memory_kind=asked.memory_kind)
