"""A constructor of Optax optimizers with its arguments, some of which can change at run time.

An argument may be a definition with a recipe of its own, like the parts of a chain. Its
hyper-parameters are then hyper-parameters of the whole:

    recipe = Recipe(optax.adamw, (1e-3,), {})
    recipe.hyper_params.learning_rate            # 0.001
    tx = recipe.build(learning_rate=traced)      # optax.adamw(traced)
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from opt_core import OptimizerDef
from opt_core.errors import HyperParamError

from opt_optax_bridge._arguments import (
    definitions_in,
    is_hyper_param,
    make_hyper_params,
    map_argument,
    snapshot,
)
from opt_optax_bridge._transformation import as_optax

_Path = tuple[str, ...]
"""The name of a hyper-parameter, preceded by the names of the parts that contain it."""


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
    def _bound(self) -> inspect.BoundArguments | None:
        """Every argument of the signature, defaults included."""
        try:
            bound = inspect.signature(self.constructor).bind(*self.args, **self.kwargs)
        except (TypeError, ValueError):  # no signature, or arguments that the call will reject
            return None
        bound.apply_defaults()
        return bound

    @property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return self._bound.signature.parameters if self._bound else {}

    @functools.cached_property
    def arguments(self) -> Mapping[str, Any]:
        """Every named argument with its value, defaults included."""
        named = dict(self._bound.arguments) if self._bound else {}
        for name, parameter in self._parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                named |= named.pop(name)
            elif parameter.kind is parameter.VAR_POSITIONAL:
                del named[name]
        return named

    @functools.cached_property
    def parts(self) -> Mapping[str, OptimizerDef]:
        """The definitions among the arguments."""
        return definitions_in(self._bound.arguments if self._bound else {})

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
        names = tuple(address.split("."))
        if names in self._values:
            return [names]
        return [path for path in self._values if path[-len(names) :] == names]

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
        if self._bound is None:
            return self.constructor, self.args, self.kwargs
        return self.constructor, dict(self._bound.arguments)

    def build(self, **overrides: Any) -> Any:
        """Calls the constructor, with some arguments replaced."""
        return self._build({self._fields.get(name, (name,)): v for name, v in overrides.items()})

    def _build(self, overrides: Mapping[_Path, Any]) -> Any:
        if self._bound is None or not (overrides or self.parts):
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
