"""The names of `t5x.adafactor`, so that T5X code runs with only its import line changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from opt_core import Optimizer, OptimizerDef, OptimizerState
from opt_core.t5x import lenient_references

from opt_adafactor import _adafactor
from opt_adafactor._hyper_params import _AdafactorHyperParams as _AdafactorHyperParams
from opt_adafactor._rules import (
    HEURISTIC_RULE,
    FactorDim,
    FactorRule,
    HeuristicRule,
    HParamMap,
    factor_name_to_factordim,
    standard_logical_factor_rules,
)
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
    """`opt_adafactor.Adafactor` where T5X code relies on T5X's behaviour.

    Factored statistics have no axes, so they are replicated, and `restore_state` accepts parameters
    in another precision (T5X can save them in bfloat16), and partition specs or `None` in place of
    any leaf. Updates are the same, and a checkpoint of either class restores into the other.

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
        """Returns the optimizer with each leaf replaced by its logical axes, as in T5X.

        `v_row`, `v_col` and the step get `None`. `v` gets the parameter's axes unless its shape is
        `(1,)`, the shape of an unused slot; `m` gets them if `beta1` is neither `None` nor 0.

        Raises:
          TreeMismatchError: `param_axes` do not match the parameters; lists the paths.
        """
        derived = super().derive_logical_axes(optimizer, param_axes)
        treedef: Any = jax.tree.structure(optimizer.target)
        rows = zip(
            treedef.flatten_up_to(optimizer.state.param_states),
            treedef.flatten_up_to(derived.target),
            strict=True,
        )
        states = [
            _AdafactorParamState(
                v_row=None,
                v_col=None,
                v=None if state.v.shape == (1,) else spec,
                m=spec if self.hyper_params.beta1 else None,
            )
            for state, spec in rows
        ]
        return derived.replace(state=OptimizerState(None, treedef.unflatten(states)))

    def restore_reference(
        self, target: Any, state: OptimizerState, state_dict: Mapping[str, Any]
    ) -> tuple[Any, OptimizerState]:
        """Returns references that accept parameters in another precision, specs and `None`."""
        return lenient_references(target, state, state_dict)
