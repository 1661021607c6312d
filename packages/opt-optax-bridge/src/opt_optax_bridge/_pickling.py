"""Pickles of Optax transformations, which are closures.

The standard pickle stores functions by name. A function made inside another cannot be looked up by
name, so its parts are stored: its code, the module whose globals it uses, and the values it has
captured. That ties the pickle to the Python version and to the source of that module.
"""

from __future__ import annotations

import importlib
import io
import marshal
import pickle
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from opt_core.closures import assign_cells, blank_function, cells, code_of


def dumps(obj: Any) -> bytes:
    """Returns a pickle of `obj`, functions made inside functions included."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    """Returns the object. As with every pickle, load only what you trust."""
    return pickle.loads(data)  # noqa: S301


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        match obj:
            case types.FunctionType():
                return _reduce_function(obj)
            case jax.stages.Wrapped():  # a compiled function can be pickled only by name
                return getattr(obj, "__qualname__", "")
            case types.ModuleType():
                return importlib.import_module, (obj.__name__,)
            case jax.Array() if jnp.issubdtype(obj.dtype, jax.dtypes.prng_key):
                data = np.asarray(jax.random.key_data(obj))
                return _wrap_key, (data, str(jax.random.key_impl(obj)))
        return NotImplemented


def _wrap_key(data: Any, impl: str) -> Any:
    return jax.random.wrap_key_data(data, impl=impl)


def _reduce_function(function: types.FunctionType) -> Any:
    found = _find(function.__module__, function.__qualname__)
    if found is function:
        return NotImplemented  # by name, as usual
    depth = 0
    while found is not None:  # decorated: the name leads to a function that wraps this one
        found, depth = getattr(found, "__wrapped__", None), depth + 1
        if found is function:
            return _unwrap, (function.__module__, function.__qualname__, depth)
    state = (
        function.__defaults__,
        function.__kwdefaults__,
        {k: v for k, v in vars(function).items() if k != "__wrapped__"},
        cells(function),
    )
    made = (
        sys.version_info[:2],
        marshal.dumps(code_of(function)),
        function.__module__,
        function.__name__,
        function.__qualname__,
    )
    return _make_function, made, state, None, None, _fill_function


def _find(module: str, qualname: str) -> Any:
    try:
        obj: Any = importlib.import_module(module)
        for name in qualname.split("."):
            obj = getattr(obj, name)
    except (ImportError, AttributeError):
        return None
    return obj


def _unwrap(module: str, qualname: str, depth: int) -> Any:
    function = _find(module, qualname)
    for _ in range(depth):
        function = getattr(function, "__wrapped__", None)
    if function is None:
        raise pickle.UnpicklingError(f"`{module}.{qualname}` has changed since it was pickled")
    return function


def _make_function(
    python: tuple[int, int], code: bytes, module: str, name: str, qualname: str
) -> types.FunctionType:
    if python != sys.version_info[:2]:
        raise pickle.UnpicklingError(
            f"`{module}.{qualname}` was pickled under Python {python[0]}.{python[1]}; a function "
            f"made inside another cannot move to {sys.version_info[0]}.{sys.version_info[1]}"
        )
    known = vars(importlib.import_module(module))
    function = blank_function(marshal.loads(code), known, name)  # noqa: S302
    function.__qualname__ = qualname
    function.__module__ = module
    return function


def _fill_function(function: types.FunctionType, state: tuple[Any, ...]) -> None:
    defaults, kwdefaults, attributes, contents = state
    function.__defaults__ = defaults
    function.__kwdefaults__ = kwdefaults
    vars(function).update(attributes)
    assign_cells(function, contents)
