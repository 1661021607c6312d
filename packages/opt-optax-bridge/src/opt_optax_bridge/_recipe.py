"""A constructor of Optax optimizers with its arguments, some of which can change at run time.

An argument may be a definition with a recipe of its own, like the parts of a chain. Its
hyper-parameters are then part of the whole's.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import itertools
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from opt_core import OptimizerDef
from opt_core.errors import HyperParamError

from opt_optax_bridge._fields import make_hyper_params

_Path = tuple[str, ...]
"""The name of a hyper-parameter, preceded by the names of the parts that contain it."""

_PLAIN = (int, float)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a transformation was built, and can be rebuilt with other numbers.

    Definitions among the arguments are parts: the constructor gets their transformations. A part
    is named after its keyword, or else after its constructor (`adam`; repeated: `adam_1`).

    Attributes:
      constructor: the function that was called.
      args: its positional arguments.
      kwargs: its keyword arguments.
    """

    constructor: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __post_init__(self) -> None:
        # A later change of a list would affect rebuilding, but not what was built.
        object.__setattr__(self, "args", _snapshot(self.args))
        object.__setattr__(self, "kwargs", _snapshot(self.kwargs))

    def __reduce__(self) -> Any:
        return Recipe, (self.constructor, self.args, self.kwargs)

    @property
    def name(self) -> str:
        """The constructor's name."""
        constructor = getattr(self.constructor, "func", self.constructor)  # of a partial
        return getattr(constructor, "__name__", type(constructor).__name__)

    @functools.cached_property
    def _bound(self) -> inspect.BoundArguments | None:
        try:
            return inspect.signature(self.constructor).bind(*self.args, **self.kwargs)
        except (TypeError, ValueError):  # no signature, or arguments that the call will reject
            return None

    @property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return self._bound.signature.parameters if self._bound else {}

    @functools.cached_property
    def _complete(self) -> dict[str, Any]:
        """Every argument of the signature, defaults included."""
        if self._bound is None:
            return {}
        bound = copy.copy(self._bound)
        bound.arguments = copy.copy(bound.arguments)
        bound.apply_defaults()
        return dict(bound.arguments)

    @functools.cached_property
    def arguments(self) -> Mapping[str, Any]:
        """Every named argument with its value, defaults included."""
        named = dict(self._complete)
        for name, parameter in self._parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                named |= named.pop(name)
            elif parameter.kind is parameter.VAR_POSITIONAL:
                del named[name]
        return named

    @functools.cached_property
    def parts(self) -> Mapping[str, OptimizerDef]:
        """The definitions among the arguments."""
        arguments = self._bound.arguments if self._bound else {}
        found = [part for name, value in arguments.items() for part in _parts_in(value, name)]
        names = _unique_names(found)
        return {name: part for name, (_, part) in zip(names, found, strict=True)}

    @functools.cached_property
    def _recipes(self) -> Mapping[str, Recipe]:
        recipes = {name: getattr(part, "recipe", None) for name, part in self.parts.items()}
        return {name: recipe for name, recipe in recipes.items() if recipe is not None}

    @functools.cached_property
    def _values(self) -> Mapping[_Path, tuple[Any, Any]]:
        """The values and defaults of all hyper-parameters, including those of the parts."""
        own = {
            (name,): (value, parameter.default if parameter else None)
            for name, value in self.arguments.items()
            if _is_hyper_param(value, parameter := self._parameters.get(name))
        }
        return own | {
            (part, *path): values
            for part, recipe in self._recipes.items()
            for path, values in recipe._values.items()
        }

    @functools.cached_property
    def _fields(self) -> Mapping[str, _Path]:
        """The hyper-parameters by their shortest unambiguous address."""
        return {
            next(a for a in _addresses(path) if self._found(a) == [path]): path
            for path in self._values
        }

    def _found(self, address: str) -> list[_Path]:
        """The hyper-parameters that an address may mean; its own take precedence over parts'."""
        names = tuple(address.split("."))
        if names in self._values:
            return [names]
        return [path for path in self._values if path[-len(names) :] == names]

    @functools.cached_property
    def hyper_params(self) -> Any:
        """A frozen dataclass of the arguments that are a float or a schedule.

        A hyper-parameter that two parts have is called `part.name`.
        """
        found = {field: self._values[path] for field, path in self._fields.items()}
        values = {field: value for field, (value, _) in found.items()}
        defaults = {k: default for k, (_, default) in found.items() if isinstance(default, _PLAIN)}
        return make_hyper_params(f"{self.name}_hyper_params", values, defaults)

    def by_field(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Returns overrides by the fields of `hyper_params`, whichever address was used.

        Args:
          overrides: values by address; other names are kept unchanged.

        Raises:
          HyperParamError: a name is ambiguous, or two addresses mean one hyper-parameter.
        """
        fields = {path: field for field, path in self._fields.items()}
        given: dict[str, str] = {}
        for name in overrides:
            found = [fields[path] for path in self._found(name)]
            if len(found) > 1:
                raise HyperParamError(
                    f"`{name}` is a hyper-parameter of {len(found)} parts: "
                    f"{', '.join(f'`{field}`' for field in found)}. Say which: "
                    f"`apply_gradient(grads, **{{{found[0]!r}: ...}})`."
                )
            field = found[0] if found else name
            if field in given:
                raise HyperParamError(f"`{given[field]}` and `{name}` are the same; give one")
            given[field] = name
        return {field: overrides[name] for field, name in given.items()}

    def has_argument(self, name: str) -> bool:
        """Whether the constructor of this recipe, or of one of its parts, takes the argument."""
        return name in self.arguments or any(
            recipe.has_argument(name) for recipe in self._recipes.values()
        )

    def has_hyper_param(self, name: str) -> bool:
        """Whether `name` is a hyper-parameter, possibly of several parts."""
        return bool(self._found(name))

    @property
    def identity(self) -> Any:
        """Equal for recipes of the same transformation, however their arguments were passed."""
        given = (self.args, self.kwargs) if self._bound is None else (self._complete,)
        return (self.constructor, *given)

    def build(self, **overrides: Any) -> Any:
        """Calls the constructor, with some arguments replaced.

        Args:
          **overrides: new values by field of `hyper_params`. A number that replaces a schedule
            becomes a constant schedule, so that the state keeps its count.
        """
        return self._build({self._fields.get(name, (name,)): v for name, v in overrides.items()})

    def _build(self, overrides: Mapping[_Path, Any]) -> Any:
        if self._bound is None or not (overrides or self.parts):
            return self.constructor(*self.args, **self.kwargs)
        own = {
            path[0]: _in_place_of(self.arguments[path[0]], value)
            for path, value in overrides.items()
            if len(path) == 1
        }
        bound = copy.copy(self._bound)
        named = {name: own.pop(name) for name in self._parameters if name in own}
        bound.arguments = type(bound.arguments)(bound.arguments, **named)
        # In the order of `parts`: the same walk over the arguments finds and replaces them.
        built = iter([self._build_part(name, overrides) for name in self.parts])
        for name, value in bound.arguments.items():
            bound.arguments[name] = _replace_parts(value, built)
        return self.constructor(*bound.args, **{**bound.kwargs, **own})

    def _build_part(self, name: str, overrides: Mapping[_Path, Any]) -> Any:
        recipe = self._recipes.get(name)
        if recipe is None:
            return as_optax(self.parts[name])
        return as_optax(
            recipe._build({path[1:]: v for path, v in overrides.items() if path[0] == name})
        )


def as_optax(transformation: Any) -> Any:
    """Returns a definition, or anything with `init` and `update`, as an Optax transformation."""
    if isinstance(transformation, OptimizerDef) and not hasattr(transformation, "optax_optimizer"):
        from opt_optax_bridge._transformation import as_transformation  # a circular import

        return as_transformation(transformation)
    tx = getattr(transformation, "optax_optimizer", transformation)
    if isinstance(tx, optax.GradientTransformation):
        return tx
    return optax.GradientTransformationExtraArgs(tx.init, tx.update)


def _in_place_of(own: Any, value: Any) -> Any:
    if callable(own) and not callable(value):
        return functools.partial(_constant_schedule, value)
    return value


def _parts_in(value: Any, name: str | None) -> Iterator[tuple[str | None, OptimizerDef]]:
    """Yields the definitions in an argument, with their keywords."""
    if isinstance(value, OptimizerDef):
        yield name, value
    elif type(value) is dict:
        for key, inner in value.items():
            yield from _parts_in(inner, str(key))
    elif type(value) in (list, tuple):
        for inner in value:
            yield from _parts_in(inner, None)


def _replace_parts(value: Any, built: Iterator[Any]) -> Any:
    """Returns an argument in which the next of `built` replaces each definition."""
    if isinstance(value, OptimizerDef):
        return next(built)
    if type(value) is dict:
        return {key: _replace_parts(inner, built) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replace_parts(inner, built) for inner in value)
    return value


def _unique_names(parts: Iterable[tuple[str | None, OptimizerDef]]) -> list[str]:
    found = list(parts)
    taken = {name for name, _ in found if name is not None}
    names = []
    for given, part in found:
        name = given
        if name is None:
            recipe = getattr(part, "recipe", None)
            own = recipe.name if recipe else type(part).__name__
            repeated = (f"{own}_{n}" for n in itertools.count(1))
            name = next(n for n in itertools.chain([own], repeated) if n not in taken)
            taken.add(name)
        names.append(name)
    return names


def _addresses(path: _Path) -> Iterator[str]:
    """Yields the addresses of a path, shortest first."""
    return (".".join(path[-n:]) for n in range(1, len(path) + 1))


def _snapshot(value: Any) -> Any:
    """Returns copies of containers and NumPy arrays."""
    if isinstance(value, Iterator):
        raise TypeError("an argument is an iterator, which can be used only once; pass a list")
    if type(value) is dict:
        return {key: _snapshot(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_snapshot, value))
    return value.copy() if type(value) in (set, np.ndarray) else value


def _constant_schedule(value: Any, count: Any) -> Any:
    del count
    return value


def is_number(value: Any) -> bool:
    """Whether a value is a real number or a scalar array of one, not a bool."""
    if isinstance(value, int | float):
        return not isinstance(value, bool)
    if not isinstance(value, np.ndarray | np.generic | jax.Array):
        return False
    is_real = jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)
    return value.shape == () and is_real


def _is_hyper_param(value: Any, parameter: inspect.Parameter | None) -> bool:
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
    """Whether a callable argument is a schedule: a map from a step count to a float.

    The value alone does not show it: `jnp.float32` maps a count to a float too.
    """
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
