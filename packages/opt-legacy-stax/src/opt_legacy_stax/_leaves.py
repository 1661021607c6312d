"""Single leaves of a state: what they are in a file, and what comes back.

A leaf keeps its kind: an array of JAX's, of NumPy's, a NumPy or Python scalar, a PRNG key.
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

# The dtypes that safetensors has a name for. Others are stored as bytes.
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
    """What a file says of a leaf.

    Attributes:
      kind: what it is outside the file.
      dtype: of its entries, by NumPy's name; of a key's data.
      shape: of the array; of a key's data.
      impl: the implementation of a PRNG key, else empty.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    impl: str = ""

    @property
    def stored_dtype(self) -> str:
        """The name that safetensors has for the dtype in the file."""
        return _STORED.get(self.dtype, "U8")

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in the file."""
        return self.shape if self.dtype in _STORED else (*self.shape, dtype_of(self.dtype).itemsize)

    @property
    def nbytes(self) -> int:
        """How many bytes it takes."""
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
    """Returns whether it is an array that JAX, as it is configured, would round or wrap."""
    dtype = dtype_of(spec.dtype)
    is_array = spec.kind in ("jax", "weak")
    return is_array and bool(jax.dtypes.canonicalize_dtype(dtype) != dtype)


def dtype_of(name: str) -> np.dtype[Any]:
    """Returns the dtype of a name; those of `ml_dtypes` included.

    Examples:
      >>> dtype_of('bfloat16').itemsize, dtype_of('float32').itemsize
      (2, 4)
    """
    return np.dtype(name)  # JAX has registered those of `ml_dtypes`


def to_file(leaf: Any, name: str) -> tuple[LeafSpec, np.ndarray]:
    """Returns what a leaf is, and its entries in the memory order of the file.

    Args:
      leaf: a leaf of a state.
      name: what errors call it.

    Raises:
      SaveError: it cannot be stored exactly, or has no entries to store.
    """
    if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
        raise SaveError(
            f"`{name}` is abstract ({type(leaf).__name__}). Save outside of `jit`, `eval_shape` "
            "and the like."
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
        f"`{name}` is a {shown(type(leaf).__name__)}. A state is saved with leaves that are arrays "
        "or numbers."
    )


def _jax_to_file(leaf: jax.Array, name: str) -> tuple[LeafSpec, np.ndarray]:
    if leaf.is_deleted():
        raise SaveError(f"`{name}` is deleted: it was donated. Save the state that came back.")
    if not leaf.is_fully_addressable:
        raise SaveError(
            f"`{name}` is spread over processes. Gather it first "
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
        raise SaveError(f"`{name}` is an integer of more than 64 bits.") from None


def _checked(spec: LeafSpec, array: np.ndarray, name: str) -> tuple[LeafSpec, np.ndarray]:
    if not is_known(spec.dtype) or array.dtype.hasobject or array.dtype.names is not None:
        raise SaveError(
            f"`{name}` has dtype {array.dtype}, which the format cannot hold exactly. Convert it "
            "to a numeric dtype."
        )
    # C order: the bytes of a transposed, strided or broadcast array are others than its entries.
    native = array.astype(dtype_of(spec.dtype), order="C", copy=False)
    return spec, np.ascontiguousarray(native).reshape(spec.shape)


def from_file(spec: LeafSpec, array: np.ndarray) -> Any:
    """Returns the leaf that was saved, of the entries that the file had.

    Args:
      spec: what the file says of it.
      array: its entries; owned by nobody else.
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
            # JAX has no public way to make the others weak; a signalling NaN becomes another one.
            is_same = weak.dtype == array.dtype and np.asarray(weak).tobytes() == array.tobytes()
            return weak if is_same else strong
        case "key":
            return jax.random.wrap_key_data(jnp.asarray(array), impl=spec.impl)
        case _:
            return array.item()


def spec_of(leaf: Any) -> LeafSpec:
    """Returns what a leaf of a reference is; its entries are not looked at.

    A leaf without shape and dtype has the dtype `object`, which no file has.
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
    """Returns whether a saved leaf can stand for an expected one.

    Shapes and dtypes are equal; but a number of Python's, or an array of NumPy's, may stand for
    what JAX, as it is configured, makes of it, where that is all that is known.
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
    """Returns whether all of the entries, if they are integers, are within those of the dtype.

    Examples:
      >>> is_within(np.array(2**40), 'int32'), is_within(np.array(2**20), 'int32')
      (False, True)
    """
    if array.dtype == dtype_of(dtype) or not array.size or array.dtype.kind not in "iu":
        return True
    limits = np.iinfo(dtype_of(dtype))
    return bool(array.min() >= limits.min and array.max() <= limits.max)
