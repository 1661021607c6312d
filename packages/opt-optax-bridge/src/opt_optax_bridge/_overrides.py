"""Updates with arguments that are known only at run time.

The transformation is built and traced with the numbers as weakly typed scalars, like the Python
floats that Optax expects, so that nothing is promoted. The traced program shows whether an override
has an effect at all, and is then run:

    update = Update(opt_optax_bridge.adamw(1e-3), grads, state.param_states, params)
    updates, param_states = update.run({'learning_rate': traced})
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from opt_core import OptimizerState
from opt_core.errors import HyperParamError, OptimizerError
from opt_core.extend import listed

from opt_optax_bridge._arguments import changed_fields, field_values, is_number
from opt_optax_bridge._program import Program, named, weakly_typed
from opt_optax_bridge._signatures import accepted_keywords
from opt_optax_bridge._stable_state import check_shapes

if TYPE_CHECKING:
    from opt_optax_bridge._wrapper import OptaxWrapper

T = TypeVar("T")

_STAND_IN = 1.0
_IDLE = "it acts only when the state is created, not in an update"
_STRUCTURAL = "it decides a Python branch, shapes or structure"


@dataclasses.dataclass(frozen=True)
class Update:
    """One update of a definition, with overridden hyper-parameters."""

    definition: OptaxWrapper
    grads: Any
    state: Any  # the transformation's own
    params: Any
    extra_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    applies: bool = False  # call the transformation's `apply`, which returns parameters

    def run(self, overrides: Mapping[str, Any]) -> Any:
        """Returns the updates (with `applies` the parameters) and the state."""
        return self._checked(overrides, {}).run(*self._operands(overrides))

    def schedule_values(
        self, overrides: Mapping[str, Any], schedules: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns the value of each schedule in the update that `run` would make."""
        # `None` for one that the update does not evaluate, NaN for one that it evaluates at several
        # counts with different results. In a branch that this step does not take (of
        # `optax.MultiSteps`) it is the value that the branch would use.
        program = self._checked(overrides, schedules)
        value_of: dict[str, Any] = {}
        for name in schedules:
            try:
                values = program.values(name, *self._operands(overrides))
            except LookupError as where:
                raise HyperParamError(
                    f"`{name}` has no single value in this update: its schedule is evaluated "
                    f"inside a `{where}`, for many counts at once"
                ) from None
            value_of[name] = functools.reduce(_nan_unless_equal, values) if values else None
        return value_of

    def overridable(self) -> tuple[str, ...]:
        """Returns the names of the hyper-parameters that can change at run time."""
        names = field_values(self.definition.built_with)
        self._trace({}, {})  # raises any error that is not about overrides
        reasons = self._reasons(dict.fromkeys(names, _STAND_IN))
        return tuple(name for name in names if name not in reasons)

    @functools.cached_property
    def _arrays(self) -> dict[str, Any]:
        """The extra arguments that can be traced; functions, strings and flags cannot."""
        return {name: value for name, value in self.extra_args.items() if _is_traceable(value)}

    def _operands(self, overrides: Mapping[str, Any]) -> tuple[Any, ...]:
        """Everything that is traced, the overriding numbers first."""
        return _numbers(overrides), self._arrays, self.grads, self.state, self.params

    def _checked(self, overrides: Mapping[str, Any], schedules: Mapping[str, Any]) -> Program:
        """The traced update; every override must have an effect. Values of schedules are named."""
        self._check_values(overrides)
        if self.extra_args:
            update = self.definition.optax_optimizer.update
            if unknown := self.extra_args.keys() - accepted_keywords(update, self.extra_args):
                raise self.definition.unknown_names_error(sorted(unknown))
        if overrides or schedules:
            self.definition.check_recipe()
        try:
            program = self._trace(overrides, schedules)
            self._check_state(program)
        except Exception as error:
            if reasons := self._reasons(overrides):
                raise self._cannot_act(reasons) from error
            raise
        if idle := _idle(program, overrides):
            raise self._cannot_act(dict.fromkeys(idle, _IDLE))
        return program

    def _trace(self, overrides: Mapping[str, Any], schedules: Mapping[str, Any]) -> Program:
        by_schedules = {name: value for name, value in overrides.items() if callable(value)}
        static_args = {k: value for k, value in self.extra_args.items() if k not in self._arrays}

        def update(numbers: Any, arrays: Any, grads: Any, state: Any, params: Any) -> Any:
            naming = {name: _naming(name, schedule) for name, schedule in schedules.items()}
            tx = self.definition.build({**by_schedules, **naming, **numbers})
            if self.applies:
                return tx.apply(params, state, grads, **arrays, **static_args)
            return tx.update(grads, state, params, **arrays, **static_args)

        return Program.trace(update, *self._operands(overrides))

    def _reasons(self, overrides: Mapping[str, Any]) -> dict[str, str]:
        """The reason by override for those that fail alone; empty if another argument fails."""
        if self._reason({}) is not None:
            return {}
        reasons = ((name, self._reason({name: value})) for name, value in overrides.items())
        return {name: reason for name, reason in reasons if reason is not None}

    def _reason(self, override: Mapping[str, Any]) -> str | None:
        try:
            program = self._trace(override, {})
            self._check_state(program)
        except Exception:
            return _STRUCTURAL
        return _IDLE if _idle(program, override) else None

    def _check_state(self, program: Program) -> None:
        _, state = jax.tree.unflatten(program.output, program.jaxpr.out_avals)
        check_shapes(self.state, state)

    def _check_values(self, overrides: Mapping[str, Any]) -> None:
        for name, value in overrides.items():
            built_with = getattr(self.definition.built_with, name)
            if is_number(value) or (callable(value) and callable(built_with)):
                continue
            got = f"shape {np.shape(value)}" if hasattr(value, "shape") else repr(value)
            raise HyperParamError(
                f"`{name}` must be a real number or a scalar array; got {got}. A schedule can "
                "replace only a schedule: otherwise build the optimizer with it."
            )

    def _cannot_act(self, reasons: Mapping[str, str]) -> HyperParamError:
        lines = [
            f"`{name}` cannot be overridden at run time: {why}" for name, why in reasons.items()
        ]
        allowed = listed(self.overridable(), none="")
        return HyperParamError("; ".join(lines) + f". Of this optimizer these may be: {allowed}")


