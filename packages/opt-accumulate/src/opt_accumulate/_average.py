"""An average of the parameters beside the optimizer, and the parameters to evaluate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_leaves_with_path

from opt_accumulate._arrays import (
    accumulator_dtype_of,
    check_dtype,
    on_device,
    put_beside,
    traced_once,
)
from opt_accumulate._guard import GuardState
from opt_accumulate._inner import InnerUpdate, ParamsTransformation, emit_if
from opt_accumulate._trees import (
    broadcast_prefix,
    check_choice,
    check_integer,
    children,
    path_str,
    walk,
)
from opt_accumulate.errors import EvaluationError, OptionError

_SCHEDULE_FREE = {"b1", "weight_sum", "z"}  # fields of a state that Optax does not export


def eval_params(state: Any, params: Any) -> Any:
    """Returns the parameters to evaluate: an average of them, if an optimizer keeps one.

    At any depth of the state it finds the average of `with_average`, the one that
    `optax.contrib.schedule_free` implies, and the slow parameters of `optax.lookahead`. Without
    these it returns the master copy, if there is one, or `params`. In `optax.partition` and in
    groups, each part may have its own. Traceable.

    States of other packages may have either by a method of their class: `eval_params(params)`, with
    `optax.MaskedNode()` for parameters that they do not keep, or `master_params(params)`, of
    float32 or wider where they have more precision.

    Args:
      state: the state of an optimizer, or any tree that contains it.
      params: the parameters that belong to it; with `optax.lookahead` its `LookaheadParams`.

    Returns:
      A tree like `params`, in their dtypes; with `optax.lookahead` like the slow ones.

    Raises:
      EvaluationError: two of them provide the same parameter, or one provides a parameter that is
        not in `params`.

    Examples:
      >>> from opt_accumulate import with_average
      >>> tx = optax.chain(optax.clip(1.0), with_average(optax.sgd(1.0), 0.9))
      >>> params = jnp.zeros(2, jnp.bfloat16)
      >>> state = tx.init(params)
      >>> updates, state = jax.jit(tx.update)(-jnp.ones(2), state, params)
      >>> params = optax.apply_updates(params, updates)
      >>> found = eval_params(state, params)
      >>> str(found.dtype), [round(float(x), 2) for x in found]
      ('bfloat16', [0.1, 0.1])
    """
    own = _by_path(params)
    kept: dict[str, tuple[str, Any]] = {}  # by path: what provides it, and the values
    if isinstance(params, optax.LookaheadParams):
        slow = [path for path in own if path.startswith("slow")]
        kept = {path: ("the slow parameters", own[path]) for path in slow}
    for name, leaves in _providers(state, own, params):
        for path, leaf in leaves.items():
            if path not in own:
                raise EvaluationError(
                    f"{name} of `state` has `{path}`, which `params` lack. "
                    "Pass the parameters that the state belongs to."
                )
            if path in kept:
                raise EvaluationError(
                    f"{kept[path][0]} and {name} both provide parameters to evaluate of `{path}`. "
                    "Keep only one of them."
                )
            kept[path] = name, leaf
    if kept:
        found = [kept[path][1] if path in kept else leaf for path, leaf in own.items()]
    else:
        found = jax.tree.leaves(master_params(state, params))
    cast = [_cast(new, old) for new, old in zip(found, own.values(), strict=True)]
    evaluated = jax.tree.unflatten(jax.tree.structure(params), cast)
    return evaluated.slow if isinstance(params, optax.LookaheadParams) else evaluated


def master_params(state: Any, params: Any) -> Any:
    """Returns the parameters as precisely as a state has them."""
    for _, node in walk(state):
        if callable(getattr(type(node), "master_params", None)):
            params = node.master_params(params)
    return params


def _providers(state: Any, own: Any, params: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, node in walk(state):
        if callable(getattr(type(node), "eval_params", None)):
            leaves = _by_path(node.eval_params(params))
        elif set(getattr(node, "_fields", ())) >= _SCHEDULE_FREE:
            # Optax's own function wants all of the parameters, which a part of a partition has not.
            z, b1 = _by_path(node.z), jnp.asarray(node.b1)
            leaves = {at: (own.get(at, z[at]) - (1 - b1) * z[at]) / b1 for at in z}
        else:
            continue
        yield f"the `{type(node).__name__}` at `{path_str(path)}`", leaves


def _by_path(tree: Any) -> dict[str, Any]:
    # By name: a group may see a dict where the parameters are a `FrozenDict`.
    return {path_str(path): leaf for path, leaf in tree_leaves_with_path(tree)}


def _cast(new: Any, old: Any) -> Any:
    dtype = jnp.result_type(old)
    return new if jnp.result_type(new) == dtype else jax.lax.convert_element_type(new, dtype)


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
        """Returns the average, for the function of this name."""
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
    stored, so rounded ones in bfloat16, unless `tx` keeps a master copy (a state with a method
    `master_params`): then it averages that. `eval_params` returns the average.

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
    schedule = _Rate(decay, start, every, warmup, form)
    check_dtype("dtype", dtype, 32)
    inner = InnerUpdate(tx)

    def init(params: Any) -> AverageState:
        state = inner.init(params)
        average = _copies(master_params(state, params), dtype, select)
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
            state, new, (params, updates), lambda moved: optax.apply_updates(*moved)
        )

    def apply(
        params: Any, state: AverageState, grads: Any, **extra_args: Any
    ) -> tuple[Any, AverageState]:
        params, new = inner.apply(grads, grads, state.inner, params, extra_args)
        return params, after(state, new, params, lambda moved: moved)

    def after(
        state: AverageState, new: Any, moved: Any, params_of: Callable[[Any], Any]
    ) -> AverageState:
        count = jnp.asarray(state.count)
        updated = _has_updated(new, state.inner)
        conditions = [one for one in (updated, schedule.counts(count)) if one is not None]

        def body(average: Any, operands: Any) -> Any:
            moved, inner_state = operands
            return schedule.move(average, master_params(inner_state, params_of(moved)), count)

        if conditions:
            is_due = jnp.stack(conditions).all()
            _, average = emit_if(is_due, body, state.average, (moved, new))
        else:
            average = body(state.average, (moved, new))
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

    def __post_init__(self) -> None:
        """Raises an `OptionError` where the arguments do not define an average."""
        check_choice("form", self.form, get_args(Form))
        if self.form == "polyak" and (self.decay is not None or self.warmup):
            raise OptionError(
                "`form='polyak'` is a plain mean: it takes neither `decay` nor `warmup`."
            )
        if self.form == "ema" and self.decay is None:
            raise OptionError("`decay` is missing: give a number such as 0.999, or a schedule.")
        if isinstance(self.decay, int | float) and not 0 <= self.decay < 1:
            raise OptionError(f"`decay` must be at least 0 and less than 1, found {self.decay!r}.")
        check_integer("start", self.start, 0)
        check_integer("every", self.every, 1)

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

        def move_leaf(old: Any, param: Any, rate: Any) -> Any:
            new = jax.lax.convert_element_type(param, old.dtype)
            rate = jnp.asarray(rate, jnp.finfo(old.dtype).dtype)
            # At a rate of 1 it is the parameters to the bit, whatever it was.
            return jnp.where(rate == 1, new, old + rate * (new - old))

        moved = traced_once(move_leaf, average, params)

        def leaf(old: Any, param: Any) -> Any:
            if isinstance(old, optax.MaskedNode):
                return old
            return put_beside(moved(on_device(old), param, rate), old)

        return jax.tree.map(leaf, average, params, is_leaf=_is_masked)

    def _rate(self, t: jax.Array) -> Any:
        if self.form == "polyak":
            return 1 / (t + 1)
        # 1 - 0.999 in float32 is 5e-5 off: a number is subtracted in Python.
        decay = self.decay(t) if callable(self.decay) else self.decay
        rate = 1 - decay if isinstance(decay, jax.Array) else float(1 - decay)
        return jnp.maximum(rate, 9 / (10 + t)) if self.warmup else rate


def _copies(params: Any, dtype: Any, select: Any) -> Any:
    """Returns the parameters that are averaged, in the dtype of the average."""
    mask = select(params) if callable(select) else select
    chosen = broadcast_prefix(True if mask is None else mask, params, "select")

    def leaf(param: Any, is_chosen: Any) -> Any:
        own = jnp.result_type(param)
        if not is_chosen or not jnp.issubdtype(own, jnp.inexact):
            return optax.MaskedNode()
        wide = jax.dtypes.canonicalize_dtype(accumulator_dtype_of(own, dtype))
        return jax.lax.convert_element_type(jnp.copy(param), wide)

    return jax.tree.map(leaf, params, chosen)


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)
