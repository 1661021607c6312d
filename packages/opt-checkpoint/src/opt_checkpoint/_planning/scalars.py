"""Whether small leaves of a checkpoint have the same bits, without reading arrays."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from opt_checkpoint._disk.digest import bound
from opt_checkpoint._disk.manifest import Manifest
from opt_checkpoint._naming.names import NamedState
from opt_checkpoint._naming.schema import LeafInfo, Source

# A raw PRNG key has up to four words, a typed one is a scalar.
_FEW = 4


@runtime_checkable
class _Recorded(Protocol):
    """A step on disk: its manifest has a digest of every leaf."""

    @property
    def manifest(self) -> Manifest: ...


def are_same(leaves: Sequence[LeafInfo], source: Source) -> bool | None:
    """Whether leaves have one value, bit for bit.

    Counts are in the schema. Of others, up to four elements, the digests tell that a step on disk
    has of its leaves, and the values of a state in memory.

    Args:
      leaves: of the source; one at least.
      source: has them. Nothing is read from a disk.

    Returns:
      `None` where nothing says so.
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
    """Something that is equal for equal bits of one shape and dtype, and for no others."""
    if isinstance(source, NamedState):
        return _value_bits(source.leaves[leaf.name])
    if isinstance(source, _Recorded) and isinstance(source.manifest, Manifest):
        digest = source.manifest.records[leaf.name].digest
        return None if digest is None else bound(leaf.name, digest)
    return None


def _value_bits(value: Any) -> bytes | None:
    if isinstance(value, jax.ShapeDtypeStruct | jax.core.Tracer):
        return None
    if isinstance(value, jax.Array):
        if value.is_deleted():
            return None
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        if not value.is_fully_addressable:
            if not value.is_fully_replicated:
                return None
            value = value.addressable_data(0)
    return np.asarray(value).tobytes()
