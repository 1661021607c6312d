"""Single leaves of a state, to and from arrays in a file.

A leaf keeps its kind: JAX or NumPy array, NumPy or Python scalar, PRNG key.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from opt_legacy_stax._trees import shown
from opt_legacy_stax.errors import SaveError

_NUMBERS = (int, float, bool, complex)
_PYTHON = {"int": "int64", "float": "float64", "bool": "bool", "complex": "complex128"}
_KINDS = ("jax", "weak", "numpy", "scalar", *_PYTHON)
_FLOATS = ("float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
# dtypes that safetensors has a name for since its release 0.4; others are stored as bytes
_NATIVE = ("bool", *_INTEGERS, *_FLOATS)
_FLOAT8 = ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")
_AS_BYTES = (
    *("complex64", "complex128", "int2", "uint2", "int4", "uint4", "float4_e2m1fn"),
    *(f"float8_{name}" for name in _FLOAT8),
)


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """The description of a leaf in a file."""

    # What it is in memory: `jax`, `weak`, `numpy`, `scalar`, the name of a Python type, or
    # `key<impl>`; `abstract` for an expected leaf that has only a shape and a dtype.
    kind: str
    dtype: str  # for a PRNG key, as the shape, that of the key data
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the leaf in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        if self.kind in _PYTHON:
            return f"a Python {self.kind}"
        is_key = self.kind.startswith("key<")
        return self.kind if is_key else f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def is_known(dtype: Any) -> bool:
    """Returns whether a dtype of this name can be stored."""
    return dtype in _NATIVE or dtype in _AS_BYTES


def parse_spec(kind: Any, dtype: Any, shape: Any) -> LeafSpec:
    """Returns the spec with these fields; raises `ValueError` if there is no such leaf."""
    is_shape = type(shape) is list and all(type(dim) is int and dim >= 0 for dim in shape)
    is_kind = type(kind) is str and (kind in _KINDS or kind.startswith("key<"))
    if not (is_kind and type(dtype) is str and is_known(dtype) and is_shape):
        raise ValueError(f"a leaf has an unknown kind, dtype or shape: {[kind, dtype, shape]}")
    return LeafSpec(kind, dtype, tuple(shape))


def to_file(leaf: Any, name: str) -> tuple[LeafSpec, np.ndarray]:
    """Returns the spec of a leaf, and its values as a contiguous array."""
    if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
        raise SaveError(
            f"`{name}` is abstract ({type(leaf).__name__}). Call `save` outside of `jit`, "
            "`eval_shape` and other transformations."
        )
    kind, values = type(leaf).__name__, leaf
    if isinstance(leaf, jax.Array):
        _check_readable(leaf, name)
        kind = "weak" if leaf.ndim == 0 and leaf.aval.weak_type else "jax"
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            kind, values = f"key<{jax.random.key_impl(leaf)}>", jax.random.key_data(leaf)
    elif type(leaf) in _NUMBERS:
        try:
            values = np.asarray(leaf, _PYTHON[kind])
        except OverflowError:
            raise SaveError(f"`{name}` is an integer that does not fit in 64 bits.") from None
    elif type(leaf) in (np.ndarray, np.memmap):
        kind = "numpy"
    elif isinstance(leaf, np.generic):
        kind = "scalar"
    else:
        raise SaveError(
            f"`{name}` is a {shown(kind)}; leaves of a saved state must be arrays or numbers."
        )
    array = np.asarray(values)
    if not is_known(array.dtype.name) or array.dtype.names is not None:
        raise SaveError(
            f"`{name}` has dtype {array.dtype}, which the format cannot hold exactly. Convert it "
            "to a numeric dtype."
        )
    native = array.astype(array.dtype.newbyteorder("="), order="C", copy=False)
    return LeafSpec(kind, array.dtype.name, array.shape), native


def _check_readable(leaf: jax.Array, name: str) -> None:
    if leaf.is_deleted():
        raise SaveError(
            f"the buffer of `{name}` has been donated or deleted. Save the state that the update "
            "returned."
        )
    if not leaf.is_fully_addressable:
        raise SaveError(
            f"`{name}` is not fully addressable by this process. Gather it first "
            "(`jax.experimental.multihost_utils.process_allgather`)."
        )


def stored(array: np.ndarray) -> np.ndarray:
    """Returns an array as a tensor that safetensors can hold: itself, or its bytes."""
    if array.dtype.name in _NATIVE:
        return array
    shape = (*array.shape, array.dtype.itemsize)
    return np.frombuffer(array.tobytes(), np.uint8).reshape(shape)


def from_file(spec: LeafSpec, data: bytes | bytearray) -> Any:
    """Returns the leaf that was saved, from its bytes."""
    array = np.frombuffer(data, np.dtype(spec.dtype)).reshape(spec.shape).copy()
    match spec.kind:
        case "numpy":
            return array
        case "scalar":
            return array[()]
        case "jax":
            return jnp.asarray(array)
        case "weak":
            weak, strong = jnp.asarray(array.item()), jnp.asarray(array)
            # Only Python scalars become weak arrays, which loses other dtypes and signalling NaNs.
            is_same = weak.dtype == array.dtype and np.asarray(weak).tobytes() == array.tobytes()
            return weak if is_same else strong
        case kind if kind.startswith("key<"):
            return jax.random.wrap_key_data(jnp.asarray(array), impl=kind[4:-1])
        case _:
            return array.item()


def spec_of(leaf: Any) -> LeafSpec:
    """Returns the spec of a leaf of a reference state, without reading its values."""
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data: Any = jax.eval_shape(jax.random.key_data, leaf)
            return LeafSpec(f"key<{_impl_of(leaf)}>", data.dtype.name, data.shape)
        kind = "jax" if isinstance(leaf, jax.Array) else "abstract"
        return LeafSpec(kind, leaf.dtype.name, tuple(leaf.shape))
    if isinstance(leaf, np.ndarray | np.generic):
        return LeafSpec("numpy", leaf.dtype.name, leaf.shape)
    if type(leaf) in _NUMBERS:
        kind = type(leaf).__name__
        return LeafSpec(kind, _PYTHON[kind], ())
    return LeafSpec("jax", "object", ())  # `object` never occurs in a file


def _impl_of(keys: Any) -> str:
    """Returns the PRNG implementation of keys, which may have a shape only."""
    found: list[str] = []

    def look(traced: jax.Array) -> jax.Array:
        found.append(str(jax.random.key_impl(traced)))
        return jax.random.key_data(traced)

    jax.eval_shape(look, keys)
    return found[0]


def fits(saved: LeafSpec, expected: LeafSpec) -> bool:
    """Returns whether shape and dtype of a saved leaf match those of an expected one."""
    if "key<" in saved.kind + expected.kind:
        return saved == expected
    if saved.shape != expected.shape or saved.dtype == expected.dtype:
        return saved.shape == expected.shape
    if expected.kind != "abstract" or saved.kind in ("jax", "weak"):
        return False
    # A number or NumPy array also matches what JAX converts it to, under `jax_enable_x64` or not.
    return bool(jax.dtypes.canonicalize_dtype(saved.dtype) == np.dtype(expected.dtype))


def needs_64_bits(spec: LeafSpec) -> bool:
    """Returns whether the leaf is a JAX array that needs `jax_enable_x64`, which is off."""
    is_array = spec.kind in ("jax", "weak")
    return is_array and bool(jax.dtypes.canonicalize_dtype(spec.dtype) != np.dtype(spec.dtype))


def is_within(leaf: Any, expected: LeafSpec) -> bool:
    """Returns whether the values of an integer leaf fit into the narrower dtype expected."""
    array = np.asarray(leaf) if not isinstance(leaf, jax.Array) else np.empty(0)
    if expected.kind != "abstract" or not array.size or array.dtype.kind not in "iu":
        return True
    limits = np.iinfo(np.dtype(expected.dtype))
    return bool(array.min() >= limits.min and array.max() <= limits.max)
