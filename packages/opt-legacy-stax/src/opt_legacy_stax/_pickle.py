"""Old pickles of unpacked states, read without running what they say.

The unpickler knows a dozen names. Each stands for a class or function of this module that records
its arguments; NumPy's and JAX's own code sees nothing of the file but bytes, dtypes and shapes that
were checked.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np

from opt_legacy_stax._joinpoint import JoinPoint
from opt_legacy_stax._leaves import dtype_of, is_known
from opt_legacy_stax.errors import UnsafePickleError


def load_unpacked_pickle(path_or_file: str | os.PathLike[str] | IO[bytes]) -> Any:
    """Returns the tree of a pickle that was made of `unpack_optimizer_state(state)`.

    Pickles are programs: never load those of strangers with `pickle.load`. This reads the kind of
    pickle that such a tree gives, and refuses everything else. Safer than `pickle.load` by far, it
    is still for files of your own: convert them once, with `pack_optimizer_state` and `save`.

    Args:
      path_or_file: a path, or a file object opened for reading bytes.

    Returns:
      The tree, with this module's join points and NumPy arrays; JAX's arrays become NumPy's. For
      `pack_optimizer_state`, or `convert_old_layout` where the pickle is older than jax 0.2.20.

    Raises:
      UnsafePickleError: the pickle holds anything but arrays, numbers, dicts, lists, tuples, `None`
        and join points, or is damaged.
    """
    if isinstance(path_or_file, str | os.PathLike):
        data = Path(path_or_file).read_bytes()
    else:
        data = path_or_file.read()
    try:
        _check_opcodes(data)
        found = _Unpickler(io.BytesIO(data)).load()
        return _Converter(limit=len(data)).convert(found)
    except UnsafePickleError:
        raise
    except Exception as error:  # an unpickler raises whatever a damaged file makes it raise
        raise UnsafePickleError(
            f"the pickle is damaged, or holds more than a state: {type(error).__name__}."
        ) from None


# Opcodes that a pickle of plain containers, numbers, text, bytes and objects has.
_OPCODES = frozenset(
    [
        "PROTO",
        "FRAME",
        "STOP",
        "MARK",
        "POP",
        "POP_MARK",
        "DUP",
        "NONE",
        "NEWTRUE",
        "NEWFALSE",
        "INT",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG",
        "LONG1",
        "LONG4",
        "FLOAT",
        "BINFLOAT",
        "UNICODE",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE8",
        "STRING",
        "BINSTRING",
        "SHORT_BINSTRING",
        "BINBYTES",
        "SHORT_BINBYTES",
        "BINBYTES8",
        "BYTEARRAY8",
        "EMPTY_DICT",
        "DICT",
        "SETITEM",
        "SETITEMS",
        "EMPTY_LIST",
        "LIST",
        "APPEND",
        "APPENDS",
        "EMPTY_TUPLE",
        "TUPLE",
        "TUPLE1",
        "TUPLE2",
        "TUPLE3",
        "PUT",
        "BINPUT",
        "LONG_BINPUT",
        "MEMOIZE",
        "GET",
        "BINGET",
        "LONG_BINGET",
        "GLOBAL",
        "STACK_GLOBAL",
        "REDUCE",
        "BUILD",
        "NEWOBJ",
    ]
)


def _check_opcodes(data: bytes) -> None:
    """Raises unless every opcode is known and declares no more than the file holds."""
    for count, (opcode, argument, position) in enumerate(pickletools.genops(data)):
        if opcode.name not in _OPCODES:
            raise UnsafePickleError(
                f"the pickle has the opcode {opcode.name} at byte {position}, which no state needs."
            )
        # The memo is an array: an index far beyond what is in it would be allocated.
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(str(argument)) > count:
            raise UnsafePickleError(f"the pickle stores beyond its memo at byte {position}.")


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
            raise UnsafePickleError(f"the pickle holds an array of dtype {self.name[:40]!r}.")
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


class _Extension:
    """The type of a dtype that NumPy itself does not have."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Array:
    """The contents of an array, as `ndarray.__setstate__` gets them."""

    def __init__(self) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def resolve(self) -> np.ndarray:
        _, shape, dtype, is_fortran, raw = self.state
        return _array(raw, dtype, shape, "F" if is_fortran else "C")


