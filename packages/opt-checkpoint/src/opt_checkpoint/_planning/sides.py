"""A checkpoint and a target as `Side`s of `opt_core.state_changes`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from opt_core import StateDescription
from opt_core.state_changes import Side

from opt_checkpoint._disk.digest import bound
from opt_checkpoint._disk.manifest import Manifest
from opt_checkpoint._naming.names import NamedState, local
from opt_checkpoint._naming.schema import LeafInfo, Names, Schema, Source, leaf_path

# A raw PRNG key has up to four words, a typed one is a scalar.
_FEW = 4


def state_leaves(schema: Schema, like: Mapping[str, LeafInfo]) -> list[LeafInfo]:
    """Returns the leaves of transformations; those without a description get that of their name."""
    found = []
    for leaf in schema.leaves:
        if leaf.kind == "state" and not leaf.transformation and leaf.name in like:
            known = like[leaf.name]
            found.append(
                dataclasses.replace(known, shape=leaf.shape, dtype=leaf.dtype, value=leaf.value)
            )
        elif leaf.kind == "state" and leaf.transformation:
            found.append(leaf)
    return found


def side_of(source: Source, leaves: Sequence[LeafInfo], described: Any = None) -> Side:
    """Returns a source as a side, with its own description or that of its schema."""
    known = tuple(leaf.description for leaf in leaves)
    return Side(
        StateDescription(known, source.schema.transformations) if described is None else described,
        [leaf.name for leaf in leaves],
        _owners(source.schema),
        lambda i: leaves[i].value,
        lambda positions: are_same([leaves[i] for i in positions], source),
        leaves,
    )


def _owners(schema: Schema) -> dict[Names, Names]:
    """The group of every parameter that is trained."""
    if not schema.groups:
        return {leaf.path[1:]: () for leaf in schema.leaves if leaf.kind == "params"}
    return {
        param: group
        for group, params in _trained_groups(schema).items()
        for param in params
        if group is not None
    }


def _trained_groups(schema: Schema) -> dict[Names | None, Sequence[Names]]:
    """The parameters of groups in which transformations act; all others under `None`."""
    acting = {t.group[:n] for t in schema.transformations for n in range(1, len(t.group) + 1)}
    found: dict[Names | None, Sequence[Names]] = {}
    for name, params in schema.groups.items():
        group = leaf_path(name) if leaf_path(name) in acting else None
        found[group] = [*found.get(group, ()), *params]
    return found


def frozen(schema: Schema) -> set[Names]:
    """Returns the parameters known not to be trained: `FROZEN`, or `set_to_zero`."""
    last = {made.group: made.name for made in schema.transformations}
    groups: dict[Names, set[Names]] = {}
    for group, params in _trained_groups(schema).items():
        for param in params:
            groups.setdefault(param, set()).update(() if group is None else (group,))
    for leaf in schema.leaves:
        if leaf.kind == "state" and leaf.parameter is not None and leaf.group:
            groups.setdefault(leaf.parameter, set()).add(leaf.group)
    known = {group for found in groups.values() for group in found}
    # `optax.partition` does not say which parameters are in a group without state for each.
    unknown = {group for group in last if group and group not in known}
    found = {param for param, own in groups.items() if not own}
    for leaf in schema.leaves:
        if leaf.kind == "params":
            own = groups.get(leaf.path[1:])
            names = {last[group] for group in (own or unknown) if group in last}
            found |= {leaf.path[1:]} if names == {"set_to_zero"} else set()
    return found


def are_same(leaves: Sequence[LeafInfo], source: Source) -> bool | None:
    """Whether leaves have the same value, bit for bit; `None` if that would need reading arrays.

    Counts are in the schema. Others of up to four elements are compared by the digests of a step on
    disk, or by the values of a state in memory.
    """
    if len(leaves) == 1:
        return True
    values = {leaf.value for leaf in leaves}
    if None not in values:
        return len(values) == 1
    if len({(leaf.shape, leaf.dtype) for leaf in leaves}) > 1:
        return False
    if any(leaf.parameter is not None or math.prod(leaf.shape) > _FEW for leaf in leaves):
        return None
    bits = {_bits(leaf, source) for leaf in leaves}
    return None if None in bits else len(bits) == 1


def _bits(leaf: LeafInfo, source: Source) -> Hashable:
    """Something that is equal if and only if the bits are, for one shape and dtype."""
    if isinstance(source, NamedState):
        return _value_bits(source.leaves[leaf.name])
    manifest = getattr(source, "manifest", None)
    digest = manifest.records[leaf.name].digest if isinstance(manifest, Manifest) else None
    return None if digest is None else bound(leaf.name, digest)


def _value_bits(value: Any) -> bytes | None:
    if isinstance(value, jax.ShapeDtypeStruct | jax.core.Tracer):
        return None
    if isinstance(value, jax.Array):
        if value.is_deleted() or not (value.is_fully_addressable or value.is_fully_replicated):
            return None
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
    return local(value).tobytes()
