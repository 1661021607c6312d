"""How a leaf is stored: as an array, as the data of a PRNG key, or in the manifest only."""

from __future__ import annotations

import dataclasses
import urllib.parse
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from opt_core.errors import OptimizerError
from opt_core.extend import LeafInfo, Names, is_wide, shown

from opt_checkpoint.errors import LeafError, LoadError

PYTHON = "python"
_SCALARS = (bool, int, float, str)
_MAX_BITS = 14_284  # of 4,300 digits
_MAX_DIMS = 64  # NumPy's
_INT64_MAX = 2**63 - 1
_WALKED = 2**31  # on CPU, JAX iterates over the other sizes of an empty array
# The data of a PRNG key in whole words, as of the largest of JAX's implementations.
_KEY_DATA, _KEY_DTYPE = (4,), "uint32"

# What TensorStore's zarr driver writes and reads back bit for bit.
DTYPES = frozenset(
    {
        *("bool", "int2", "int4", "int8", "int16", "int32", "int64"),
        *("uint8", "uint16", "uint32", "uint64", "bfloat16", "float16", "float32", "float64"),
        *("complex64", "complex128", "float4_e2m1fn", "float8_e4m3b11fnuz", "float8_e4m3fn"),
        *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    }
)


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
        if type(leaf) is int and not is_readable(leaf):
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
        _check_shape(info, LeafError)
        if not isinstance(jax.random.key_impl(leaf), str):
            raise LeafError(
                f"`{info.name}`: this type of PRNG keys has no name: register it, or save "
                "`jax.random.key_data`"
            )
        return jax.random.key_data(leaf)
    if not isinstance(leaf, jax.Array | np.ndarray):
        leaf = np.asarray(leaf, dtype=info.dtype if info.dtype in DTYPES else None)
    dtype = "float0" if leaf.dtype == jax.dtypes.float0 else str(leaf.dtype)
    if dtype not in DTYPES:
        raise LeafError(
            f"`{info.name}`: {dtype} cannot be saved. Convert it, or keep it out of the state. "
            f"These can: {', '.join(sorted(DTYPES))}, and typed PRNG keys"
        )
    if (tuple(leaf.shape), dtype) != (info.shape, info.dtype):
        raise LeafError(
            f"`{info.name}`: expected {shown(info)} as the schema says, found {shown(leaf)}"
        )
    _check_shape(info, LeafError)
    # a copy: the caller may write to it later
    return np.array(leaf, order="C") if isinstance(leaf, np.ndarray) else leaf


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


def check(info: LeafInfo, record: Record) -> None:
    """Raises a `LoadError` unless a record matches its leaf."""
    where = f"`{info.name:.200}`"
    _check_shape(info, LoadError)
    if (info.dtype == PYTHON) != is_scalar(record.scalar):
        raise LoadError(f"{where}: {info.dtype:.40} with a value of {type(record.scalar).__name__}")
    if info.is_key != (record.impl is not None):
        raise LoadError(f"{where}: {info.dtype:.40} with the key type `{record.impl!s:.40}`")
    if is_stored(info) != (record.digest is not None):
        raise LoadError(
            f"{where}: expected a digest if and only if {list(info.shape)!s:.80} has bits"
        )


def _check_shape(info: LeafInfo, error: type[OptimizerError]) -> None:
    """Raises an `error` unless NumPy can hold an array of the shape and dtype.

    NumPy counts bytes as if no size were 0, so empty arrays have limits too.
    """
    sizes, dtype = info.shape, info.dtype
    if info.dtype == PYTHON:
        if sizes:
            raise error(f"`{info.name:.200}`: expected a Python scalar, found {len(sizes)} sizes")
        return
    if info.is_key:
        sizes, dtype = (*sizes, *_KEY_DATA), _KEY_DTYPE
    if len(sizes) > _MAX_DIMS:
        most = _MAX_DIMS - len(sizes) + len(info.shape)
        raise error(
            f"`{info.name:.200}`: expected at most {most} dimensions, found {len(info.shape)}"
        )
    nbytes = jnp.dtype(dtype).itemsize
    is_walked = 0 in info.shape and sum(size > 0 for size in info.shape) > 1
    most = _WALKED if is_walked else _INT64_MAX
    for size in sizes:  # one at a time: the product of many large integers is slow
        nbytes *= max(size, 1)
        if nbytes > most:
            raise error(
                f"`{info.name:.200}`: {info.dtype:.40}{list(info.shape)!s:.80} is larger than any "
                f"memory: expected at most {most:,} bytes, not counting sizes of 0"
            )


def is_scalar(leaf: Any) -> bool:
    """Whether it is a Python scalar, which the manifest holds."""
    return type(leaf) in _SCALARS


def is_readable(number: int) -> bool:
    """Whether an integer has few enough digits for Python to read them by default."""
    return number.bit_length() <= _MAX_BITS


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
