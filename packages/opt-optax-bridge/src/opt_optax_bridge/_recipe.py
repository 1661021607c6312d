"""A constructor of Optax optimizers with its arguments, some of which can change at run time."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import inspect
import itertools
import pickle
import pkgutil
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from opt_core import OptimizerDef
from opt_core.errors import HyperParamError

from opt_optax_bridge._transformation import as_optax

_Path = tuple[str, ...]
"""The name of a hyper-parameter, preceded by the names of the parts that contain it."""


_ANY_SIGNATURE = inspect.signature(lambda *args, **kwargs: None)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a transformation was built, and can be rebuilt with other numbers.

    Definitions among the arguments are parts: the constructor gets their transformations. A part
    is named after its keyword, or else after its constructor (`adam`; repeated: `adam_1`).
    """

    constructor: Callable[..., Any]  # the function that was called
    args: tuple[Any, ...]  # its positional arguments
    kwargs: dict[str, Any]  # its keyword arguments

    def __post_init__(self) -> None:
        # A later change of a list would affect rebuilding, but not what was built.
        object.__setattr__(self, "args", snapshot(self.args))
        object.__setattr__(self, "kwargs", snapshot(self.kwargs))

    def __reduce__(self) -> Any:
        # The name of a constructor that was decorated leads to what the decorator returned.
        module, name = (getattr(self.constructor, x, "") for x in ("__module__", "__qualname__"))
        with contextlib.suppress(ValueError, ImportError, AttributeError):
            exported = pkgutil.resolve_name(f"{module}:{name}")
            if exported is not self.constructor and inspect.unwrap(exported) is self.constructor:
                return _recipe_by_name, (f"{module}:{name}", self.args, self.kwargs)
        return Recipe, (self.constructor, self.args, self.kwargs)

    @property
    def name(self) -> str:
        """The constructor's name."""
        constructor = getattr(self.constructor, "func", self.constructor)  # of a partial
        return getattr(constructor, "__name__", type(constructor).__name__)

    @functools.cached_property
    def _bound(self) -> inspect.BoundArguments:
        """Every argument of the signature, defaults included."""
        try:
            bound = inspect.signature(self.constructor).bind(*self.args, **self.kwargs)
        except (TypeError, ValueError):  # no signature, or arguments that the call will reject
            bound = _ANY_SIGNATURE.bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return bound

    @property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return self._bound.signature.parameters

    @functools.cached_property
    def arguments(self) -> Mapping[str, Any]:
        """Every named argument with its value, defaults included."""
        named = dict(self._bound.arguments)
        for name, parameter in self._parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                named |= named.pop(name)
            elif parameter.kind is parameter.VAR_POSITIONAL:
                del named[name]
        return named

    @functools.cached_property
    def parts(self) -> Mapping[str, OptimizerDef]:
        """The definitions among the arguments."""
        return definitions_in(self._bound.arguments)

    @functools.cached_property
    def _recipes(self) -> Mapping[str, Recipe]:
        recipes = {name: getattr(part, "recipe", None) for name, part in self.parts.items()}
        return {name: recipe for name, recipe in recipes.items() if recipe is not None}

    @functools.cached_property
    def _values(self) -> Mapping[_Path, tuple[Any, Any]]:
        """The values and defaults of all hyper-parameters, including those of the parts."""
        values: dict[_Path, tuple[Any, Any]] = {
            (name,): (value, parameter.default if parameter else None)
            for name, value in self.arguments.items()
            if is_hyper_param(value, parameter := self._parameters.get(name))
        }
        for part, recipe in self._recipes.items():
            values |= {(part, *path): pair for path, pair in recipe._values.items()}
        return values

    @functools.cached_property
    def _fields(self) -> Mapping[str, _Path]:
        """The hyper-parameters by their shortest unambiguous address."""
        return {
            next(a for a in _addresses(path) if self._at(a) == [path]): path
            for path in self._values
        }

    def _at(self, address: str) -> list[_Path]:
        """The hyper-parameters that an address may mean; its own take precedence over parts'."""
        own = [path for path in self._values if ".".join(path) == address]
        return own or [path for path in self._values if address in _addresses(path)]

    @functools.cached_property
    def hyper_params(self) -> Any:
        """A frozen dataclass of the arguments that are a float or a schedule."""
        pairs = {field: self._values[path] for field, path in self._fields.items()}
        return make_hyper_params(
            f"{self.name}_hyper_params",
            values={field: value for field, (value, _) in pairs.items()},
            defaults={
                k: value for k, (_, value) in pairs.items() if isinstance(value, int | float)
            },
        )

    def by_field(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Returns overrides by the fields of `hyper_params`, whichever address was used."""
        fields = {path: field for field, path in self._fields.items()}
        addresses: dict[str, str] = {}
        for name in overrides:
            candidates = [fields[path] for path in self._at(name)]
            if len(candidates) > 1:
                raise HyperParamError(
                    f"`{name}` is a hyper-parameter of {len(candidates)} parts: "
                    f"{', '.join(f'`{field}`' for field in candidates)}. Say which: "
                    f"`apply_gradient(grads, **{{{candidates[0]!r}: ...}})`."
                )
            field = candidates[0] if candidates else name
            if field in addresses:
                raise HyperParamError(f"`{addresses[field]}` and `{name}` are the same; give one")
            addresses[field] = name
        return {field: overrides[name] for field, name in addresses.items()}

    def has_argument(self, name: str) -> bool:
        """Whether the constructor of this recipe, or of one of its parts, takes the argument."""
        return name in self.arguments or any(
            recipe.has_argument(name) for recipe in self._recipes.values()
        )

    def has_hyper_param(self, name: str) -> bool:
        """Whether `name` is a hyper-parameter, possibly of several parts."""
        return bool(self._at(name))

    @property
    def identity(self) -> Any:
        """Equal for recipes of the same transformation, however their arguments were passed."""
        return self.constructor, dict(self._bound.arguments)

    def build(self, **overrides: Any) -> Any:
        """Calls the constructor, with some arguments replaced."""
        return self._build({self._fields.get(name, (name,)): v for name, v in overrides.items()})

    def _build(self, overrides: Mapping[_Path, Any]) -> Any:
        if not (overrides or self.parts):
            return self.constructor(*self.args, **self.kwargs)
        replaced = {
            path[0]: _in_place_of(self.arguments[path[0]], value)
            for path, value in overrides.items()
            if len(path) == 1
        }
        bound = copy.copy(self._bound)
        named = {name: replaced.pop(name) for name in self._parameters if name in replaced}
        bound.arguments = type(bound.arguments)(bound.arguments, **named)
        # In the order of `parts`: the same walk over the arguments finds and replaces them.
        parts = iter([self._build_part(name, overrides) for name in self.parts])
        for name, value in bound.arguments.items():
            bound.arguments[name] = map_argument(
                lambda _, item: next(parts) if isinstance(item, OptimizerDef) else item, value, name
            )
        return self.constructor(*bound.args, **{**bound.kwargs, **replaced})

    def _build_part(self, name: str, overrides: Mapping[_Path, Any]) -> Any:
        recipe = self._recipes.get(name)
        if recipe is None:
            return as_optax(self.parts[name])
        return as_optax(
            recipe._build({path[1:]: v for path, v in overrides.items() if path[0] == name})
        )


def _recipe_by_name(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recipe:
    return Recipe(inspect.unwrap(pkgutil.resolve_name(name)), args, kwargs)


def _in_place_of(argument: Any, value: Any) -> Any:
    if callable(argument) and not callable(value):
        return functools.partial(_constant_schedule, value)
    return value


def _constant_schedule(value: Any, count: Any) -> Any:
    del count
    return value


def _addresses(path: _Path) -> Iterator[str]:
    """Yields the addresses of a path, shortest first."""
    return (".".join(path[-n:]) for n in range(1, len(path) + 1))


# Arguments: which of them are hyper-parameters, and the definitions in them.


def is_number(value: Any) -> bool:
    """Whether a value is a real number or a scalar array of one, not a bool."""
    if isinstance(value, int | float):
        return not isinstance(value, bool)
    if not isinstance(value, np.ndarray | np.generic | jax.Array):
        return False
    is_real = jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)
    return value.shape == () and is_real


def is_hyper_param(value: Any, parameter: inspect.Parameter | None) -> bool:
    """Whether an argument can be overridden at run time; `parameter` is its declaration."""
    if callable(value):
        return _is_schedule(value, parameter)
    if not is_number(value):
        return False
    if isinstance(value, float) or (not isinstance(value, int) and _is_floating(value)):
        return True
    # `weight_decay=0` is meant as a float; an argument that is an integer by design is structural.
    return parameter is not None and not (
        parameter.annotation is int or isinstance(parameter.default, int)
    )


def _is_schedule(value: Any, parameter: inspect.Parameter | None) -> bool:
    """Whether a callable argument is a schedule: a map from a step count to a float."""
    # The value alone does not show it: `jnp.float32` maps a count to a float too.
    annotation = parameter.annotation if parameter else Any
    if annotation in (inspect.Parameter.empty, Any, "Any"):  # no information
        if isinstance(value, type) or hasattr(value, "dtype"):
            return False
    elif not _admits_schedule(annotation):
        return False
    try:
        rate = jax.eval_shape(value, jax.ShapeDtypeStruct((), jnp.int32))
    except Exception:
        return False
    leaves = jax.tree.leaves(rate)
    return len(leaves) == 1 and leaves[0].shape == () and _is_floating(leaves[0])


def _is_floating(value: Any) -> bool:
    return bool(jnp.issubdtype(value.dtype, jnp.floating))


def _admits_schedule(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return "Schedule" in annotation
    if annotation == optax.Schedule:
        return True
    members = typing.get_args(annotation)
    return float in members and any(typing.get_origin(m) is Callable for m in members)


def map_argument(fn: Callable[[str | None, Any], Any], value: Any, keyword: str | None) -> Any:
    """Returns an argument with `fn(keyword, item)` for every item of its containers."""
    if type(value) is dict:
        return {key: map_argument(fn, item, str(key)) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_argument(fn, item, None) for item in value)
    return fn(keyword, value)


def snapshot(value: Any) -> Any:
    """Returns copies of containers and NumPy arrays."""
    return map_argument(_copied, value, None)


def _copied(_: str | None, value: Any) -> Any:
    if isinstance(value, Iterator):
        raise TypeError("an argument is an iterator, which can be used only once; pass a list")
    return value.copy() if type(value) in (set, np.ndarray) else value


def definitions_in(arguments: Mapping[str, Any]) -> dict[str, OptimizerDef]:
    """Returns the definitions among arguments by unique names."""
    pairs: list[tuple[str | None, OptimizerDef]] = []

    def collect(keyword: str | None, value: Any) -> None:
        if isinstance(value, OptimizerDef):
            pairs.append((keyword, value))

    for name, value in arguments.items():
        map_argument(collect, value, name)
    named: dict[str, OptimizerDef] = {}
    taken = {keyword for keyword, _ in pairs if keyword is not None}
    for keyword, definition in pairs:
        name = _unused(definition, taken) if keyword is None or keyword in named else keyword
        taken.add(name)
        named[name] = definition
    return named


def _unused(definition: OptimizerDef, taken: Iterable[str]) -> str:
    recipe = getattr(definition, "recipe", None)
    base = recipe.name if recipe else type(definition).__name__
    numbered = (f"{base}_{n}" for n in itertools.count(1))
    return next(name for name in itertools.chain([base], numbered) if name not in taken)


def make_hyper_params(
    class_name: str, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> Any:
    """Returns a frozen dataclass and pytree; its constructor fills in missing `defaults`."""
    cls = _hyper_params_class(class_name, tuple(values), tuple((defaults or {}).items()))
    return cls(**values)


@functools.cache
def _hyper_params_class(
    class_name: str, fields: tuple[str, ...], defaults: tuple[tuple[str, Any], ...]
) -> type:
    body = {
        **dict(defaults),
        "__annotations__": dict.fromkeys(fields, Any),
        "__doc__": "The arguments that can be overridden at run time.",
        "__module__": __name__,
    }
    cls = types.new_class(class_name, (_HyperParams,), {}, lambda ns: ns.update(body))
    return flax.struct.dataclass(cls, kw_only=True, init=False, repr=False, eq=False)


class _HyperParams:
    """What `dataclasses` would generate as source, where field names cannot contain a dot."""

    def __init__(self: Any, **values: Any) -> None:
        names = [field.name for field in dataclasses.fields(self)]
        values = {**self._defaults(), **values}
        if values.keys() != set(names):
            raise TypeError(f"{type(self).__name__} has the fields {names}; got {[*values]}")
        vars(self).update({name: values[name] for name in names})

    def _defaults(self: Any) -> dict[str, Any]:
        fields = dataclasses.fields(self)
        return {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({values})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).items()))

    def __reduce__(self) -> Any:
        return make_hyper_params, (type(self).__name__, dict(vars(self)), self._defaults())


def changed_fields(defaults: Any, hyper_params: Any) -> dict[str, Any]:
    """Returns the fields of `hyper_params` that differ from those of `defaults`."""
    return {
        name: value
        for name, value in field_values(hyper_params).items()
        if not _is_same(getattr(defaults, name), value)
    }


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, float) and isinstance(b, float) and a == b)


def field_values(record: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass by name."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def dumps(content: Any) -> bytes:
    """Returns a pickle of what a definition consists of."""
    # Python's own stores functions by name. What has none, as in `sgd(lambda count: 0.1)`, needs
    # cloudpickle; it is used where it is installed.
    try:
        return pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        try:
            cloudpickle: Any = importlib.import_module("cloudpickle")
        except ImportError:
            raise pickle.PicklingError(
                f"{error}. This definition holds a function without a name, which a pickle cannot "
                "store. One that a constructor makes pickles as the constructor's name and its "
                "arguments, `wrap_optax_optimizer(constructor)(...)`, if schedules and masks are "
                "functions of a module too. Anything else needs cloudpickle to be installed."
            ) from error
    return bytes(cloudpickle.dumps(content))
