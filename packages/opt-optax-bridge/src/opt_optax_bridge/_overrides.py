"""Updates with arguments that are known only at run time: built, traced and run with scalars.

These are weakly typed, like the Python floats that Optax expects, so that nothing is promoted.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.extend.core.primitives import convert_element_type_p
from jax.interpreters import partial_eval
from opt_core import OptimizerState
from opt_core.errors import HyperParamError, OptimizerError, StateChangedError
from opt_core.extend import differences, listed, strip_weak_type

from opt_optax_bridge._recipe import field_values, is_number
from opt_optax_bridge._signatures import accepted_keywords

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
        # Without parameters, as in a group that all have left, there is nothing to act on.
        if jax.tree.leaves(self.grads) and (idle := _idle(program, overrides)):
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


def float_dtype(value: Any) -> Any:
    """Returns the floating-point dtype in which a hyper-parameter is reported."""
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


# A state keeps structure, shapes, dtypes and weak types, so that a step compiles once.


def keep_avals(old: Any, new: Any) -> Any:
    """Returns the state after an update with the dtypes of the one before it, all strong."""
    check_shapes(old, new)

    def cast(before: Any, after: Any) -> Any:
        if getattr(after, "dtype", None) != before.dtype:
            return jnp.asarray(after, before.dtype)
        return strip_weak_type(after)

    return jax.tree.map(cast, old, new)


def same_shapes(old: Any, new: Any) -> bool:
    """Whether two pytrees have the same structure and their leaves the same shapes."""
    structures: list[Any] = [jax.tree.structure(old), jax.tree.structure(new)]
    shapes = [[np.shape(leaf) for leaf in jax.tree.leaves(tree)] for tree in (old, new)]
    return bool(structures[0] == structures[1]) and shapes[0] == shapes[1]


def check_shapes(old: Any, new: Any) -> None:
    """Raises a `StateChangedError` if structure or a shape differs; leaves may be abstract."""
    if same_shapes(old, new):
        return
    raise StateChangedError(
        "the transformation changed the structure or the shapes of its state:\n"
        + "\n".join(differences(old, new, lambda leaf: str(np.shape(leaf))))
        + "\nSuch a step cannot be compiled once, scanned or restored. Use a transformation that "
        "initialises its whole state, and gradients with the shapes of the parameters."
    )


# Traced functions whose dependencies can be inspected, and of which parts can be run.


_PREFIX = "opt_optax_bridge/"
_Values = Callable[[Sequence[Any]], Sequence[Any]]  # of variables, or positions of inputs


def named(name: str, value: Any) -> Any:
    """Returns `value`, marked with a name that the traced program shows."""
    return checkpoint_name(value, _PREFIX + name)


def weakly_typed(number: jax.Array) -> Any:
    """Returns a weakly typed scalar: like a Python number it does not promote others."""
    return convert_element_type_p.bind(
        number, new_dtype=number.dtype, weak_type=True, sharding=None
    )


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced function."""

    function: Callable[..., Any]  # compiled as part of its caller
    jaxpr: ClosedJaxpr  # its inputs are the leaves of the operands
    operands: Any  # the structure of the tuple of operands
    output: Any  # the structure of the result

    @classmethod
    def trace(cls, function: Callable[..., Any], *operands: Any) -> Program:
        """Traces `function` on operands."""
        jitted = jax.jit(function)
        traced = jitted.trace(*operands)
        jaxpr, output = traced.jaxpr, traced.out_info
        structure: Any = jax.tree.structure(operands)
        if len(jaxpr.in_avals) != structure.num_leaves:
            # It captures values of a trace around it, as a loss function does: JAX made inputs of
            # them. Here they are constants.
            jaxpr, output = jax.make_jaxpr(function, return_shape=True)(*operands)
        return cls(jitted, jaxpr, structure, jax.tree.structure(output))

    def reached(self) -> set[str]:
        """Returns the keys of the first operand, a dict, that the output depends on."""
        program = self.jaxpr.jaxpr
        _, used = partial_eval.dce_jaxpr(program, [True] * len(program.outvars))
        inputs: dict[str, bool] = jax.tree.unflatten(self.operands, used)[0]
        return {name for name, is_used in inputs.items() if is_used}

    def run(self, *operands: Any) -> Any:
        """Returns the output for operands; scalars are cast to the dtypes they were traced with."""
        # In a caller that is being traced the program becomes one call, which XLA inlines:
        # repeating its equations one by one takes half as long as tracing them. Otherwise it runs
        # operation by operation: each update is a new function, and would be compiled every time.
        if is_staged(operands):
            return self.function(*operands)
        return jax.tree.unflatten(self.output, _run(self.jaxpr, jax.tree.leaves(operands)))

    def values(self, name: str, *operands: Any) -> list[Any]:
        """Returns all values of that name, computing nothing else."""
        # They may be inside branches, compiled functions or loops; of a loop the first pass counts.
        leaves = jax.tree.leaves(operands)
        return list(_find(self.jaxpr, name, lambda places: [leaves[i] for i in places]))


def is_staged(operands: Any) -> bool:
    """Whether a caller that is being traced into a program will compile what is done with these."""
    return any(
        isinstance(leaf, partial_eval.DynamicJaxprTracer) for leaf in jax.tree.leaves(operands)
    )


def _run(program: ClosedJaxpr, leaves: Sequence[Any]) -> Sequence[Any]:
    cast = [
        leaf if isinstance(leaf, jax.Array) and leaf.shape else jnp.asarray(leaf, aval.dtype)
        for leaf, aval in zip(leaves, program.in_avals, strict=True)
    ]
    return list(jaxpr_as_fun(program)(*cast))


def _find(program: ClosedJaxpr, name: str, inputs: _Values) -> Iterator[Any]:
    """Yields the values of a name, reading only the inputs that they need."""
    jaxpr = program.jaxpr

    def values(outvars: Sequence[Any]) -> Sequence[Any]:
        unnamed = jaxpr.debug_info._replace(result_paths=None)
        whole = jaxpr.replace(outvars=list(outvars), debug_info=unnamed)
        part, used = partial_eval.dce_jaxpr(whole, [True] * len(outvars))
        places = [i for i, is_used in enumerate(used) if is_used]
        return _run(ClosedJaxpr(part, program.consts), inputs(places))

    for equation in jaxpr.eqns:
        if equation.params.get("name") == _PREFIX + name:
            yield strip_weak_type(jnp.asarray(values(equation.invars)[0]))
        for body in _bodies(equation):
            yield from _find(body, name, functools.partial(_of_body, body, equation, values))


def _of_body(body: ClosedJaxpr, equation: Any, values: _Values, places: Sequence[int]) -> Any:
    """Inputs of a body, which are the last operands of its equation."""
    operands = equation.invars[len(equation.invars) - len(body.jaxpr.invars) :]
    if any(operands[i].aval.shape != body.in_avals[i].shape for i in places):
        raise LookupError(equation.primitive.name)
    return values([operands[i] for i in places])


def _bodies(equation: Any) -> Iterator[ClosedJaxpr]:
    for value in equation.params.values():
        for body in value if isinstance(value, tuple | list) else (value,):
            if isinstance(body, ClosedJaxpr):
                yield body
            elif isinstance(body, Jaxpr):
                yield ClosedJaxpr(body, ())
