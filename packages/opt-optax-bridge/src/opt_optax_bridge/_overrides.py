"""Updates with arguments that are known at run time only.

The transformation is built and traced with stand-ins for the numbers: weakly typed scalars, as the
Python floats are that Optax expects there, so that nothing is promoted. The traced program is then
evaluated with the numbers themselves. It also tells whether an argument acts at all.
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
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from opt_core import path_names
from opt_core.errors import HyperParamError

from opt_optax_bridge._recipe import is_number
from opt_optax_bridge._stable_state import same_shapes

if TYPE_CHECKING:
    from opt_optax_bridge._wrapper import OptaxWrapper

_STAND_IN = 1.0


def changed_fields(own: Any, given: Any) -> dict[str, Any]:
    """Returns the fields of `given` that are not those of `own`."""
    fields = ((f.name, getattr(given, f.name)) for f in dataclasses.fields(own))
    return {name: value for name, value in fields if not _is_same(getattr(own, name), value)}


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, float) and isinstance(b, float) and a == b)


def traced_update(
    definition: OptaxWrapper,
    overrides: Mapping[str, Any],
    extra_args: Mapping[str, Any],
    grads: Any,
    state: Any,
    params: Any,
) -> tuple[Any, Any]:
    """Returns what the transformation's `update` returns, with overrides and extra arguments.

    Args:
      definition: knows how to build the transformation.
      overrides: numbers or scalar arrays by hyper-parameter; a schedule in the place of one.
      extra_args: keyword arguments of `update`: pytrees of arrays, or functions.
      grads: gradients, as `update` takes them.
      state: the transformation's state.
      params: parameters.

    Raises:
      HyperParamError: an override is no scalar, or cannot act at run time; an extra argument is
        not used by the transformation. Says which and why.
    """
    _check_values(definition, overrides)
    numbers = {name: value for name, value in overrides.items() if not callable(value)}
    schedules = {name: value for name, value in overrides.items() if callable(value)}
    functions = {k: _Watched(v) for k, v in extra_args.items() if callable(v)}
    arrays = {k: v for k, v in extra_args.items() if k not in functions}

    def update(numbers: Any, arrays: Any, grads: Any, state: Any, params: Any) -> Any:
        tx = definition.build({**numbers, **schedules})
        return tx.update(grads, state, params, **arrays, **functions)

    operands = (dict.fromkeys(numbers, _STAND_IN), arrays, grads, state, params)
    try:
        program, out = jax.make_jaxpr(update, return_shape=True)(*operands)
    except Exception as error:
        reasons = _reasons(definition, overrides, extra_args, grads, state, params)
        if reasons:
            raise _cannot_act(definition, reasons, extra_args, grads, state, params) from error
        raise
    reached = _reached_inputs(program, operands)
    idle = {name: _IDLE for name in numbers if (0, name) not in reached}
    if idle:
        raise _cannot_act(definition, idle, extra_args, grads, state, params)
    unused = [name for name in arrays if (1, name) not in reached]
    unused += [name for name, function in functions.items() if not function.was_called]
    if unused:
        raise HyperParamError(_unused_message(definition, unused))
    results = evaluate(program, jax.tree.leaves((numbers, *operands[1:])))
    updates, new_state = jax.tree.unflatten(jax.tree.structure(out), results)
    return updates, new_state


def evaluate(program: ClosedJaxpr, leaves: Sequence[Any]) -> list[Any]:
    """Runs a traced program on leaves, scalars cast to the dtypes it was traced with."""
    cast = [
        leaf if isinstance(leaf, jax.Array) and leaf.shape else jnp.asarray(leaf, aval.dtype)
        for leaf, aval in zip(leaves, program.in_avals, strict=True)
    ]
    return list(jaxpr_as_fun(program)(*cast))


def overridable(
    definition: OptaxWrapper, extra_args: Mapping[str, Any], grads: Any, state: Any, params: Any
) -> tuple[str, ...]:
    """Returns the names of the hyper-parameters that can change at run time.

    Each is tried: with a traced value, the update must build, keep the structure of the state, and
    depend on the value.
    """
    names = [field.name for field in dataclasses.fields(definition.hyper_params)]
    stand_ins = dict.fromkeys(names, _STAND_IN)
    reasons = _reasons(definition, stand_ins, extra_args, grads, state, params)
    return tuple(name for name in names if name not in reasons)


_IDLE = "it acts only when the state is created, not in an update"
_STRUCTURAL = "it decides a Python branch, shapes or structure"


def _reasons(
    definition: OptaxWrapper,
    overrides: Mapping[str, Any],
    extra_args: Mapping[str, Any],
    grads: Any,
    state: Any,
    params: Any,
) -> dict[str, str]:
    """Tries each override alone; returns why those fail that do. Empty if the rest is to blame."""
    attempt = functools.partial(
        _reason_against, definition, extra_args=extra_args, operands=(grads, state, params)
    )
    if attempt(None) is not None:  # fails without any override as well
        return {}
    tried = ((name, attempt(name, overrides[name])) for name in overrides)
    return {name: reason for name, reason in tried if reason is not None}


def _reason_against(
    definition: OptaxWrapper,
    name: str | None,
    value: Any = None,
    *,
    extra_args: Mapping[str, Any],
    operands: tuple[Any, Any, Any],
) -> str | None:
    numbers = {} if name is None or callable(value) else {name: _STAND_IN}
    schedules = {name: value} if name is not None and callable(value) else {}

    def update(numbers: Any, grads: Any, state: Any, params: Any) -> Any:
        tx = definition.build({**numbers, **schedules})
        return tx.update(grads, state, params, **extra_args)

    try:
        program, (_, new_state) = jax.make_jaxpr(update, return_shape=True)(numbers, *operands)
    except Exception:
        return _STRUCTURAL
    if not same_shapes(operands[1], new_state):
        return _STRUCTURAL
    if numbers and (0, name) not in _reached_inputs(program, (numbers, *operands)):
        return _IDLE
    return None


def _reached_inputs(program: ClosedJaxpr, operands: tuple[Any, ...]) -> set[tuple[int, str]]:
    """Returns the position of every operand that an output depends on, with its keys if a dict."""
    needed = needed_variables(program, program.jaxpr.outvars)
    paths = [path_names(path) for path, _ in jax.tree_util.tree_leaves_with_path(operands)]
    return {
        (int(names[0]), names[1] if len(names) > 1 else "")
        for names, variable in zip(paths, program.jaxpr.invars, strict=True)
        if variable in needed
    }


def needed_variables(program: ClosedJaxpr, outputs: Sequence[Any]) -> set[Any]:
    """Returns the variables of a traced program that `outputs` depend on."""
    needed = {out for out in outputs if not isinstance(out, Literal)}
    for equation in reversed(program.jaxpr.eqns):
        if any(out in needed for out in equation.outvars):
            needed.update(v for v in equation.invars if not isinstance(v, Literal))
    return needed


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
    definition: OptaxWrapper, reasons: Mapping[str, str], *context: Any
) -> HyperParamError:
    lines = [f"`{name}` cannot be overridden at run time: {why}" for name, why in reasons.items()]
    allowed = ", ".join(f"`{name}`" for name in overridable(definition, *context))
    return HyperParamError("; ".join(lines) + f". Of this optimizer these may be: {allowed}")


def _unused_message(definition: OptaxWrapper, names: Sequence[str]) -> str:
    listed = ", ".join(f"`{name}`" for name in names)
    valid = ", ".join(f"`{field.name}`" for field in dataclasses.fields(definition.hyper_params))
    return (
        f"{listed}: neither a hyper-parameter of this optimizer ({valid or 'it has none'}) nor an "
        "extra argument that its transformation uses"
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
