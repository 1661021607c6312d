"""`MultiSteps`: Optax's interface and states; the inner optimizer runs only when it emits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from opt_accumulate._arrays import (
    accumulator_dtype_of,
    cast_like,
    check_dtype,
    traced_once,
)
from opt_accumulate._inner import InnerUpdate, Step, emit_if, zeros_if
from opt_accumulate._skip import ask, last_decision
from opt_accumulate._trees import (
    check_integer,
    check_like,
    what_is_wrong,
)


class MultiSteps:
    """Accumulates gradients over mini-steps; every k of them make one step of an optimizer.

    `optax.MultiSteps` with the same arguments, the same state class and the same numbers, except
    that

    * the inner optimizer runs only on the mini-steps that emit: all others cost the accumulation;
    * `apply` takes and returns parameters, and leaves them where they are until there is a step;
    * nothing non-finite stays in the accumulator after an emission, or leaves before it;
    * extra arguments reach the inner optimizer, through `gradient_transformation()` too;
    * it accumulates in float32 and hands that on, not a copy rounded to the gradients' dtype;
    * `flush` emits a window that is not full.

    A window that already holds k mini-steps or more, as after a restore with a smaller k, emits
    with its next one. A schedule is evaluated at the number of steps made; its value is
    converted to int32 and is at least 1.

    Donate parameters and state to the compiled step (`jax.jit(..., donate_argnums=(0, 1))`), else
    XLA copies what the step could have left in place.

    Examples:
      >>> steps = MultiSteps(optax.sgd(1.0), 2)
      >>> params = jnp.zeros(2)
      >>> state = steps.init(params)
      >>> step = jax.jit(steps.apply)
      >>> for grads in (jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])):
      ...     params, state = step(params, state, grads)
      ...     print(params.tolist(), bool(steps.has_updated(state)))
      [0.0, 0.0] False
      [-2.0, -3.0] True
    """

    def __init__(
        self,
        opt: Any,
        every_k_schedule: Any,
        use_grad_mean: bool = True,
        should_skip_update_fn: Callable[..., tuple[Any, Any]] | None = None,
        accumulator_dtype: Any = jnp.float32,
    ) -> None:
        """Configures the accumulation; allocates nothing.

        Args:
          opt: the inner optimizer, a gradient transformation.
          every_k_schedule: how many mini-steps make a step: a positive integer, or a function from
            the number of steps made to one.
          use_grad_mean: whether the inner optimizer gets the mean of the gradients, or their sum.
          should_skip_update_fn: `f(updates, gradient_step, params)` returns whether to skip the
            mini-step, a boolean scalar, and the new `skip_state`.
          accumulator_dtype: of the accumulator. float32 does not truncate float64; complex
            gradients get the complex dtype of that precision. `None`: each parameter's own dtype.

        Raises:
          OptionError: `every_k_schedule` is neither a positive integer nor a function;
            `accumulator_dtype` cannot hold gradients.
          TypeError: `should_skip_update_fn` is not a function.
        """
        if accumulator_dtype is not None:
            check_dtype("accumulator_dtype", accumulator_dtype, 16)
        if should_skip_update_fn is not None and not callable(should_skip_update_fn):
            raise TypeError(
                "`should_skip_update_fn` must be a function of (updates, gradient_step, params) "
                f"that returns (skip, state), found {should_skip_update_fn!r}. Give e.g. "
                "`skip_not_finite`."
            )
        self._inner = InnerUpdate(opt)
        self._every_k: Any = every_k_schedule
        if not callable(every_k_schedule) and not isinstance(every_k_schedule, jax.core.Tracer):
            self._every_k = check_integer("every_k_schedule", every_k_schedule, 1)
        self._mean = use_grad_mean
        self._should_skip = should_skip_update_fn
        self._dtype = accumulator_dtype

    @property
    def inner_opt(self) -> optax.GradientTransformationExtraArgs:
        """The inner optimizer; it takes extra arguments, whether it uses them or not."""
        return self._inner.opt

    def init(self, params: Any) -> optax.MultiStepsState:
        """Returns the state before the first mini-step; it shares no buffer with `params`.

        Raises:
          TypeError: a leaf of `params` is not an array or a number.
        """
        inner_state = self._inner.init(params)

        def empty(param: Any) -> jax.Array:
            dtype = accumulator_dtype_of(jnp.result_type(param), self._dtype)
            return jnp.zeros_like(param, dtype=dtype)

        skip_state: Any = ()
        if self._should_skip is not None:
            zeros = jax.tree.map(jnp.zeros_like, params)
            _, skip_state = ask(self._should_skip, zeros, jnp.zeros([], jnp.int32), params)
        return optax.MultiStepsState(
            mini_step=jnp.zeros([], jnp.int32),
            gradient_step=jnp.zeros([], jnp.int32),
            inner_opt_state=inner_state,
            acc_grads=jax.tree.map(empty, params),
            skip_state=skip_state,
        )

    def update(
        self, updates: Any, state: optax.MultiStepsState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, optax.MultiStepsState]:
        """Takes in the gradients of one mini-step.

        Args:
          updates: the gradients.
          state: the state.
          params: the parameters, if the inner optimizer wants them.
          **extra_args: for the inner optimizer, on the mini-step that emits.

        Returns:
          What to add to the parameters, zeros unless a window is full; and the new state.
        """
        emit, state = self._begin(updates, state, params)
        operands = state.acc_grads, updates, state.inner_opt_state, params, extra_args
        return _made_if(emit, self._inner.updating(*operands), state)

    def apply(
        self, params: Any, state: optax.MultiStepsState, grads: Any, **extra_args: Any
    ) -> tuple[Any, optax.MultiStepsState]:
        """Takes in the gradients of one mini-step, and steps if the window is full.

        What `update` and `optax.apply_updates` do, without the addition on the mini-steps that do
        not emit, and without rounding the updates to the gradients' dtype on the one that does.

        Args:
          params: the parameters.
          state: the state.
          grads: the gradients.
          **extra_args: for the inner optimizer, on the mini-step that emits.

        Returns:
          The parameters and the state.
        """
        emit, state = self._begin(grads, state, params)
        check_like(params, state.acc_grads, "params")
        operands = state.acc_grads, grads, state.inner_opt_state, params, extra_args
        return _made_if(emit, self._inner.applying(*operands), state)

    def flush(
        self, state: optax.MultiStepsState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, optax.MultiStepsState]:
        """Emits a window before it is full, e.g. at the end of an epoch.

        The inner optimizer gets the mean (or sum) of the mini-steps that the window holds. An empty
        window gives zeros, and the state as it was.

        Args:
          state: the state.
          params: the parameters, if the inner optimizer wants them.
          **extra_args: for the inner optimizer.

        Returns:
          What to add to the parameters, and the new state.
        """
        self._check(state)
        emit, gradient_step = jnp.asarray(state.mini_step) > 0, jnp.asarray(state.gradient_step)
        grads_like = state.acc_grads
        if params is not None:
            check_like(params, grads_like, "params")
            grads_like = cast_like(grads_like, params)
        skip_state: Any = state.skip_state
        if (skipped := last_decision(skip_state)) is not None:
            skip_state = {**skip_state, "should_skip": skipped & ~emit}
        emptied = state._replace(
            mini_step=jnp.zeros_like(state.mini_step),
            gradient_step=jnp.where(emit, optax.safe_increment(gradient_step), gradient_step),
            skip_state=skip_state,
        )
        operands = state.acc_grads, grads_like, state.inner_opt_state, params, extra_args
        return _made_if(emit, self._inner.updating(*operands), emptied)

    def has_updated(self, state: optax.MultiStepsState) -> jax.Array:
        """Returns whether the mini-step that returned `state` emitted: a boolean scalar.

        Works on states of Optax; one that does not say whether the last mini-step was skipped is
        read as Optax reads it.
        """
        _check_kind(state)
        updated = jnp.logical_and(
            jnp.asarray(state.mini_step) == 0, jnp.asarray(state.gradient_step) > 0
        )
        skipped = last_decision(state.skip_state)
        return updated if skipped is None else jnp.logical_and(updated, ~jnp.asarray(skipped))

    def gradient_transformation(self) -> optax.GradientTransformationExtraArgs:
        """Returns `init` and `update` as a transformation that takes extra arguments."""
        update: Any = self.update  # Optax's type of it lacks the extra arguments
        return optax.GradientTransformationExtraArgs(self.init, update)

    def describe_fields(self) -> dict[str, Any]:
        """Returns what the fields of a state mean, as `opt_core.protocols.DescribesFields` asks.

        In plain data: checkpoints and surgery on groups read it, and this package needs neither.
        """
        window = {"effect": "window", "count": ("mini_step",)}
        return {
            "name": "multi_steps",
            "roles": {
                "mini_step": "count",
                "gradient_step": "count",
                "acc_grads": "accumulator",
                "skip_state": "other",
            },
            "settings": {"every_k_schedule": self._every_k, "use_grad_mean": self._mean},
            "bearing": {"every_k_schedule": window, "use_grad_mean": window},
        }

    def _check(self, state: Any) -> None:
        _check_kind(state)
        if self._should_skip is None and jax.tree.leaves(state.skip_state):
            raise ValueError(
                "`skip_state` was made with a `should_skip_update_fn`, and there is none. To "
                "change it, take a new state of it between two windows: "
                "`state._replace(skip_state=steps.init(params).skip_state)`."
            )

    def _begin(
        self, grads: Any, state: optax.MultiStepsState, params: Any
    ) -> tuple[jax.Array, optax.MultiStepsState]:
        """Accumulates, and decides whether to emit; in the state, all else is as after that."""
        self._check(state)
        check_like(grads, state.acc_grads)
        mini_step, gradient_step = map(jnp.asarray, (state.mini_step, state.gradient_step))
        k = self._every_k
        if not isinstance(k, int):
            k = _at_least_one(k(gradient_step) if callable(k) else k)
        emit, held = mini_step >= k - 1, optax.safe_increment(mini_step)
        skip, skip_state = None, state.skip_state
        if self._should_skip is not None:
            skip, skip_state = ask(self._should_skip, grads, gradient_step, params)
            emit, held = emit & ~skip, jnp.where(skip, mini_step, held)
        return emit, state._replace(
            mini_step=jnp.where(emit, 0, held),
            gradient_step=jnp.where(emit, optax.safe_increment(gradient_step), gradient_step),
            acc_grads=self._accumulated(grads, state.acc_grads, mini_step, skip),
            skip_state=skip_state,
        )

    def _accumulated(
        self, grads: Any, accumulator: Any, count: jax.Array, skip: jax.Array | None
    ) -> Any:
        """Returns the accumulator with one more gradient in it, unless that is skipped."""

        def leaf(grad: Any, old: Any, count: jax.Array, skip: jax.Array | None) -> Any:
            kept = jnp.promote_types(jnp.result_type(grad), jnp.result_type(old))
            # Optax accumulates complex gradients in float32, without imaginary parts.
            gains_parts = jnp.iscomplexobj(grad) and not jnp.iscomplexobj(old)
            dtype = kept if gains_parts else jnp.result_type(old)
            wide = jnp.promote_types(kept, jnp.float32)
            grad, total = jnp.asarray(grad, wide), jnp.asarray(old, wide)
            # Optax's order of operations (Welford's mean), and its roundings.
            new = total + (grad - total) / (count + 1) if self._mean else grad + total
            new = jax.lax.convert_element_type(jax.lax.convert_element_type(new, kept), dtype)
            # Selected, never multiplied: NaN and infinity stay outside.
            return new if skip is None else jnp.where(skip, jnp.asarray(old, dtype), new)

        add = traced_once(leaf, grads, accumulator, count)
        return jax.tree.map(lambda grad, old: add(grad, old, count, skip), grads, accumulator)


def _at_least_one(k: Any) -> jax.Array:
    if np.ndim(k) or what_is_wrong(k):
        raise TypeError(
            "the function `every_k_schedule` must return the number of mini-steps of this gradient "
            f"step, found {k!r}."
        )
    return jnp.maximum(jnp.asarray(k).astype(jnp.int32), 1)


def _made_if(
    emit: jax.Array, step: Step, state: optax.MultiStepsState
) -> tuple[Any, optax.MultiStepsState]:
    """Makes the inner step, and empties the window, if the mini-step emits."""
    done, (made, inner) = emit_if(emit, *step)
    return made, state._replace(inner_opt_state=inner, acc_grads=zeros_if(done, state.acc_grads))


def _check_kind(state: Any) -> None:
    if not isinstance(state, optax.MultiStepsState):
        raise TypeError(
            f"`state` must be an `optax.MultiStepsState`, found {type(state).__name__}. Mind "
            "the order: `update(grads, state, params)`, `apply(params, state, grads)`, "
            "`flush(state, params)`."
        )
