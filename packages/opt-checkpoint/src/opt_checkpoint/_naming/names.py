"""The leaves of an optimizer by names that say what they mean, not where they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from opt_core import (
    Optimizer,
    OptimizerState,
    Role,
    flatten_with_paths,
    leaf_groups,
    roles,
)
from opt_core.protocols import DerivesLogicalAxes
from opt_optax_bridge import OptaxWrapper

from opt_checkpoint._naming.makers import Maker, makers, transformation_name
from opt_checkpoint._naming.schema import LeafInfo, Names, Schema, leaf_name
from opt_checkpoint._naming.transformations import transformations
from opt_checkpoint.errors import LeafError

_PLAIN = (tuple, list, dict)
_CHAINS = frozenset({"chain", "named_chain", "partition"})
_PARTITIONS = frozenset({"optax:PartitionState", "optax:MultiTransformState"})
_LIBRARIES = (
    *("jax", "flax", "optax", "orbax-checkpoint"),
    *("opt-core", "opt-optax-bridge", "opt-checkpoint"),
)


@dataclasses.dataclass(frozen=True)
class NamedState(Mapping[str, Any]):
    """The leaves of an optimizer by name; a `Source` that restores may come from.

    Attributes:
      leaves: arrays (or `jax.ShapeDtypeStruct`s) by name.
      schema: what they are.
    """

    leaves: Mapping[str, Any]
    schema: Schema

    def __getitem__(self, name: str) -> Any:
        return self.leaves[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)

    def read(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        """Returns leaves where they are wanted; see `Source.read`."""
        return {name: _placed(self.leaves[name], place.sharding) for name, place in wanted.items()}


def _placed(leaf: Any, sharding: Any) -> Any:
    """A copy: what is restored can be donated, and what was saved stays."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise LeafError(f"found {leaf} where a value is needed: the named state is abstract")
    if not isinstance(leaf, jax.Array):
        leaf = np.array(leaf)
        if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
            return leaf
        leaf = jnp.array(leaf)
    else:
        leaf = jnp.copy(leaf)
    return leaf if sharding is None else jax.device_put(leaf, sharding)


def named_state(optimizer: Optimizer, *, param_axes: Any = None) -> NamedState:
    """Returns the leaves of an optimizer by name: see `opt_checkpoint.named_state`."""
    infos = leaf_infos(optimizer)
    values = [*jax.tree.leaves(optimizer.target), *jax.tree.leaves(optimizer.state)]
    if param_axes is not None:
        infos = _with_axes(infos, optimizer, param_axes)
    infos = [
        dataclasses.replace(info, value=_count(leaf))
        for info, leaf in zip(infos, values, strict=True)
    ]
    schema = Schema(
        leaves=tuple(infos),
        optimizer=transformations(optimizer),
        groups=_groups(optimizer),
        versions=_versions(),
    )
    return NamedState(dict(zip((i.name for i in infos), values, strict=True)), schema)


def leaf_infos(optimizer: Optimizer) -> list[LeafInfo]:
    """Returns what each leaf is: those of the parameters, the step, those of the state.

    Raises:
      LeafError: two leaves would have one name.
    """
    params = _paths(optimizer.target)
    infos = [_info(leaf, ("params", *path), "params", parameter=path) for path, leaf in params]
    if jax.tree.leaves(optimizer.state.step):
        infos.append(_info(optimizer.state.step, ("state", "step"), "state"))
    infos += _state_infos(optimizer)
    _check_unique(infos)
    return infos


def _state_infos(optimizer: Optimizer) -> list[LeafInfo]:
    # Objects of our own, to be told apart by identity after the groups are split.
    leaves = jax.tree.leaves(optimizer.state.param_states)
    states = jax.tree.structure(optimizer.state.param_states)
    params: dict[int, Names] = {}
    target = jax.tree.map(_abstract, optimizer.target)
    for path, leaf in _paths(target):
        params[id(leaf)] = path
    indexed = optimizer.replace(
        target=target, state=OptimizerState(None, jax.tree.unflatten(states, range(len(leaves))))
    )
    found: dict[int, LeafInfo] = {}
    for group, part in leaf_groups(indexed):
        for i, info in _part_infos(group, part, leaves, params):
            found[i] = info
    return [found[i] for i in range(len(leaves))]


def _part_infos(
    group: Names, part: Optimizer, leaves: list[Any], params: Mapping[int, Names]
) -> Iterator[tuple[int, LeafInfo]]:
    """The leaves of one definition's state, with their positions among all."""
    definition, states = part.optimizer_def, part.state.param_states
    shaped = jax.tree.map(lambda i: _abstract(leaves[i]), states)
    made: Mapping[Names, Maker] = {}
    if isinstance(definition, OptaxWrapper):
        made = makers(definition.optax_optimizer.init, part.target)
    whole = transformation_name(type(definition).__name__)
    own = {names: params[id(leaf)] for names, leaf in _paths(part.target)}
    occurrences = _occurrences(made)
    given = roles(part.target, shaped, whole_tree=definition.whole_tree)
    for i, role in zip(jax.tree.leaves(states), given, strict=True):
        slot = _slot(role, made, whole)
        places = occurrences.setdefault((slot.group, slot.name), [])
        if slot.node not in places:
            places.append(slot.node)
        nth = places.index(slot.node) + 1
        name = slot.name if nth == 1 else f"{slot.name}#{nth}"
        parameter = None if role.param is None else own[role.param]
        groups = (*group, *slot.group)
        prefix = tuple(part for label in groups for part in ("groups", label))
        path = ("state", *prefix, name, *slot.fields, *(parameter or ()))
        info = _info(leaves[i], path, "state", parameter=parameter)
        yield (
            i,
            dataclasses.replace(info, group=groups, transformation=name, type=slot.type),
        )


