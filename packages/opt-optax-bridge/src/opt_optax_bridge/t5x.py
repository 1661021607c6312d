"""The names of `t5x.optimizers`, so that T5X code runs with only its import line changed.

Differs from the rest of the package where T5X code relies on it, and only there:

* `apply_gradient(learning_rate=...)` is accepted and ignored: T5X's trainer always passes its own
  schedule, the Optax schedule rules;
* `restore_state` accepts parameters in another precision (T5X saves and restores them in bfloat16
  on request), and partition specs or `None` instead of any leaf.

`MultiOptimizer` works with wrapped Optax optimizers too. A learning rate for one group, as in
T5X's own example, takes effect; the trainer's, which goes to all groups, is ignored by wrapped
optimizers. A traversal may match nothing.

Not here: `amos`, which lives in jestimator (`wrap_optax_optimizer(jestimator.amos.amos)`). The
facade of `t5x.adafactor` is `opt_adafactor.t5x`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec

import flax.struct
import opt_core
from flax.core import freeze, unfreeze
from opt_core import Group, Optimizer, OptimizerDef, OptimizerState
from opt_core.errors import HyperParamError
from opt_core.extend import replace_hyper_params
from opt_core.t5x import lenient_references
from opt_partition import OptaxStatePartitionRules

from opt_optax_bridge import _constructors, _wrapper

if TYPE_CHECKING:
    from opt_optax_bridge._t5x_constructors import *  # noqa: F403  # a stub alone

__all__ = [
    "Dtype",
    "MultiOptimizer",
    "OptaxStatePartitionRules",
    "OptaxWrapper",
    "Optimizer",
    "OptimizerDef",
    "OptimizerDefType",
    "OptimizerState",
    "OptimizerStateType",
    "OptimizerType",
    "chain",
    "freeze",
    "unfreeze",
    "wrap_optax_optimizer",
]

P = ParamSpec("P")

Dtype = Any
OptimizerType = Optimizer
OptimizerStateType = OptimizerState | Mapping[str, Any]
OptimizerDefType = OptimizerDef


@flax.struct.dataclass
class _OptaxWrapperHyperParams:
    """Accepted from T5X's trainer, and ignored."""

    learning_rate: float | None = None


class OptaxWrapper(_wrapper.OptaxWrapper):
    """`opt_optax_bridge.OptaxWrapper` with T5X's leniencies.

    Args:
      optax_optimizer: an Optax transformation.
    """

    _ignored: ClassVar[Any] = _OptaxWrapperHyperParams()

    def _acting(self, hyper_params: Any) -> Any:
        # Hyper-parameters for a group of a `MultiOptimizer` have the recipe's own class.
        is_ignored = isinstance(hyper_params, _OptaxWrapperHyperParams)
        return self.built_with if is_ignored else hyper_params

    def update_group_hyper_params(self, overall: Mapping[str, Any], own: Mapping[str, Any]) -> Any:
        """Returns hyper-parameters for one update of a group, in which its own rate takes effect.

        Args:
          overall: see `opt_core.OptimizerDef.update_group_hyper_params`; a rate for all is ignored.
          own: likewise.
        """
        hyper_params = super().update_group_hyper_params(overall, own)
        rate = own.get("learning_rate", getattr(own.get("hyper_params"), "learning_rate", None))
        if rate is None or not isinstance(hyper_params, _OptaxWrapperHyperParams):
            return hyper_params
        if self.recipe is None:
            raise HyperParamError(
                "`learning_rate` cannot be given to a transformation that is already built: make "
                "it with a wrapped constructor (`wrap_optax_optimizer`)"
            )
        return replace_hyper_params(self.built_with, learning_rate=rate)

    def _overridable(self) -> str:
        return "none (`learning_rate` is ignored; those of `opt_optax_bridge` override it)"

    def restore_reference(
        self, target: Any, state: OptimizerState, state_dict: Mapping[str, Any]
    ) -> tuple[Any, OptimizerState]:
        """Returns references that accept parameters in another precision, specs and `None`."""
        return lenient_references(target, state, state_dict)


