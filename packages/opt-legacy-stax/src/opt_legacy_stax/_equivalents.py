"""The nine optimizers written as chains of Optax transformations."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from opt_legacy_stax import _triples
from opt_legacy_stax._optimizers import Optimizer, OptimizerState, keep_dtypes, pack
from opt_legacy_stax._slots import convert
from opt_legacy_stax._trees import layout_difference, leaf_paths
from opt_legacy_stax.errors import LayoutError, NoEquivalentError


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """How one optimizer is expressed in Optax.

    `build` returns the parts of the chain for the arguments of the triple, where `rate` is the part
    that multiplies by `-step_size`. `fields` names the Optax state field, unique within the chain,
    of each array that the triple keeps after `x`.
    """

    build: Callable[..., tuple[optax.GradientTransformation, ...]]
    fields: tuple[str, ...] = ()
    is_exact: bool = False
    has_shape: bool = False  # whether the triple keeps the parameter's shape too, as the last entry


def _adamax(rate: Any, b1: Any, b2: Any, eps: Any) -> tuple[optax.GradientTransformation, ...]:
    if eps != 0:
        raise _no_equivalent(
            "adamax",
            "Optax adds `eps` to the gradient inside the maximum, the triple adds it to the "
            "result; they agree only for `eps=0`",
        )
    return optax.scale_by_adamax(b1, b2, eps=0.0), rate


_RECIPES: dict[str, _Recipe] = {
    "sgd": _Recipe(lambda rate: (rate,), is_exact=True),
    "momentum": _Recipe(lambda rate, mass: (optax.trace(mass), rate), ("trace",), is_exact=True),
    "nesterov": _Recipe(
        lambda rate, mass: (optax.trace(mass, nesterov=True), rate), ("trace",), is_exact=True
    ),
    "adagrad": _Recipe(
        lambda rate, momentum: (
            optax.scale_by_rss(initial_accumulator_value=0.0, eps=0.0),
            optax.ema(momentum, debias=False),
            rate,
        ),
        ("sum_of_squares", "ema"),
    ),
    "rmsprop": _Recipe(lambda rate, gamma, eps: (optax.scale_by_rms(gamma, eps), rate), ("nu",)),
    "rmsprop_momentum": _Recipe(
        # The triple adds up positive steps.
        lambda rate, gamma, eps, momentum: (
            *(optax.scale_by_rms(gamma, eps), optax.scale(-1), rate),
            *(optax.trace(momentum), optax.scale(-1)),
        ),
        ("nu", "trace"),
    ),
    "adam": _Recipe(
        lambda rate, b1, b2, eps: (optax.scale_by_adam(b1, b2, eps), rate), ("mu", "nu")
    ),
    "adamax": _Recipe(_adamax, ("mu", "nu")),
    "sm3": _Recipe(
        lambda rate, momentum: (optax.scale_by_sm3(momentum, b2=1.0, eps=0.0), rate),
        ("nu", "mu"),
        has_shape=True,
    ),
}


@dataclasses.dataclass(frozen=True)
class OptaxEquivalent:
    """One of the nine optimizers as a chain of Optax transformations.

    Attributes:
      name: name of the optimizer.
      triple: the triple.
      transformation: the same update rule, built from Optax transformations.
      is_exact: whether both perform the same operations, so that a float32 run (parameters,
        gradients and step sizes; `jax_enable_x64` off) continues bit for bit after switching. If
        not, results differ in the last digits: Optax multiplies by `rsqrt(x)` where the triple
        divides by `sqrt(x)`, or scales by the step size at a different point. In other dtypes
        Optax rounds elsewhere.
    """

    name: str
    triple: Optimizer
    transformation: optax.GradientTransformation
    is_exact: bool
    _recipe: _Recipe = dataclasses.field(repr=False)

    def convert_state(self, state: OptimizerState, i: Any) -> tuple[Any, Any]:
        """Returns the parameters and Optax state that continue from the triple's before update `i`.

        Raises:
          NoEquivalentError: Optax cannot handle one of the parameters.
          LayoutError: `state` belongs to a different optimizer. (Optimizers that keep the same
            number of arrays, such as Adam and Adagrad, cannot be distinguished.)
          StepError: `i` is not a non-negative integer.
        """
        params, slots, step = convert(self.triple, state, i)
        tree_def = state[1]
        kept = tree_def.flatten_up_to(slots)
        for path, entries in zip(leaf_paths(tree_def), kept, strict=True):
            if self._recipe.has_shape and not entries[-1]:
                raise _no_equivalent(
                    self.name,
                    f"`optax.sm3` does not support scalars, and parameter `{path}` is one",
                )
        trees = {
            field: jax.tree.unflatten(tree_def, [entries[n] for entries in kept])
            for n, field in enumerate(self._recipe.fields, start=1)
        }
        template: Any = self.transformation.init(params)
        values = {**trees, "count": step}
        return params, tuple(
            part._replace(**{name: values[name] for name in part._fields}) for part in template
        )

    def convert_state_back(self, params: Any, opt_state: Any) -> tuple[OptimizerState, Any]:
        """Returns the state of the triple, and the `i` of its next update.

        Raises:
          LayoutError: `opt_state` is not a state of `transformation` for `params`.
        """
        tree_def: Any
        leaves, tree_def = jax.tree.flatten(params)
        expected = jax.eval_shape(self.transformation.init, params)
        if lines := layout_difference(expected, opt_state):
            raise LayoutError(
                f"`opt_state` is not a state of the equivalent of `{self.name}` for `params`:\n"
                f"{lines}\nPass what one call of `transformation.update` or `convert_state` "
                "returned."
            )
        values = {name: getattr(part, name) for part in opt_state for name in part._fields}
        fields = self._recipe.fields
        columns = [leaves, *(tree_def.flatten_up_to(values[field]) for field in fields)]
        if self._recipe.has_shape:
            columns.append([np.shape(x) for x in leaves])
        state = pack(tree_def, list(zip(*columns, strict=True)) if fields else leaves)
        # Optax keeps averages in the dtype of the gradients, the triple in the parameters' dtype.
        start = jax.eval_shape(self.triple.init_fn, params)
        count = next(p.count for p in opt_state if isinstance(p, optax.ScaleByScheduleState))
        return keep_dtypes(start, state.packed_state), count


def optax_equivalent(name: str, **kwargs: Any) -> OptaxEquivalent:
    """See `opt_legacy_stax.optax_equivalent`."""
    recipe = _RECIPES.get(name)
    if recipe is None:
        raise NoEquivalentError(
            f"`name` must be one of {', '.join(_RECIPES)}; got {name!r}. For a custom triple, use "
            "`to_optax(triple)`."
        )
    factory = getattr(_triples, name)
    arguments = inspect.signature(factory).bind(**kwargs)
    arguments.apply_defaults()
    if arguments.arguments.pop("upstream_numerics"):
        raise _no_equivalent(
            name, "Optax rounds like the default numerics, not like those of JAX's module"
        )
    triple = factory(**kwargs)  # validates the step size
    step_size, *others = arguments.arguments.values()
    # Even a constant goes through a schedule: its counter is the `i` to return to the triple with.
    schedule = step_size if callable(step_size) else optax.constant_schedule(step_size)
    rate = optax.scale_by_schedule(lambda count: -1 * schedule(count))
    transformation = optax.chain(*recipe.build(rate, *others))
    return OptaxEquivalent(name, triple, transformation, recipe.is_exact, recipe)


def _no_equivalent(name: str, reason: str) -> NoEquivalentError:
    return NoEquivalentError(
        f"Optax has no equivalent of this `{name}`: {reason}. Use `to_optax({name}(...))`, which "
        "wraps the triple itself as a transformation."
    )
