"""An average of the parameters beside the optimizer, and the parameters to evaluate.

`with_average` keeps the one; `eval_params` finds the others, wherever in a state they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_leaves_with_path

from opt_accumulate._arrays import (
    accumulator_dtype_of,
    on_device,
    put_beside,
    traced_once,
)
from opt_accumulate._guard import GuardState
from opt_accumulate._inner import InnerUpdate, ParamsTransformation, emit_if
from opt_accumulate._trees import (
    broadcast_prefix,
    check_integer,
    check_numbers,
    children,
    path_str,
    walk,
)
from opt_accumulate.errors import EvaluationError, OptionError


@runtime_checkable
class HoldsMasterParams(Protocol):
    """A state that keeps the parameters in higher precision than the model has them.

    Structural: a class of states only needs a method of this name.
    """

    def master_params(self, params: Any) -> Any:
        """Returns a tree like `params`, of float32 or wider where it has more precision.

        Args:
          params: the parameters that belong to the state.
        """


@runtime_checkable
class HoldsEvalParams(Protocol):
    """A state that keeps the parameters to evaluate, such as `AverageState`.

    Structural: a class of states only needs a method of this name.
    """

    def eval_params(self, params: Any) -> Any:
        """Returns a tree like `params`, with `optax.MaskedNode()` for those it does not keep.

        Args:
          params: the parameters that belong to the state.
        """


_SCHEDULE_FREE = {"b1", "weight_sum", "z"}  # fields of a state that Optax does not export


class _Provider(NamedTuple):
    name: str
    leaves: dict[str, Any]


def eval_params(state: Any, params: Any) -> Any:
    """Returns the parameters to evaluate: an average of them, if an optimizer keeps one.

    At any depth of the state it finds the average of `with_average` (or any `HoldsEvalParams`),
    the one that `optax.contrib.schedule_free` implies, and the slow parameters of
    `optax.lookahead`. Without these it returns the master copy (`HoldsMasterParams`), if there
    is one, or `params`. In `optax.partition` and in groups, each part may have its own.
    Traceable.

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
    providers = list(_providers(state, params))
    if isinstance(params, optax.LookaheadParams):
        providers.append(_Provider("the slow parameters", {}))
        if len(providers) > 1:
            raise _conflict(providers[0], providers[1], "")
        params = params.slow
    structure = jax.tree.structure(params)
    leaves = _by_path(params)
    owners: dict[str, _Provider] = {}
    for provider in providers:
        for path in provider.leaves:
            if path not in leaves:
                raise EvaluationError(
                    f"{provider.name} of `state` has `{path}`, which `params` lack. "
                    "Pass the parameters that the state belongs to."
                )
            if path in owners:
                raise _conflict(owners[path], provider, path)
            owners[path] = provider
    if providers:
        found = [owners[path].leaves[path] if path in owners else leaves[path] for path in leaves]
    else:
        found = jax.tree.leaves(master_params(state, params))
    cast = [_cast(new, old) for new, old in zip(found, leaves.values(), strict=True)]
    return jax.tree.unflatten(structure, cast)


def master_params(state: Any, params: Any) -> Any:
    """Returns the parameters as precisely as a state has them."""
    for _, node in walk(state):
        if callable(getattr(type(node), "master_params", None)):
            params = node.master_params(params)
    return params


def _providers(state: Any, params: Any) -> Iterator[_Provider]:
    own = _by_path(params)
    for path, node in walk(state):
        name = f"the `{type(node).__name__}` at `{path_str(path)}`"
        if callable(getattr(type(node), "eval_params", None)):
            yield _Provider(name, _by_path(node.eval_params(params)))
        elif set(getattr(node, "_fields", ())) >= _SCHEDULE_FREE:
            # Optax's own function wants all of the parameters, which a part of a partition has not.
            z, b1 = _by_path(node.z), jnp.asarray(node.b1)
            leaves = {at: (own[at] - (1 - b1) * leaf) / b1 for at, leaf in z.items() if at in own}
            yield _Provider(name, leaves)


def _by_path(tree: Any) -> dict[str, Any]:
    # By name: a group may see a dict where the parameters are a `FrozenDict`.
    return {path_str(path): leaf for path, leaf in tree_leaves_with_path(tree)}


def _conflict(one: _Provider, other: _Provider, path: str) -> EvaluationError:
    of = f" of `{path}`" if path else ""
    return EvaluationError(
        f"{one.name} and {other.name} both provide parameters to evaluate{of}. Keep only one of "
        "them."
    )


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
