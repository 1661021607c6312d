"""The transformations of Optax that do what the triples do, and their states."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from opt_legacy_stax import _triples
from opt_legacy_stax._optimizers import Optimizer, OptimizerState, pack
from opt_legacy_stax._steps import check_step
from opt_legacy_stax._trees import leaf_paths
from opt_legacy_stax.errors import NoEquivalentError, ScheduleError

# What is kept beside the parameters: the triple's, by name, each a tree like the parameters.
Kept = Mapping[str, Any]
# Makes a transformation of the triple's arguments.
_Maker = Callable[[Mapping[str, Any]], Any]


@dataclasses.dataclass(frozen=True)
class OptaxEquivalent:
    """One of the nine optimizers in Optax's own words.

    Attributes:
      name: of the optimizer.
      triple: the optimizer.
      transformation: the same mathematics, made of Optax's transformations.
      is_exact: whether the operations are the same, so that a run that switches continues bit for
        bit. Else the last places differ: Optax multiplies by `rsqrt(x)` where the triple divides by
        `sqrt(x)`, or scales by the step size at another place.
    """

    name: str
    triple: Optimizer
    transformation: optax.GradientTransformation
    is_exact: bool
    _recipe: _Recipe = dataclasses.field(repr=False)

    def convert_state(self, state: OptimizerState, i: Any) -> tuple[Any, Any]:
        """Returns parameters and state of Optax, to go on from a state of the triple.

        Args:
          state: the triple's, or that of JAX's optimizer of the same name.
          i: number of updates made, the `i` of the next one.

        Raises:
          NoEquivalentError: Optax cannot treat one of the parameters.
        """
        packed, tree_def, subtree_defs = state
        kept = [jax.tree.unflatten(d, s) for d, s in zip(subtree_defs, packed, strict=True)]
        self._recipe.check(tree_def, kept)
        columns = self._recipe.take_apart(kept)
        params = jax.tree.map(jnp.asarray, self.triple.params_fn(state))
        trees = {name: jax.tree.unflatten(tree_def, column) for name, column in columns.items()}
        count = jnp.asarray(check_step(i), jnp.int32)
        template = self.transformation.init(params)
        return params, _fill(template, count, self._recipe.to_optax(trees))

    def convert_state_back(self, params: Any, opt_state: Any) -> tuple[OptimizerState, Any]:
        """Returns the triple's state and the `i` of its next update.

        Args:
          params: the parameters.
          opt_state: the state of `transformation`.

        Raises:
          NoEquivalentError: `opt_state` counts no updates, as that of `sgd` without a schedule does
            not need to.
        """
        tree_def: Any
        leaves, tree_def = jax.tree.flatten(params)
        fields = self._recipe.to_optax_fields
        found = {field: optax.tree.get(opt_state, field) for field in fields}
        trees = self._recipe.from_optax(found)
        columns = {name: tree_def.flatten_up_to(tree) for name, tree in trees.items()}
        kept = [
            self._recipe.put_together(x, {name: column[n] for name, column in columns.items()})
            for n, x in enumerate(leaves)
        ]
        return pack(tree_def, kept), _count(opt_state)


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """How one optimizer is written in Optax.

    Attributes:
      build: the transformation, of the triple's arguments.
      slots: names of what the triple keeps beside `x`, in order.
      fields: the field of Optax's state for each of them.
      is_exact: see `OptaxEquivalent`.
      negated: a slot that Optax keeps with the other sign.
    """

    build: Callable[[Mapping[str, Any]], optax.GradientTransformation]
    slots: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    is_exact: bool = False
    negated: str = ""
    has_shape: bool = False

    @property
    def to_optax_fields(self) -> tuple[str, ...]:
        return self.fields

    def take_apart(self, kept: list[Any]) -> dict[str, list[Any]]:
        return {name: [subtree[1 + k] for subtree in kept] for k, name in enumerate(self.slots)}

    def put_together(self, x: Any, slots: Mapping[str, Any]) -> Any:
        if not self.slots:
            return x
        shape = (np.shape(x),) if self.has_shape else ()
        return (x, *(slots[name] for name in self.slots), *shape)

    def to_optax(self, slots: Kept) -> dict[str, Any]:
        return {
            field: self._signed(name, slots[name])
            for name, field in zip(self.slots, self.fields, strict=True)
        }

    def from_optax(self, found: Kept) -> dict[str, Any]:
        return {
            name: self._signed(name, found[field])
            for name, field in zip(self.slots, self.fields, strict=True)
        }

    def check(self, tree_def: Any, kept: list[Any]) -> None:
        if self.has_shape:
            for path, subtree in zip(leaf_paths(tree_def), kept, strict=True):
                if not subtree[-1]:
                    raise _no_equivalent("sm3", f"`optax.sm3` has no scalars, and `{path}` is one")

    def _signed(self, name: str, tree: Any) -> Any:
        return jax.tree.map(jnp.negative, tree) if name == self.negated else tree


def optax_equivalent(name: str, **kwargs: Any) -> OptaxEquivalent:
    """See `opt_legacy_stax.optax_equivalent`."""
    recipe = _RECIPES.get(name)
    if recipe is None:
        raise NoEquivalentError(
            f"`name` must be one of {', '.join(_RECIPES)}; got {name!r}. For a triple of your own "
            "use `to_optax(triple)`."
        )
    maker = getattr(_triples, name)
    arguments = inspect.signature(maker).bind(**kwargs)
    arguments.apply_defaults()
    if arguments.arguments.pop("upstream_numerics"):
        raise _no_equivalent(name, "Optax rounds as the default does, not as JAX's module")
    triple = maker(**kwargs)  # complains about the step size
    return OptaxEquivalent(name, triple, recipe.build(arguments.arguments), recipe.is_exact, recipe)


def _no_equivalent(name: str, reason: str) -> NoEquivalentError:
    return NoEquivalentError(
        f"Optax has no equivalent of this `{name}`: {reason}. Use `to_optax({name}(...))`, which "
        "is the triple itself as a transformation."
    )


def _rate(arguments: Mapping[str, Any]) -> optax.GradientTransformation:
    """Returns the last step: `-step_size *`, which counts where the step size is a schedule."""
    rate = arguments["step_size"]
    if not callable(rate) and np.ndim(rate) != 0:
        raise ScheduleError("a step size must be a number or a function of the step.")
    # A schedule of a number counts too: the triple needs to know `i` when the run goes back to it.
    schedule = rate if callable(rate) else optax.constant_schedule(rate)
    return optax.scale_by_schedule(lambda count: -1 * schedule(count))


def _chain(*parts: _Maker) -> _Maker:
    return lambda arguments: optax.chain(*(part(arguments) for part in parts))


def _adamax(arguments: Mapping[str, Any]) -> optax.GradientTransformation:
    if arguments["eps"] != 0:
        raise _no_equivalent(
            "adamax",
            "Optax adds `eps` to the gradient before the maximum, the triple to the maximum after "
            "it; they agree for `eps=0` alone",
        )
    return optax.scale_by_adamax(arguments["b1"], arguments["b2"], eps=0.0)


_RECIPES: dict[str, _Recipe] = {
    "sgd": _Recipe(_chain(_rate), is_exact=True),
    "momentum": _Recipe(
        _chain(lambda a: optax.trace(a["mass"]), _rate), ("velocity",), ("trace",), is_exact=True
    ),
    "nesterov": _Recipe(
        _chain(lambda a: optax.trace(a["mass"], nesterov=True), _rate),
        ("velocity",),
        ("trace",),
        is_exact=True,
    ),
    "adagrad": _Recipe(
        _chain(
            lambda a: optax.scale_by_rss(initial_accumulator_value=0.0, eps=0.0),
            lambda a: optax.ema(a["momentum"], debias=False),
            _rate,
        ),
        ("g_sq", "m"),
        ("sum_of_squares", "ema"),
    ),
    "rmsprop": _Recipe(
        _chain(lambda a: optax.scale_by_rms(a["gamma"], a["eps"]), _rate),
        ("avg_sq_grad",),
        ("nu",),
    ),
    "rmsprop_momentum": _Recipe(
        _chain(
            lambda a: optax.scale_by_rms(a["gamma"], a["eps"]),
            _rate,
            lambda a: optax.trace(a["momentum"]),
        ),
        ("avg_sq_grad", "mom"),
        ("nu", "trace"),
        negated="mom",
    ),
    "adam": _Recipe(
        _chain(lambda a: optax.scale_by_adam(a["b1"], a["b2"], a["eps"]), _rate),
        ("m", "v"),
        ("mu", "nu"),
    ),
    "adamax": _Recipe(_chain(_adamax, _rate), ("m", "u"), ("mu", "nu")),
    "sm3": _Recipe(
        _chain(lambda a: optax.scale_by_sm3(a["momentum"], b2=1.0, eps=0.0), _rate),
        ("m", "vs"),
        ("nu", "mu"),
        has_shape=True,
    ),
}


def _fill(template: Any, count: Any, fields: Mapping[str, Any]) -> Any:
    """Returns a state of Optax with these fields, and every counter at `count`."""
    filled = []
    for part in template:
        values = {
            name: count if name == "count" else fields[name]
            for name in getattr(part, "_fields", ())
        }
        filled.append(part._replace(**values))
    return tuple(filled)


def _count(opt_state: Any) -> Any:
    """Returns how many updates the step size has been scheduled for."""
    return next(part.count for part in opt_state if isinstance(part, optax.ScaleByScheduleState))
