"""The names of `t5x.adafactor`, so that T5X code runs with only its import line changed.

The arithmetic, the state and the checkpoint layout are those of `opt_adafactor`, which have always
been T5X's. `Adafactor` here differs where T5X code relies on what T5X does, and only there:

* `derive_logical_axes` gives the factored statistics no axes, so they are replicated;
* after `set_param_axes`, `hyper_params.factor_map` is a plain dict;
* `restore_state` takes parameters in another precision (T5X saves and restores them in bfloat16 on
  request), and partition specs or `None` in the place of any leaf.

Where no T5X code stands between, prefer `opt_adafactor.Adafactor`: its factored statistics lie as
the parameters do, and no partitioner has to add axes to them afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opt_core import Optimizer, OptimizerDef, OptimizerState, RestoreReport
from opt_core.errors import HyperParamError
from opt_core.t5x import lenient_references

from opt_adafactor import _adafactor
from opt_adafactor._axes import FactorMap
from opt_adafactor._factor_rules import (
    HEURISTIC_RULE,
    FactorDim,
    FactorRule,
    HeuristicRule,
    factor_name_to_factordim,
    standard_logical_factor_rules,
)
from opt_adafactor._hparam_map import HParamMap
from opt_adafactor._hyper_params import _AdafactorHyperParams as _AdafactorHyperParams
from opt_adafactor._plan import Plan
from opt_adafactor._state import _AdafactorParamState as _AdafactorParamState

__all__ = [
    "HEURISTIC_RULE",
    "Adafactor",
    "FactorDim",
    "FactorRule",
    "HParamMap",
    "HeuristicRule",
    "OptimizerDef",
    "OptimizerState",
    "factor_name_to_factordim",
    "standard_logical_factor_rules",
]


class Adafactor(_adafactor.Adafactor):
    """`opt_adafactor.Adafactor` with the axes, the `factor_map` and the leniencies of T5X.

    It takes the same arguments and makes the same updates; a checkpoint of one restores into the
    other.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> rules = {'vocab': FactorDim.COLUMN, 'embed': FactorDim.ROW}
      >>> definition = Adafactor(0.1, min_dim_size_to_factor=2, logical_factor_rules=rules)
      >>> axes = {'w': P('vocab', 'embed')}
      >>> definition.set_param_axes(axes)
      >>> definition.hyper_params.factor_map
      {'w': (<FactorDim.COLUMN: 3>, <FactorDim.ROW: 2>)}
      >>> optimizer = definition.create({'w': jnp.ones((4, 3))})
      >>> definition.derive_logical_axes(optimizer, axes).state.param_states['w']
      _AdafactorParamState(v_row=None, v_col=None, v=None, m=None)
    """

    def derive_logical_axes(self, optimizer: Optimizer, param_axes: Any) -> Optimizer:
        """Returns an optimizer whose leaves are logical axes instead of arrays, as T5X has them.

        `v_row` and `v_col` have none. `v` has the parameter's axes unless its shape is `(1,)`,
        which is that of an unused slot; `m` has them if `beta1` is neither `None` nor 0. The step
        has none.

        Args:
          optimizer: an optimizer of this definition; only shapes are read.
          param_axes: a tree like the parameters with a `PartitionSpec` of logical names per leaf;
            containers may be of another kind.

        Raises:
          ParamAxesError: `param_axes` do not fit the parameters; lists the paths.
        """
        derived = super().derive_logical_axes(optimizer, param_axes)
        treedef = self._plan(optimizer.target).treedef
        rows = zip(
            treedef.flatten_up_to(optimizer.state.param_states),
            treedef.flatten_up_to(derived.target),
            strict=True,
        )
        has_axes_of_m = bool(self.hyper_params.beta1)
        states = [
            _AdafactorParamState(
                v_row=None,
                v_col=None,
                v=None if state.v.shape == (1,) else spec,
                m=spec if has_axes_of_m else None,
            )
            for state, spec in rows
        ]
        return derived.replace(state=OptimizerState(None, treedef.unflatten(states)))

    def _shown_map(self, rules: FactorMap) -> Mapping[str, Any]:
        return dict(rules)

    def _plan(self, params: Any) -> Plan:
        if self._told and self.hyper_params.factor_map != self._told[-1]:
            raise HyperParamError(
                "`hyper_params.factor_map` was changed after `set_param_axes`, and the rules of "
                "this definition were not. Change `logical_factor_rules` or the axes, or give a "
                "`factor_map` to `Adafactor`."
            )
        return super()._plan(params)

    def _match(
        self, target: Any, state: OptimizerState, state_dict: Mapping[str, Any]
    ) -> tuple[tuple[Any, OptimizerState], RestoreReport]:
        return super()._match(*lenient_references(target, state, state_dict), state_dict)
