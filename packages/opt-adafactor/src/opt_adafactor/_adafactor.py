"""The optimizer definition `Adafactor`, with T5X's interface, state and checkpoint layout."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from opt_core import (
    OptimizerDef,
    OptimizerState,
    StateDescription,
)
from opt_core.errors import HyperParamError
from opt_core.extend import split_path

from opt_adafactor._factoring import heuristic_dims, init_plan, make_plan, parse_rule
from opt_adafactor._hyper_params import _AdafactorHyperParams, check_hyper_params, check_overrides
from opt_adafactor._rules import HParamMap, convert_logical_rules, factor_rules_from_axes
from opt_adafactor._state import (
    FLOAT32,
    _AdafactorParamState,
    describe,
    init_states,
)
from opt_adafactor._update import decay_rate_pow, learning_rate_of, update_tree


class Adafactor(OptimizerDef):
    """T5X's generalized Adafactor: factored second moments for parameters of any rank.

    The second moments of a parameter are stored as row and column means; a factor rule says which
    dimensions are rows, columns or batch. With `beta2 = 1 - (step + 1)**-decay_rate`, an update of
    a factored parameter `p` with gradient `g` is

    ```
    q = g**2 + epsilon1
    v_row <- beta2 * v_row + (1 - beta2) * mean(q, columns)
    v_col <- beta2 * v_col + (1 - beta2) * mean(q, rows)
    u = g / sqrt(v_row / mean(v_row, rows)) / sqrt(v_col)
    u = u / max(1, rms(u) / clipping_threshold)
    p <- p - learning_rate * max(rms(p), epsilon2) * u
    ```

    and with `v <- beta2 * v + (1 - beta2) * q` and `u = g / sqrt(v)` for a parameter that is not
    factored.

    Instances are immutable except for `set_param_axes`. Those with the same arguments are equal.

    Examples:
      >>> definition = Adafactor(learning_rate=0.1, min_dim_size_to_factor=2)
      >>> optimizer = definition.create({'w': jnp.ones((3, 2)), 'b': jnp.ones(3)})
      >>> jax.tree.map(lambda x: x.shape, optimizer.state.param_states['w'])
      _AdafactorParamState(v_row=(2,), v_col=(3,), v=(1,), m=(1,))
      >>> step = jax.jit(lambda o, g, lr: o.apply_gradient(g, learning_rate=lr))
      >>> optimizer = step(optimizer, optimizer.target, 0.5)
      >>> optimizer.target['b'].tolist(), int(optimizer.state.step)
      ([0.5, 0.5, 0.5], 1)

    References:
      Shazeer and Stern, `Adafactor: Adaptive Learning Rates with Sublinear Memory Cost`, 2018,
      https://arxiv.org/abs/1804.04235; generalized to factor rules in T5X
      (https://github.com/google-research/t5x).
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
        skip_nan_updates: bool = False,
        respect_rank2_rules: bool = False,
    ) -> None:
        """Creates a definition; numeric hyper-parameters can be overridden in each step.

        Args:
          learning_rate: a number or a function of the step; `None` to pass one with every step.
          factored: whether to factor at all. If not, batch dimensions are ignored too.
          multiply_by_parameter_scale: whether the learning rate is relative to the root mean square
            of each parameter; an `HParamMap` decides by path.
          beta1: decay rate of the momentum of the scaled updates; `None` for no momentum.
          decay_rate: exponent of the decay of the second moments.
          step_offset: step that counts as 0 in the decay, e.g. when fine-tuning starts with fresh
            statistics. Up to this step the decay is 0.
          clipping_threshold: maximum root mean square of an update before scaling; `None` disables
            clipping.
          weight_decay_rate: fraction subtracted from each parameter per step, not multiplied by the
            learning rate.
          min_dim_size_to_factor: without a rule, a matrix is factored if both dimensions are at
            least this large.
          epsilon1: added to squared gradients.
          epsilon2: minimum parameter scale.
          dtype_momentum: dtype of the momentum.
          factor_map: the `FactorRule` of each parameter, by path.
          logical_factor_rules: the `FactorDim` (or its name) of each logical axis name. They take
            effect with `with_param_axes` or `set_param_axes`, before `factor_map`.
          weight_decay_rate_lr_exponent: if given, the weight decay is
            `weight_decay_rate * learning_rate**exponent`, where a rate of `None` counts as 1.
          global_norm_clip_threshold: maximum global norm of the gradients; `None` or 0 disables
            clipping by global norm.
          max_parameter_scale: maximum parameter scale; `None` for no limit.
          skip_nan_updates: whether entries of parameters and statistics that a step would make inf
            or NaN stay as they are; the step is counted all the same.
          respect_rank2_rules: whether to apply explicit rules to parameters of rank 2 and below
            that have no batch dimension. T5X ignores them to keep a single checkpoint layout, and
            so does the default.

        Raises:
          ValueError: `factored` is False but `factor_map` is given, or a value is out of range.
          TypeError: an argument has the wrong type.
          UnknownNameError: `logical_factor_rules` use an unknown `FactorDim` name.
          FactorRuleError: a value of `logical_factor_rules` is not a `FactorDim`.
        """
        arguments = dict(locals())
        if not factored and factor_map is not None:
            raise ValueError(
                "`factored` is False, but `factor_map` is given: pass only one of them"
            )
        if factor_map is not None and not isinstance(factor_map, HParamMap):
            raise TypeError(
                "`factor_map` must be either None or `HParamMap` type, found "
                f"{type(factor_map).__name__}"
            )
        if not jnp.issubdtype(dtype_momentum, jnp.floating):
            raise TypeError(
                f"`dtype_momentum` must be a floating-point dtype, found {dtype_momentum}"
            )
        if logical_factor_rules is not None:
            arguments["logical_factor_rules"] = convert_logical_rules(logical_factor_rules)
        names = [field.name for field in dataclasses.fields(_AdafactorHyperParams)]
        hyper_params = _AdafactorHyperParams(**{name: arguments[name] for name in names})
        check_hyper_params(hyper_params)
        super().__init__(hyper_params)
        self.dtype_momentum = jax.dtypes.canonicalize_dtype(dtype_momentum)
        self._own_map = factor_map

    def with_param_axes(self, param_axes: Any) -> Self:
        """Returns a definition whose factor rules are derived from logical axes.

        Args:
          param_axes: a tree with the keys of the parameters and a `PartitionSpec` of logical axis
            names, or `None`, per leaf; container types may differ. Each entry of a spec is a name,
            a tuple of names or `None`.

        Raises:
          HyperParamError: the definition has no `logical_factor_rules`.
          UnknownNameError: `logical_factor_rules` have no rule for an axis name.
          FactorRuleError: the axis names of a parameter do not form a valid rule.

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
                "`with_param_axes` needs `logical_factor_rules`, which map axis names to factor "
                "dimensions. Pass `standard_logical_factor_rules()` or your own to `Adafactor`."
            )
        definition = copy.copy(self)
        definition.hyper_params = self._with_rules_of(param_axes)
        return definition

    def set_param_axes(self, param_axes: Any) -> None:
        """Sets the logical axes of the model in place, as T5X's trainer does.

        Prefer `with_param_axes`. Does nothing without `logical_factor_rules`.

        Args:
          param_axes: see `with_param_axes`.

        Raises:
          HyperParamError: different axes were set before.
          UnknownNameError: see `with_param_axes`.
          FactorRuleError: see `with_param_axes`.
        """
        if self.hyper_params.logical_factor_rules is None:
            return
        hyper_params = self._with_rules_of(param_axes)
        if self.hyper_params.factor_map not in (self._own_map, hyper_params.factor_map):
            raise HyperParamError(
                "`set_param_axes` was called before with different axes. Use `with_param_axes`, "
                "which returns a new definition for each model."
            )
        self.hyper_params = hyper_params

    def init_state(self, params: Any) -> OptimizerState:
        """Returns the initial state, all zeros; see `OptimizerDef.init_state`.

        Raises:
          FactorRuleError: a parameter has no rule but needs one, or its rule does not fit.
          ParamAxesError: the axes passed to `with_param_axes` do not match the parameters.
        """
        plan = init_plan(params, self.hyper_params)
        states = init_states(plan, params, self.dtype_momentum)
        return OptimizerState(jnp.zeros([], jnp.int32), plan.treedef.unflatten(states))

    def update_hyper_params(self, **overrides: Any) -> Any:
        """Returns the hyper-parameters of one update; see `OptimizerDef.update_hyper_params`.

        Raises:
          HyperParamError: a name is unknown, or cannot be overridden in a step.
        """
        return self._checked(super().update_hyper_params(**overrides))

    def resolve_hyper_params(
        self, hyper_params: Any, params: Any, state: OptimizerState, **extra_args: Any
    ) -> Any:
        """Returns `hyper_params` with the learning rate of the next step, if it is a schedule."""
        del params, extra_args
        if not callable(hyper_params.learning_rate):
            return hyper_params
        return hyper_params.replace(learning_rate=learning_rate_of(hyper_params, state.step))

    def apply_gradient(
        self, hyper_params: Any, params: Any, state: OptimizerState, grads: Any
    ) -> tuple[Any, OptimizerState]:
        """Applies one update; see `OptimizerDef.apply_gradient`.

        Raises:
          HyperParamError: no learning rate is given, or a hyper-parameter cannot be overridden.
          TreeMismatchError: gradients or state do not match the parameters.
        """
        return update_tree(self._checked(hyper_params), params, state, grads)

    def describe_state(self, params: Any, state: OptimizerState) -> StateDescription:
        """Returns a description of every leaf of the state; see `OptimizerDef.describe_state`.

        `v_row` keeps all dimensions of its parameter except the columns, `v_col` all except the
        rows, `v` and `m` all of them. Unused slots keep none.

        Examples:
          >>> from opt_core import describe_state
          >>> definition = Adafactor(learning_rate=0.1, min_dim_size_to_factor=2)
          >>> found = describe_state(definition.create({'w': jnp.ones((3, 3))}))
          >>> [(leaf.field, leaf.dimensions, leaf.role) for leaf in found.leaves[:2]]
          [(('v_row',), (0,), 'factored'), (('v_col',), (1,), 'factored')]
        """
        plan = make_plan(params, self.hyper_params)
        return describe(plan, self.hyper_params, params, state.param_states, self.dtype_momentum)

    # Per-parameter methods that T5X code and its tests call directly.

    @staticmethod
    def _decay_rate_pow(i: Any, exponent: Any = 0.8) -> jax.Array:
        return decay_rate_pow(i, exponent)

    def _parse_rule(
        self, rule: Any, shape: Any, path: str, fallback_to_heuristics: bool = True
    ) -> tuple[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]] | None]:
        hyper_params = self.hyper_params
        if not fallback_to_heuristics:
            hyper_params = hyper_params.replace(respect_rank2_rules=True)
        found = parse_rule(rule, tuple(shape), path, hyper_params)
        return found.averaged, (found.rows, found.cols) if found.is_factored else None

    def _factored_dims(self, shape: Any) -> tuple[tuple[int], tuple[int]] | None:
        dims = heuristic_dims(tuple(shape), self.hyper_params)
        return None if dims is None else ((dims[0],), (dims[1],))

    def init_param_state(self, param: Any, path: str) -> _AdafactorParamState:
        """Returns the initial state of a single parameter, by its `/`-joined keys."""
        keys = split_path(path)
        states = self.init_state(unflatten_dict({keys: param})).param_states
        return flatten_dict(states)[keys]  # type: ignore[no-any-return]

    def apply_param_gradient(
        self, step: Any, hyper_params: Any, param: Any, state: Any, grad: Any, path: str
    ) -> tuple[Any, _AdafactorParamState]:
        """Returns a single parameter, by its `/`-joined keys, and its state after one update."""
        keys = split_path(path)
        params, grads, states = (unflatten_dict({keys: x}) for x in (param, grad, state))
        before = OptimizerState(step, states)
        new, after = self.apply_gradient(hyper_params, params, before, grads)
        return flatten_dict(new)[keys], flatten_dict(after.param_states)[keys]

    def _with_rules_of(self, param_axes: Any) -> Any:
        rules = factor_rules_from_axes(param_axes, self.hyper_params.logical_factor_rules)
        return self.hyper_params.replace(factor_map=rules)

    def _checked(self, hyper_params: Any) -> Any:
        own, rules = self.hyper_params, hyper_params.factor_map
        if rules is not own.factor_map and rules == self._own_map:  # from before `set_param_axes`
            hyper_params = hyper_params.replace(factor_map=own.factor_map)
        check_overrides(own, hyper_params)
        return hyper_params

    def _identity(self) -> Any:
        return self.hyper_params, self.dtype_momentum
