"""The one module that inspects functions: their code, captured variables and globals.

Optimizers are often made of closures. Their contents decide whether two are the same and what their
state means, and are needed to pickle them. Nothing is traced or called.
"""

from __future__ import annotations

import copy
import dis
import functools
import sys
import types
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

__all__ = [
    "Rebuilt",
    "Unassigned",
    "assign_cells",
    "attributes",
    "blank_function",
    "cells",
    "closure_vars",
    "code_of",
    "code_values",
    "definer_of",
    "factory_of",
    "globals_read",
    "origin_of",
    "own_name",
    "package_of",
    "parts",
    "qualified",
    "reached",
    "rebound_names",
    "unwrapped",
]

_FOREIGN = frozenset({"jax", "jaxlib", "numpy", "builtins", "functools", "flax"})
_DEPTH = 12
_ONE_NAMESPACE = frozenset(
    {
        *("optax", "opt_accumulate", "opt_adafactor", "opt_checkpoint", "opt_core"),
        *("opt_legacy_stax", "opt_matrix", "opt_nnx", "opt_optax_bridge", "opt_partition"),
        "opt_precision",
    }
)
_MAIN = ("__main__", "__mp_main__")


class Unassigned:
    """Stands for the value of an unassigned variable; a class, so that it is pickled by name."""


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


def cells(function: types.FunctionType) -> dict[str, Any]:
    """Returns the values of a function's captured variables, some possibly unassigned.

    Examples:
      >>> def scale(factor):
      ...     return lambda x: factor * x
      >>> cells(scale(2.0))
      {'factor': 2.0}
    """
    names = function.__code__.co_freevars
    return dict(zip(names, map(_content, function.__closure__ or ()), strict=True))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # captured before it was assigned
        return Unassigned


def closure_vars(function: Any) -> dict[str, Any]:
    """Returns the captured variables of a function by name, or the attributes of a method's object.

    Examples:
      >>> import functools
      >>> closure_vars(functools.partial(print, 1, sep=', '))
      {'0': 1, 'sep': ', '}
    """
    given: dict[str, Any] = {}
    if isinstance(function, functools.partial):
        given = {str(i): value for i, value in enumerate(function.args)} | function.keywords
    match unwrapped(function):
        case types.MethodType() as method:
            return attributes(method.__self__) | given
        case types.FunctionType() as plain:
            return {k: v for k, v in cells(plain).items() if v is not Unassigned} | given
    return given


def attributes(value: Any) -> dict[str, Any]:
    """Returns the Python attributes of an object that is neither a class nor a module."""
    if isinstance(value, type | types.ModuleType | np.ndarray | jax.Array):
        return {}
    found = getattr(value, "__dict__", None)
    return dict(found) if isinstance(found, dict) else {}


def parts(value: Any) -> list[Any]:
    """Returns the direct contents of a function, a container or an object."""
    match value:
        case None | bool() | int() | float() | str() | bytes() | np.ndarray() | jax.Array():
            return []
        case types.FunctionType():
            return [] if package_of(value) in _FOREIGN else list(closure_vars(value).values())
        case types.MethodType():
            return list(attributes(value.__self__).values())
        case functools.partial():
            return [value.func, *value.args, *value.keywords.values()]
        case tuple() | list():
            return list(value)
        case Mapping():
            return list(value.values())
    inner = getattr(value, "__wrapped__", None)
    if isinstance(inner, types.FunctionType):
        return parts(inner)
    return list(attributes(value).values())


def package_of(function: Any) -> str:
    """Returns the outermost package of the module of a function, or of its object's class."""
    plain = unwrapped(function)
    owner = type(plain.__self__) if isinstance(plain, types.MethodType) else plain
    return str(getattr(owner, "__module__", None) or "").partition(".")[0]


def origin_of(value: Any) -> str:
    """Returns the outermost package that defines a function, method or class.

    What a script defines, which is the module `__main__` while it runs, has the name under which
    another program imports it: that of its file, or of its package under `python -m`.

    Examples:
      >>> import json
      >>> origin_of(json.JSONEncoder), origin_of(json.JSONEncoder().encode)
      ('json', 'json')
    """
    plain = unwrapped(value)
    module = str(getattr(getattr(plain, "__func__", plain), "__module__", None) or "unknown")
    if module in _MAIN and (found := sys.modules.get(module)) is not None:
        if (spec := getattr(found, "__spec__", None)) is not None:
            module = spec.name
        elif file := getattr(found, "__file__", None):
            module = Path(file).stem
    return module.partition(".")[0]


def qualified(name: str, origin: str) -> str:
    """Returns the name by which states are told apart, with the package that defines it.

    Optax and the packages that describe states by the same names share one namespace.

    Examples:
      >>> qualified('adam', 'optax'), qualified('adam', 'mine')
      ('adam', 'mine.adam')
    """
    return name if origin in _ONE_NAMESPACE else f"{origin}.{name}"


