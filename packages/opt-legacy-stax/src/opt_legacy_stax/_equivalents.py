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
from opt_legacy_stax._dtypes import keep_dtypes
from opt_legacy_stax._optimizers import Optimizer, OptimizerState, pack, repacked
from opt_legacy_stax._states import check_state
from opt_legacy_stax._steps import whole_step
from opt_legacy_stax._trees import leaf_paths
from opt_legacy_stax.errors import LayoutError, NoEquivalentError, ScheduleError

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
      is_exact: whether the operations are the same, so that a run in float32 (parameters, gradients
        and step sizes; `jax_enable_x64` off) that switches continues bit for bit. Else the last
        places differ: Optax multiplies by `rsqrt(x)` where the triple divides by `sqrt(x)`, or
        scales by the step size at another place. For other dtypes see `is_exact_for`.
    """

    name: str
    triple: Optimizer
    transformation: optax.GradientTransformation
    is_exact: bool
    _recipe: _Recipe = dataclasses.field(repr=False)
    _arguments: Mapping[str, Any] = dataclasses.field(repr=False)

    def is_exact_for(self, params: Any, grads: Any = None) -> bool:
        """Whether a run over these parameters continues bit for bit, as far as dtypes tell.

        The triple computes in the highest dtype there is and rounds back; Optax rounds the step
        size to the dtype of the gradient, and keeps its averages in the dtype of the gradient. So
        only
        what has one dtype is exact: float32 throughout without `jax_enable_x64`; or any dtype, that
        of the gradients too, where all arguments are Python numbers.

        Args:
          params: pytree of arrays, or of `jax.ShapeDtypeStruct` leaves.
          grads: the gradients, if their dtypes are not those of the parameters.

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
        return all(dtype == jnp.float32 for dtype in before) and not _is_64_bit()

    def convert_state(self, state: OptimizerState, i: Any) -> tuple[Any, Any]:
        """Returns parameters and state of Optax, to go on from a state of the triple.

        Args:
          state: the triple's, or that of JAX's optimizer of the same name.
          i: number of updates made, the `i` of the next one.

        Raises:
          NoEquivalentError: Optax cannot treat one of the parameters.
          LayoutError: the state is of another optimizer. (Two that keep as many arrays look alike,
            as Adam's and Adagrad's do, and cannot be told apart.)
          StepError: `i` is no number of updates.
        """
        check_state(state)
        packed, tree_def, subtree_defs = state
        kept = [jax.tree.unflatten(d, s) for d, s in zip(subtree_defs, packed, strict=True)]
        self._recipe.check(self.name, tree_def, kept)
        columns = self._recipe.take_apart(kept)
        params = jax.tree.map(jnp.asarray, self.triple.params_fn(state))
        trees = {name: jax.tree.unflatten(tree_def, column) for name, column in columns.items()}
        template = self.transformation.init(params)
        return params, _fill(template, whole_step(i), self._recipe.to_optax(trees))

    def convert_state_back(self, params: Any, opt_state: Any) -> tuple[OptimizerState, Any]:
        """Returns the triple's state and the `i` of its next update.

        Args:
          params: the parameters.
          opt_state: the state of `transformation`.

        Raises:
          LayoutError: `opt_state` is no state of `transformation`, or of other parameters.
        """
        tree_def: Any
        leaves, tree_def = jax.tree.flatten(params)
        _check_optax_state(self.name, jax.eval_shape(self.transformation.init, params), opt_state)
        trees = self._recipe.from_optax(_fields(opt_state))
        columns = {name: tree_def.flatten_up_to(tree) for name, tree in trees.items()}
        kept = [
            self._recipe.put_together(x, {name: column[n] for name, column in columns.items()})
            for n, x in enumerate(leaves)
        ]
        state = pack(tree_def, kept)
        # Optax keeps averages in the dtype of the gradients, the triple in that of the parameters.
        start = jax.eval_shape(self.triple.init_fn, params)
        pairs = zip(start.packed_state, state.packed_state, strict=True)
        return repacked(state, [keep_dtypes(*pair) for pair in pairs]), _count(opt_state)


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """How one optimizer is written in Optax.

    Attributes:
      build: the transformation, of the triple's arguments.
      slots: names of what the triple keeps beside `x`, in order.
      fields: the field of Optax's state for each of them. No two parts of a chain share one.
      is_exact: see `OptaxEquivalent`.
      negated: a slot that Optax keeps with the other sign.
      has_shape: whether the triple keeps the shape of the parameter too, at the end.
    """

    build: Callable[[Mapping[str, Any]], optax.GradientTransformation]
    slots: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    is_exact: bool = False
    negated: str = ""
    has_shape: bool = False

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

    def check(self, optimizer: str, tree_def: Any, kept: list[Any]) -> None:
        """Raises an error if what is kept for a parameter is not what the triple keeps."""
        names = ("x", *self.slots, *(("shape",) if self.has_shape else ()))
        for path, subtree in zip(leaf_paths(tree_def), kept, strict=True):
            if not self._is_kept(subtree, len(names)):
                expected = f"`({', '.join(names)})`" if self.slots else "an array"
                found = _kind(subtree)
                raise LayoutError(
                    f"`state` is not one of `{optimizer}`: for parameter `{path}` expected "
                    f"{expected}, found {found}. Convert it with the equivalent of the optimizer "
                    "that made it."
                )
            if self.has_shape and not subtree[-1]:
                raise _no_equivalent("sm3", f"`optax.sm3` has no scalars, and `{path}` is one")

    def _is_kept(self, subtree: Any, length: int) -> bool:
        if not self.slots:
            return jax.tree_util.all_leaves([subtree])
        if not isinstance(subtree, tuple) or len(subtree) != length:
            return False
        if self.has_shape:
            *arrays, accumulators, shape = subtree
            is_kept = isinstance(accumulators, list) and isinstance(shape, tuple)
            return is_kept and jax.tree_util.all_leaves(arrays)
        return jax.tree_util.all_leaves(subtree)

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
    given = dict(arguments.arguments)
    return OptaxEquivalent(name, triple, recipe.build(given), recipe.is_exact, recipe, given)


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


