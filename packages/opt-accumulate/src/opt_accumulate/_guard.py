"""`guard`: skips steps that spikes or non-finite values would spoil."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from opt_accumulate._arrays import inexact, on_device, put_beside
from opt_accumulate._inner import InnerUpdate, ParamsTransformation, Step, emit_if
from opt_accumulate._placement import axes_of_types, vary
from opt_accumulate._skip import all_finite, global_norm
from opt_accumulate._trees import check_choice, check_integer, path_str, walk
from opt_accumulate.errors import OptionError, StuckError


@dataclasses.dataclass(frozen=True)
class Spike:
    """The definition of a spike: a value many standard deviations above the mean of a window.

    The window holds the latest finite values of steps that were made. Rejected values never enter
    it, so they do not affect later decisions. Values below the mean are never spikes.

    Attributes:
      window: the size of the window.
      sigma: how many standard deviations above the mean make a spike.
      min_deviation: a lower bound of the standard deviation, relative to the mean: a window of
        nearly equal values says little about the next one.
      warmup: values to accept before the first decision; at most `window`.
      patience: after this many consecutive finite spikes the level is taken to have changed: the
        window is emptied and restarts with the next step.
      argument: of a guard's `loss`, the keyword by which the loop passes it to `update`, such as
        `value` (NumPyro, `optax.contrib.reduce_on_plateau`).

    Raises:
      OptionError: a number is out of range, or `argument` is not a keyword.
    """

    window: int = 128
    sigma: float = 6.0
    min_deviation: float = 0.01
    warmup: int = 32
    patience: int = 16
    argument: str = "loss"

    def __post_init__(self) -> None:
        """Checks the values."""
        for name, least in (("window", 2), ("warmup", 2), ("patience", 1)):
            check_integer(name, getattr(self, name), least)
        if self.warmup > self.window:
            raise OptionError(
                f"`warmup` must be at most `window`, {self.window}, found {self.warmup}: no "
                "step would ever be judged."
            )
        if not (self.sigma > 0 and self.min_deviation >= 0):
            raise OptionError(
                "`sigma` must be positive and `min_deviation` not negative, found "
                f"{self.sigma!r} and {self.min_deviation!r}."
            )
        if type(self.argument) is not str or not self.argument.isidentifier():
            raise OptionError(f"`argument` must be the name of a keyword, found {self.argument!r}.")


class Window(NamedTuple):
    """The values that the next value is compared with."""

    values: Any  # float32 [window]; a ring buffer, of which the first `count` entries are filled
    count: Any  # int32 scalar; values accepted since the window was last empty
    rejected: Any  # int32 scalar; consecutive finite spikes

    @classmethod
    def empty(cls, spike: Spike) -> Window:
        """Returns the window before the first step."""
        zeros = jnp.zeros([spike.window], jnp.float32)
        return cls(zeros, jnp.zeros([], jnp.int32), jnp.zeros([], jnp.int32))

    def threshold(self, spike: Spike) -> jax.Array:
        """Returns the value above which values are spikes; infinity before the warmup is over."""
        filled = jnp.minimum(self.count, spike.window)
        is_filled = jnp.arange(spike.window) < filled
        # Scaled: squares of values above 1e19 overflow float32.
        unit = jnp.maximum(jnp.max(jnp.abs(self.values), where=is_filled, initial=0), 1e-30)
        scaled = jnp.where(is_filled, self.values / unit, 0)
        mean = scaled.sum() / jnp.maximum(filled, 1)
        squares = jnp.where(is_filled, jnp.square(scaled - mean), 0)
        deviation = jnp.sqrt(squares.sum() / jnp.maximum(filled - 1, 1))
        deviation = jnp.maximum(deviation, spike.min_deviation * jnp.abs(mean))
        limit = unit * (mean + spike.sigma * deviation)
        return jnp.where(self.count < spike.warmup, jnp.inf, limit)

    def judged(self, spike: Spike, value: jax.Array, accepted: jax.Array) -> Window:
        """Returns the window after a step."""
        is_finite = jnp.isfinite(value)
        enters = accepted & is_finite
        is_next = jnp.arange(spike.window) == self.count % spike.window
        values = jnp.where(enters & is_next, value, self.values)
        count = jnp.where(enters, optax.safe_increment(self.count), self.count)
        in_a_row = jnp.where(value > self.threshold(spike), self.rejected + 1, 0)
        rejected = jnp.where(is_finite, in_a_row, self.rejected)
        is_new_level = rejected >= spike.patience
        return Window(
            values, jnp.where(is_new_level, 0, count), jnp.where(is_new_level, 0, rejected)
        )


class Reason(enum.IntFlag):
    """Why a step was skipped; several may hold at once.

    Examples:
      >>> Reason(6)
      <Reason.LOSS|GRAD_NORM: 6>
    """

    NONFINITE = 1
    LOSS = 2
    GRAD_NORM = 4
    UPDATE_NORM = 8


class GuardState(NamedTuple):
    """The state of `guard`.

    Attributes:
      count: int32 scalar; steps, skipped ones included.
      skipped: int32 scalar; steps that were skipped.
      consecutive: int32 scalar; steps skipped in a row up to now.
      was_skipped: bool scalar; whether the last step was skipped.
      stuck: bool scalar; whether `consecutive` has reached `max_consecutive`.
      reason: int32 scalar; the `Reason` of the last skipped step, 0 if there was none.
      last_skipped: int32 scalar; the number of that step, counted from 0, or -1.
      loss: the `Window` of losses, or `None`.
      grad_norm: the `Window` of the gradients' norms, or `None`.
      update_norm: the `Window` of the updates' norms, or `None`.
      inner: the state of the optimizer.
    """

    count: Any
    skipped: Any
    consecutive: Any
    was_skipped: Any
    stuck: Any
    reason: Any
    last_skipped: Any
    loss: Any
    grad_norm: Any
    update_norm: Any
    inner: Any

    @staticmethod
    def describe_fields() -> dict[str, Any]:
        """Returns what the fields mean, as `opt_core.protocols.DescribesFields` asks."""
        counts = ("count", "skipped", "consecutive", "last_skipped")
        flags = ("was_skipped", "stuck", "reason", "loss")
        # Norms are over all parameters: with some of them gone, they are another number.
        norms = ("grad_norm", "update_norm")
        return {
            "roles": {
                **dict.fromkeys(counts, "count"),
                **dict.fromkeys(flags, "other"),
                **dict.fromkeys(norms, "statistic"),
            },
            "passes_on": True,
        }


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GuardReport:
    """What a guard has done, as scalars for logs: the fields of `GuardState` by the same names."""

    skipped: Any
    consecutive: Any
    was_skipped: Any
    stuck: Any
    reason: Any
    last_skipped: Any


def guard_states(state: Any) -> list[tuple[str, GuardState]]:
    """Returns the guards in a state with their paths, the outer ones first."""
    found = ((path_str(path), node) for path, node in walk(state))
    return [(path, node) for path, node in found if isinstance(node, GuardState)]


def report(state: Any) -> GuardReport:
    """Returns what the guard in a state has done; traceable.

    Args:
      state: the state of `guard`, or of an optimizer around it.

    Raises:
      OptionError: `state` does not contain exactly one guard.

    Examples:
      >>> import optax
      >>> from opt_accumulate import guard
      >>> tx = guard(optax.sgd(0.1), loss=None)
      >>> params = jnp.ones(2)
      >>> _, state = jax.jit(tx.apply)(params, tx.init(params), jnp.array([1.0, jnp.nan]))
      >>> found = report(state)
      >>> int(found.skipped), Reason(int(found.reason))
      (1, <Reason.NONFINITE: 1>)
    """
    states = guard_states(state)
    if len(states) != 1:
        paths = ", ".join(f"`{path}`" for path, _ in states)
        raise OptionError(
            f"`state` must hold one guard, found {len(states)}{': ' + paths if paths else ''}. "
            "Pass the state of one of them."
        )
    ((_, found),) = states
    names = (field.name for field in dataclasses.fields(GuardReport))
    return GuardReport(**{name: jnp.asarray(getattr(found, name)) for name in names})


def check_skips(state: Any, max_consecutive: int | None = None) -> None:
    """Raises if too many steps in a row have been skipped.

    Waits for the state: call it where metrics are read anyway, outside of compiled functions.

    Args:
      state: the state of a `guard`, or of an optimizer around it.
      max_consecutive: how many to tolerate; `None` for fewer than the guard's own limit.

    Raises:
      StuckError: there have been more.
      OptionError: `max_consecutive` is negative; `state` has no guard.

    Examples:
      >>> import optax
      >>> from opt_accumulate import guard
      >>> tx = guard(optax.sgd(0.1), loss=None)
      >>> params, state = jnp.ones(1), tx.init(jnp.ones(1))
      >>> step = jax.jit(tx.apply)
      >>> for _ in range(3):
      ...     params, state = step(params, state, jnp.array([jnp.nan]))
      >>> check_skips(state, 3)
      >>> check_skips(state, 2)
      Traceback (most recent call last):
      ...
      opt_accumulate.errors.StuckError: 3 steps in a row were skipped, ...
    """
    if max_consecutive is not None and max_consecutive < 0:
        raise OptionError(f"`max_consecutive` must not be negative, found {max_consecutive}.")
    guards = [guard for _, guard in guard_states(state)]
    if not guards:
        raise OptionError(
            "nothing in `state` counts the steps that were skipped in a row. Wrap the optimizer, "
            "or its `MultiSteps`, in `guard`."
        )
    scalars = jax.device_get([(guard.consecutive, guard.stuck) for guard in guards])
    number = max(int(consecutive) for consecutive, _ in scalars)
    is_stuck = any(bool(stuck) for _, stuck in scalars)
    if is_stuck if max_consecutive is None else number > max_consecutive:
        most = "that of the guard" if max_consecutive is None else max_consecutive
        raise StuckError(
            f"{number} steps in a row were skipped, and `max_consecutive` is {most}. Parameters "
            "and optimizer are as before them: go back to a checkpoint, to other data or to a "
            "smaller learning rate."
        )


NonFinite = Literal["skip", "apply"]

_DEFAULT = Spike()


def guard(
    tx: Any,
    *,
    loss: Spike | None = _DEFAULT,
    grad_norm: Spike | None = _DEFAULT,
    update_norm: Spike | None = None,
    nonfinite: NonFinite = "skip",
    max_consecutive: int | None = None,
) -> ParamsTransformation:
    """Skips steps whose loss, gradients or updates are spikes or not finite.

    A skipped step leaves the parameters and the state of `tx` bit for bit unchanged. The decision
    is made from scalars before any other work: skipping a step by `apply` costs one read of the
    gradients, for their norm or, with `grad_norm=None`, for whether all are finite. Only where the
    squares add up to infinity they are read once more, to tell large numbers from infinite ones.
    Values of skipped steps never enter the windows that later steps are compared with, so one NaN
    skips one step.

    Spikes in the norm of the updates precede those of the loss, but an update must be computed
    before it can be judged: with `update_norm`, a step skipped for it costs a full step, and every
    step needs memory for a second state.

    Args:
      tx: the optimizer: a gradient transformation, a `MultiSteps`, or anything with `init` and
        `apply`, whose `params` may be any tree that a step replaces.
      loss: what is a spike of the loss, which is then the argument `loss=` of `update` and `apply`,
        or the one that `Spike(argument=...)` names; `None` to ignore the loss, in loops that pass
        none.
      grad_norm: what is a spike of the global norm of the gradients; `None` to ignore it.
      update_norm: what is a spike of the global norm of the updates (in `apply`, of the change of
        `params`); `None` to ignore it.
      nonfinite: whether to `'skip'` or to `'apply'` a step whose loss is inf or NaN, or whose
        gradients or updates hold one; `'apply'` e.g. where `tx` scales losses.
      max_consecutive: after this many skipped steps in a row `report(state).stuck` is true, and
        `check_skips(state)` raises; `None` for never.

    Returns:
      A transformation with `init`, `update` and `apply`, whose state is a `GuardState`.

    Raises:
      OptionError: an argument is out of range.

    Examples:
      >>> tx = guard(optax.sgd(1.0), loss=Spike(warmup=2))
      >>> params = jnp.zeros(())
      >>> state = tx.init(params)
      >>> step = jax.jit(tx.apply)
      >>> for loss in (1.0, 1.1, 50.0, jnp.nan, 1.0):
      ...     params, state = step(params, state, jnp.ones(()), loss=loss)
      ...     print(float(params), bool(state.was_skipped))
      -1.0 False
      -2.0 False
      -2.0 True
      -2.0 True
      -3.0 False
    """
    check_choice("nonfinite", nonfinite, get_args(NonFinite))
    if max_consecutive is not None:
        check_integer("max_consecutive", max_consecutive, 1)
    judge = _Judge(loss, grad_norm, update_norm, nonfinite == "skip", max_consecutive)
    for name, spike in judge.spikes().items():
        if not isinstance(spike, Spike):
            raise OptionError(f"`{name}` must be a `Spike` or None, found {spike!r}.")
        if name != "loss" and spike.argument != "loss":
            raise OptionError(
                f"`{name}` is computed, not passed: its `Spike` takes no `argument`, found "
                f"{spike.argument!r}. Give it to the `Spike` of `loss`."
            )
    inner = InnerUpdate(tx)

    def init(params: Any) -> GuardState:
        return judge.init(inner.init(params))

    def update(
        grads: Any, state: GuardState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, GuardState]:
        step = inner.updating(grads, grads, state.inner, params, extra_args)
        return judge.judged(step, state, grads, extra_args)

    def apply(
        params: Any, state: GuardState, grads: Any, **extra_args: Any
    ) -> tuple[Any, GuardState]:
        step = inner.applying(grads, grads, state.inner, params, extra_args)
        return judge.judged(step, state, grads, extra_args)

    return ParamsTransformation(init, update, apply)


@dataclasses.dataclass(frozen=True)
class _Judge:
    """Decides which steps are made, and keeps the statistics."""

    loss: Spike | None
    grad_norm: Spike | None
    update_norm: Spike | None
    skips_nonfinite: bool
    max_consecutive: int | None

    def extra_arg_names(self, names: Iterable[str]) -> frozenset[str]:
        """Returns those of `names` that it takes from the extra arguments of an update."""
        return frozenset(names) & ({self.loss.argument} if self.loss is not None else set())

    def spikes(self) -> dict[str, Spike]:
        """Returns what is judged, by the names of a state's windows."""
        named = {"loss": self.loss, "grad_norm": self.grad_norm, "update_norm": self.update_norm}
        return {name: spike for name, spike in named.items() if spike is not None}

    def init(self, inner: Any) -> GuardState:
        """Returns the state before the first step."""
        windows = dict.fromkeys(("loss", "grad_norm", "update_norm"))
        windows |= {name: Window.empty(spike) for name, spike in self.spikes().items()}
        zeros = {name: jnp.int32(0) for name in ("count", "skipped", "consecutive", "reason")}
        flags = {name: jnp.array(False) for name in ("was_skipped", "stuck")}
        return GuardState(**zeros, **flags, last_skipped=jnp.int32(-1), **windows, inner=inner)

    def judged(
        self, step: Step, state: GuardState, grads: Any, extra_args: Mapping[str, Any]
    ) -> tuple[Any, GuardState]:
        """Returns the updates or parameters of a step, made or not, and the new state."""
        values = {}
        if self.grad_norm is not None:
            values["grad_norm"] = global_norm(grads)
        elif self.skips_nonfinite:
            values["grad_norm"] = jnp.where(all_finite(grads), 0.0, jnp.inf)
        if self.loss is not None:
            values["loss"] = _loss(self.loss.argument, extra_args)

        # The norm of an update that is not computed enters no window. (A NaN stops `debug_nans`.)
        norm, reason = jnp.float32(jnp.inf), self._reason(values, state)
        if self.update_norm is not None:
            axes = axes_of_types((reason, step.carry, grads))
            norm, reason = vary((norm, reason), axes)

        def body(carried: Any, operands: Any) -> Any:
            old, norm, reason = carried
            new = step.make(old, operands)
            if self.update_norm is not None:
                norm = vary(global_norm(_difference(new[0], old[0])), axes)
                reason = self._reason({"update_norm": norm}, state)
                new = jax.tree.map(functools.partial(_chosen, reason == 0), new, old)
            return new, norm, reason

        carried = step.carry, norm, reason
        _, (made, values["update_norm"], reason) = emit_if(
            reason == 0, body, carried, step.operands
        )
        windows = {
            name: getattr(state, name).judged(spike, values[name], reason == 0)
            for name, spike in self.spikes().items()
        }
        return made[0], self._counted(state._replace(inner=made[1], **windows), reason)

    def _reason(self, values: Mapping[str, jax.Array], state: GuardState) -> jax.Array:
        """Returns the `Reason` that these values are, 0 for none."""
        reason, spikes = jnp.int32(0), self.spikes()
        for name, value in values.items():
            finite = jnp.isfinite(value)
            if name in spikes:
                is_spike = finite & (value > getattr(state, name).threshold(spikes[name]))
                reason |= jnp.where(is_spike, Reason[name.upper()].value, 0)
            if self.skips_nonfinite:
                reason |= jnp.where(finite, 0, Reason.NONFINITE.value)
        return reason

    def _counted(self, state: GuardState, reason: jax.Array) -> GuardState:
        """Returns the state with one more step counted."""
        skip = reason != 0
        count = jnp.asarray(state.count)
        consecutive = jnp.where(skip, optax.safe_increment(state.consecutive), 0)
        most = self.max_consecutive
        return state._replace(
            count=optax.safe_increment(count),
            skipped=jnp.where(skip, optax.safe_increment(state.skipped), state.skipped),
            consecutive=consecutive,
            was_skipped=skip,
            stuck=jnp.zeros_like(skip) if most is None else consecutive >= most,
            reason=jnp.where(skip, reason, state.reason),
            last_skipped=jnp.where(skip, count, state.last_skipped),
        )


