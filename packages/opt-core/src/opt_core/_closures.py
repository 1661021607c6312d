"""The one walker over closures: the parts of functions, containers and objects."""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import enum
import functools
import inspect
import itertools
import re
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict

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
    """One level of a value."""

    # what makes two values with equal children the same: a type, the code of a function
    kind: tuple[Any, ...]
    # names, or the keys of a mapping, and what the value holds there
    children: Sequence[tuple[Any, Any]]


def opened(value: Any) -> Opened | None:
    """Returns the parts of a value; `None` for numbers, arrays, classes and the like."""
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


@functools.cache
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


@functools.cache
def _globals_read(code: types.CodeType) -> tuple[tuple[str, str], ...]:
    """The globals that code or nested code reads, each with the attribute of it that is read."""
    steps = itertools.pairwise(dis.get_instructions(code))
    read = {
        (step.argval, after.argval if after.opname == "LOAD_ATTR" else "")
        for step, after in steps
        if step.opname == "LOAD_GLOBAL"
    }
    return tuple(sorted(read.union(*map(_globals_read, _inner(code)))))


def _inner(code: types.CodeType) -> Iterator[types.CodeType]:
    return (const for const in code.co_consts if isinstance(const, types.CodeType))


def rebound_names(function: types.FunctionType) -> frozenset[str]:
    """Returns the captured variables that a function assigns."""
    return _rebound(function.__code__)


@functools.cache
def _rebound(code: types.CodeType) -> frozenset[str]:
    stores = (op.argval for op in dis.get_instructions(code) if op.opname == "STORE_DEREF")
    return frozenset(stores) & frozenset(code.co_freevars)


# Equality of things that were built the same way.


class _Same:
    """Stands for an object that is equal only to itself."""

    __slots__ = ("_object",)

    def __init__(self, obj: Any) -> None:
        self._object = obj  # kept alive, so that its id is not reused

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._object is self._object

    def __hash__(self) -> int:
        return id(self._object)


def fingerprint(obj: Any) -> Hashable:
    """Returns a hashable value that is equal for objects built the same way."""
    # Numbers compare with their type, arrays by content, containers by elements, dataclasses, plain
    # and mutable objects by attributes, functions by code and captured values. So do the globals
    # that a function names, if they are numbers, containers, arrays, mutable, or functions and
    # objects of the same module, and numbers and containers that it reads of classes and modules;
    # other globals compare by identity. An opaque object (a tracer, a compiled function) is equal
    # only to itself.
    return _fingerprint(obj, {})


_NEXT: Final = -1  # no `id`


def _fingerprint(obj: Any, seen: dict[int, int]) -> Hashable:
    match obj:
        case None | bool() | int() | str() | bytes() | type() | types.ModuleType():
            return (type(obj), obj)
        case float():
            return (type(obj), float(obj).hex())  # nan equals nan, -0.0 is not 0.0
        case complex():
            return (type(obj), obj.real.hex(), obj.imag.hex())
        case types.CodeType():
            return obj
        case enum.Enum():
            return (type(obj), obj)
        case jax.core.Tracer():
            return _Same(obj)
    if id(obj) in seen:  # a cycle, or a function that many share
        return ("seen", seen[id(obj)])
    # A number is never used twice, although some objects are forgotten again below.
    seen[id(obj)] = seen[_NEXT] = seen.get(_NEXT, 0) + 1
    value = _composite(obj, seen)
    if isinstance(obj, tuple | list | Mapping | np.ndarray):
        del seen[id(obj)]  # whether two places share an equal container makes no difference
    return value


def _composite(obj: Any, seen: dict[int, int]) -> Hashable:
    each = functools.partial(_fingerprint, seen=seen)
    match obj:
        case np.ndarray() | np.generic() | jax.Array():
            return _array(obj)
        case dict() | FrozenDict() | types.MappingProxyType():
            held = attributes(obj) if isinstance(obj, dict) else {}
            if isinstance(obj, defaultdict):
                held = held | {"default_factory": obj.default_factory}
            is_ordered = isinstance(obj, OrderedDict)
            items = obj.items() if is_ordered else _in_order(obj)
            pairs = [(each(key), each(value)) for key, value in items]
            both = tuple(pairs) if is_ordered else frozenset(pairs)
            return (type(obj), _named(held.items(), seen), both)
        case set() | frozenset():
            return (type(obj), _named(attributes(obj).items(), seen), frozenset(map(each, obj)))
        case types.FunctionType():
            return (_parts(obj, seen), tuple(_globals(obj, seen)))
        case tuple() | list() | functools.partial():
            return _parts(obj, seen)
        case types.MethodType() | types.BuiltinMethodType():
            return _parts(obj, seen)
    is_value = _defines_equality(type(obj))
    is_record = dataclasses.is_dataclass(obj) or isinstance(obj, types.SimpleNamespace)
    if is_value and not is_record and _is_hashable(obj):
        return (type(obj), obj)
    if not _is_plain(type(obj)):
        return _Same(obj)
    # What holds nothing and says nothing of equality may be a sentinel.
    held = attributes(obj)
    return (type(obj), _named(held.items(), seen)) if held or is_value else _Same(obj)