def _fields(opt_state: Any) -> dict[str, Any]:
    """Returns the fields of the parts of a chain, by name; a parameter's own name is no field."""
    return {field: getattr(p, field) for p in opt_state for field in getattr(p, "_fields", ())}


def _check_optax_state(optimizer: str, expected: Any, found: Any) -> None:
    """Raises an error if `found` is no state of the transformation, or of other parameters."""
    parts = found if isinstance(found, tuple) and not hasattr(found, "_fields") else (found,)
    kinds, given = ([type(part).__name__ for part in each] for each in (expected, parts))
    if kinds != given:
        raise LayoutError(
            f"`opt_state` is not a state of the equivalent of `{optimizer}`: expected "
            f"({', '.join(kinds)}), found ({', '.join(given)}). Pass one that `transformation` or "
            "`convert_state` made."
        )
    structures: list[Any] = [jax.tree.structure(each) for each in (expected, found)]
    shapes = [list(map(jnp.shape, jax.tree.leaves(each))) for each in (expected, found)]
    if structures[0] != structures[1] or shapes[0] != shapes[1]:
        raise LayoutError(
            "`opt_state` is of other parameters than `params`: their trees or shapes differ. Pass "
            "the two that an update returned."
        )


def _is_64_bit() -> bool:
    return jax.dtypes.canonicalize_dtype(np.float64) == np.float64


def _kind(subtree: Any) -> str:
    if jax.tree_util.all_leaves([subtree]):
        return "an array"
    return f"a {type(subtree).__name__} of {len(subtree)}"


def _count(opt_state: Any) -> Any:
    """Returns how many updates the step size has been scheduled for."""
    return next(part.count for part in opt_state if isinstance(part, optax.ScaleByScheduleState))
