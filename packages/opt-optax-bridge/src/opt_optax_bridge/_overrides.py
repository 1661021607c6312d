"""Updates with arguments that are known at run time only.

The transformation is built and traced with the numbers as weakly typed scalars, as the Python
floats are that Optax expects there, so that nothing is promoted. The traced program tells whether
an argument acts at all; then it is run.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from opt_core.errors import HyperParamError, UnusedArgumentError

from opt_optax_bridge._program import Program, named, weakly_typed
from opt_optax_bridge._recipe import is_number
from opt_optax_bridge._signatures import named_arguments, takes_any_keyword
from opt_optax_bridge._stable_state import check_shapes

if TYPE_CHECKING:
    from opt_optax_bridge._wrapper import OptaxWrapper

_STAND_IN = 1.0
_IDLE = "it acts only when the state is created, not in an update"
_STRUCTURAL = "it decides a Python branch, shapes or structure"


@dataclasses.dataclass(frozen=True)
class UpdateArgs:
    """What a transformation's `update` is called with.

    Attributes:
      grads: gradients.
      state: the transformation's state.
      params: parameters.
      extra_args: keyword arguments: pytrees of arrays, functions, or anything static.
    """

    grads: Any
    state: Any
    params: Any
    extra_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def arrays(self) -> dict[str, Any]:
        """The extra arguments that can be traced."""
        return {name: value for name, value in self.extra_args.items() if _is_traceable(value)}

    @property
    def static(self) -> dict[str, Any]:
        """The extra arguments that cannot: functions, strings, flags."""
        return {name: value for name, value in self.extra_args.items() if name not in self.arrays}

    def operands(self, numbers: Mapping[str, Any]) -> tuple[Any, ...]:
        """Everything that is traced, the overriding numbers first."""
        return dict(numbers), self.arrays, self.grads, self.state, self.params


def _is_traceable(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(is_number(leaf) or hasattr(leaf, "shape") for leaf in leaves)


def changed_fields(own: Any, given: Any) -> dict[str, Any]:
    """Returns the fields of `given` that are not those of `own`."""
    fields = ((f.name, getattr(given, f.name)) for f in dataclasses.fields(own))
    return {name: value for name, value in fields if not _is_same(getattr(own, name), value)}


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, float) and isinstance(b, float) and a == b)


def overridden_update(
    definition: OptaxWrapper, overrides: Mapping[str, Any], args: UpdateArgs
) -> tuple[Any, Any]:
    """Returns what the transformation's `update` returns, with overrides and extra arguments.

    Args:
      definition: knows how to build the transformation.
      overrides: numbers or scalar arrays by hyper-parameter; a schedule in the place of one.
      args: what `update` is called with.

    Raises:
      HyperParamError: an override is no scalar, or cannot act at run time. Says which and why.
      UnusedArgumentError: an extra argument is not used by the transformation.
    """
    program = _checked(definition, overrides, args, schedules={})
    updates, state = program.run(*args.operands(_numbers(overrides)))
    return updates, state


def evaluated_schedules(
    definition: OptaxWrapper,
    overrides: Mapping[str, Any],
    args: UpdateArgs,
    schedules: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the value of each schedule in the update that `overridden_update` would make.

    Args:
      definition: knows how to build the transformation.
      overrides: see `overridden_update`; what that refuses is refused here.
      args: what `update` is called with.
      schedules: schedules by hyper-parameter, overriding ones included.

    Returns:
      A scalar per schedule; `None` for one that the update does not evaluate, NaN for one that it
      evaluates at different counts with different results. In a branch that this step does not take
      (`optax.MultiSteps`) it is what the branch would use.

    Raises:
      HyperParamError: see `overridden_update`; or a schedule has many values in one update.
    """
    program = _checked(definition, overrides, args, schedules)
    operands = args.operands(_numbers(overrides))
    values = {}
    for name in schedules:
        try:
            values[name] = _agreed(program.values(name, *operands))
        except LookupError as where:
            raise HyperParamError(_many_values_message(name, where)) from None
    return values


def _agreed(values: Sequence[Any]) -> Any:
    if len(values) < 2:
        return values[0] if values else None
    first = values[0]
    same = functools.reduce(jnp.logical_and, [first == value for value in values[1:]])
    return jnp.where(same, first, jnp.asarray(jnp.nan, first.dtype))


def overridable(definition: OptaxWrapper, args: UpdateArgs) -> tuple[str, ...]:
    """Returns the names of the hyper-parameters that can change at run time.

    Each is tried: with a traced value, the update must build, keep the structure of the state, and
    depend on the value.
    """
    names = [field.name for field in dataclasses.fields(definition.hyper_params)]
    _trace(definition, {}, args, args.static, {})  # raises what else is wrong, if anything is
    reasons = _reasons(definition, dict.fromkeys(names, _STAND_IN), args)
    return tuple(name for name in names if name not in reasons)


def overridable_in_general(definition: OptaxWrapper) -> tuple[str, ...]:
    """Returns what can be overridden for a matrix and a vector; all if that cannot be tried."""
    params = {"matrix": jnp.ones((4, 4)), "vector": jnp.ones(4)}
    try:
        state = jax.eval_shape(definition.init_state, params).param_states
        return overridable(definition, UpdateArgs(params, state, params))
    except Exception:
        return tuple(field.name for field in dataclasses.fields(definition.hyper_params))


