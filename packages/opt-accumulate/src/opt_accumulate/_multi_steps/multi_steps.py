"""`MultiSteps`: Optax's interface and states; the inner optimizer runs only when it emits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from opt_accumulate._buffers import own_buffers, zeros_of
from opt_accumulate._checks import check_like, check_numbers
from opt_accumulate._dtypes import cast_like, check_accumulator_dtype
from opt_accumulate._emission import Form, check_form, emit_if, zeros_if
from opt_accumulate._inner import InnerUpdate
from opt_accumulate._multi_steps import accumulator
from opt_accumulate._multi_steps import window_means as window_means_
from opt_accumulate._multi_steps.every_k import parse_every_k
from opt_accumulate._skip.state import (
    NEW_SKIP_STATE,
    SKIP,
    ask,
    check_skip_function,
    init_skip_state,
    last_decision,
)

ShouldSkip = Callable[..., tuple[Any, Any]]


class _MiniStep(NamedTuple):
    """What is decided about one mini-step before anything of the size of the parameters moves."""

    emit: jax.Array
    state: optax.MultiStepsState
    extra_args: dict[str, Any]


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
      >>> for grads in (jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])):
      ...     params, state = steps.apply(params, state, grads)
      ...     print(params.tolist(), bool(steps.has_updated(state)))
      [0.0, 0.0] False
      [-2.0, -3.0] True
    """

    def __init__(
        self,
        opt: Any,
        every_k_schedule: Any,
        use_grad_mean: bool = True,
        should_skip_update_fn: ShouldSkip | None = None,
        accumulator_dtype: Any = jnp.float32,
        *,
        window_means: Sequence[str] = (),
        form: Form = "loop",
    ) -> None:
        """Configures the accumulation; allocates nothing.

        Args:
          opt: the inner optimizer, a gradient transformation.
          every_k_schedule: how many mini-steps make a step: a positive integer, or a function from
            the number of steps made to one.
          use_grad_mean: whether the inner optimizer gets the mean of the gradients, or their sum.
          should_skip_update_fn: `f(updates, gradient_step, params)` returns whether to skip the
            mini-step, and the new `skip_state`; or a `StatefulSkipFunction`.
          accumulator_dtype: of the accumulator. float32 does not truncate float64; complex
            gradients get the complex dtype of that precision. `None`: each parameter's own dtype.
          window_means: names of scalar extra arguments of which the inner optimizer gets the mean
            over the mini-steps of the window, not the value on the last one.
          form: how a mini-step branches: `"loop"`, the fastest; `"cond"`, which has a reverse-mode
            derivative; or `"select"`, without control flow.

        Raises:
          TypeError: `every_k_schedule` is neither an integer nor a function;
            `should_skip_update_fn` is not a function; `window_means` are not names.
          ValueError: `every_k_schedule` is not positive, or not a scalar; `accumulator_dtype`
            cannot hold gradients; `form` is unknown.
        """
        check_form(form)
        check_accumulator_dtype(accumulator_dtype)
        check_skip_function(should_skip_update_fn)
        self._inner = InnerUpdate(opt)
        self._every_k_schedule = every_k_schedule
        self._every_k = parse_every_k(every_k_schedule)
        self._mean = use_grad_mean
        self._should_skip = should_skip_update_fn
        self._dtype = accumulator_dtype
        self._window_means = window_means_.parse_names(window_means)
        self._form = form

    @property
    def inner_opt(self) -> optax.GradientTransformationExtraArgs:
        """The inner optimizer; it takes extra arguments, whether it uses them or not."""
        return self._inner.opt

    def extra_arg_names(self, names: Iterable[str]) -> frozenset[str]:
        """Returns those of `names` that `window_means` has; the inner optimizer may take more."""
        return frozenset(names).intersection(self._window_means)

    def init(self, params: Any) -> optax.MultiStepsState:
        """Returns the state before the first mini-step; it shares no buffer with `params`.

        Raises:
          TypeError: a leaf of `params` is not an array or a number.
        """
        check_numbers(params, "params")
        skip_state = () if self._should_skip is None else init_skip_state(self._should_skip, params)
        state = optax.MultiStepsState(
            mini_step=jnp.zeros([], jnp.int32),
            gradient_step=jnp.zeros([], jnp.int32),
            inner_opt_state=self._inner.init(params),
            acc_grads=accumulator.zeros_for(params, self._dtype),
            skip_state=window_means_.attach(skip_state, self._window_means),
        )
        owned: optax.MultiStepsState = own_buffers(state, apart_from=params)
        return owned

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
        step = self._begin(updates, state, params, extra_args)
        make = self._inner.traced_once(step.extra_args)

        def body(carry: Any, operands: Any) -> Any:
            acc, params, extra_args = operands
            new, inner = make(acc, updates, carry[1], params, extra_args)
            return cast_like(new, carry[0]), inner

        like = make.updates_like(updates, step.state.inner_opt_state, params, step.extra_args)
        carry = zeros_of(like), step.state.inner_opt_state
        operands = step.state.acc_grads, params, step.extra_args
        done, (new, inner) = emit_if(step.emit, body, carry, operands, self._form)
        return new, self._end(step.state, done, inner)

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
        step = self._begin(grads, state, params, extra_args)
        check_like(params, state.acc_grads, "params")

        def body(carry: Any, operands: Any) -> Any:
            acc, extra_args = operands
            new, inner = self._inner(acc, grads, carry[1], carry[0], extra_args)
            return cast_like(optax.apply_updates(carry[0], new), carry[0]), inner

        carry = cast_like(params, params), step.state.inner_opt_state
        operands = step.state.acc_grads, step.extra_args
        done, (params, inner) = emit_if(step.emit, body, carry, operands, self._form)
        return params, self._end(step.state, done, inner)

    def flush(
        self, state: optax.MultiStepsState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, optax.MultiStepsState]:
        """Emits a window before it is full, e.g. at the end of an epoch.

        The inner optimizer gets the mean (or sum) of the mini-steps that the window holds. An empty
        window gives zeros, and the state as it was.

        Args:
          state: the state.
          params: the parameters, if the inner optimizer wants them.
          **extra_args: for the inner optimizer; means of the window need not be given.

        Returns:
          What to add to the parameters, and the new state.
        """
        self._check(state)
        skip_state, means = window_means_.detach(state.skip_state, self._window_means)
        emit = jnp.asarray(state.mini_step) > 0
        inner = cast_like(state.inner_opt_state, state.inner_opt_state)
        extra_args = {**extra_args, **means}

        def body(carry: Any, operands: Any) -> Any:
            acc, params, extra_args = operands
            new, inner = self._inner(acc, grads_like, carry[1], params, extra_args)
            return cast_like(new, carry[0]), inner

        acc = state.acc_grads
        if params is not None:
            check_like(params, acc, "params")
        grads_like = acc if params is None else cast_like(acc, params)
        like = self._inner.updates_like(grads_like, inner, params, extra_args)
        operands = acc, params, extra_args
        done, (new, inner) = emit_if(emit, body, (zeros_of(like), inner), operands, self._form)
        if last_decision(skip_state) is not None:
            skip = jnp.where(emit, False, last_decision(skip_state))
            skip_state = {**skip_state, SKIP: skip}
        means = {name: jnp.where(emit, 0, mean) for name, mean in means.items()}
        gradient_step = jnp.asarray(state.gradient_step)
        state = state._replace(
            mini_step=jnp.zeros_like(jnp.asarray(state.mini_step)),
            gradient_step=jnp.where(emit, optax.safe_increment(gradient_step), gradient_step),
            skip_state=window_means_.join(skip_state, means),
        )
        return new, self._end(state, done, inner)

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
        is_number = isinstance(self._every_k, int)
        window = {"effect": "window", "count": ("mini_step",)}
        return {
            "name": "multi_steps",
            "roles": {
                "mini_step": "count",
                "gradient_step": "count",
                "acc_grads": "accumulator",
                "skip_state": "other",
            },
            "settings": {
                "every_k_schedule": self._every_k if is_number else self._every_k_schedule,
                "use_grad_mean": self._mean,
            },
            "bearing": {"every_k_schedule": window, "use_grad_mean": window},
        }

    def _check(self, state: Any) -> None:
        """Raises unless `state` is one that these arguments understand."""
        _check_kind(state)
        unread = self._should_skip is None and not self._window_means
        if unread and jax.tree.leaves(state.skip_state):
            raise ValueError(
                "`skip_state` was made with a `should_skip_update_fn` or `window_means`, and there "
                f"are none. {NEW_SKIP_STATE}"
            )

    def _begin(
        self, grads: Any, state: optax.MultiStepsState, params: Any, extra_args: dict[str, Any]
    ) -> _MiniStep:
        """Accumulates, and decides whether to emit; in the state, all else is as after that."""
        self._check(state)
        check_like(grads, state.acc_grads)
        mini_step, gradient_step = map(jnp.asarray, (state.mini_step, state.gradient_step))
        skip_state, means = window_means_.detach(state.skip_state, self._window_means)
        k = self._every_k if isinstance(self._every_k, int) else self._every_k(gradient_step)
        emit = mini_step >= k - 1
        skip = None
        if self._should_skip is not None:
            skip, skip_state = ask(self._should_skip, grads, gradient_step, params, skip_state)
            emit = jnp.logical_and(emit, ~skip)
        new_means = window_means_.take_in(extra_args, means, mini_step)
        kept = {
            name: _select(emit, jnp.zeros_like(new), _select(skip, means[name], new))
            for name, new in new_means.items()
        }
        held = _select(skip, mini_step, optax.safe_increment(mini_step))
        inner = state.inner_opt_state
        new_state = optax.MultiStepsState(
            mini_step=_select(emit, jnp.zeros_like(mini_step), held),
            gradient_step=_select(emit, optax.safe_increment(gradient_step), gradient_step),
            inner_opt_state=cast_like(inner, inner),
            acc_grads=accumulator.accumulate(
                grads, state.acc_grads, mini_step, skip, mean=self._mean
            ),
            skip_state=window_means_.join(skip_state, kept),
        )
        return _MiniStep(emit, new_state, {**extra_args, **new_means})

    def _end(
        self, state: optax.MultiStepsState, done: jax.Array, inner: Any
    ) -> optax.MultiStepsState:
        acc = zeros_if(done, state.acc_grads, self._form)
        return state._replace(inner_opt_state=inner, acc_grads=acc)


def _check_kind(state: Any) -> None:
    if not isinstance(state, optax.MultiStepsState):
        raise TypeError(
            f"`state` must be an `optax.MultiStepsState`, found {type(state).__name__}. Mind "
            "the order: `update(grads, state, params)`, `apply(params, state, grads)`, "
            "`flush(state, params)`."
        )


def _select(predicate: jax.Array | None, chosen: Any, otherwise: Any) -> Any:
    """Selects, never multiplies; `None` is false."""
    if predicate is None:
        return otherwise
    return jnp.where(predicate, chosen, otherwise)