def resolve(
    definition: OptaxWrapper,
    hyper_params: Any,
    params: Any,
    state: OptimizerState,
    extra_args: Mapping[str, Any],
) -> Any:
    """Returns hyper-parameters with schedules as numbers; see `resolve_hyper_params`."""
    changed = changed_fields(definition.built_with, hyper_params)
    values, resolved = field_values(hyper_params), {}
    schedules = {name: value for name, value in values.items() if callable(value)}
    if schedules or changed or extra_args:
        resolved = ask(
            lambda update: update.schedule_values(changed, schedules),
            definition,
            params,
            state,
            extra_args,
        )
    numbers = {k: jnp.asarray(v, _float_dtype(v)) for k, v in values.items() if k not in schedules}
    return dataclasses.replace(hyper_params, **numbers, **resolved)


def ask(
    question: Callable[[Update], T],
    definition: OptaxWrapper,
    params: Any,
    state: OptimizerState,
    extra_args: Mapping[str, Any],
) -> T:
    """Inspects an update with zero gradients, on which no answer depends."""
    grads = jax.tree.map(jnp.zeros_like, params)
    update = Update(definition, grads, state.param_states, params, extra_args)
    try:
        return question(update)
    except OptimizerError:
        raise
    except Exception:
        examples = jax.tree.map(lambda g: g[None], grads)
        if not definition.takes_per_example_grads(params, state, examples):
            raise
        return question(dataclasses.replace(update, grads=examples))


def overridable_in_general(definition: OptaxWrapper) -> tuple[str, ...]:
    """Returns what can be overridden for a matrix and a vector; all names if trying fails."""
    params = {"matrix": jnp.ones((4, 4)), "vector": jnp.ones(4)}
    try:
        state = jax.eval_shape(definition.init_state, params).param_states
        return Update(definition, params, state, params).overridable()
    except Exception:
        return tuple(field_values(definition.built_with))


def _is_traceable(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(is_number(leaf) or hasattr(leaf, "shape") for leaf in leaves)


def _numbers(overrides: Mapping[str, Any]) -> dict[str, jax.Array]:
    dtype = jnp.result_type(float)
    return {k: weakly_typed(jnp.asarray(v, dtype)) for k, v in overrides.items() if not callable(v)}


def _float_dtype(value: Any) -> Any:
    dtype = jax.dtypes.canonicalize_dtype(getattr(value, "dtype", np.dtype(float)))
    return dtype if jnp.issubdtype(dtype, jnp.floating) else jnp.result_type(float)


def _idle(program: Program, overrides: Mapping[str, Any]) -> list[str]:
    """The overrides that the result does not depend on."""
    reached = program.reached()
    return [name for name in _numbers(overrides) if name not in reached]


def _nan_unless_equal(value: Any, again: Any) -> Any:
    """The value of a schedule that is evaluated several times; NaN if the results differ."""
    return jnp.where(value == again, value, jnp.asarray(jnp.nan, value.dtype))


def _naming(name: str, schedule: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda count: named(name, schedule(count))
