"""Conversion of single leaves of a state to and from their form in a file.

A leaf keeps its kind: JAX or NumPy array, NumPy or Python scalar, PRNG key.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from opt_legacy_stax._trees import shown
from opt_legacy_stax.errors import SaveError

Kind = Literal["jax", "weak", "numpy", "scalar", "int", "float", "bool", "complex", "key"]
KINDS = frozenset(get_args(Kind))
_PYTHON: dict[str, tuple[type, str]] = {
    "int": (int, "int64"),
    "float": (float, "float64"),
    "bool": (bool, "bool"),
    "complex": (complex, "complex128"),
}

# Dtypes that safetensors has a name for. All others are stored as bytes.
_STORED = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_FLOAT8 = ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")
_AS_BYTES = (
    *("complex64", "complex128", "int2", "uint2", "int4", "uint4", "float4_e2m1fn"),
    *(f"float8_{name}" for name in _FLOAT8),
)
_NAMES = frozenset({*_STORED, *_AS_BYTES})


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """The description of a leaf in a file.

    Attributes:
      kind: what the leaf is in memory.
      dtype: NumPy name of its dtype; for a PRNG key, of the key data.
      shape: shape of the array; for a PRNG key, of the key data.
      impl: implementation of a PRNG key, otherwise empty.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    impl: str = ""

    @property
    def stored_dtype(self) -> str:
        """The safetensors name of the dtype in the file."""
        return _STORED.get(self.dtype, "U8")

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in the file."""
        return self.shape if self.dtype in _STORED else (*self.shape, dtype_of(self.dtype).itemsize)

    @property
    def nbytes(self) -> int:
        """Size of the leaf in bytes."""
        size = dtype_of(self.dtype).itemsize
        for dim in self.shape:
            size *= dim  # a Python integer: no overflow
        return size

    def __str__(self) -> str:
        dims = ", ".join(map(str, self.shape))
        if self.kind in _PYTHON:
            return f"a Python {self.kind}"
        return f"key<{self.impl}>" if self.kind == "key" else f"{self.dtype}[{dims}]"


def is_known(dtype: str) -> bool:
    """Returns whether a dtype can be stored."""
    return dtype in _NAMES


def is_consistent(spec: LeafSpec) -> bool:
    """Returns whether a leaf of this kind can have this dtype and shape."""
    if spec.kind in _PYTHON and spec.dtype != _PYTHON[spec.kind][1]:
        return False
    return spec.shape == () or spec.kind in ("jax", "numpy", "key")


def needs_64_bits(spec: LeafSpec) -> bool:
    """Returns whether the leaf is a JAX array that needs `jax_enable_x64`, which is off."""
    dtype = dtype_of(spec.dtype)
    is_array = spec.kind in ("jax", "weak")
    return is_array and bool(jax.dtypes.canonicalize_dtype(dtype) != dtype)


def dtype_of(name: str) -> np.dtype[Any]:
    """Returns the dtype with this name, including those of `ml_dtypes`.

    Examples:
      >>> dtype_of('bfloat16').itemsize, dtype_of('float32').itemsize
      (2, 4)
    """
    return np.dtype(name)  # importing JAX registers those of `ml_dtypes`


def to_file(leaf: Any, name: str) -> tuple[LeafSpec, np.ndarray]:
    """Returns the spec of a leaf, and its values in the memory order of the file.

    Args:
      leaf: a leaf of a state.
      name: name of the leaf in error messages.

    Raises:
      SaveError: the leaf is abstract, or cannot be stored exactly.
    """
    if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
        raise SaveError(
            f"`{name}` is abstract ({type(leaf).__name__}). Call `save` outside of `jit`, "
            "`eval_shape` and other transformations."
        )
    if isinstance(leaf, jax.Array):
        return _jax_to_file(leaf, name)
    for kind, (python_type, dtype) in _PYTHON.items():
        if type(leaf) is python_type:
            return _checked(LeafSpec(kind, dtype, ()), _python_number(leaf, dtype, name), name)
    if type(leaf) in (np.ndarray, np.memmap) or isinstance(leaf, np.generic):
        kind = "numpy" if isinstance(leaf, np.ndarray) else "scalar"
        return _checked(LeafSpec(kind, leaf.dtype.name, leaf.shape), np.asarray(leaf), name)
    raise SaveError(
        f"`{name}` is a {shown(type(leaf).__name__)}; leaves of a saved state must be arrays or "
        "numbers."
    )


def _jax_to_file(leaf: jax.Array, name: str) -> tuple[LeafSpec, np.ndarray]:
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
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(leaf))
        spec = LeafSpec("key", data.dtype.name, data.shape, str(jax.random.key_impl(leaf)))
        return _checked(spec, data, name)
    is_weak = leaf.ndim == 0 and leaf.aval.weak_type
    spec = LeafSpec("weak" if is_weak else "jax", leaf.dtype.name, leaf.shape)
    return _checked(spec, np.asarray(leaf), name)


def _python_number(leaf: Any, dtype: str, name: str) -> np.ndarray:
    try:
        return np.asarray(leaf, dtype)
    except OverflowError:
        raise SaveError(f"`{name}` is an integer that does not fit in 64 bits.") from None


def _checked(spec: LeafSpec, array: np.ndarray, name: str) -> tuple[LeafSpec, np.ndarray]:
    if not is_known(spec.dtype) or array.dtype.hasobject or array.dtype.names is not None:
        raise SaveError(
            f"`{name}` has dtype {array.dtype}, which the format cannot hold exactly. Convert it "
            "to a numeric dtype."
        )
    # The raw buffer of a transposed, strided or broadcast array is not in C order.
    native = array.astype(dtype_of(spec.dtype), order="C", copy=False)
    return spec, np.ascontiguousarray(native).reshape(spec.shape)


def from_file(spec: LeafSpec, array: np.ndarray) -> Any:
    """Returns the leaf that was saved.

    Args:
      spec: the spec from the file.
      array: the values from the file, in a buffer that is not shared.
    """
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
        case "key":
            return jax.random.wrap_key_data(jnp.asarray(array), impl=spec.impl)
        case _:
            return array.item()


def spec_of(leaf: Any) -> LeafSpec:
    """Returns the spec of a leaf of a reference state, without reading its values.

    A leaf without shape and dtype gets the dtype `object`, which never occurs in a file.
    """
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data: Any = jax.eval_shape(jax.random.key_data, leaf)
            return LeafSpec("key", data.dtype.name, data.shape, _impl_of(leaf))
        kind = "jax" if isinstance(leaf, jax.Array) else "abstract"
        return LeafSpec(kind, leaf.dtype.name, tuple(leaf.shape))
    if isinstance(leaf, np.ndarray | np.generic):
        return LeafSpec("numpy", leaf.dtype.name, leaf.shape)
    for kind, (python_type, dtype) in _PYTHON.items():
        if type(leaf) is python_type:
            return LeafSpec(kind, dtype, ())
    return LeafSpec("jax", "object", ())


def _impl_of(keys: Any) -> str:
    found: list[str] = []

    def look(traced: jax.Array) -> jax.Array:
        found.append(str(jax.random.key_impl(traced)))
        return jax.random.key_data(traced)

    jax.eval_shape(look, keys)
    return found[0]


def fits(saved: LeafSpec, expected: LeafSpec) -> bool:
    """Returns whether a saved leaf matches an expected one.

    Shapes and dtypes must be equal, with one exception: a Python number or NumPy array also matches
    an abstract leaf of the dtype that JAX converts it to under the current `jax_enable_x64`.
    """
    if saved.kind == "key" or expected.kind == "key":
        return saved == expected
    if saved.shape != expected.shape:
        return False
    if saved.dtype == expected.dtype:
        return True
    if expected.kind != "abstract" or saved.kind in ("jax", "weak"):
        return False
    return bool(jax.dtypes.canonicalize_dtype(dtype_of(saved.dtype)) == dtype_of(expected.dtype))


def is_within(array: np.ndarray, dtype: str) -> bool:
    """Returns whether all values of an integer array fit into a dtype; `True` for other arrays.

    Examples:
      >>> is_within(np.array(2**40), 'int32'), is_within(np.array(2**20), 'int32')
      (False, True)
    """
    if array.dtype == dtype_of(dtype) or not array.size or array.dtype.kind not in "iu":
        return True
    limits = np.iinfo(dtype_of(dtype))
    return bool(array.min() >= limits.min and array.max() <= limits.max)