def _numbers(overrides: Mapping[str, Any]) -> dict[str, jax.Array]:
    dtype = jnp.result_type(float)
    return {k: jnp.asarray(v, dtype) for k, v in overrides.items() if not callable(v)}


def _checked(
    definition: OptaxWrapper,
    overrides: Mapping[str, Any],
    args: UpdateArgs,
    schedules: Mapping[str, Any],
) -> Program:
    """Traces `(updates, state)`, in which every argument must act; schedules' values are named."""
    _check_values(definition, overrides)
    if overrides or schedules:
        definition.check_recipe()
    functions = {k: _Watched(value) for k, value in args.static.items() if callable(value)}
    try:
        program = _trace(definition, overrides, args, {**args.static, **functions}, schedules)
        _check_state(args, program)
    except Exception as error:
        if reasons := _reasons(definition, overrides, args):
            raise _cannot_act(definition, reasons, args) from error
        raise
    reached = {names[:2] for names in program.reached()}
    idle = {name: _IDLE for name in _numbers(overrides) if ("0", name) not in reached}
    if idle:
        raise _cannot_act(definition, idle, args)
    unused = [name for name in args.arrays if ("1", name) not in reached]
    called = {name for name, function in functions.items() if function.was_called}
    unused += [name for name in args.static if name not in called | _taken(definition, args)]
    if unused:
        raise UnusedArgumentError(_unused_message(definition, unused), unused)
    return program


def _taken(definition: OptaxWrapper, args: UpdateArgs) -> frozenset[str]:
    """The keywords that the transformation names, or hands on to a function that it is given."""
    functions = [value for value in args.static.values() if callable(value)]
    if any(takes_any_keyword(function) for function in functions):
        return frozenset(args.static)
    takers = [definition.optax_optimizer.update, *functions]
    return frozenset[str]().union(*map(named_arguments, takers))


def _trace(
    definition: OptaxWrapper,
    overrides: Mapping[str, Any],
    args: UpdateArgs,
    static_args: Mapping[str, Any],
    schedules: Mapping[str, Any],
) -> Program:
    static = {name: value for name, value in overrides.items() if callable(value)}

    def update(numbers: Any, arrays: Any, grads: Any, state: Any, params: Any) -> Any:
        naming = {name: _naming(name, schedule) for name, schedule in schedules.items()}
        weak = {name: weakly_typed(number) for name, number in numbers.items()}
        tx = definition.build({**static, **naming, **weak})
        return tx.update(grads, state, params, **arrays, **static_args)

    return Program.trace(update, *args.operands(_numbers(overrides)))


def _naming(name: str, schedule: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda count: named(name, schedule(count))


def _reasons(
    definition: OptaxWrapper, overrides: Mapping[str, Any], args: UpdateArgs
) -> dict[str, str]:
    """Tries each override alone; returns why those fail that do. Empty if the rest is to blame."""
    attempt = functools.partial(_reason_against, definition, args)
    if attempt({}) is not None:  # fails without any override as well
        return {}
    tried = ((name, attempt({name: value})) for name, value in overrides.items())
    return {name: reason for name, reason in tried if reason is not None}


def _reason_against(
    definition: OptaxWrapper, args: UpdateArgs, override: Mapping[str, Any]
) -> str | None:
    try:
        program = _trace(definition, override, args, args.static, {})
        _check_state(args, program)
    except Exception:
        return _STRUCTURAL
    reached = {names[:2] for names in program.reached()}
    return _IDLE if any(("0", name) not in reached for name in _numbers(override)) else None


def _check_state(args: UpdateArgs, program: Program) -> None:
    _, state = jax.tree.unflatten(program.output, program.jaxpr.out_avals)
    check_shapes(args.state, state)


def _check_values(definition: OptaxWrapper, overrides: Mapping[str, Any]) -> None:
    for name, value in overrides.items():
        own = getattr(definition.hyper_params, name)
        if is_number(value) or (callable(value) and callable(own)):
            continue
        found = f"shape {np.shape(value)}" if hasattr(value, "shape") else repr(value)
        raise HyperParamError(
            f"`{name}` must be a real number or a scalar array; got {found}. A schedule can "
            "replace only a schedule: otherwise build the optimizer with it."
        )


def _cannot_act(
    definition: OptaxWrapper, reasons: Mapping[str, str], args: UpdateArgs
) -> HyperParamError:
    lines = [f"`{name}` cannot be overridden at run time: {why}" for name, why in reasons.items()]
    allowed = ", ".join(f"`{name}`" for name in overridable(definition, args))
    return HyperParamError("; ".join(lines) + f". Of this optimizer these may be: {allowed}")


def _unused_message(definition: OptaxWrapper, names: Sequence[str]) -> str:
    listed = ", ".join(f"`{name}`" for name in names)
    valid = ", ".join(f"`{name}`" for name in overridable_in_general(definition))
    if definition.recipe is None:
        valid = "it has none: a wrapped constructor would, see `wrap_optax_optimizer`"
    return (
        f"{listed}: neither a hyper-parameter of this optimizer ({valid or 'it has none'}) nor an "
        "extra argument that its transformation uses"
    )


def _many_values_message(name: str, where: LookupError) -> str:
    return (
        f"`{name}` has no single value in this update: its schedule is evaluated inside a "
        f"`{where}`, for many counts at once"
    )


class _Watched:
    """A function argument that remembers whether it was called."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.__signature__ = inspect.signature(function)
        self._function = function
        self.was_called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.was_called = True
        return self._function(*args, **kwargs)
