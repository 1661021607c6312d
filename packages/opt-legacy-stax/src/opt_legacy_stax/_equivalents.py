"""The nine optimizers written as chains of Optax transformations."""

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
from opt_legacy_stax._optimizers import (
    Optimizer,
    OptimizerState,
    keep_dtypes,
    pack,
    repacked,
    unpacked,
)
from opt_legacy_stax._slots import check_made_by, whole_step
from opt_legacy_stax._trees import leaf_paths
from opt_legacy_stax.errors import LayoutError, NoEquivalentError

# Builds a transformation from the arguments of the triple.
_Builder = Callable[[Mapping[str, Any]], Any]


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
        divides by `sqrt(x)`, or scales by the step size at a different point. For other dtypes see
        `is_exact_for`.
    """

    name: str
    triple: Optimizer
    transformation: optax.GradientTransformation
    is_exact: bool
    _recipe: _Recipe = dataclasses.field(repr=False)
    _arguments: Mapping[str, Any] = dataclasses.field(repr=False)

    def is_exact_for(self, params: Any, grads: Any = None) -> bool:
        """Whether a run with parameters and gradients of these dtypes continues bit for bit.

        The triple computes in the widest dtype involved and rounds the result back; Optax casts the
        step size to the dtype of the gradient and keeps its averages in that dtype. Results are
        therefore exact only for a single dtype: float32 throughout without `jax_enable_x64`, or any
        dtype shared by parameters and gradients if all arguments are Python numbers.

        Args:
          params: pytree of arrays or `jax.ShapeDtypeStruct` leaves.
          grads: the gradients, if their dtypes differ from those of `params`.

        Examples:
          >>> equivalent = optax_equivalent('sgd', step_size=np.float32(0.1))
          >>> equivalent.is_exact_for(jnp.ones(2)), equivalent.is_exact_for(jnp.ones(2, 'bfloat16'))
          (True, False)
        """
        if not self.is_exact:
            return False
        leaves = (jax.tree.leaves(params), jax.tree.leaves(params if grads is None else grads))
        before, after = ([jnp.result_type(leaf) for leaf in each] for each in leaves)
        if before != after or not all(jnp.issubdtype(dtype, jnp.inexact) for dtype in before):
            return False
        if all(type(value) in (bool, int, float) for value in self._arguments.values()):
            return True
        is_64_bit = jax.dtypes.canonicalize_dtype(np.float64) == np.float64
        return all(dtype == jnp.float32 for dtype in before) and not is_64_bit

    def convert_state(self, state: OptimizerState, i: Any) -> tuple[Any, Any]:
        """Returns the parameters and Optax state that continue from a state of the triple.

        Args:
          state: a state of the triple, or of JAX's optimizer of the same name.
          i: number of updates already made, i.e. the `i` of the next update.

        Raises:
          NoEquivalentError: Optax cannot handle one of the parameters.
          LayoutError: `state` belongs to a different optimizer. (Optimizers that keep the same
            number of arrays, such as Adam and Adagrad, cannot be distinguished.)
          StepError: `i` is not a non-negative integer.
        """
        check_made_by(self.triple, state)
        tree_def, kept = state[1], unpacked(state)
        for path, subtree in zip(leaf_paths(tree_def), kept, strict=True):
            if self._recipe.has_shape and not subtree[-1]:
                raise _no_equivalent(
                    self.name,
                    f"`optax.sm3` does not support scalars, and parameter `{path}` is one",
                )
        columns = {field: [k[1 + n] for k in kept] for n, field in enumerate(self._recipe.fields)}
        trees = {field: jax.tree.unflatten(tree_def, each) for field, each in columns.items()}
        params = jax.tree.map(jnp.asarray, self.triple.params_fn(state))
        template = self.transformation.init(params)
        return params, _fill(template, whole_step(i), self._recipe.signed(trees))

    def convert_state_back(self, params: Any, opt_state: Any) -> tuple[OptimizerState, Any]:
        """Returns the state of the triple, and the `i` of its next update.

        Args:
          params: the parameters.
          opt_state: a state of `transformation`.

        Raises:
          LayoutError: `opt_state` is not a state of `transformation` for `params`.
        """
        tree_def: Any
        leaves, tree_def = jax.tree.flatten(params)
        _check_optax_state(self.name, jax.eval_shape(self.transformation.init, params), opt_state)
        trees, fields = self._recipe.signed(_fields(opt_state)), self._recipe.fields
        columns = [leaves, *(tree_def.flatten_up_to(trees[field]) for field in fields)]
        if self._recipe.has_shape:
            columns.append([np.shape(x) for x in leaves])
        state = pack(tree_def, list(zip(*columns, strict=True)) if fields else leaves)
        # Optax keeps averages in the dtype of the gradients, the triple in the parameters' dtype.
        start = jax.eval_shape(self.triple.init_fn, params)
        pairs = zip(start.packed_state, state.packed_state, strict=True)
        return repacked(state, [keep_dtypes(*pair) for pair in pairs]), _count(opt_state)


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """How one optimizer is expressed in Optax."""

    build: _Builder
    # The Optax state field, unique within the chain, of each array that the triple keeps after `x`.
    fields: tuple[str, ...] = ()
    is_exact: bool = False
    negated: str = ""  # a field that Optax keeps with the opposite sign
    has_shape: bool = False  # whether the triple keeps the parameter's shape too, as the last entry

    def signed(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields from one form in the other: changing a sign is its own inverse."""
        return {
            name: jax.tree.map(jnp.negative, tree) if name == self.negated else tree
            for name, tree in fields.items()
        }


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
    given = dict(arguments.arguments)
    return OptaxEquivalent(name, triple, recipe.build(given), recipe.is_exact, recipe, given)