def _parts(obj: Any, seen: dict[int, int]) -> Hashable:
    parts = opened(obj)
    assert parts is not None, "only what has no parts is opened to `None`"
    children = parts.children
    if isinstance(obj, types.FunctionType) and (rebound := rebound_names(obj)):
        # Of the same value: Optax's cosine schedule makes 100 100.0 when it is called.
        children = [
            (name, float(x) if name in rebound and isinstance(x, int | float) else x)
            for name, x in children
        ]
    return (parts.kind, _named(children, seen))


def _named(items: Iterable[tuple[Any, Any]], seen: dict[int, int]) -> tuple[Hashable, ...]:
    return tuple((name, _fingerprint(value, seen)) for name, value in items)


def _in_order(mapping: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """The items in a canonical order: shared objects are numbered as they are seen."""
    items = list(mapping.items())
    if all(isinstance(key, str | int) for key in mapping):
        items.sort(key=lambda item: (type(item[0]).__name__, str(item[0])))
    return items


def _is_hashable(obj: Any) -> bool:
    try:
        hash(obj)
    except TypeError:
        return False
    return True


def _defines_equality(cls: type) -> bool:
    return any("__eq__" in base.__dict__ for base in cls.__mro__ if base is not object)


class _Plain:
    """A class whose instances keep everything in `__dict__`."""


def _is_plain(cls: type) -> bool:
    """Whether all that an instance keeps is in attributes: a bigger one keeps state in C."""
    if cls is types.SimpleNamespace:
        return True
    count = sum(len(slots(base)) for base in cls.__mro__)
    pointer = np.dtype(np.intp).itemsize
    sizes = (object.__basicsize__, _Plain.__basicsize__)
    return cls.__basicsize__ - count * pointer in sizes


def _globals(function: types.FunctionType, seen: dict[int, int]) -> Iterator[Hashable]:
    # Without them a function that is defined again, after a global got a new value, would pass
    # for the old one, and the old compiled step would run.
    known = function.__globals__
    for name, attribute in _globals_read(function.__code__):
        if name in known:
            value = known[name]
            yield (name, _fingerprint(value, seen) if _is_data(value, function) else _Same(value))
            if isinstance(value, type | types.ModuleType):  # `config.RATE`
                held = vars(value).get(attribute)
                yield (attribute, _fingerprint(held, seen) if isinstance(held, _DATA) else None)


def _is_data(value: Any, function: types.FunctionType) -> bool:
    """Whether a global may change its content, or is built from something that may."""
    if isinstance(value, types.FunctionType):
        return value.__globals__ is function.__globals__
    if isinstance(value, type):
        return False
    is_own = type(value).__module__ == function.__module__
    is_mutable = type(value).__hash__ is None
    return is_own or is_mutable or dataclasses.is_dataclass(value) or isinstance(value, _DATA)


_DATA = (
    *(type(None), bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset),
    *(np.ndarray, np.generic, jax.Array, functools.partial, types.SimpleNamespace),
)


def _array(array: np.ndarray[Any, Any] | np.generic | jax.Array) -> Hashable:
    if isinstance(array, np.ndarray) and type(array) is not np.ndarray:
        return _Same(array)  # a mask or the like besides the data
    if isinstance(array, jax.Array):
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            with jax.ensure_compile_time_eval():  # inside a trace too
                return (str(array.dtype), _array(jax.random.key_data(array)))
        if array.is_deleted() or not array.is_fully_addressable:
            return _Same(array)
    content = np.asarray(array)
    if content.dtype == object:
        return _Same(array)
    weak = bool(getattr(array, "weak_type", False))
    return (type(array), weak, str(content.dtype), content.shape, content.tobytes())