class _JaxArray(_Array):
    """The contents of an array of JAX's."""

    def resolve(self) -> Any:
        array = super().resolve()
        fits = jax.dtypes.canonicalize_dtype(array.dtype) == array.dtype
        return jnp.asarray(array) if fits else array


class _Ready:
    """An array whose contents were arguments."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def resolve(self) -> Any:
        return self.value


class _Marker:
    """A join point."""

    subtree: Any

    def __setstate__(self, state: Any) -> None:
        if type(state) is not dict or state.keys() != {"subtree"}:
            raise ValueError("a join point with other attributes")
        self.subtree = state["subtree"]


def _array(raw: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    if isinstance(raw, str):
        raw = raw.encode("latin1")  # Python 2, and protocols before 3
    if type(dtype) is not _Dtype or type(raw) not in (bytes, bytearray) or order not in ("C", "F"):
        raise ValueError("no array")
    if type(shape) is not tuple or not all(type(dim) is int and dim >= 0 for dim in shape):
        raise ValueError("no shape")
    resolved = dtype.resolve()
    array = np.frombuffer(bytes(raw), resolved).reshape(shape, order=order)
    return array.astype(resolved.newbyteorder("="), order="C")


def _reconstruct(subtype: Any, shape: Any, dtype: Any) -> _Array:
    if subtype is not _Array or shape != (0,):
        raise ValueError("no array")
    return _Array()


def _reconstruct_array(make: Any, arguments: Any, state: Any, *_: Any) -> _Array:
    if make is not _reconstruct or type(arguments) is not tuple:
        raise ValueError("no array of JAX's")
    _reconstruct(*arguments)
    array = _JaxArray()
    array.__setstate__(state)
    return array


def _from_buffer(raw: Any, dtype: Any, shape: Any, order: Any, *_: Any) -> _Ready:
    return _Ready(_array(raw, dtype, shape, order))


def _scalar(dtype: Any, raw: Any) -> _Ready:
    return _Ready(_array(raw, dtype, (), "C")[()])


def _new_object(kind: Any, base: Any, state: Any) -> Any:
    """What protocols 0 and 1 make an object with."""
    if kind is not _Marker or base is not object or state is not None:
        raise ValueError("no join point")
    return _Marker()


def _encode(text: Any, encoding: Any) -> bytes:
    if type(text) is not str or encoding != "latin1":
        raise ValueError("no bytes")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    return b""


_NUMPY = ("numpy.core", "numpy._core")
_GLOBALS: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("jax._src.array", "_reconstruct_array"): _reconstruct_array,
    ("jax._src.device_array", "reconstruct_device_array"): _reconstruct_array,
    ("copy_reg", "_reconstructor"): _new_object,
    ("copyreg", "_reconstructor"): _new_object,
    ("__builtin__", "object"): object,
    ("builtins", "object"): object,
    ("_codecs", "encode"): _encode,
    ("__builtin__", "bytes"): _no_bytes,  # how protocols before 3 write `b""`
    **{(f"{n}.multiarray", "_reconstruct"): _reconstruct for n in _NUMPY},
    **{(f"{n}.multiarray", "scalar"): _scalar for n in _NUMPY},
    **{(f"{n}.numeric", "_frombuffer"): _from_buffer for n in _NUMPY},
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
                f"the pickle asks for `{module[:80]}.{name[:80]}`, which is no array and no "
                "JoinPoint. It was not run."
            ) from None
        return found

    def persistent_load(self, pid: Any) -> Any:
        raise UnsafePickleError("the pickle refers to objects outside of it.")


class _Converter:
    """Makes the tree of what the unpickler recorded, of no more nodes than the file has bytes."""

    def __init__(self, limit: int) -> None:
        self._left = limit

    def convert(self, node: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise UnsafePickleError("the pickle describes more than it holds.")
        match node:
            case _Array() | _Ready():
                return node.resolve()
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

    def _key(self, key: Any) -> Any:
        if type(key) not in (str, int):
            raise UnsafePickleError("the pickle holds a dict whose keys are no texts or integers.")
        return key
