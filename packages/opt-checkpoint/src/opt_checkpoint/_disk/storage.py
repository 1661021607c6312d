"""How a leaf is stored: as an array, as the data of a PRNG key, or in the manifest only."""

from __future__ import annotations

import dataclasses
import functools
import urllib.parse
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from opt_checkpoint._naming.names import is_wide
from opt_checkpoint._naming.schema import DTYPES, LeafInfo, Names, shown
from opt_checkpoint.errors import LeafError, LoadError

PYTHON = "python"
_SCALARS = (bool, int, float, str)
_MAX_BITS = 14_284  # of 4,300 digits


@dataclasses.dataclass(frozen=True)
class Record:
    """What the manifest says about one leaf in addition to the schema.

    Attributes:
      digest: 16 hexadecimal digits over its bits and its name; `None` if it is not in the store.
      impl: of a PRNG key.
      scalar: of a Python scalar.
    """

    digest: str | None = None
    impl: str | None = None
    scalar: Any = None


def is_stored(info: LeafInfo) -> bool:
    """Whether a leaf is in the store: an array with elements."""
    return info.dtype != PYTHON and 0 not in info.shape


def store_key(path: Names) -> Names:
    """Returns the components of the key in the store: letters, digits, `_`, `-`, and `%` escapes.

    Examples:
      >>> store_key(('params', 'a.b', '../x', ''))
      ('params', 'a%2Eb', '%2E%2E%2Fx', '%')
    """
    return tuple(
        urllib.parse.quote(part, safe="", errors="surrogatepass")
        .replace(".", "%2E")
        .replace("~", "%7E")
        or "%"
        for part in path
    )


def to_store(info: LeafInfo, leaf: Any) -> Any:
    """Returns the array to store for a leaf; the result is not used for one that is not stored.

    A `LeafError` says that it cannot be saved, or does not match the schema.
    """
    if info.dtype == PYTHON:
        if type(leaf) is int and leaf.bit_length() > _MAX_BITS:
            raise LeafError(f"`{info.name}`: Python could not read so many digits again")
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct | jax.core.Tracer):
        raise LeafError(f"`{info.name}`: expected an array, found `{leaf}`, which has no value")
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise LeafError(
            f"`{info.name}`: the array has been donated or deleted: save it before the step that "
            "donates it"
        )
    if isinstance(leaf, np.ma.MaskedArray):
        raise LeafError(f"`{info.name}`: a masked array loses its mask. Save `.data` and `.mask`")
    if info.is_key:
        if not isinstance(jax.random.key_impl(leaf), str):
            raise LeafError(
                f"`{info.name}`: this type of PRNG keys has no name: register it, or save "
                "`jax.random.key_data`"
            )
        return jax.random.key_data(leaf)
    if not isinstance(leaf, jax.Array | np.ndarray):
        leaf = np.asarray(leaf, dtype=info.dtype if info.dtype in DTYPES else None)
    dtype = _dtype_name(leaf.dtype)
    if dtype not in DTYPES:
        raise LeafError(
            f"`{info.name}`: {dtype} cannot be saved. Convert it, or keep it out of the state. "
            f"These can: {', '.join(sorted(DTYPES))}, and typed PRNG keys"
        )
    if (tuple(leaf.shape), dtype) != (info.shape, info.dtype):
        raise LeafError(
            f"`{info.name}`: expected {shown(info)} as the schema says, found {shown(leaf)}"
        )
    # a copy: the caller may write to it later
    return np.array(leaf, order="C") if isinstance(leaf, np.ndarray) else leaf


@functools.cache  # NumPy makes these names anew every time
def _dtype_name(dtype: Any) -> str:
    return "float0" if dtype == jax.dtypes.float0 else str(dtype)


def stored_shape(info: LeafInfo, record: Record) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype in the store."""
    if info.is_key:
        data = jax.eval_shape(lambda: jax.random.key_data(_key(record.impl)))
        return jax.ShapeDtypeStruct((*info.shape, *data.shape), data.dtype)
    return jax.ShapeDtypeStruct(info.shape, jnp.dtype(info.dtype))


def from_store(info: LeafInfo, record: Record, stored: Any, sharding: Sharding | None) -> Any:
    """Returns the leaf; the inverse of `to_store`."""
    if info.dtype == PYTHON:
        return record.scalar
    if is_stored(info):
        return jax.random.wrap_key_data(stored, impl=record.impl) if info.is_key else stored
    if info.is_key:
        return jax.random.split(_key(record.impl), info.shape)
    return placed(np.zeros(info.shape, jnp.dtype(info.dtype)), sharding)


def placed(array: np.ndarray[Any, Any], sharding: Sharding | None) -> Any:
    """Returns it as a JAX array, if JAX can hold it."""
    if is_wide(array.dtype):
        return array
    return jnp.asarray(array) if sharding is None else jax.device_put(array, sharding)


def _key(impl: str | None) -> jax.Array:
    try:
        return jax.random.key(0, impl=impl)
    except ValueError as error:
        raise LoadError(f"this JAX has no PRNG keys of `{impl!s:.40}`: {error!s:.200}") from None


def is_scalar(leaf: Any) -> bool:
    """Whether it is a Python scalar, which the manifest holds."""
    return type(leaf) in _SCALARS


def nest(flat: Mapping[Names, Any]) -> dict[str, Any]:
    """Returns a nested dictionary; raises a `LeafError` if one key is the beginning of another."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        inner: Any = tree
        for part in path[:-1]:
            inner = inner.setdefault(part, {}) if isinstance(inner, dict) else None
        if not isinstance(inner, dict) or path[-1] in inner:
            raise LeafError(
                f"`{'/'.join(path)}`: another leaf has the same name, or its name is the beginning "
                "of this one: rename one of them"
            )
        inner[path[-1]] = value
    return tree


def data_sharding(sharding: Sharding | None, rank: int) -> Sharding | None:
    """Returns the sharding of the data of PRNG keys: the words of a key are not split."""
    if isinstance(sharding, NamedSharding):
        spec = PartitionSpec(*sharding.spec, *(None,) * (rank - len(sharding.spec)))
        return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    return sharding