def _chosen(condition: jax.Array, new: Any, old: Any) -> Any:
    return put_beside(jnp.where(condition, on_device(new), on_device(old)), old)


def _difference(new: Any, old: Any) -> Any:
    """The update that was made, in float32 at least: differences of bfloat16 are coarse enough."""

    def leaf(new: Any, old: Any) -> Any:
        dtype = jnp.result_type(new)
        if not jnp.issubdtype(dtype, jnp.inexact):
            return jnp.zeros([], jnp.float32)
        wide = inexact(dtype)
        return jnp.asarray(new, wide) - jnp.asarray(old, wide)

    return jax.tree.map(leaf, new, old)


def _loss(argument: str, extra_args: Mapping[str, Any]) -> jax.Array:
    if argument not in extra_args:
        raise TypeError(
            f"`update` needs the argument `{argument}`: the guard judges it. Pass "
            f"`{argument}=...` in every step; of a loop that passes it by another name give that, "
            "`guard(tx, loss=Spike(argument=...))`; or build `guard(tx, loss=None)`. Passed are "
            f"{sorted(extra_args) or 'no extra arguments'}."
        )
    loss = extra_args[argument]
    if np.shape(loss) or jnp.iscomplexobj(loss):
        raise ValueError(
            f"`{argument}` must be a real scalar; found an array of shape "
            f"{np.shape(loss)} and dtype {jnp.result_type(loss)}."
        )
    return jnp.asarray(loss, jnp.float32)