@dataclasses.dataclass(frozen=True)
class _Slot:
    """The transformation that a leaf belongs to: where its node is, and what it is called."""

    node: Names
    group: Names
    name: str
    type: str
    fields: Names


def _occurrences(made: Mapping[Names, Maker]) -> dict[tuple[Names, str], list[Names]]:
    """The nodes of each transformation, in the order in which they act, by group and name."""
    found: dict[tuple[Names, str], list[Names]] = {}
    for node, maker in made.items():
        if maker.factory not in _CHAINS:
            key = _partition_groups(maker.types, node), transformation_name(maker.factory)
            found.setdefault(key, []).append(node)
    return found


def _slot(role: Role, made: Mapping[Names, Maker], whole: str) -> _Slot:
    """The innermost node that a transformation made; where none is known, the innermost record."""
    outer = role.outer
    names = tuple(name for _, name in outer)
    inner = tuple(name for _, name in role.inner)
    candidates = [names[:k] for k in range(len(outer) + 1)]
    by_maker = [node for node in candidates if node in made and made[node].factory not in _CHAINS]
    records = [node for k, node in enumerate(candidates[:-1]) if not _is_plain(outer[k][0])]
    if by_maker:
        node = by_maker[-1]
        name = transformation_name(made[node].factory)
    elif records:
        node = records[-1]
        name = transformation_name(outer[len(node)][0].__name__)
    else:
        node, name = (), whole
    at = len(node)
    group = _partition_groups([kind for kind, _ in outer[:at]], node)
    kind = _type_id(outer[at][0]) if at < len(outer) else ""
    if not kind and role.inner:
        kind = _type_id(role.inner[0][0])
    return _Slot(node, group, name, kind, (*names[at:], *inner))


def _partition_groups(types: Sequence[type], names: Names) -> Names:
    """The groups of `optax.partition` around a node, by the path to it."""
    return tuple(
        names[k + 1]
        for k, kind in enumerate(types[:-1])
        if _type_id(kind) in _PARTITIONS and names[k] == "inner_states"
    )


def _is_plain(kind: type) -> bool:
    return kind in _PLAIN or issubclass(kind, Mapping)


def _type_id(kind: type) -> str:
    """Package and name: types move between the modules of a package."""
    return f"{kind.__module__.partition('.')[0]}:{kind.__qualname__}"


def _info(leaf: Any, path: Names, kind: str, *, parameter: Names | None = None) -> LeafInfo:
    abstract = _abstract(leaf)
    return LeafInfo(path, tuple(abstract.shape), str(abstract.dtype), kind, parameter)


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return jax.ShapeDtypeStruct(np.shape(leaf), dtype)


def _paths(tree: Any) -> list[tuple[Names, Any]]:
    """The leaves of a tree with their paths, in the order of JAX."""
    return [(names, leaf) for names, leaf in flatten_with_paths(tree) if leaf is not None]


def _check_unique(infos: list[LeafInfo]) -> None:
    seen: dict[str, LeafInfo] = {}
    for info in infos:
        if info.name in seen:
            raise LeafError(
                f"two leaves would have the name `{info.name}`: found {info.dtype}"
                f"{list(info.shape)} and {seen[info.name].dtype}{list(seen[info.name].shape)}. "
                "Rename a key of the parameters or a field of the state."
            )
        seen[info.name] = info


def _count(leaf: Any) -> int | None:
    """The value of a single integer."""
    if isinstance(leaf, jax.ShapeDtypeStruct | jax.core.Tracer) or np.size(leaf) != 1:
        return None
    if not jnp.issubdtype(jnp.result_type(leaf), np.integer):
        return None
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        leaf = leaf.addressable_data(0)
    return int(np.asarray(leaf).reshape(()))


def _with_axes(infos: list[LeafInfo], optimizer: Optimizer, param_axes: Any) -> list[LeafInfo]:
    definition = optimizer.optimizer_def
    if not isinstance(definition, DerivesLogicalAxes):
        return infos
    axes = definition.derive_logical_axes(optimizer, param_axes)
    is_axes = {"is_leaf": lambda x: x is None or isinstance(x, PartitionSpec)}
    flat = [
        *jax.tree.leaves(axes.target, **is_axes),
        *jax.tree.leaves(axes.state.step, **is_axes),
        *jax.tree.leaves(axes.state.param_states, **is_axes),
    ]
    return [
        dataclasses.replace(info, axes=None if spec is None else tuple(spec))
        for info, spec in zip(infos, flat, strict=True)
    ]


def _groups(optimizer: Optimizer) -> dict[str, tuple[Names, ...]]:
    """The parameters of each group; those of none are frozen."""
    found: dict[str, tuple[Names, ...]] = {}
    target = jax.tree.map(_abstract, optimizer.target)
    params = {id(leaf): path for path, leaf in _paths(target)}
    for group, part in leaf_groups(optimizer.replace(target=target)):
        if group:
            own = [params.pop(id(leaf)) for leaf in jax.tree.leaves(part.target)]
            found[leaf_name(group)] = tuple(own)
    if found and params:
        # No group is called so: `~` is escaped in the names of groups.
        found["frozen" if "frozen" not in found else "~frozen"] = tuple(params.values())
    return found


def _versions() -> dict[str, str]:
    found = {}
    for library in _LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found
