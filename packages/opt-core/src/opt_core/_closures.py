"""The one walker over closures: what functions, containers and objects are made of.

Optimizers are often made of functions that have captured their settings and one another. Python
compares functions by identity and shows none of it, so this looks inside, which is not pleasant:
where something keeps its state in C, it counts as opaque. Nothing is traced or called.

  >>> import optax
  >>> names = [name for name, _ in opened(optax.scale_by_rms(0.9).update).children]
  >>> names[:2]
  ['bias_correction', 'decay']

Equality of definitions, their settings and what made a state are read off `opened`.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

_FOREIGN = frozenset({"jax", "jaxlib", "numpy", "builtins", "functools", "flax"})
_FLAT = frozenset({"optax", "jax", "numpy"})  # their factories are functions of a module
_ONE_NAMESPACE = frozenset(
    {
        *("optax", "opt_accumulate", "opt_adafactor", "opt_checkpoint", "opt_core"),
        *("opt_legacy_stax", "opt_matrix", "opt_nnx", "opt_optax_bridge", "opt_partition"),
        "opt_precision",
    }
)
_MAIN = ("__main__", "__mp_main__")
_PLAIN = (tuple, list, dict, set, frozenset)


def unwrapped(function: Any) -> Any:
    """Returns the Python function inside of compiled and partial ones."""
    while not isinstance(function, types.FunctionType | types.MethodType):
        if isinstance(function, functools.partial):
            function = function.func
        elif callable(inner := getattr(function, "__wrapped__", None)):
            function = inner
        else:
            break
    return function


def code_of(function: Any) -> types.CodeType | None:
    """Returns the code of a function or method, also of a compiled or partial one."""
    plain = unwrapped(function)
    code = getattr(getattr(plain, "__func__", plain), "__code__", None)
    return code if isinstance(code, types.CodeType) else None


def _cells(function: types.FunctionType) -> dict[str, Any]:
    """The values of a function's captured variables that have been assigned."""
    held = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # captured before it was assigned
            held[name] = cell.cell_contents
    return held


class Opened(NamedTuple):
    """One level of a value.

    Attributes:
      kind: what makes two values with equal children the same: a type, the code of a function.
      children: names, or the keys of a mapping, and what the value holds there.
    """

    kind: tuple[Any, ...]
    children: Sequence[tuple[Any, Any]]


def opened(value: Any) -> Opened | None:
    """Returns what a value is made of; `None` for numbers, arrays, classes and the like."""
    # Of a function these are its captured variables, defaults and attributes; `globals_read` has
    # the globals.
    match value:
        case None | bool() | int() | float() | complex() | str() | bytes() | type():
            return None
        case np.ndarray() | np.generic() | jax.Array() | types.ModuleType() | types.CodeType():
            return None
        case types.FunctionType():
            kind = types.FunctionType, value.__module__, value.__qualname__, value.__code__
            held = _cells(value) | {
                "__defaults__": value.__defaults__,
                "__kwdefaults__": value.__kwdefaults__,
            }
            return Opened(kind, [*held.items(), *sorted(vars(value).items())])
        case types.MethodType():
            both = [("__self__", value.__self__), ("__func__", value.__func__)]
            return Opened((types.MethodType,), both)
        case types.BuiltinMethodType():
            return Opened((type(value), value.__name__), [("__self__", value.__self__)])
        case functools.partial():
            arguments = [*_numbered(value.args), *value.keywords.items()]
            children = [("func", value.func), *arguments, *attributes(value).items()]
            return Opened((type(value),), children)
        case tuple() | list() | set() | frozenset():
            return Opened((type(value),), [*_numbered(value), *attributes(value).items()])
        case Mapping():
            return Opened((type(value),), [*value.items(), *attributes(value).items()])
    inner = getattr(value, "__wrapped__", None) if callable(value) else None
    if isinstance(inner, types.FunctionType):  # of a compiled function
        return Opened((type(value),), [("__wrapped__", inner)])
    return Opened((type(value),), list(attributes(value).items()))


def _numbered(values: Any) -> list[tuple[str, Any]]:
    return [(str(i), value) for i, value in enumerate(values)]


def attributes(value: Any) -> dict[str, Any]:
    """Returns the Python attributes of an object, without what it has cached, sorted by name."""
    if type(value) in _PLAIN or isinstance(value, type | types.ModuleType | np.ndarray | jax.Array):
        return {}
    names = [name for base in type(value).__mro__ for name in slots(base)]
    kept = {name: getattr(value, name) for name in names if hasattr(value, name)}
    in_dict = getattr(value, "__dict__", None)
    kept |= in_dict if isinstance(in_dict, dict) else {}
    return {name: kept[name] for name in sorted(kept) if not _is_cache(type(value), name)}


