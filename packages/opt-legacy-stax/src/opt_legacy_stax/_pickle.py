"""Old pickles of unpacked states, read without executing them.

Allowed names resolve to records of calls, since NumPy's own `dtype.__setstate__` trusts what it is
given; `_rebuild` then matches those that describe an array or a join point.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
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

    Everything but arrays, numbers, dicts, lists, tuples, `None` and join points is rejected, as are
    the pickle protocols 0 and 1. Memory and depth are not limited: convert your own files once,
    with `pack_optimizer_state` and `save`.

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
        # One object can be referred to many times: no more are rebuilt than the pickle has bytes.
        return _rebuild(_Unpickler(io.BytesIO(data)).load(), iter(range(len(data))))
    except UnsafePickleError:
        raise
    except Exception as error:  # a damaged pickle can make the unpickler raise anything
        raise UnsafePickleError(
            f"the pickle is damaged, or contains more than a state: {type(error).__name__}."
        ) from None


class _Record:
    """A function or class that a pickle names, or a call of it."""

    __match_args__ = ("name", "arguments", "state")

    def __init__(self, name: str, *arguments: Any, state: Any = None) -> None:
        self.name, self.arguments, self.state = name, arguments, state

    def __call__(self, *arguments: Any) -> _Record:
        if self.arguments:
            raise ValueError("a call of the result of a call")
        return _Record(self.name, *arguments)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _JoinPoint:
    """A join point, which a pickle creates as an object of its class."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


_JOIN_POINTS = (
    "jax.example_libraries.optimizers",
    "jax.experimental.optimizers",
    "opt_legacy_stax._joinpoint",
)
_NAMES = {
    "numpy": ("ndarray", "dtype"),
    "numpy.core.multiarray": ("_reconstruct", "scalar"),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "numpy.core.numeric": ("_frombuffer",),
    "numpy._core.numeric": ("_frombuffer",),
    "jax._src.array": ("_reconstruct_array",),
    "jax._src.device_array": ("reconstruct_device_array",),
    "__builtin__": ("bytes",),
    "_codecs": ("encode",),
}
_EXTENSION_TYPES = ("ml_dtypes", "jaxlib.xla_extension", "jaxlib.xla_client")


class _Unpickler(pickle.Unpickler):
    """Resolves only the allowed names, without importing anything."""

    def find_class(self, module: str, name: str) -> Any:
        if module in _EXTENSION_TYPES:
            return _Record("extension type", name)
        if name == "JoinPoint" and module in _JOIN_POINTS:
            return _JoinPoint
        if name not in _NAMES.get(module, ()):
            raise UnsafePickleError(
                f"the pickle refers to `{shown(module)}.{shown(name)}`, which is not part of an "
                "array or a JoinPoint. It was not executed."
            )
        return _Record(name)


def _rebuild(node: Any, budget: Iterator[int]) -> Any:
    """Returns the tree without records."""
    next(budget)
    match node:
        case _JoinPoint(state=dict(state)) if state.keys() == {"subtree"}:
            return JoinPoint(_rebuild(state["subtree"], budget))
        case _Record("_reconstruct", (_Record("ndarray"), (0,), _), (_, *contents)):
            return _array(*contents)
        case _Record("_frombuffer", (raw, dtype, shape, order, *_), None):  # in protocol 5
            return _array(shape, dtype, order == "F", raw)
        case _Record("scalar", (dtype, raw), None):
            return _array((), dtype, False, raw)[()]
        case _Record(
            "_reconstruct_array" | "reconstruct_device_array",
            (_Record("_reconstruct", ()), arguments, state, *_),
            None,
        ):
            array = _rebuild(_Record("_reconstruct", *arguments, state=state), budget)
            is_exact = jax.dtypes.canonicalize_dtype(array.dtype) == array.dtype
            return jnp.asarray(array) if is_exact else array
        case dict() if all(type(key) in (str, int) for key in node):
            return {key: _rebuild(child, budget) for key, child in node.items()}
        case list():
            return [_rebuild(child, budget) for child in node]
        case tuple():
            return tuple([_rebuild(child, budget) for child in node])
        case None | bool() | int() | float():
            return node
    found = f"`{node.name}`" if isinstance(node, _Record) else type(node).__name__.lstrip("_")
    raise UnsafePickleError(
        f"the pickle contains a {found}, which is neither an array, a JoinPoint, nor a container "
        "of them with strings or integers as keys."
    )


def _array(shape: Any, dtype: Any, is_fortran: Any, raw: Any) -> np.ndarray:
    array = np.frombuffer(_bytes(raw), _dtype(dtype)).reshape(
        shape, order="F" if is_fortran else "C"
    )
    return array.astype(array.dtype.newbyteorder("="), order="C")


def _dtype(node: Any) -> np.dtype[Any]:
    match node:
        case _Record("dtype", (str(name) | _Record("extension type", (str(name),)), *_), state):
            saved: Any = (3, "=", None, None, None) if state is None else state
            _, order, *structure = saved
            dtype = np.dtype(name)
            if structure[:3] == [None, None, None] and is_number(dtype):
                return dtype.newbyteorder(order)
            raise UnsafePickleError(
                f"the pickle contains an array of the unsupported dtype {shown(repr(name))}."
            )
    raise ValueError("not a dtype")


def _bytes(node: Any) -> bytes | bytearray:
    match node:
        case bytes() | bytearray():
            return node
        case _Record("encode", (str(text), "latin1"), None):  # in protocols before 3
            return text.encode("latin1")
        case _Record("bytes", (), None):
            return b""
    raise ValueError("not bytes")
