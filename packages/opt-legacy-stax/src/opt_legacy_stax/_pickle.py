"""Old pickles of unpacked states, read without executing them.

The unpickler's `find_class` resolves about a dozen names, each to a stand-in defined here: NumPy's
own `dtype.__setstate__` trusts what it is given. At the end, the stand-ins are replaced.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from opt_legacy_stax._files import PathOrFile, is_number, read
from opt_legacy_stax._joinpoint import JoinPoint
from opt_legacy_stax._trees import shown
from opt_legacy_stax.errors import UnsafePickleError


def load_unpacked_pickle(path_or_file: PathOrFile) -> Any:
    """Reads a pickle of `unpack_optimizer_state(state)` without executing it.

    Everything but arrays, numbers, dicts, lists, tuples, `None` and join points is rejected. Memory
    and depth are not limited: convert your own files once, with `pack_optimizer_state` and `save`.

    Args:
      path_or_file: a path, or a file object opened for reading bytes.

    Returns:
      The tree, with join points of this module, for `pack_optimizer_state`, or for
      `convert_old_layout` if the pickle is older than jax 0.2.20. JAX arrays are placed on the
      default device; 64-bit ones become NumPy arrays unless `jax_enable_x64` is on.

    Raises:
      UnsafePickleError: the pickle contains anything else, or is damaged.
    """
    data = read(path_or_file)
    try:
        return _rebuild(_Unpickler(io.BytesIO(data)).load(), itertools.count(), len(data))
    except UnsafePickleError:
        raise
    except Exception as error:  # a damaged pickle can make the unpickler raise anything
        raise UnsafePickleError(
            f"the pickle is damaged, or contains more than a state: {type(error).__name__}."
        ) from None


class _Global:
    """A function or class that a pickle may name; `call` is `None` if it must not be called."""

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        if self._call is None:
            raise ValueError("call of an object that is not callable")
        return self._call(*arguments)

    def __setstate__(self, state: Any) -> None:
        # Without this method, the opcode `BUILD` would set any attribute.
        raise ValueError("attributes for an object that has none")


class _Scalar(_Global):
    """The scalar type of an extension dtype (`ml_dtypes`)."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class _Dtype:
    """The arguments of `numpy.dtype`."""

    def __init__(self, name: Any, *_: Any) -> None:
        self.name = name.name if isinstance(name, _Scalar) else name
        self.order = "="

    def __setstate__(self, state: Any) -> None:
        _, self.order, subdtype, names, fields, *_ = state
        if (subdtype, names, fields) != (None, None, None):
            raise ValueError("a structured dtype")

    def rebuild(self) -> np.dtype[Any]:
        if not isinstance(self.name, str) or self.order not in ("<", ">", "=", "|"):
            raise ValueError("not a dtype")
        dtype = np.dtype(self.name)
        if not is_number(dtype):
            raise UnsafePickleError(
                f"the pickle contains an array of the unsupported dtype {shown(repr(self.name))}."
            )
        return dtype.newbyteorder(">" if self.order == ">" else "<")


