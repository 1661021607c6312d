"""Reading old pickles of unpacked states without executing them.

The unpickler resolves about a dozen names, each to an inert stand-in defined here that records its
arguments. Only validated bytes, dtypes and shapes are passed on to NumPy and JAX.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np

from opt_legacy_stax._joinpoint import JoinPoint
from opt_legacy_stax._leaves import dtype_of, is_known
from opt_legacy_stax._opcodes import check_opcodes
from opt_legacy_stax._trees import shown
from opt_legacy_stax.errors import UnsafePickleError


def load_unpacked_pickle(path_or_file: str | bytes | os.PathLike[str] | IO[bytes]) -> Any:
    """Reads a pickle of `unpack_optimizer_state(state)` without executing it.

    Pickles are programs: never use `pickle.load` on files from untrusted sources. This function
    reads only pickles of such trees and rejects everything else. It is much safer than
    `pickle.load`, but still meant for your own files: convert them once with `pack_optimizer_state`
    and `save`.

    Args:
      path_or_file: a path, or a file object opened for reading bytes.

    Returns:
      The tree, with join points of this module, for `pack_optimizer_state`, or for
      `convert_old_layout` if the pickle is older than jax 0.2.20. JAX arrays are placed on the
      default device; 64-bit ones become NumPy arrays unless `jax_enable_x64` is on. An array that
      the pickle refers to twice is shared in the tree.

    Raises:
      UnsafePickleError: the pickle contains anything other than arrays, numbers, dicts, lists,
        tuples, `None` and join points, or is damaged.
    """
    if isinstance(path_or_file, str | bytes | os.PathLike):
        data = Path(os.fsdecode(path_or_file)).read_bytes()
    else:
        data = path_or_file.read()
    try:
        check_opcodes(data)
        found = _Unpickler(io.BytesIO(data)).load()
        return _Converter(limit=len(data)).convert(found)
    except UnsafePickleError:
        raise
    except Exception as error:  # a damaged pickle can make the unpickler raise anything
        raise UnsafePickleError(
            f"the pickle is damaged, or contains more than a state: {type(error).__name__}."
        ) from None


class _Inert:
    """An object without settable state: the `BUILD` opcode would otherwise set any attribute."""

    def __setstate__(self, state: Any) -> None:
        raise ValueError("attributes for an object that has none")


class _Dtype:
    """The arguments of `numpy.dtype`."""

    def __init__(self, name: Any, *_: Any) -> None:
        self.name = name.name if isinstance(name, _Extension) else name
        self.order = "="

    def __setstate__(self, state: Any) -> None:
        _, self.order, subdtype, names, fields, *_ = state
        if (subdtype, names, fields) != (None, None, None):
            raise ValueError("a structured dtype")

    def resolve(self) -> np.dtype[Any]:
        if not isinstance(self.name, str) or self.order not in ("<", ">", "=", "|"):
            raise ValueError("not a dtype")
        name = _SHORT.get(self.name, self.name)
        if not is_known(name):
            raise UnsafePickleError(
                f"the pickle contains an array of the unsupported dtype {shown(repr(self.name))}."
            )
        dtype = dtype_of(name)
        return dtype.newbyteorder(">") if self.order == ">" else dtype.newbyteorder("<")


# The short names with which NumPy pickles its dtypes, e.g. `f4`.
_SHORT = {
    f"{np.dtype(name).kind}{np.dtype(name).itemsize}": name
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}


class _Extension(_Inert):
    """The scalar type of an extension dtype (`ml_dtypes`)."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Latin1(_Inert):
    """Bytes pickled as a Latin-1 string, as protocols before 3 do; encoded lazily."""

    def __init__(self, text: Any, encoding: Any) -> None:
        if type(text) is not str or encoding != "latin1":
            raise ValueError("not bytes")
        self.text = text


class _Array:
    """An array, with the state that is passed to `ndarray.__setstate__`."""

    def __init__(self, is_jax: bool = False) -> None:
        self.is_jax = is_jax
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @property
    def raw(self) -> Any:
        return self.state[4]

    def resolve(self) -> Any:
        _, shape, dtype, is_fortran, raw = self.state
        array = _array(raw, dtype, shape, "F" if is_fortran else "C")
        fits = self.is_jax and jax.dtypes.canonicalize_dtype(array.dtype) == array.dtype
        return jnp.asarray(array) if fits else array


class _Buffer(_Inert):
    """An array whose contents are passed as arguments (`_frombuffer`, protocol 5)."""

    def __init__(self, raw: Any, dtype: Any, shape: Any, order: Any, *_: Any) -> None:
        self.raw, self.dtype, self.shape, self.order = raw, dtype, shape, order

    def resolve(self) -> Any:
        return _array(self.raw, self.dtype, self.shape, self.order)


class _Scalar(_Buffer):
    """A NumPy scalar."""

    def __init__(self, dtype: Any, raw: Any) -> None:
        super().__init__(raw, dtype, (), "C")

    def resolve(self) -> Any:
        return super().resolve()[()]


class _Marker:
    """A join point."""

    subtree: Any

    def __setstate__(self, state: Any) -> None:
        if type(state) is not dict or state.keys() != {"subtree"}:
            raise ValueError("a join point with other attributes")
        self.subtree = state["subtree"]


