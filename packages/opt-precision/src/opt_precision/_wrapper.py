"""A transformation whose state or parameters are stored in fewer bits.

`Rounded` for parameters is around `Quantized` for moments, whichever was asked for first.
"""

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
from opt_precision._states import EXTRA_FIELD, STATE_OF, QuantizedState, is_masked
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
        _, quantized, _ = taken_apart(self)
        sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(params)]
        chunk = (Moments() if quantized is None else quantized.moments).chunk_bytes
        copied = 4 * max(sizes, default=0) if jax.default_backend() == "cpu" else 0
        most: int = 4 * _ARRAYS * min(chunk // 4, sum(sizes)) + _LEAF_BYTES * len(sizes) + copied
        return most

    @property
    def wrapper(self) -> Any:
        """What the functions are methods of."""
        return self.update.__self__  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True, eq=False)
class _Wrapper:
    """What both parts do."""

    tx: optax.GradientTransformationExtraArgs  # the transformation inside

    def update(
        self, updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        """Returns float32 updates and the new state, as Optax's transformations do."""
        return self._step(updates, state, params, extra_args, is_in_place=False)

    def apply(self, params: Any, state: Any, grads: Any, **extra_args: Any) -> tuple[Any, Any]:
        """Returns the new parameters and state, computed block by block in place of the old."""
        return self._step(grads, state, params, extra_args, is_in_place=True)

    def _step(
        self, grads: Any, given: Any, params: Any, extra_args: Any, *, is_in_place: bool
    ) -> tuple[Any, Any]:
        bare, state, params = bare_values((grads, given, params))
        made, extras, new = self.step(
            bare, state, params, extra_args, is_in_place=is_in_place
        ).run()
        rounded, quantized, _ = taken_apart(self)
        if quantized is not None:
            step: Any = state.step if rounded is None else state.inner.step
            step = optax.safe_increment(step)  # the largest int32 stays what it is
            new = QuantizedState(step, new)
        if rounded is not None:
            new = rounded.next_state(state, new, extras)
        tree: Any = jax.tree.structure(grads)
        if tree == jax.tree.structure(bare):
            return made, new
        tree = jax.tree.structure((grads, given))
        wrapped: tuple[Any, Any] = jax.tree.unflatten(tree, jax.tree.leaves((made, new)))
        return wrapped

    def step(
        self, grads: Any, state: Any, params: Any, extra_args: Any, *, is_in_place: bool
    ) -> Step:
        """A step of both parts."""
        rounded, quantized, tx = taken_apart(self)
        weights, extras, of_weights, of_moments = NEAREST, [], 0, 0
        if rounded is not None:
            weights, extras = rounded.weights, rounded.extras(state, params)
            of_weights, state = getattr(state, "step", 0), state.inner
        if quantized is not None:
            _check_kind(state, QuantizedState)
            of_moments, state = state.step, state.inner
        moments = Moments() if quantized is None else quantized.moments
        return Step(
            Arguments(
                grads=grads,
                params=params,
                extra_args=extra_args,
                is_in_place=is_in_place,
                tx=tx,
                state=state,
                is_coded=quantized is not None,
                moments=moments,
                weights=weights,
                extras=extras,
                steps=(of_weights, of_moments),
            )
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Quantized(_Wrapper):
    """Moments are stored in fewer bits, or on the host."""

    moments: Moments

    @property
    def name(self) -> str:
        """The name of the constructor."""
        return "offload_state" if self.moments.codec is None else "quantize_state"

    def first(self, params: Any) -> tuple[First, list[Planned]]:
        """The traced `init`, and what becomes of every leaf."""
        first = First(self.tx, params)
        first.check_order(self.name)
        return first, first.plan(self.moments.codec or identity(), self.moments.select)

    def init(self, params: Any) -> QuantizedState:
        """Returns the state before the first step."""
        first, plan = self.first(params)
        refuse_named(self.name, params, plan)
        state = first.state(plan)
        if self.moments.on_host is not None:
            state = hosted(state, first.plan(identity(), self.moments.on_host))
        return QuantizedState(jnp.zeros([], jnp.int32), each_in_a_variable(state))

    def describe_fields(self) -> dict[str, Any]:
        """Returns what the fields mean, as `opt_core.protocols.DescribesFields` asks."""
        return {
            "name": self.name,
            "roles": {"step": "count"},
            "settings": {"seed": self.moments.seed},
            "passes_on": True,
        }


@dataclasses.dataclass(frozen=True, eq=False)
class Rounded(_Wrapper):
    """bfloat16 parameters take small updates."""

    weights: Weights  # how parameters are rounded

    @property
    def name(self) -> str:
        """The name of the constructor."""
        return self.weights.constructor

    @property
    def _field(self) -> str | None:
        """The field of the state for what is kept besides parameters."""
        return EXTRA_FIELD.get(self.weights.method)

    def init(self, params: Any) -> Any:
        """Returns the state before the first step."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if jnp.result_type(leaf) == jnp.float16:
                raise StateError(
                    f"`{self.name}`: {jax.tree_util.keystr(path)} is float16; parameters are "
                    "stored in bfloat16 or float32. Convert them."
                )
        if isinstance(self.tx, Precise):
            inner: Any = self.tx.init(params)
        else:
            first = First(self.tx, params)
            first.check_order(self.name)
            inner = first.state()
        fields: dict[str, Any] = {"inner": inner}
        if self.weights.needs_noise:
            fields["step"] = jnp.zeros([], jnp.int32)
        if self._field is not None:
            fields[self._field] = jax.tree.map(self._first_extra, params)
        return STATE_OF[self.weights.method](**fields)

    def _first_extra(self, leaf: Any) -> Any:
        leaf = jnp.asarray(leaf)
        is_met = self.weights.is_met_by(leaf.dtype)
        return self.weights.first_extra(leaf) if is_met else optax.MaskedNode()

    def next_state(self, state: Any, inner: Any, extras: Any) -> Any:
        """The state after a step."""
        fields = {"inner": inner}
        if self.weights.needs_noise:
            fields["step"] = optax.safe_increment(state.step)
        if self._field is not None:
            fields[self._field] = extras
        return state._replace(**fields)

    def extras(self, state: Any, params: Any) -> list[Any]:
        """What is kept besides each parameter; `None` where nothing is."""
        if params is None:
            raise StateError(f"`{self.name}` needs the parameters: `update(grads, state, params)`")
        _check_kind(state, STATE_OF[self.weights.method])
        if self._field is None:
            return []
        leaves, tree = jax.tree_util.tree_flatten_with_path(params)
        structure: Any = tree
        try:
            kept = structure.flatten_up_to(getattr(state, self._field))
        except ValueError:
            raise StateError(
                f"the state of `{self.name}` was made for other parameters than these {len(leaves)}"
            ) from None
        extras = [None if is_masked(one) else one for one in kept]
        for (path, param), extra in zip(leaves, extras, strict=True):
            dtype = jnp.result_type(param)
            if self.weights.is_met_by(dtype) != (extra is not None):
                raise StateError(
                    f"{jax.tree_util.keystr(path)} is {dtype.name}, and the state of "
                    f"`{self.name}` was made for another dtype. Call `init` again, or convert "
                    "the parameters."
                )
        return extras

    def describe_fields(self) -> dict[str, Any]:
        """Returns what the fields mean, as `opt_core.protocols.DescribesFields` asks."""
        roles = {"step": "count", "master": "params_copy", "low": "other", "compensation": "other"}
        return {
            "name": self.name,
            "roles": roles,
            "settings": {"method": self.weights.method, "seed": self.weights.seed},
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


def taken_apart(tx: Any) -> tuple[Rounded | None, Quantized | None, Any]:
    """The two parts of a transformation of this package, and the transformation inside."""
    parts: dict[type, Any] = {}
    while isinstance(tx, Precise | _Wrapper):
        part = tx.wrapper if isinstance(tx, Precise) else tx
        parts[type(part)], tx = part, part.tx
    return parts.get(Rounded), parts.get(Quantized), tx


def put_together(tx: Any, moments: Moments | None, weights: Weights | None) -> Precise:
    """A transformation with one part or both."""
    if moments is not None:
        quantized = Quantized(tx, moments)
        tx = Precise(quantized.init, quantized.update)
    if weights is not None:
        rounded = Rounded(tx, weights)
        tx = Precise(rounded.init, rounded.update)
    wrapped: Precise = tx
    return wrapped


def _check_kind(state: Any, kind: type) -> None:
    if not isinstance(state, kind):
        raise StateError(
            f"`state` must be a `{kind.__name__}`, found {type(state).__name__}. Mind the order: "
            "`update(grads, state, params)`, `apply(params, state, grads)`."
        )
