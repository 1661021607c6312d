"""Old pickles of unpacked states, read without running what they say.

The unpickler knows a dozen names. Each stands for a class or function of this module that records
its arguments; NumPy's and JAX's own code sees nothing of the file but bytes, dtypes and shapes that
were checked.
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
    """Returns the tree of a pickle that was made of `unpack_optimizer_state(state)`.

    Pickles are programs: never load those of strangers with `pickle.load`. This reads the kind of
    pickle that such a tree gives, and refuses everything else. Safer than `pickle.load` by far, it
    is still for files of your own: convert them once, with `pack_optimizer_state` and `save`.

    Args:
      path_or_file: a path, or a file object opened for reading bytes.

    Returns:
      The tree, with this module's join points. Arrays of JAX's come back as such, on the default
      device; as NumPy's where JAX, as it is configured, would round or wrap them. What occurs twice
      in the pickle is one array in the tree. For `pack_optimizer_state`, or `convert_old_layout`
      where the pickle is older than jax 0.2.20.

    Raises:
      UnsafePickleError: the pickle holds anything but arrays, numbers, dicts, lists, tuples, `None`
        and join points, or is damaged.
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
    except Exception as error:  # an unpickler raises whatever a damaged file makes it raise
        raise UnsafePickleError(
            f"the pickle is damaged, or holds more than a state: {type(error).__name__}."
        ) from None


class _Inert:
    """What a pickle can name, and cannot change: `BUILD` would set the attributes of anything."""

    def __setstate__(self, state: Any) -> None:
        raise ValueError("attributes for what takes none")


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
            raise ValueError("no dtype")
        name = _SHORT.get(self.name, self.name)
        if not is_known(name):
            raise UnsafePickleError(f"the pickle holds an array of dtype {shown(repr(self.name))}.")
        dtype = dtype_of(name)
        return dtype.newbyteorder(">") if self.order == ">" else dtype.newbyteorder("<")


# How NumPy writes its own dtypes.
_SHORT = {
    f"{np.dtype(name).kind}{np.dtype(name).itemsize}": name
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}


class _Extension(_Inert):
    """The type of a dtype that NumPy itself does not have."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Latin1(_Inert):
    """Bytes that were written as text; they are made where they are needed."""

    def __init__(self, text: Any, encoding: Any) -> None:
        if type(text) is not str or encoding != "latin1":
            raise ValueError("no bytes")
        self.text = text


class _Array:
    """The contents of an array, as `ndarray.__setstate__` gets them."""

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
    """An array whose contents were arguments."""

    def __init__(self, raw: Any, dtype: Any, shape: Any, order: Any, *_: Any) -> None:
        self.raw, self.dtype, self.shape, self.order = raw, dtype, shape, order

    def resolve(self) -> Any:
        return _array(self.raw, self.dtype, self.shape, self.order)


class _Scalar(_Buffer):
    """A scalar of NumPy's."""

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
        raise ValueError("no array")
    if type(shape) is not tuple or not all(type(dim) is int and dim >= 0 for dim in shape):
        raise ValueError("no shape")
    resolved = dtype.resolve()
    array = np.frombuffer(raw, resolved).reshape(shape, order=order)
    return array.astype(resolved.newbyteorder("="), order="C")


class _Global(_Inert):
    """A function or class that a pickle names.

    Args:
      make: called with what the pickle passes.
    """

    def __init__(self, make: Callable[..., Any] | None = None) -> None:
        self._make = make

    def __call__(self, *arguments: Any) -> Any:
        if self._make is None:
            raise ValueError("a call of what is not called")
        return self._make(*arguments)


_NDARRAY, _OBJECT = _Global(), _Global()


@_Global
def _reconstruct(subtype: Any, shape: Any, dtype: Any) -> _Array:
    if subtype is not _NDARRAY or shape != (0,):
        raise ValueError("no array")
    return _Array()


@_Global
def _reconstruct_array(make: Any, arguments: Any, state: Any, *_: Any) -> _Array:
    if make is not _reconstruct or type(arguments) is not tuple:
        raise ValueError("no array of JAX's")
    _reconstruct(*arguments)
    array = _Array(is_jax=True)
    array.__setstate__(state)
    return array


@_Global
def _new_object(kind: Any, base: Any, state: Any) -> Any:
    """What protocols 0 and 1 make an object with."""
    if kind is not _Marker or base is not _OBJECT or state is not None:
        raise ValueError("no join point")
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
    """Finds the names of `_GLOBALS` and no others; nothing is imported."""

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if module in _EXTENSION_MODULES and is_known(name):
            return _Extension(name)  # type: ignore[return-value]
        try:
            found: Callable[..., Any] = _GLOBALS[module, name]
        except KeyError:
            raise UnsafePickleError(
                f"the pickle asks for `{shown(module)}.{shown(name)}`, which is no array and no "
                "JoinPoint. It was not run."
            ) from None
        return found

    def persistent_load(self, pid: Any) -> Any:
        raise UnsafePickleError("the pickle refers to objects outside of it.")


class _Converter:
    """Makes the tree of what the unpickler recorded.

    It has no more nodes than the file has bytes, and neither have its arrays: what the file holds
    once may be named many times.
    """

    def __init__(self, limit: int) -> None:
        self._nodes = self._bytes = limit
        self._arrays: dict[int, Any] = {}

    def convert(self, node: Any) -> Any:
        self._nodes -= 1
        if self._nodes < 0:
            raise UnsafePickleError("the pickle describes more than it holds.")
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
                    f"the pickle holds a {type(node).__name__.lstrip('_')}, which is no array and "
                    "no JoinPoint."
                )

    def _array(self, node: _Array | _Buffer) -> Any:
        if id(node) not in self._arrays:  # the nodes live as long as the tree does
            raw = node.raw.text if isinstance(node.raw, _Latin1) else node.raw
            self._bytes -= len(raw)
            if self._bytes < 0:
                raise UnsafePickleError("the pickle describes larger arrays than it holds.")
            self._arrays[id(node)] = node.resolve()
        return self._arrays[id(node)]

    def _key(self, key: Any) -> Any:
        if type(key) not in (str, int):
            raise UnsafePickleError("the pickle holds a dict whose keys are no texts or integers.")
        return key