class MultiOptimizer(opt_core.MultiOptimizer):
    """`opt_core.MultiOptimizer` with T5X's leniencies.

    The trainer's `apply_gradient(learning_rate=...)` reaches every group, and wrapped Optax
    optimizers ignore it, as they do alone. One for a single group, by `hyper_params=[...]` or
    `group_overrides=`, takes effect.

    A traversal may match nothing: its definition then updates nothing, but keeps its position in
    `hyper_params` and `sub_optimizers`. Regular expressions and functions must match something.

    Args:
      *pairs: pairs of a traversal and a definition, or one sequence of them.
      traversals_and_optimizers: the same, by the name that it has in T5X.
      names: see `opt_core.MultiOptimizer`.
      rest: likewise.

    Examples:
      >>> import jax.numpy as jnp
      >>> sgd = _wrapped('sgd')
      >>> definition = MultiOptimizer([('kernel', sgd(0.1)), ('bias', sgd(0.1))])
      >>> optimizer = definition.create({'kernel': jnp.ones(1), 'bias': jnp.ones(1)})
      >>> kernel, bias = definition.hyper_params
      >>> optimizer = optimizer.apply_gradient(
      ...     optimizer.target, hyper_params=[kernel.replace(learning_rate=0.5), bias])
      >>> {name: float(value[0]) for name, value in optimizer.target.items()}
      {'bias': 0.9, 'kernel': 0.5}
    """

    def __init__(
        self,
        *pairs: Any,
        traversals_and_optimizers: Any = None,  # T5X's configurations bind it by its name
        names: Sequence[str] | None = None,
        rest: OptimizerDef = opt_core.FROZEN,
    ) -> None:
        if traversals_and_optimizers is not None:
            pairs = (*pairs, traversals_and_optimizers)
        super().__init__(*pairs, names=names, rest=rest)

    def may_be_empty(self, group: Group) -> bool:
        """Returns whether a group may have no leaf, as one of a traversal may in Flax and T5X."""
        return super().may_be_empty(group) or hasattr(group.pattern, "iterate")

    def restore_reference(
        self, target: Any, state: OptimizerState, state_dict: Mapping[str, Any]
    ) -> tuple[Any, OptimizerState]:
        """Returns references that accept parameters in another precision, specs and `None`."""
        return lenient_references(target, state, state_dict)


def wrap_optax_optimizer(optax_optimizer: Callable[P, Any]) -> Callable[P, OptaxWrapper]:
    """Turns a constructor of Optax optimizers into a constructor of T5X definitions.

    Args:
      optax_optimizer: a function that returns a `GradientTransformation`.

    Returns:
      A function with the same signature and docstring that returns an `OptaxWrapper`.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> optimizer = wrap_optax_optimizer(optax.sgd)(0.1).create({'w': jnp.ones(2)})
      >>> optimizer.apply_gradient({'w': jnp.ones(2)}, learning_rate=7.0).target['w'].tolist()
      [0.9, 0.9]
    """
    return _constructors.wrap_into(OptaxWrapper, optax_optimizer)


chain = _constructors.wrap_into(OptaxWrapper, _constructors.chain_sequence, "chain")


_ABSENT = {
    "amos": "it lives in jestimator: `wrap_optax_optimizer(jestimator.amos.amos)`",
    "Adafactor": "it is in `opt_adafactor.t5x`, as it was in `t5x.adafactor`",
}


@functools.cache
def _wrapped(name: str) -> Callable[..., OptaxWrapper]:
    return _constructors.wrap_into(
        OptaxWrapper, _constructors.constructor(name, __name__, is_optimizer=True), name
    )


if not TYPE_CHECKING:  # for a type checker any name would be an attribute

    def __getattr__(name: str) -> Callable[..., OptaxWrapper]:
        """Finds `adamw` and every other optimizer in the installed Optax, when it is asked for."""
        if name in _ABSENT:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}: {_ABSENT[name]}")
        return _wrapped(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_constructors.optimizer_names()})
