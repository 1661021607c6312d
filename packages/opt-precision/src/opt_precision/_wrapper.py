"""A transformation whose state or parameters are stored in fewer bits."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax

from opt_precision._codecs import identity
from opt_precision._init import (
    First,
    Planned,
    bare_values,
    each_in_a_variable,
    hosted,
    refuse_named,
)
from opt_precision._select import Moments
from opt_precision._states import PrecisionState, is_masked, is_state
from opt_precision._step import Step
from opt_precision._update import Arguments
from opt_precision._weights import NEAREST, Weights
from opt_precision.errors import StateError

_ARRAYS: Final = 16  # of float32 and of one block, that are there at once
_LEAF_BYTES: Final = 4096  # for each leaf: keys, and where it begins


class Precise(optax.GradientTransformationExtraArgs):
    """A transformation of this package: Optax's `init` and `update`, and `apply`."""

    @property
    def apply(self) -> Any:
        """Takes and returns parameters: `apply(params, state, grads, **extra_args)`."""
        return self.wrapper.apply

    def temporary_bytes(self, params: Any) -> int:
        """Returns the bytes that a step in place needs besides its arguments, at most.

        For transformations that treat elements by themselves, with parameters and state donated.
        XLA for CPUs needs 4 bytes more for each element of the largest leaf.

        Args:
          params: as one device has them; arrays or `jax.ShapeDtypeStruct`s.
        """
        sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(params)]
        chunk = (self.wrapper.moments or Moments()).chunk_bytes
        copied = 4 * max(sizes, default=0) if jax.default_backend() == "cpu" else 0
        most: int = 4 * _ARRAYS * min(chunk // 4, sum(sizes)) + _LEAF_BYTES * len(sizes) + copied
        return most

    @property
    def wrapper(self) -> Wrapper:
        """What the functions are methods of."""
        owner: Wrapper = self.update.__self__  # type: ignore[attr-defined]
        return owner


@dataclasses.dataclass(frozen=True, eq=False)
class Wrapper:
    """A transformation, and how its moments and the parameters are stored."""

    tx: optax.GradientTransformationExtraArgs  # the transformation inside
    moments: Moments | None  # `None` as they are
    weights: Weights

    @property
    def names(self) -> list[str]:
        """The names of the constructors."""
        of_moments = [] if self.moments is None else [self.moments.constructor]
        return [*of_moments, *([] if self.weights == NEAREST else [self.weights.constructor])]

    def first(self, params: Any) -> tuple[First, list[Planned]]:
        """The traced `init`, and what becomes of every leaf."""
        first = First(self.tx, params)
        for name in self.names:
            first.check_order(name)
        if self.moments is None:
            return first, first.leaves
        return first, first.plan(self.moments.codec or identity(), self.moments.select)

    def init(self, params: Any) -> Any:
        """Returns the state before the first step."""
        first, plan = self.first(params)
        if self.weights != NEAREST:
            _check_floats(self.weights.constructor, params)
        refuse_named(self.names[0], params, plan)
        state = first.state(plan)
        if self.moments is not None and self.moments.on_host is not None:
            state = hosted(state, first.plan(identity(), self.moments.on_host))
        kept: Any = None if self.weights == NEAREST else optax.MaskedNode()
        if self.weights.keeps:
            kept = jax.tree.map(self._first_extra, params)
        return PrecisionState(jnp.zeros([], jnp.int32), kept, each_in_a_variable(state))

    def update(
        self, updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        """Returns float32 updates and the new state, as Optax's transformations do."""
        return self._run(updates, state, params, extra_args, is_in_place=False)

    def apply(self, params: Any, state: Any, grads: Any, **extra_args: Any) -> tuple[Any, Any]:
        """Returns the new parameters and state, computed block by block in place of the old."""
        return self._run(grads, state, params, extra_args, is_in_place=True)

    def _run(
        self, grads: Any, given: Any, params: Any, extra_args: Any, *, is_in_place: bool
    ) -> tuple[Any, Any]:
        bare, state, params = bare_values((grads, given, params))
        step = self.step(bare, state, params, extra_args, is_in_place=is_in_place)
        made, extras, inner = step.run()
        number: Any = optax.safe_increment(state.step)  # the largest int32 stays what it is
        new = PrecisionState(number, extras if self.weights.keeps else state.kept, inner)
        tree: Any = jax.tree.structure((grads, given))
        if tree == jax.tree.structure((bare, state)):
            return made, new
        wrapped: tuple[Any, Any] = jax.tree.unflatten(tree, jax.tree.leaves((made, new)))
        return wrapped

    def step(
        self, grads: Any, state: Any, params: Any, extra_args: Any, *, is_in_place: bool
    ) -> Step:
        """A step on some arguments."""
        if not is_state(state):
            raise StateError(
                f"`state` must be a `PrecisionState`, found {type(state).__name__}. Mind the "
                "order: `update(grads, state, params)`, `apply(params, state, grads)`."
            )
        found, wanted = state.weights.method, self.weights.method
        if found != wanted and not (self.weights.keeps and found == "stochastic"):
            raise StateError(
                f"`state` was made for weights that are stored by {found!r}, expected {wanted!r}. "
                "Make it by the `init` of this transformation."
            )
        return Step(
            Arguments(
                grads=grads,
                params=params,
                extra_args=extra_args,
                is_in_place=is_in_place,
                tx=self.tx,
                state=state.inner,
                is_coded=self.moments is not None,
                moments=self.moments or Moments(),
                weights=self.weights,
                extras=self._extras(state, params),
                step=state.step,
            )
        )

    def _first_extra(self, leaf: Any) -> Any:
        leaf = jnp.asarray(leaf)
        is_met = self.weights.is_met_by(leaf.dtype)
        return self.weights.first_extra(leaf) if is_met else optax.MaskedNode()

    def _extras(self, state: PrecisionState, params: Any) -> list[Any]:
        """What is kept besides each parameter; `None` where nothing is."""
        name = self.weights.constructor
        if params is None and self.weights != NEAREST:
            raise StateError(f"`{name}` needs the parameters: `update(grads, state, params)`")
        if not self.weights.keeps:
            return []
        leaves, tree = jax.tree_util.tree_flatten_with_path(params)
        structure: Any = tree
        try:
            kept = structure.flatten_up_to(state.kept)
        except ValueError:
            raise StateError(
                f"the state of `{name}` was made for other parameters than these {len(leaves)}"
            ) from None
        extras = [None if is_masked(one) else one for one in kept]
        for (path, param), extra in zip(leaves, extras, strict=True):
            dtype = jnp.result_type(param)
            if self.weights.is_met_by(dtype) != (extra is not None):
                raise StateError(
                    f"{jax.tree_util.keystr(path)} is {dtype.name}, and the state of `{name}` was "
                    "made for another dtype. Call `init` again, or convert the parameters."
                )
        return extras

    def describe_fields(self) -> dict[str, Any]:
        """Returns what the fields mean, as `opt_core.protocols.DescribesFields` asks."""
        kept = "params_copy" if self.weights.method == "f32" else "other"
        of_moments = {} if self.moments is None else {"state_seed": self.moments.seed}
        return {
            "name": "precision",
            "roles": {"step": "count", "kept": kept},
            "settings": {"method": self.weights.method, "seed": self.weights.seed, **of_moments},
            "passes_on": True,
        }


def apply(tx: Any, params: Any, state: Any, grads: Any, **extra_args: Any) -> tuple[Any, Any]:
    """Makes one step in place: returns the new parameters and state.

    Under `jit` with parameters and state donated, the temporaries are those of one block of a leaf.

    Args:
      tx: a transformation of this package, or any that has such an `apply`, or only Optax's
        `update`.
      params: the parameters.
      state: the state that belongs to them.
      grads: the gradients.
      **extra_args: for the transformation.

    Examples:
      >>> import opt_precision, optax
      >>> tx = opt_precision.quantize_state(optax.adam(0.1), opt_precision.bfloat16())
      >>> params = {'w': jnp.ones(3)}
      >>> params, state = apply(tx, params, tx.init(params), {'w': jnp.ones(3)})
      >>> params['w'].tolist()
      [0.9, 0.9, 0.9]
    """
    if hasattr(tx, "apply"):
        params_and_state: tuple[Any, Any] = tx.apply(params, state, grads, **extra_args)
        return params_and_state
    with_extra_args = optax.with_extra_args_support  # type: ignore[attr-defined]
    updates, state = with_extra_args(tx).update(grads, state, params, **extra_args)
    return apply_updates(params, updates), state


def apply_updates(params: Any, updates: Any) -> Any:
    """Adds updates to parameters in float32, and rounds once, by bits.

    What `optax.apply_updates` does, also where a compiler would take the rounding for a no-op.

    Args:
      params: the parameters.
      updates: what `update` returned; `None` leaves a parameter as it is.
    """

    def add(param: Any, update: Any) -> Any:
        if param is None or update is None:
            return param
        return NEAREST.place(jnp.asarray(param), None, jnp.asarray(update), None)[0]

    return jax.tree.map(add, params, updates, is_leaf=lambda x: x is None)


def _check_floats(name: str, params: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if jnp.result_type(leaf) == jnp.float16:
            raise StateError(
                f"`{name}`: {jax.tree_util.keystr(path)} is float16; parameters are stored in "
                "bfloat16 or float32. Convert them."
            )