def slots(cls: type) -> tuple[str, ...]:
    """Returns the names of the slots that a class itself defines."""
    listed = cls.__dict__.get("__slots__", ())
    names = (listed,) if isinstance(listed, str) else tuple(listed)
    private = f"_{cls.__name__.lstrip('_')}"
    return tuple(
        private + name if name.startswith("__") and not name.endswith("__") else name
        for name in names
        if name not in ("__dict__", "__weakref__")
    )


def _is_cache(cls: type, name: str) -> bool:
    return isinstance(inspect.getattr_static(cls, name, None), functools.cached_property)


def closure_vars(function: Any) -> dict[str, Any]:
    """Returns what a function has captured by name, or the attributes of a method's object."""
    bound: dict[str, Any] = {}
    if isinstance(function, functools.partial):
        bound = dict(_numbered(function.args)) | function.keywords
    match unwrapped(function):
        case types.MethodType() as method:
            return attributes(method.__self__) | bound
        case types.FunctionType() as plain:
            return _cells(plain) | bound
    return bound


def package_of(function: Any) -> str:
    """Returns the outermost package of the module of a function, or of its object's class."""
    plain = unwrapped(function)
    owner = type(plain.__self__) if isinstance(plain, types.MethodType) else plain
    return str(getattr(owner, "__module__", None) or "").partition(".")[0]


def origin_of(value: Any) -> str:
    """Returns the outermost package that defines a function, method or class."""
    # What a script defines, which is the module `__main__` while it runs, has the name under which
    # another program imports it: that of its file, or of its package under `python -m`.
    plain = unwrapped(value)
    module = str(getattr(getattr(plain, "__func__", plain), "__module__", None) or "unknown")
    if module in _MAIN and (script := sys.modules.get(module)) is not None:
        if (spec := getattr(script, "__spec__", None)) is not None:
            module = spec.name
        elif file := getattr(script, "__file__", None):
            module = Path(file).stem
    return module.partition(".")[0]


def qualified(name: str, origin: str) -> str:
    """Returns the name by which states are told apart, with the package that defines it."""
    return name if origin in _ONE_NAMESPACE else f"{origin}.{name}"


def snake_case(name: str) -> str:
    """Returns the name of a class or function in descriptions."""
    words = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
    return re.sub(words, "_", name).lower().removesuffix("_state").strip("_") or name


def factory_of(function: Any) -> str:
    """Returns the name of the function that a function was defined in, or of its object's class."""
    plain = unwrapped(function)
    if isinstance(plain, types.MethodType):
        return type(plain.__self__).__name__
    return definer_of(function)


def definer_of(function: Any) -> str:
    """Returns the same, but for a method the class that defines it, not a subclass."""
    code = code_of(function)
    if code is None:
        return type(function).__name__
    *outer, name = code.co_qualname.split(".<locals>.")
    if "." in name:  # of a class
        return name.split(".")[-2]
    if not outer:
        return name
    scope = outer[0] if package_of(function) in _FLAT else outer[-1]
    return scope.rpartition(".")[2]


def own_name(function: Any) -> str:
    """Returns the name that a function was defined with."""
    code = code_of(function)
    return str(code.co_name if code is not None else getattr(unwrapped(function), "__name__", ""))


def reached(value: Any, is_end: Callable[[Any], bool] = lambda _: False) -> Iterator[Any]:
    """Yields a value and, recursively, everything that it holds up to an end, each object once."""
    seen: set[int] = set()
    left = [value]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        is_foreign = isinstance(value, types.FunctionType) and package_of(value) in _FOREIGN
        if not is_foreign and not is_end(value) and (parts := opened(value)) is not None:
            left += [child for _, child in reversed(parts.children)]


def globals_read(function: types.FunctionType) -> dict[str, Any]:
    """Returns the globals that a function or a nested one may read, sorted by name."""
    known = function.__globals__
    return {name: known[name] for name in sorted(_names(function.__code__) & known.keys())}


def _names(code: types.CodeType) -> set[str]:
    return set(code.co_names).union(*map(_names, _inner(code)))


def _inner(code: types.CodeType) -> Iterator[types.CodeType]:
    return (const for const in code.co_consts if isinstance(const, types.CodeType))


def rebound_names(function: types.FunctionType) -> frozenset[str]:
    """Returns the captured variables that a function assigns."""
    return _rebound(function.__code__)


@functools.cache
def _rebound(code: types.CodeType) -> frozenset[str]:
    stores = (op.argval for op in dis.get_instructions(code) if op.opname == "STORE_DEREF")
    return frozenset(stores) & frozenset(code.co_freevars)