def _no_equivalent(name: str, reason: str) -> NoEquivalentError:
    return NoEquivalentError(
        f"Optax has no equivalent of this `{name}`: {reason}. Use `to_optax({name}(...))`, which "
        "wraps the triple itself as a transformation."
    )


def _rate(arguments: Mapping[str, Any]) -> optax.GradientTransformation:
    """Returns the last part of each chain, which multiplies by `-step_size`."""
    rate = arguments["step_size"]
    # Even a constant goes through a schedule: its counter is the `i` to return to the triple with.
    schedule = rate if callable(rate) else optax.constant_schedule(rate)
    return optax.scale_by_schedule(lambda count: -1 * schedule(count))


def _chain(*parts: _Builder) -> _Builder:
    return lambda arguments: optax.chain(*(part(arguments) for part in parts))


def _adamax(arguments: Mapping[str, Any]) -> optax.GradientTransformation:
    if arguments["eps"] != 0:
        raise _no_equivalent(
            "adamax",
            "Optax adds `eps` to the gradient inside the maximum, the triple adds it to the "
            "result; they agree only for `eps=0`",
        )
    return optax.scale_by_adamax(arguments["b1"], arguments["b2"], eps=0.0)


_RECIPES: dict[str, _Recipe] = {
    "sgd": _Recipe(_chain(_rate), is_exact=True),
    "momentum": _Recipe(_chain(lambda a: optax.trace(a["mass"]), _rate), ("trace",), is_exact=True),
    "nesterov": _Recipe(
        _chain(lambda a: optax.trace(a["mass"], nesterov=True), _rate), ("trace",), is_exact=True
    ),
    "adagrad": _Recipe(
        _chain(
            lambda a: optax.scale_by_rss(initial_accumulator_value=0.0, eps=0.0),
            lambda a: optax.ema(a["momentum"], debias=False),
            _rate,
        ),
        ("sum_of_squares", "ema"),
    ),
    "rmsprop": _Recipe(_chain(lambda a: optax.scale_by_rms(a["gamma"], a["eps"]), _rate), ("nu",)),
    "rmsprop_momentum": _Recipe(
        _chain(
            lambda a: optax.scale_by_rms(a["gamma"], a["eps"]),
            _rate,
            lambda a: optax.trace(a["momentum"]),
        ),
        ("nu", "trace"),
        negated="trace",
    ),
    "adam": _Recipe(
        _chain(lambda a: optax.scale_by_adam(a["b1"], a["b2"], a["eps"]), _rate), ("mu", "nu")
    ),
    "adamax": _Recipe(_chain(_adamax, _rate), ("mu", "nu")),
    "sm3": _Recipe(
        _chain(lambda a: optax.scale_by_sm3(a["momentum"], b2=1.0, eps=0.0), _rate),
        ("nu", "mu"),
        has_shape=True,
    ),
}


def _fill(template: Any, count: Any, fields: Mapping[str, Any]) -> Any:
    """Returns an Optax state with these fields, and with every counter set to `count`."""
    values = {**fields, "count": count}
    return tuple(
        part._replace(**{name: values[name] for name in part._fields}) for part in template
    )


def _fields(opt_state: Any) -> dict[str, Any]:
    """Returns the fields of all parts of a chain state, by name."""
    return {field: getattr(p, field) for p in opt_state for field in getattr(p, "_fields", ())}


def _check_optax_state(optimizer: str, expected: Any, found: Any) -> None:
    """Raises an error unless `found` is a state of the transformation for these parameters."""
    parts = found if isinstance(found, tuple) and not hasattr(found, "_fields") else (found,)
    kinds, given = ([type(part).__name__ for part in each] for each in (expected, parts))
    if kinds != given:
        raise LayoutError(
            f"`opt_state` is not a state of the equivalent of `{optimizer}`: expected "
            f"({', '.join(kinds)}), found ({', '.join(given)}). Pass a state returned by "
            "`transformation` or `convert_state`."
        )
    structures: list[Any] = [jax.tree.structure(each) for each in (expected, found)]
    shapes = [list(map(jnp.shape, jax.tree.leaves(each))) for each in (expected, found)]
    if structures[0] != structures[1] or shapes[0] != shapes[1]:
        raise LayoutError(
            "`opt_state` does not belong to `params`: their tree structures or shapes differ. "
            "Pass parameters and state from the same update."
        )


def _count(opt_state: Any) -> Any:
    """Returns the step counter of the learning-rate schedule."""
    return next(part.count for part in opt_state if isinstance(part, optax.ScaleByScheduleState))