def _array(raw: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    if isinstance(raw, _Latin1):
        raw = raw.text
    if isinstance(raw, str):
        raw = raw.encode("latin1")  # Python 2, and protocols before 3
    if type(dtype) is not _Dtype or type(raw) not in (bytes, bytearray) or order not in ("C", "F"):
        raise ValueError("not an array")
    if type(shape) is not tuple or not all(type(dim) is int and dim >= 0 for dim in shape):
        raise ValueError("not a shape")
    resolved = dtype.resolve()
    array = np.frombuffer(raw, resolved).reshape(shape, order=order)
    return array.astype(resolved.newbyteorder("="), order="C")


class _Global(_Inert):
    """A function or class that a pickle may name.

    Args:
      make: called with the arguments in the pickle; `None` if it must not be called.
    """

    def __init__(self, make: Callable[..., Any] | None = None) -> None:
        self._make = make

    def __call__(self, *arguments: Any) -> Any:
        if self._make is None:
            raise ValueError("call of an object that is not callable")
        return self._make(*arguments)


_NDARRAY, _OBJECT = _Global(), _Global()


@_Global
def _reconstruct(subtype: Any, shape: Any, dtype: Any) -> _Array:
    if subtype is not _NDARRAY or shape != (0,):
        raise ValueError("not an array")
    return _Array()


@_Global
def _reconstruct_array(make: Any, arguments: Any, state: Any, *_: Any) -> _Array:
    if make is not _reconstruct or type(arguments) is not tuple:
        raise ValueError("not a JAX array")
    _reconstruct(*arguments)
    array = _Array(is_jax=True)
    array.__setstate__(state)
    return array


@_Global
def _new_object(kind: Any, base: Any, state: Any) -> Any:
    """How protocols 0 and 1 create objects."""
    if kind is not _Marker or base is not _OBJECT or state is not None:
        raise ValueError("not a join point")
    return _Marker()


_NUMPY = ("numpy.core", "numpy._core")
_GLOBALS: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _Global(_Dtype),
    ("jax._src.array", "_reconstruct_array"): _reconstruct_array,
    ("jax._src.device_array", "reconstruct_device_array"): _reconstruct_array,
    ("copy_reg", "_reconstructor"): _new_object,
    ("copyreg", "_reconstructor"): _new_object,
    ("__builtin__", "object"): _OBJECT,
    ("builtins", "object"): _OBJECT,
    ("_codecs", "encode"): _Global(_Latin1),
    ("__builtin__", "bytes"): _Global(lambda: b""),  # how protocols before 3 write `b""`
    **{(f"{n}.multiarray", "_reconstruct"): _reconstruct for n in _NUMPY},
    **{(f"{n}.multiarray", "scalar"): _Global(_Scalar) for n in _NUMPY},
    **{(f"{n}.numeric", "_frombuffer"): _Global(_Buffer) for n in _NUMPY},
    **{
        (module, "JoinPoint"): _Marker
        for module in (
            "jax.example_libraries.optimizers",
            "jax.experimental.optimizers",
            "opt_legacy_stax._joinpoint",
        )
    },
}
_EXTENSION_MODULES = ("ml_dtypes", "jaxlib.xla_extension", "jaxlib.xla_client")


class _Unpickler(pickle.Unpickler):
    """Resolves only the names in `_GLOBALS`, without importing anything."""

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if module in _EXTENSION_MODULES and is_known(name):
            return _Extension(name)  # type: ignore[return-value]
        try:
            found: Callable[..., Any] = _GLOBALS[module, name]
        except KeyError:
            raise UnsafePickleError(
                f"the pickle refers to `{shown(module)}.{shown(name)}`, which is not part of an "
                "array or a JoinPoint. It was not executed."
            ) from None
        return found

    def persistent_load(self, pid: Any) -> Any:
        raise UnsafePickleError("the pickle refers to external objects by persistent id.")


class _Converter:
    """Converts the recorded objects to a tree.

    A pickle can refer to one object many times. The number of nodes and the total size of the
    arrays are therefore limited to the size of the file.
    """

    def __init__(self, limit: int) -> None:
        self._nodes = self._bytes = limit
        self._arrays: dict[int, Any] = {}

    def convert(self, node: Any) -> Any:
        self._nodes -= 1
        if self._nodes < 0:
            raise UnsafePickleError("the pickle describes more objects than its size allows.")
        match node:
            case _Array() | _Buffer():
                return self._array(node)
            case _Marker():
                return JoinPoint(self.convert(node.subtree))
            case dict():
                return {self._key(key): self.convert(child) for key, child in node.items()}
            case list():
                return [self.convert(child) for child in node]
            case tuple():
                return tuple(self.convert(child) for child in node)
            case None | bool() | int() | float():
                return node
            case _:
                raise UnsafePickleError(
                    f"the pickle contains a {type(node).__name__.lstrip('_')}, which is neither an "
                    "array nor a JoinPoint."
                )

    def _array(self, node: _Array | _Buffer) -> Any:
        if id(node) not in self._arrays:  # the nodes live as long as the tree does
            raw = node.raw.text if isinstance(node.raw, _Latin1) else node.raw
            self._bytes -= len(raw)
            if self._bytes < 0:
                raise UnsafePickleError("the pickle describes larger arrays than its size allows.")
            self._arrays[id(node)] = node.resolve()
        return self._arrays[id(node)]

    def _key(self, key: Any) -> Any:
        if type(key) not in (str, int):
            raise UnsafePickleError(
                "the pickle contains a dict whose keys are neither strings nor integers."
            )
        return key
