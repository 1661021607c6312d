"""The leaves of an optimizer by names that say what they mean, not where they are."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict
from jax.sharding import NamedSharding, Sharding
from opt_core import Optimizer, describe_state, flatten_with_paths, leaf_groups
from opt_core.state_changes import committed_sharding
from opt_core.storage import storages, stored_as

from opt_checkpoint._naming.schema import (
    Kind,
    LeafInfo,
    Names,
    Schema,
    leaf_name,
    numbered,
    shown,
    state_path,
)
from opt_checkpoint.errors import LeafError

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
        """Returns leaves in the given shardings; see `Source.read`."""
        return {name: _placed(self.leaves[name], place.sharding) for name, place in wanted.items()}

    def shardings(self, names: Iterable[str]) -> dict[str, Sharding]:
        """Returns where leaves are on a mesh, by name; memory kinds are left out, as on disk."""
        found = {name: committed_sharding(self.leaves[name]) for name in names}
        return {
            name: NamedSharding(place.mesh, place.spec)
            for name, place in found.items()
            if isinstance(place, NamedSharding)
        }


def _placed(leaf: Any, sharding: Any) -> Any:
    """A copy: what is restored can be donated, and what was saved stays."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise LeafError(f"found {leaf} where a value is needed: the named state is abstract")
    if not isinstance(leaf, jax.Array) and is_wide((leaf := np.array(leaf)).dtype):
        return leaf
    leaf = jnp.array(leaf)
    return leaf if sharding is None else jax.device_put(leaf, sharding)


def is_wide(dtype: Any) -> bool:
    """Whether JAX cannot hold a dtype, as 64 bits by default."""
    return bool(jax.dtypes.canonicalize_dtype(dtype) != dtype)


def named_state(
    optimizer: Optimizer, others: Mapping[Names, Any] = FrozenDict(), param_axes: Any = None
) -> NamedState:
    """Returns the leaves by name: parameters, others of the model by path, then the state.

    Raises:
      LeafError: two leaves would have the same name.
    """
    params = named_leaves(optimizer.target)
    infos = [*_model_infos(params), *_state_infos(optimizer)]
    if param_axes is not None:
        infos = _with_axes(infos, optimizer, param_axes)
    infos[len(params) : len(params)] = _model_infos(others.items())
    _check_unique(infos)
    values = [leaf for _, leaf in params] + [*others.values(), *jax.tree.leaves(optimizer.state)]
    infos = [
        dataclasses.replace(info, value=count_of(leaf))
        for info, leaf in zip(infos, values, strict=True)
    ]
    schema = Schema(
        leaves=tuple(infos),
        optimizer=describe_state(optimizer).transformations,
        groups=_groups(optimizer),
        versions=dict(_versions()),
        storage=storages(optimizer.state.param_states),
    )
    return NamedState(dict(zip((i.name for i in infos), values, strict=True)), schema)


def _model_infos(leaves: Iterable[tuple[Names, Any]]) -> list[LeafInfo]:
    return [leaf_info(x, ("params", *at), "params", parameter=at) for at, x in leaves]


def _state_infos(optimizer: Optimizer) -> Iterator[LeafInfo]:
    for step in jax.tree.leaves(optimizer.state.step):
        yield leaf_info(step, ("state", "step"), "state")
    leaves = jax.tree.leaves(optimizer.state.param_states)
    rows = zip(
        leaves,
        describe_state(optimizer).leaves,
        stored_as(optimizer.state.param_states),
        strict=True,
    )
    for leaf, known, stored in rows:
        name = numbered(known.transformation, known.number)
        yield LeafInfo(
            path=(*state_path(known.group, name), *known.field, *(known.parameter or ())),
            shape=tuple(np.shape(leaf)),
            dtype=_dtype(leaf),
            kind="state",
            parameter=known.parameter,
            group=known.group,
            transformation=name,
            role=known.role,
            dimensions=known.dimensions,
            stored=stored,
        )


def leaf_info(leaf: Any, path: Names, kind: Kind, *, parameter: Names | None = None) -> LeafInfo:
    """Returns what a leaf is that does not belong to a transformation."""
    return LeafInfo(path, tuple(np.shape(leaf)), _dtype(leaf), kind, parameter)


def _dtype(leaf: Any) -> str:
    return str(leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf))


def named_leaves(tree: Any) -> list[tuple[Names, Any]]:
    """Returns the leaves of a tree with their paths, in the order of JAX."""
    return [(names, leaf) for names, leaf in flatten_with_paths(tree) if leaf is not None]


def _check_unique(infos: list[LeafInfo]) -> None:
    seen: dict[str, LeafInfo] = {}
    for info in infos:
        if info.name in seen:
            raise LeafError(
                f"two leaves would have the name `{info.name}`: {shown(info)} and "
                f"{shown(seen[info.name])}. Rename a key of the parameters or a field of the state."
            )
        seen[info.name] = info


def count_of(leaf: Any) -> int | None:
    """Returns the value of a single integer; `None` for anything else."""
    if isinstance(leaf, jax.ShapeDtypeStruct | jax.core.Tracer) or np.size(leaf) != 1:
        return None
    if not jnp.issubdtype(jnp.result_type(leaf), np.integer):
        return None
    return int(local(leaf).reshape(()))


def update_counts(leaves: Iterable[LeafInfo]) -> tuple[dict[str, int | None], bool]:
    """Returns the counts of a state, and whether they say how many updates have been made."""
    single = [leaf for leaf in leaves if leaf.kind == "state" and not leaf.shape]
    counts = {leaf.name: leaf.value for leaf in single if leaf.path[-1] == "count"}
    are_mini = any(leaf.path[-1] in ("mini_step", "gradient_step") for leaf in single)
    return counts, len(set(counts.values())) <= 1 and not are_mini


def local(leaf: Any) -> np.ndarray[Any, Any]:
    """Returns the local value of a leaf that is the same in all processes."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        leaf = leaf.addressable_data(0)
    return np.asarray(leaf)


def _with_axes(infos: list[LeafInfo], optimizer: Optimizer, param_axes: Any) -> list[LeafInfo]:
    axes = optimizer.optimizer_def.derive_logical_axes(optimizer, param_axes)
    ours, theirs = ((o.target, o.state.step, o.state.param_states) for o in (optimizer, axes))
    structure: Any = jax.tree.structure(ours)
    flat = structure.flatten_up_to(theirs)  # `None` stands for no axes, and for no leaf
    return [
        dataclasses.replace(info, axes=None if spec is None else tuple(spec))
        for info, spec in zip(infos, flat, strict=True)
    ]


def _groups(optimizer: Optimizer) -> dict[str, tuple[Names, ...]]:
    """The parameters of each group; those without one are frozen."""
    found = {
        leaf_name(group): tuple(path for path, _ in named_leaves(part.target))
        for group, part in leaf_groups(optimizer)
        if group
    }
    trained = {path for paths in found.values() for path in paths}
    frozen = [path for path, _ in named_leaves(optimizer.target) if path not in trained]
    if found and frozen:
        # no group can have this name: `~` is escaped in the names of groups
        found["frozen" if "frozen" not in found else "~frozen"] = tuple(frozen)
    return found


@functools.cache  # the metadata of a distribution take milliseconds to parse
def _versions() -> Mapping[str, str]:
    return {library: version(library) for library in _LIBRARIES}
