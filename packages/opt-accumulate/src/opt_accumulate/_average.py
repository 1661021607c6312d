"""`with_average`: an average of the parameters beside the optimizer that updates them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from opt_accumulate._arrays import (
    accumulator_dtype_of,
    on_device,
    put_beside,
    traced_once,
)
from opt_accumulate._eval_params import master_params
from opt_accumulate._guard_state import GuardState
from opt_accumulate._inner import InnerUpdate, ParamsTransformation, emit_if
from opt_accumulate._trees import broadcast_prefix, check_integer, check_numbers, children
from opt_accumulate.errors import OptionError

Form = Literal["ema", "polyak"]
Decay = float | jax.Array | Callable[[Any], Any]


class AverageState(NamedTuple):
    """The state of `with_average`.

    Attributes:
      count: int32 scalar; updates of the parameters so far; saturates at 2**31 - 1.
      average: like the parameters, in the dtype of the average; `optax.MaskedNode()` in place of
        those that are not averaged.
      inner: the state of the optimizer.
    """

    count: Any
    average: Any
    inner: Any

    def eval_params(self, params: Any) -> Any:
        """Returns the average; see `HoldsEvalParams`."""
        del params
        return jax.tree.map(on_device, self.average)

    @staticmethod
    def describe_fields() -> dict[str, Any]:
        """Returns what the fields mean, as `opt_core.protocols.DescribesFields` asks."""
        return {"roles": {"count": "count", "average": "params_copy"}, "passes_on": True}


def with_average(
    tx: Any,
    decay: Decay | None = None,
    *,
    dtype: Any = jnp.float32,
    start: int = 0,
    every: int = 1,
    warmup: bool = False,
    form: Form = "ema",
    select: Any = None,
) -> ParamsTransformation:
    """Keeps an average of the parameters after each update.

    The average starts as a copy of the parameters and is updated by
    `average + (1 - d) * (params - average)`, in its own dtype. It averages the parameters as
    stored, so rounded ones in bfloat16, unless `tx` keeps a master copy (`HoldsMasterParams`):
    then it averages that. `eval_params` returns the average.

    A mini-step of an inner `MultiSteps` that does not emit, and a step that an inner `guard`
    skips, leave the average untouched. Wrap everything that changes the updates, so that the
    average sees the parameters as they will be. The average may be placed in host memory
    (memory kind `pinned_host`).

    Args:
      tx: the optimizer; a gradient transformation, or a `MultiSteps`.
      decay: d, in [0, 1), or a function from t to it, where t counts the updates of the average
        from 0. Only for `form='ema'`.
      dtype: of the average: float32 or float64, since narrower ones would lose `1 - d` in
        rounding. Wider parameters are averaged in their own dtype.
      start: the first update of the parameters, counted from 0, that is averaged. Before it the
        average equals the parameters.
      every: average only each `every`-th update, starting with `start`.
      warmup: whether to use `min(d, (1 + t) / (10 + t))` for d.
      form: `'ema'`, exponential; or `'polyak'`, the plain mean of the parameters after each
        averaged update, excluding the initial ones.
      select: which parameters to average: a tree of bools that is a prefix of the parameters, or a
        function from the parameters to one; `None` for all. Only floating-point and complex
        parameters are averaged.

    Returns:
      A transformation with `init`, `update` and `apply`, whose state is an `AverageState`.

    Raises:
      OptionError: an argument is out of range, or does not apply to `form`.

    Examples:
      >>> tx = with_average(optax.sgd(1.0), 0.5)
      >>> params = jnp.zeros(2)
      >>> state = tx.init(params)
      >>> step = jax.jit(tx.apply)
      >>> for _ in range(2):
      ...     params, state = step(params, state, jnp.array([-1.0, -2.0]))
      >>> params.tolist(), state.average.tolist()
      ([2.0, 4.0], [1.25, 2.5])
    """
    schedule = _Rate.checked(decay, start, every, warmup, form)
    wanted = _checked_dtype(dtype)
    inner = InnerUpdate(tx)

    def init(params: Any) -> AverageState:
        check_numbers(params, "params")
        state = inner.init(params)
        average = _copies(master_params(state, params), wanted, select)
        return AverageState(jnp.zeros([], jnp.int32), average, state)

    def update(
        grads: Any, state: AverageState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, AverageState]:
        if params is None:
            raise ValueError(
                "`with_average` needs the parameters: call `update(grads, state, params)`."
            )
        updates, new = inner(grads, grads, state.inner, params, extra_args)
        return updates, after(
            state, new, lambda moved: optax.apply_updates(*moved), (params, updates)
        )

    def apply(
        params: Any, state: AverageState, grads: Any, **extra_args: Any
    ) -> tuple[Any, AverageState]:
        params, new = inner.apply(params, state.inner, grads, extra_args)
        return params, after(state, new, lambda moved: moved, params)

    def after(
        state: AverageState, new: Any, params_of: Callable[[Any], Any], moved: Any
    ) -> AverageState:
        count = jnp.asarray(state.count)
        updated = _has_updated(new, state.inner)
        conditions = [one for one in (updated, schedule.counts(count)) if one is not None]
        is_due = jnp.stack(conditions).all() if conditions else None

        def body(average: Any, operands: Any) -> Any:
            moved, inner_state = operands
            params = master_params(inner_state, params_of(moved))
            return schedule.move(average, params, count)

        if is_due is None:
            average = body(state.average, (moved, new))
        else:
            _, average = emit_if(is_due, body, state.average, (moved, new))
        following = optax.safe_increment(count)
        counted = following if updated is None else jnp.where(updated, following, count)
        return AverageState(counted, average, new)

    return ParamsTransformation(init, update, apply)


def _has_updated(new: Any, old: Any) -> jax.Array | None:
    """Returns whether the step from one state to the next updated parameters; `None` for always."""
    # A `MultiSteps`, Optax's too, shows it in its count of steps, a guard in its last decision. Of
    # several side by side, as in `optax.partition`, one that updated is enough.
    if isinstance(new, optax.MultiStepsState):
        stepped: jax.Array = jnp.asarray(new.gradient_step) != jnp.asarray(old.gradient_step)
        inside = _has_updated(new.inner_opt_state, old.inner_opt_state)
        return stepped if inside is None else stepped & inside
    if isinstance(new, GuardState):
        inside = _has_updated(new.inner, old.inner)
        made = ~jnp.asarray(new.was_skipped)
        return made if inside is None else made & inside
    pairs = zip(children(new), children(old), strict=True)
    answers = [_has_updated(child, before) for (_, child), (_, before) in pairs]
    updated = [answer for answer in answers if answer is not None]
    return jnp.stack(updated).any() if updated else None


@dataclasses.dataclass(frozen=True)
class _Rate:
    """How far an average moves towards the parameters, 1 - d, at each of their updates."""

    decay: Any
    start: int
    every: int
    warmup: bool
    form: Form

    @classmethod
    def checked(cls, decay: Any, start: int, every: int, warmup: bool, form: Form) -> _Rate:
        """Raises an `OptionError` where the arguments do not define an average."""
        if form not in get_args(Form):
            raise OptionError(f"`form` must be one of {', '.join(get_args(Form))}, found {form!r}.")
        if form == "polyak" and (decay is not None or warmup):
            raise OptionError(
                "`form='polyak'` is a plain mean: it takes neither `decay` nor `warmup`."
            )
        if form == "ema" and decay is None:
            raise OptionError("`decay` is missing: give a number such as 0.999, or a schedule.")
        if isinstance(decay, int | float) and not 0 <= decay < 1:
            raise OptionError(f"`decay` must be at least 0 and less than 1, found {decay!r}.")
        check_integer("start", start, 0)
        check_integer("every", every, 1)
        return cls(decay, start, every, warmup, form)

    def counts(self, count: jax.Array) -> jax.Array | None:
        """Returns whether update `count` moves the average; `None` if each does."""
        if self.every == 1:
            return None
        return (count < self.start) | ((count - self.start) % self.every == 0)

    def move(self, average: Any, params: Any, count: jax.Array) -> Any:
        """Returns the average after update `count` has made `params`."""
        rate = self._rate(jnp.maximum(count - self.start, 0) // self.every)
        if self.start:
            rate = jnp.where(count < self.start, 1, rate)

        def move_leaf(old: Any, param: Any, array: Any) -> Any:
            new = jax.lax.convert_element_type(param, old.dtype)
            if array is None:
                return old + rate * (new - old)
            share = array.astype(jnp.finfo(old.dtype).dtype)
            # At a rate of 1 it is the parameters to the bit, whatever it was.
            return jnp.where(share == 1, new, old + share * (new - old))

        moved = traced_once(move_leaf, average, params)
        array = None if isinstance(rate, float) else rate

        def leaf(old: Any, param: Any) -> Any:
            if isinstance(old, optax.MaskedNode):
                return old
            return put_beside(moved(on_device(old), param, array), old)

        return jax.tree.map(leaf, average, params, is_leaf=_is_masked)

    def _rate(self, t: jax.Array) -> Any:
        if self.form == "polyak":
            return 1 / (t + 1)
        # 1 - 0.999 in float32 is 5e-5 off: a number is subtracted in Python.
        decay = self.decay(t) if callable(self.decay) else self.decay
        rate = 1 - decay if isinstance(decay, jax.Array) else float(1 - decay)
        return jnp.maximum(rate, 9 / (10 + t)) if self.warmup else rate


def _checked_dtype(dtype: Any) -> Any:
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = ""
    if name not in ("float32", "float64"):
        raise OptionError(
            f"`dtype` must be float32 or float64, found {dtype!r}. An average of less precision "
            "does not move: the steps of a decay of 0.999 are below half of its last digit."
        )
    return dtype


def _copies(params: Any, dtype: Any, select: Any) -> Any:
    """Returns the parameters that are averaged, in the dtype of the average."""
    mask = select(params) if callable(select) else select
    chosen = [True] * len(jax.tree.leaves(params))
    if mask is not None:
        chosen = broadcast_prefix(mask, params, "select")

    def leaf(param: Any, is_chosen: Any) -> Any:
        own = jnp.result_type(param)
        if not is_chosen or not jnp.issubdtype(own, jnp.inexact):
            return optax.MaskedNode()
        wide = jax.dtypes.canonicalize_dtype(accumulator_dtype_of(own, dtype))
        return jax.lax.convert_element_type(jnp.copy(param), wide)

    structure = jax.tree.structure(params)
    leaves = [leaf(*pair) for pair in zip(jax.tree.leaves(params), chosen, strict=True)]
    return jax.tree.unflatten(structure, leaves)


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)
