"""The one module that looks into functions: what they have captured, and who defined them.

Optax's transformations are pairs of closures. What a pair is made of is in the variables that its
functions have captured; nothing is traced or called to see it.
"""

from __future__ import annotations

import copy
import functools
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

_FOREIGN = frozenset({"jax", "jaxlib", "numpy", "builtins", "functools", "flax"})
_DEPTH = 12


class Half(NamedTuple):
    """One half of a transformation, or both: what `optax.chain` keeps of its members."""

    init: Any
    update: Any


def is_transformation(value: Any) -> bool:
    """Whether a value has Optax's `init` and `update`."""
    if isinstance(value, type | types.ModuleType | np.ndarray | jax.Array):
        return False
    return callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))


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


def captured(function: Any) -> dict[str, Any]:
    """Returns what a function has captured, by name; of a method the attributes of its object.

    Examples:
      >>> def scale(factor):
      ...     return lambda x: factor * x
      >>> captured(scale(2.0))
      {'factor': 2.0}
    """
    given: dict[str, Any] = {}
    if isinstance(function, functools.partial):
        given = {str(i): value for i, value in enumerate(function.args)} | function.keywords
    match unwrapped(function):
        case types.MethodType() as method:
            return attributes(method.__self__) | given
        case types.FunctionType() as plain:
            return dict(_cells(plain)) | given
    return given


def captured_with_helpers(function: Any) -> dict[str, Any]:
    """Returns what a function and the helpers of its factory have captured, by name.

    Examples:
      >>> def scale(factor):
      ...     def times(x):
      ...         return factor * x
      ...     return lambda x: times(x)
      >>> captured_with_helpers(scale(2.0))['factor']
      2.0
    """
    factory, found = factory_of(function), captured(function)
    helpers = deque(found.values())
    seen: set[int] = set()
    while helpers:
        helper = helpers.popleft()
        if isinstance(helper, types.FunctionType) and id(helper) not in seen:
            seen.add(id(helper))
            if factory_of(helper) == factory:
                inner = dict(_cells(helper))
                found = inner | found
                helpers += inner.values()
    return found


def attributes(value: Any) -> dict[str, Any]:
    """Returns what an object that is neither a class nor a module keeps in Python."""
    if isinstance(value, type | types.ModuleType | np.ndarray | jax.Array):
        return {}
    found = getattr(value, "__dict__", None)
    return dict(found) if isinstance(found, dict) else {}


def _cells(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # captured before it was assigned
            continue


def factory_of(function: Any) -> str:
    """Returns the name of the function that a function was defined in, or of its object's class.

    Examples:
      >>> import optax
      >>> factory_of(optax.trace(0.9).init), factory_of(optax.MultiSteps(optax.sgd(1.0), 2).init)
      ('trace', 'MultiSteps')
    """
    match unwrapped(function):
        case types.MethodType() as method:
            return type(method.__self__).__name__
        case types.FunctionType() as plain:
            return _factory_name(plain.__code__.co_qualname, package_of(plain))
    return type(function).__name__


def definer_of(function: Any) -> str:
    """Returns the same, but of a method the class that defines it: a subclass may inherit `init`.

    Examples:
      >>> import optax
      >>> class Mine(optax.MultiSteps): ...
      >>> definer_of(Mine(optax.sgd(1.0), 2).init)
      'MultiSteps'
    """
    plain = unwrapped(function)
    code = getattr(getattr(plain, "__func__", plain), "__code__", None)
    if code is None:
        return factory_of(function)
    return _factory_name(code.co_qualname, package_of(function))


def _factory_name(qualified: str, package: str) -> str:
    scopes = qualified.split(".<locals>.")
    if "." in scopes[-1]:
        return scopes[-1].split(".")[-2]
    if len(scopes) == 1:
        return qualified
    # A factory of Optax's is no local function, but may have some.
    return (scopes[0] if package == "optax" else scopes[-2]).rpartition(".")[2]


def package_of(function: Any) -> str:
    """Returns the outermost package of the module of a function, or of its object's class."""
    plain = unwrapped(function)
    owner = type(plain.__self__) if isinstance(plain, types.MethodType) else plain
    return str(getattr(owner, "__module__", None) or "").partition(".")[0]


def own_name(function: Any) -> str:
    """Returns the name that a function was defined with."""
    plain = unwrapped(function)
    plain = plain.__func__ if isinstance(plain, types.MethodType) else plain
    code = getattr(plain, "__code__", None)
    return str(code.co_name if code is not None else getattr(plain, "__name__", ""))


def is_same(one: Any, other: Any) -> bool:
    """Whether two functions are one: the same object, or the same method of the same object."""
    if isinstance(one, types.MethodType) and isinstance(other, types.MethodType):
        return one.__func__ is other.__func__ and one.__self__ is other.__self__
    return one is other


class Rebuilt:
    """Copies of functions in which captured values are replaced.

    Cells are copied with them: what the copies assign to, the originals do not see.

    Args:
      is_replaced: whether something else stands in the place of a value.
      replace: from such a value to what does; called once for every place.
    """

    def __init__(self, is_replaced: Callable[[Any], bool], replace: Callable[[Any], Any]) -> None:
        self._is_replaced, self._replace = is_replaced, replace
        self._reaches: dict[int, bool] = {}
        self._made: dict[int, Any] = {}

    def __call__(self, value: Any) -> Any:
        """Returns a value itself, or a copy where something inside of it is replaced."""
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
            return self._inside(inner, depth + 1)  # a compiled one would come out of a cache
        return self._object(value, depth)

    def _function(self, function: types.FunctionType, depth: int) -> Any:
        if id(function) in self._made:  # it captures itself
            return self._made[id(function)]
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        made = types.FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            cells,
        )
        made.__kwdefaults__ = function.__kwdefaults__
        made.__dict__.update(function.__dict__)
        self._made[id(function)] = made
        names = function.__code__.co_freevars
        contents = dict(_cells(function))
        for name, cell in zip(names, cells, strict=True):
            if name in contents:
                cell.cell_contents = self._new(contents[name], depth + 1)
        del self._made[id(function)]
        return made

    def _object(self, value: Any, depth: int) -> Any:
        made = copy.copy(value)
        for name, child in attributes(value).items():
            object.__setattr__(made, name, self._new(child, depth + 1))
        return made

    def _is_reaching(self, value: Any, depth: int) -> bool:
        """Whether something inside of a value is replaced."""
        if depth > _DEPTH:
            return False
        if id(value) not in self._reaches:
            self._reaches[id(value)] = False  # until it is known: it may capture itself
            self._reaches[id(value)] = any(
                self._is_replaced(child) or self._is_reaching(child, depth + 1)
                for child in parts(value)
            )
        return self._reaches[id(value)]


def parts(value: Any) -> list[Any]:
    """Returns what a function, a container or an object holds, one level down."""
    match value:
        case None | bool() | int() | float() | str() | bytes() | np.ndarray() | jax.Array():
            return []
        case types.FunctionType():
            return [] if package_of(value) in _FOREIGN else list(dict(_cells(value)).values())
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