def factory_of(function: Any, known: Container[str] = ()) -> str:
    """Returns the name of the function that a function was defined in, or of its object's class.

    Args:
      function: anything that can be called.
      known: packages whose factories are module-level functions, whatever is nested in them.

    Examples:
      >>> def scale(factor):
      ...     return lambda x: factor * x
      >>> factory_of(scale(2.0)), factory_of('a b'.split)
      ('scale', 'builtin_function_or_method')
    """
    plain = unwrapped(function)
    if isinstance(plain, types.MethodType):
        return type(plain.__self__).__name__
    return definer_of(function, known)


def definer_of(function: Any, known: Container[str] = ()) -> str:
    """Returns the same, but for a method the class that defines it, not a subclass."""
    code = code_of(function)
    if code is None:
        return type(function).__name__
    scopes = code.co_qualname.split(".<locals>.")
    if "." in scopes[-1]:
        return scopes[-1].split(".")[-2]
    if len(scopes) == 1:
        return scopes[0]
    scope = scopes[0] if package_of(function) in known else scopes[-2]
    return scope.rpartition(".")[2]


def own_name(function: Any) -> str:
    """Returns the name that a function was defined with."""
    code = code_of(function)
    return str(code.co_name if code is not None else getattr(unwrapped(function), "__name__", ""))


def reached(value: Any) -> Iterator[Any]:
    """Yields a value and, recursively, everything that it holds, each object once."""
    seen: set[int] = set()
    left = [value]
    while left:
        value = left.pop()
        if id(value) not in seen:
            seen.add(id(value))
            yield value
            left += reversed(parts(value))


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


def code_values(function: Any) -> Any:
    """Returns the code of a function as plain values, the same in every process."""
    return None if (code := code_of(function)) is None else _values(code)


def _values(code: types.CodeType) -> Any:
    inner = [_values(x) if isinstance(x, types.CodeType) else repr(x) for x in code.co_consts]
    return code.co_code.hex(), code.co_names, inner


def blank_function(
    code: types.CodeType, module_globals: dict[str, Any], name: str
) -> types.FunctionType:
    """Returns a function with unassigned captured variables; see `assign_cells`."""
    closure = tuple(types.CellType() for _ in code.co_freevars)
    return types.FunctionType(code, module_globals, name, None, closure)


def assign_cells(function: types.FunctionType, contents: Mapping[str, Any]) -> None:
    """Assigns the captured variables of a function."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if contents[name] is not Unassigned:
            cell.cell_contents = contents[name]


class Rebuilt:
    """Copies of functions in which captured values are replaced.

    Cells are copied with them, so assignments in the copies do not affect the originals.

    Args:
      is_replaced: whether to replace a value.
      replace: returns the replacement; called once for every occurrence.
    """

    def __init__(self, is_replaced: Callable[[Any], bool], replace: Callable[[Any], Any]) -> None:
        self._is_replaced, self._replace = is_replaced, replace
        self._reaches: dict[int, bool] = {}
        self._made: dict[int, Any] = {}

    def __call__(self, value: Any) -> Any:
        """Returns a value itself, or a copy if something in it is replaced."""
        return self._inside(value, 0)

    def _new(self, value: Any, depth: int) -> Any:
        return self._replace(value) if self._is_replaced(value) else self._inside(value, depth)

    def _inside(self, value: Any, depth: int) -> Any:
        if not self._is_reaching(value, depth):
            return value
        new = functools.partial(self._new, depth=depth + 1)
        match value:
            case types.FunctionType():
                return self._function(value, depth)
            case types.MethodType():
                return types.MethodType(value.__func__, self._object(value.__self__, depth))
            case functools.partial():
                given = {name: new(child) for name, child in value.keywords.items()}
                return functools.partial(new(value.func), *map(new, value.args), **given)
            case tuple() if hasattr(value, "_fields"):
                return type(value)(*map(new, value))
            case tuple() | list():
                return type(value)(map(new, value))
            case Mapping():
                return {key: new(child) for key, child in value.items()}
        inner = getattr(value, "__wrapped__", None)
        if isinstance(inner, types.FunctionType):
            return self._inside(inner, depth + 1)  # a compiled function would come from a cache
        return self._object(value, depth)

    def _function(self, function: types.FunctionType, depth: int) -> Any:
        if id(function) in self._made:  # it captures itself
            return self._made[id(function)]
        made = blank_function(function.__code__, function.__globals__, function.__name__)
        made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
        made.__dict__.update(function.__dict__)
        self._made[id(function)] = made
        held = cells(function).items()
        assign_cells(made, {name: self._new(value, depth + 1) for name, value in held})
        del self._made[id(function)]
        return made

    def _object(self, value: Any, depth: int) -> Any:
        made = copy.copy(value)
        if made is value:  # immutable objects return themselves, and must not be written to
            made = object.__new__(type(value))
        for name, child in attributes(value).items():
            object.__setattr__(made, name, self._new(child, depth + 1))
        return made

    def _is_reaching(self, value: Any, depth: int) -> bool:
        """Whether something in a value is replaced."""
        if depth > _DEPTH:
            return False
        if id(value) not in self._reaches:
            self._reaches[id(value)] = False  # until it is known: it may capture itself
            self._reaches[id(value)] = any(
                self._is_replaced(child) or self._is_reaching(child, depth + 1)
                for child in parts(value)
            )
        return self._reaches[id(value)]