class _Array:
    """An array, whose contents may follow later, for `ndarray.__setstate__`."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __setstate__(self, state: Any) -> None:
        _, *contents = state
        self.value = _array(*contents)


class _JoinPoint:
    subtree: Any

    def __setstate__(self, state: Any) -> None:
        if type(state) is not dict or state.keys() != {"subtree"}:
            raise ValueError("a join point with other attributes")
        self.subtree = state["subtree"]


_NDARRAY, _OBJECT = _Global(), _Global()


@_Global
def _reconstruct(subtype: Any, shape: Any, dtype: Any) -> _Array:
    if subtype is not _NDARRAY or shape != (0,):
        raise ValueError("not an array")
    return _Array()


def _array(shape: Any, dtype: Any, is_fortran: Any, raw: Any) -> Any:
    if isinstance(raw, str):
        raw = raw.encode("latin1")  # Python 2
    if type(dtype) is not _Dtype or type(raw) not in (bytes, bytearray):
        raise ValueError("not an array")
    stored = np.frombuffer(raw, dtype.rebuild())
    array = stored.reshape(shape, order="F" if is_fortran else "C")
    return array.astype(array.dtype.newbyteorder("="), order="C")


@_Global
def _reconstruct_jax(reconstruct: Any, arguments: Any, state: Any, *_: Any) -> _Array:
    if reconstruct is not _reconstruct or type(arguments) is not tuple:
        raise ValueError("not a JAX array")
    array: _Array = _reconstruct(*arguments)
    array.__setstate__(state)
    if jax.dtypes.canonicalize_dtype(array.value.dtype) == array.value.dtype:
        array.value = jnp.asarray(array.value)
    return array


@_Global
def _from_buffer(raw: Any, dtype: Any, shape: Any, order: Any, *_: Any) -> _Array:
    """How protocol 5 writes contiguous arrays."""
    return _Array(_array(shape, dtype, order == "F", raw))


@_Global
def _scalar(dtype: Any, raw: Any) -> _Array:
    return _Array(_array((), dtype, False, raw)[()])


@_Global
def _new_object(kind: Any, base: Any, state: Any) -> Any:
    """How protocols 0 and 1 create objects."""
    if kind is not _JoinPoint or base is not _OBJECT or state is not None:
        raise ValueError("not a join point")
    return _JoinPoint()


@_Global
def _encode(text: Any, encoding: Any) -> bytes:
    """How protocols before 3 write bytes."""
    if type(text) is not str or encoding != "latin1":
        raise ValueError("not bytes")
    return text.encode("latin1")


_NUMPY = ("numpy.core", "numpy._core")
_JOIN_POINTS = (
    "jax.example_libraries.optimizers",
    "jax.experimental.optimizers",
    "opt_legacy_stax._joinpoint",
)
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _Global(_Dtype),
    ("jax._src.array", "_reconstruct_array"): _reconstruct_jax,
    ("jax._src.device_array", "reconstruct_device_array"): _reconstruct_jax,
    ("copy_reg", "_reconstructor"): _new_object,
    ("copyreg", "_reconstructor"): _new_object,
    ("__builtin__", "object"): _OBJECT,
    ("builtins", "object"): _OBJECT,
    ("_codecs", "encode"): _encode,
    ("__builtin__", "bytes"): _Global(lambda: b""),  # how protocols before 3 write `b""`
    **{(f"{n}.multiarray", "_reconstruct"): _reconstruct for n in _NUMPY},
    **{(f"{n}.multiarray", "scalar"): _scalar for n in _NUMPY},
    **{(f"{n}.numeric", "_frombuffer"): _from_buffer for n in _NUMPY},
    **{(module, "JoinPoint"): _JoinPoint for module in _JOIN_POINTS},
}
_EXTENSION_MODULES = ("ml_dtypes", "jaxlib.xla_extension", "jaxlib.xla_client")


class _Unpickler(pickle.Unpickler):
    """Resolves only the allowed names, without importing anything."""

    def find_class(self, module: str, name: str) -> Any:
        if module in _EXTENSION_MODULES:
            return _Scalar(name)
        if (module, name) not in _ALLOWED:
            raise UnsafePickleError(
                f"the pickle refers to `{shown(module)}.{shown(name)}`, which is not part of an "
                "array or a JoinPoint. It was not executed."
            )
        return _ALLOWED[module, name]


def _rebuild(node: Any, count: Iterator[int], limit: int) -> Any:
    """Returns the tree without stand-ins."""
    # A pickle can refer to one object many times, so the number of nodes is limited to its size.
    if next(count) >= limit:
        raise UnsafePickleError("the pickle describes more objects than its size allows.")
    match node:
        case _Array(value=None):
            raise ValueError("an array without contents")
        case _Array():
            return node.value
        case _JoinPoint():
            return JoinPoint(_rebuild(node.subtree, count, limit))
        case dict() if all(type(key) in (str, int) for key in node):
            return {key: _rebuild(child, count, limit) for key, child in node.items()}
        case list():
            return [_rebuild(child, count, limit) for child in node]
        case tuple():
            return tuple(_rebuild(child, count, limit) for child in node)
        case None | bool() | int() | float():
            return node
    raise UnsafePickleError(
        f"the pickle contains a {type(node).__name__.lstrip('_')}, which is neither an array, a "
        "JoinPoint, nor a container of them with strings or integers as keys."
    )
