"""`Adafactor`, the optimizer definition: T5X's interface, state and checkpoint layout."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from opt_core import (
    Optimizer,
    OptimizerDef,
    OptimizerState,
    StateDescription,
    check_gradients,
    increment_step,
)
from opt_core.errors import HyperParamError

from opt_adafactor import _tensor
from opt_adafactor._axes import FactorMap, factor_rules_from_axes
from opt_adafactor._derived_axes import derive_logical_axes
from opt_adafactor._description import describe
from opt_adafactor._factor_rules import convert_logical_rules
from opt_adafactor._factoring import FactoringOptions, heuristic_dims, parse_rule
from opt_adafactor._hparam_map import HParamMap
from opt_adafactor._hyper_params import (
    _AdafactorHyperParams,
    check_hyper_params,
    check_overrides,
    check_static,
)
from opt_adafactor._inputs import at, check_slots, flatten_states, nest, put_slots
from opt_adafactor._inputs import learning_rate as learning_rate_of
from opt_adafactor._plan import Plan, Planner, missing_rule_hint
from opt_adafactor._state import (
    FLOAT32,
    _AdafactorParamState,
    init_slots,
    used_slots,
    with_placeholders,
)
from opt_adafactor._tree_update import clip_global_norm, make_scalars, update_tree, weight_decay
from opt_adafactor.errors import FactorRuleError


class Adafactor(OptimizerDef):
    """Adafactor as T5X has it: statistics factored over any dimensions of any parameter.

    Second moments of a parameter are kept as the means over its rows and over its columns; which
    dimensions those are, a rule says. The learning rate is relative to the parameter's root mean
    square, updates are clipped by theirs, and the decay of the second moments tends to 1.

    Immutable: `with_param_axes` returns a new definition. Definitions built the same way are equal
    and hash equal.

    Examples:
      >>> definition = Adafactor(learning_rate=0.1, min_dim_size_to_factor=2)
      >>> optimizer = definition.create({'w': jnp.ones((3, 2)), 'b': jnp.ones(3)})
      >>> jax.tree.map(lambda x: x.shape, optimizer.state.param_states['w'])
      _AdafactorParamState(v_row=(2,), v_col=(3,), v=(1,), m=(1,))
      >>> step = jax.jit(lambda o, g, lr: o.apply_gradient(g, learning_rate=lr))
      >>> optimizer = step(optimizer, optimizer.target, 0.5)
      >>> optimizer.target['b'].tolist(), int(optimizer.state.step)
      ([0.5, 0.5, 0.5], 1)
    """

    def __init__(
        self,
        learning_rate: Any = None,
        factored: bool = True,
        multiply_by_parameter_scale: bool | HParamMap = True,
        beta1: Any = None,
        decay_rate: Any = 0.8,
        step_offset: Any = 0,
        clipping_threshold: Any = 1.0,
        weight_decay_rate: Any = None,
        min_dim_size_to_factor: int = 128,
        epsilon1: Any = 1e-30,
        epsilon2: Any = 1e-3,
        dtype_momentum: Any = FLOAT32,
        factor_map: HParamMap | None = None,
        logical_factor_rules: Mapping[str, Any] | None = None,
        weight_decay_rate_lr_exponent: Any = None,
        global_norm_clip_threshold: Any = None,
        max_parameter_scale: Any = None,
        skip_nan_updates: bool | str = False,
        respect_rank2_rules: bool = False,
    ) -> None:
        """Takes the hyper-parameters; numbers among them may be overridden for one step.

        Args:
          learning_rate: a number, or a function from the step to one; `None` to give one with
            every step.
          factored: whether to factor at all. If not, batch dimensions count for nothing either.
          multiply_by_parameter_scale: whether the learning rate is relative to the root mean
            square of a parameter; a map answers by path.
          beta1: decay of a momentum of the scaled updates; `None` for none, and no memory for it.
          decay_rate: the second moments decay by `1 - (step + 1)**-decay_rate`.
          step_offset: the step that counts as 0 there: the one from which a run goes on with fresh
            statistics. Up to it the decay is 0.
          clipping_threshold: the largest root mean square of an update before it is scaled; `None`
            turns clipping off.
          weight_decay_rate: share of each parameter to take away in one step, not multiplied by
            the learning rate; `None` for none.
          min_dim_size_to_factor: without a rule, a matrix is factored if both of its dimensions
            have this size.
          epsilon1: added to squared gradients.
          epsilon2: the least parameter scale.
          dtype_momentum: what to keep the momentum in.
          factor_map: a `FactorRule` for each parameter, by path.
          logical_factor_rules: the `FactorDim` (or its name) of each logical axis name. They take
            effect with `with_param_axes` or `set_param_axes`, and go before `factor_map`.
          weight_decay_rate_lr_exponent: if given, the weight decay is
            `weight_decay_rate * learning_rate**exponent`, a rate of `None` counting as 1.
          global_norm_clip_threshold: the largest norm of all gradients together; `None` or 0 turns
            that off.
          max_parameter_scale: the largest parameter scale; `None` for no limit.
          skip_nan_updates: what to leave as it was where a step gives an inf or a NaN: nothing
            (False), those entries (True, as T5X does with NaN), every tensor that has one
            (`'tensor'`), or everything (`'global'`). The step counts in any case.
          respect_rank2_rules: whether explicit rules for rank 2 and less without a batch dimension
            hold. T5X ignores them, for one layout of checkpoints, and so does the default.

        Raises:
          ValueError: `factored` is false and there is a `factor_map`, or a value makes no sense.
          TypeError: an argument has another type.
          UnknownNameError: `logical_factor_rules` name no `FactorDim`; likewise `FactorRuleError`.
        """
        if not factored and factor_map is not None:
            raise ValueError(
                "`factored` is False, but there is a `factor_map`: give one or the other"
            )
        if factor_map is not None and not isinstance(factor_map, HParamMap):
            raise TypeError(
                "`factor_map` must be either None or `HParamMap` type, found "
                f"{type(factor_map).__name__}"
            )
        check_static(factored, min_dim_size_to_factor, dtype_momentum, respect_rank2_rules)
        if logical_factor_rules is not None:
            logical_factor_rules = convert_logical_rules(logical_factor_rules)
        hyper_params = _AdafactorHyperParams(
            learning_rate,
            factored,
            multiply_by_parameter_scale,
            beta1,
            decay_rate,
            step_offset,
            clipping_threshold,
            weight_decay_rate,
            min_dim_size_to_factor,
            epsilon1,
            epsilon2,
            factor_map,
            logical_factor_rules,
            weight_decay_rate_lr_exponent,
            global_norm_clip_threshold,
            max_parameter_scale,
            skip_nan_updates,
            respect_rank2_rules,
        )
        check_hyper_params(hyper_params)
        super().__init__(hyper_params)
        self.dtype_momentum = jax.dtypes.canonicalize_dtype(dtype_momentum)
        self._given_map = factor_map
        self._told: tuple[FactorMap, ...] = ()
        self._planner = self._new_planner()

    def with_param_axes(self, param_axes: Any) -> Self:
        """Returns a definition whose factor rules follow from logical axes.

        Args:
          param_axes: a tree like the parameters with a `PartitionSpec` of logical names per leaf;
            containers may be of another kind. A name may be `None` or a tuple of names, a leaf
            `None`.

        Raises:
          HyperParamError: there are no `logical_factor_rules`.
          UnknownNameError: they have no rule for a name.
          FactorRuleError: the names of a parameter make no rule.

        Examples:
          >>> from jax.sharding import PartitionSpec as P
          >>> scanned = {'wi': P('embed', 'layers', 'mlp')}
          >>> rules = {'embed': 'row', 'layers': 'batch', 'mlp': 'column'}
          >>> definition = Adafactor(logical_factor_rules=rules).with_param_axes(scanned)
          >>> state = definition.create({'wi': jnp.ones((16, 3, 24))}).state.param_states
          >>> state['wi'].v_row.shape, state['wi'].v_col.shape
          ((16, 3), (3, 24))
        """
        if self.hyper_params.logical_factor_rules is None:
            raise HyperParamError(
                "`with_param_axes` needs `logical_factor_rules`: they say what each axis name is. "
                "Give `standard_logical_factor_rules()` or your own."
            )
        definition = copy.copy(self)
        definition._tell((self._rules_of(param_axes),))
        return definition

    def set_param_axes(self, param_axes: Any) -> None:
        """Tells this definition the logical axes of a model, as T5X's trainer does.

        Prefer `with_param_axes`. Axes of several models may be told: those with the paths of the
        parameters at hand count. Without `logical_factor_rules` nothing happens.

        Args:
          param_axes: see `with_param_axes`.

        Raises:
          HyperParamError: other axes were told for the same parameters.
          UnknownNameError: as `with_param_axes` does; likewise `FactorRuleError`.
        """
        if self.hyper_params.logical_factor_rules is None:
            return
        rules = self._rules_of(param_axes)
        if rules in self._told:
            if self._told[-1] != rules:
                self._tell((*(told for told in self._told if told != rules), rules))
            return
        for told in self._told:
            if told.keys() == rules.keys():
                path = next(path for path in rules if rules[path] != told[path])
                raise HyperParamError(
                    "`set_param_axes`: these parameters were given axes before that lead to other "
                    f"rules: {told[path]} for `{path}`, now {rules[path]}. Use `with_param_axes`, "
                    "which returns a definition for each model."
                )
        self._tell((*self._told, rules))

    def init_state(self, params: Any) -> OptimizerState:
        """Returns zeros for `params`; see `OptimizerDef.init_state`.

        Raises:
          FactorRuleError: a parameter needs a rule and has none, or has one that does not fit.
          ParamAxesError: the axes that were told do not fit the parameters.
        """
        plan = self._plan(params)
        leaves = plan.treedef.flatten_up_to(params)
        dtype = None if self.hyper_params.beta1 is None else self.dtype_momentum
        states = [
            _AdafactorParamState(*with_placeholders(init_slots(leaf, factoring, dtype)))
            for leaf, factoring in zip(leaves, plan.factorings, strict=True)
        ]
        return OptimizerState(jnp.zeros([], jnp.int32), plan.treedef.unflatten(states))

    def update_hyper_params(self, **overrides: Any) -> Any:
        """Returns hyper-parameters for one update; see `OptimizerDef.update_hyper_params`.

        Raises:
          HyperParamError: a name is unknown, or cannot be overridden for one step.
        """
        hyper_params = super().update_hyper_params(**overrides)
        self._check_overrides(hyper_params)
        return hyper_params

    def resolve_hyper_params(
        self, hyper_params: Any, params: Any, state: OptimizerState, **extra_args: Any
    ) -> Any:
        """Returns `hyper_params` with the learning rate of the next step, if it is a schedule.

        Args:
          hyper_params: a dataclass like `self.hyper_params`.
          params: the parameters.
          state: the state that belongs to them.
          **extra_args: none are used.
        """
        del params, extra_args
        if not callable(hyper_params.learning_rate):
            return hyper_params
        return hyper_params.replace(learning_rate=learning_rate_of(hyper_params, state.step))

    def apply_gradient(
        self, hyper_params: Any, params: Any, state: OptimizerState, grads: Any
    ) -> tuple[Any, OptimizerState]:
        """Makes one update; see `OptimizerDef.apply_gradient`.

        Raises:
          HyperParamError: there is no learning rate, or an override that cannot be honoured.
          TreeMismatchError: gradients or states do not look like the parameters.
        """
        self._check_overrides(hyper_params)
        check_gradients(params, grads)
        plan = self._plan(params)
        has_momentum = hyper_params.beta1 is not None
        states = flatten_states(plan, state.param_states)
        rate = learning_rate_of(hyper_params, state.step)
        grads = clip_global_norm(
            plan.treedef.flatten_up_to(grads),
            hyper_params.global_norm_clip_threshold,
            spoils=bool(hyper_params.skip_nan_updates),
        )
        leaves = [jnp.asarray(p) for p in plan.treedef.flatten_up_to(params)]
        slots = [
            used_slots(s, f, has_momentum=has_momentum)
            for s, f in zip(states, plan.factorings, strict=True)
        ]
        check_slots(plan, leaves, slots, has_momentum=has_momentum)
        new_params, new_slots = update_tree(
            plan,
            make_scalars(hyper_params, state.step, rate),
            leaves,
            [jnp.asarray(g) for g in grads],
            slots,
            scale_by_param=hyper_params.multiply_by_parameter_scale,
            decays=[weight_decay(hyper_params, rate)] * len(states),
            skip=hyper_params.skip_nan_updates,
            finish=_tensor.subtract,
        )
        new_states = [put_slots(old, new) for old, new in zip(states, new_slots, strict=True)]
        unflatten = plan.treedef.unflatten
        return unflatten(new_params), OptimizerState(
            increment_step(state.step), unflatten(new_states)
        )

    def derive_logical_axes(self, optimizer: Optimizer, param_axes: Any) -> Optimizer:
        """Returns an optimizer whose leaves are logical axes instead of arrays.

        `v_row` has the parameter's axes without those of the column dimensions, `v_col` without
        those of the rows, `v` and `m` all of them. Unused slots and the step have `None`.

        Args:
          optimizer: an optimizer of this definition; only shapes are read.
          param_axes: a tree like the parameters with a `PartitionSpec` of logical names per leaf;
            containers may be of another kind.

        Raises:
          ParamAxesError: `param_axes` do not fit the parameters; lists the paths.
        """
        plan = self._plan(optimizer.target)
        has_momentum = self.hyper_params.beta1 is not None
        return derive_logical_axes(plan, optimizer, param_axes, has_momentum=has_momentum)

    def describe_state(self, params: Any, state: OptimizerState) -> StateDescription:
        """Returns what every leaf of the state means.

        `v_row` keeps all dimensions of its parameter but the column ones, `v_col` all but the row
        ones, `v` and `m` all. Unused slots keep none.

        Args:
          params: the parameters; arrays, tracers or `jax.ShapeDtypeStruct` leaves.
          state: the state that belongs to them.

        Examples:
          >>> from opt_core import describe_state
          >>> definition = Adafactor(learning_rate=0.1, min_dim_size_to_factor=2)
          >>> found = describe_state(definition.create({'w': jnp.ones((3, 3))}))
          >>> [(leaf.field, leaf.dimensions, leaf.role) for leaf in found.leaves[:2]]
          [(('v_row',), (0,), 'factored'), (('v_col',), (1,), 'factored')]
        """
        return describe(
            self._plan(params), self.hyper_params, params, state.param_states, self.dtype_momentum
        )

    # What T5X code calls besides, one parameter at a time.

    @staticmethod
    def _decay_rate_pow(i: Any, exponent: Any = 0.8) -> jax.Array:
        return _tensor.decay_rate_pow(i, exponent)

    def _parse_rule(
        self, rule: Any, shape: Any, path: str, fallback_to_heuristics: bool = True
    ) -> tuple[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]] | None]:
        options = self._planner.options
        if not fallback_to_heuristics:
            options = options._replace(respect_rank2_rules=True)
        found = parse_rule(rule, tuple(shape), path, options)
        return found.averaged, (found.rows, found.cols) if found.is_factored else None

    def _factored_dims(self, shape: Any) -> tuple[tuple[int], tuple[int]] | None:
        found = heuristic_dims(tuple(shape), self._planner.options)
        return None if found is None else ((found[0],), (found[1],))

    def init_param_state(self, param: Any, path: str) -> _AdafactorParamState:
        """Returns the state of one parameter, as `init_state` does of all.

        Args:
          param: the parameter.
          path: its `/`-joined keys.
        """
        state = self.init_state(nest(path, param)).param_states
        return at(state, path)  # type: ignore[no-any-return]

    def apply_param_gradient(
        self, step: Any, hyper_params: Any, param: Any, state: Any, grad: Any, path: str
    ) -> tuple[Any, _AdafactorParamState]:
        """Updates one parameter, as `apply_gradient` does all.

        Args:
          step: updates made before.
          hyper_params: the hyper-parameters.
          param: the parameter.
          state: its state.
          grad: its gradient.
          path: its `/`-joined keys.

        Returns:
          The new parameter and its new state.
        """
        params, grads, states = (nest(path, x) for x in (param, grad, state))
        new, new_state = self.apply_gradient(
            hyper_params, params, OptimizerState(step, states), grads
        )
        return at(new, path), at(new_state.param_states, path)

    def _rules_of(self, param_axes: Any) -> FactorMap:
        return factor_rules_from_axes(param_axes, self.hyper_params.logical_factor_rules)

    def _tell(self, told: tuple[FactorMap, ...]) -> None:
        self._told = told
        self.hyper_params = self.hyper_params.replace(factor_map=self._shown_map(told[-1]))
        self._planner = self._new_planner(self._planner.warned)

    def _shown_map(self, rules: FactorMap) -> Mapping[str, Any]:
        """What `hyper_params.factor_map` is after a telling; a facade may show another type."""
        return rules

    def _new_planner(self, warned: set[tuple[str, ...]] | None = None) -> Planner:
        hyper = self.hyper_params
        options = FactoringOptions(
            hyper.factored, hyper.min_dim_size_to_factor, hyper.respect_rank2_rules
        )
        return Planner(options, hyper.factor_map, self._told, warned)

    def _plan(self, params: Any) -> Plan:
        try:
            return self._planner.plan(params)
        except FactorRuleError as error:
            raise missing_rule_hint(error, self.hyper_params) from None

    def _check_overrides(self, hyper_params: Any) -> None:
        if hyper_params.factor_map in (self._given_map, *self._told):  # captured before a telling
            hyper_params = hyper_params.replace(factor_map=self.hyper_params.factor_map)
        check_overrides(self.hyper_params, hyper_params)

    def _identity(self) -> Any:
        return self.hyper_params, self.dtype_momentum, self._given_map, self._told

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in super().__getstate__().items() if k != "_planner"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._planner = self._new_planner()
