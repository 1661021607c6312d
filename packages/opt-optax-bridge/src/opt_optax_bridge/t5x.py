"""The names of `t5x.optimizers`, so that T5X code runs with only its import line changed.

Differs from the rest of the package where T5X code relies on it, and only there:

* `apply_gradient(learning_rate=...)` is accepted and ignored: T5X's trainer always passes its own
  schedule, the Optax schedule rules;
* `restore_state` takes parameters in another precision (T5X saves and restores them in bfloat16 on
  request), and partition specs or `None` in the place of any leaf.

`MultiOptimizer` works with wrapped Optax optimizers too. There a learning rate that is given to one
group, as in T5X's own example, acts; the trainer's, which all get, is ignored by the wrapped ones.

Not here: `amos`, which lives in jestimator (`wrap_optax_optimizer(jestimator.amos.amos)`). T5X's
Adafactor is in `opt_adafactor`, as it was in `t5x.adafactor`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec

import flax.struct
import jax
import jax.numpy as jnp
import opt_core
from flax.core import freeze, unfreeze
from jax.sharding import PartitionSpec
from opt_core import Optimizer, OptimizerDef, OptimizerState, RestoreReport, children
from opt_core.errors import HyperParamError
from opt_partition import OptaxStatePartitionRules

from opt_optax_bridge import _twins, _wrapper
from opt_optax_bridge._recipe import Recipe, make_hyper_params

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


@flax.struct.dataclass
class _ActingHyperParams(_OptaxWrapperHyperParams):
    """Given to one group of a `MultiOptimizer`, and obeyed."""


class OptaxWrapper(_wrapper.OptaxWrapper):
    """`opt_optax_bridge.OptaxWrapper` with T5X's leniencies.

    Args:
      optax_optimizer: an Optax transformation.
    """

    def _hyper_params_of(self, recipe: Recipe | None) -> Any:
        return _OptaxWrapperHyperParams()

    def apply_gradient(
        self,
        hyper_params: Any,
        params: Any,
        state: OptimizerState,
        grads: Any,
        **extra_args: Any,
    ) -> tuple[Any, OptimizerState]:
        """Makes one update; `hyper_params` are ignored, but for those of a group."""
        if isinstance(hyper_params, _ActingHyperParams):
            rate, twin = hyper_params.learning_rate, self._twin()
            acting = twin.update_hyper_params(learning_rate=rate)
            return twin.apply_gradient(acting, params, state, grads, **extra_args)
        return super().apply_gradient(self.hyper_params, params, state, grads, **extra_args)

    def _twin(self) -> _wrapper.OptaxWrapper:
        """The same transformation, of which the hyper-parameters act."""
        if self.recipe is None:
            raise HyperParamError(
                "`learning_rate` cannot be given to a transformation that was wrapped as it is: "
                "make it with a wrapped constructor (`wrap_optax_optimizer`)"
            )
        return _wrapper.OptaxWrapper.from_recipe(self.recipe)

    def acting_hyper_params(self, **overrides: Any) -> Any:
        """Returns the hyper-parameters that the transformation was built with."""
        self.update_hyper_params(**overrides)  # refuses what is none
        return self.recipe.hyper_params if self.recipe else make_hyper_params("no_hyper_params", {})

    def _overridable(self) -> str:
        return "none (`learning_rate` is ignored; `opt_optax_bridge` has twins that override)"

    def _match(
        self, target: Any, state: OptimizerState, state_dict: Mapping[str, Any]
    ) -> tuple[tuple[Any, OptimizerState], RestoreReport]:
        return super()._match(*_references(target, state, state_dict), state_dict)


class MultiOptimizer(opt_core.MultiOptimizer):
    """`opt_core.MultiOptimizer` with T5X's leniencies.

    The trainer's `apply_gradient(learning_rate=...)` reaches every group, and wrapped Optax
    optimizers ignore it, as they do alone. One that is given to a group, by `hyper_params=[...]` or
    `group_overrides=`, acts.

    Args:
      *traversals_and_optimizers: pairs of a traversal and a definition, or one sequence of them.

    Examples:
      >>> import jax.numpy as jnp
      >>> definition = MultiOptimizer([('kernel', _twin('sgd')(0.1)), ('bias', _twin('sgd')(0.1))])
      >>> optimizer = definition.create({'kernel': jnp.ones(1), 'bias': jnp.ones(1)})
      >>> kernel, bias = definition.hyper_params
      >>> optimizer = optimizer.apply_gradient(
      ...     optimizer.target, hyper_params=[kernel.replace(learning_rate=0.5), bias])
      >>> {name: float(value[0]) for name, value in optimizer.target.items()}
      {'bias': 0.9, 'kernel': 0.5}
    """

    def _hyper_params_of(
        self,
        definition: OptimizerDef,
        given: Mapping[str, Any],
        broadcast: Mapping[str, Any],
        overrides: Mapping[str, Any],
    ) -> Any:
        found = super()._hyper_params_of(definition, given, broadcast, overrides)
        if not isinstance(definition, OptaxWrapper):
            return found
        own = getattr(given.get("hyper_params"), "learning_rate", None)
        rate = overrides.get("learning_rate", own)
        return found if rate is None else _ActingHyperParams(rate)

    def _match_rest(
        self, target: Any, state: OptimizerState, state_dict: Mapping[str, Any]
    ) -> tuple[tuple[Any, OptimizerState], RestoreReport]:
        return super()._match_rest(*_references(target, state, state_dict), state_dict)


def _references(target: Any, state: OptimizerState, state_dict: Any) -> tuple[Any, Any]:
    """Parameters and state with leaves of the kind of what is to be restored, where T5X does so."""
    return (
        _like(_param_like, target, _entry(state_dict, "target")),
        _like(_state_leaf_like, state, _entry(state_dict, "state")),
    )


def _entry(state_dict: Any, name: str) -> Any:
    return state_dict.get(name) if isinstance(state_dict, Mapping) else None


def _like(leaf_like: Callable[[Any, Any], Any], reference: Any, value: Any) -> Any:
    """The reference with each leaf of the kind of what is to be restored."""
    node = children(reference)
    if node is None:
        return leaf_like(reference, value)
    given = {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else {}
    return node.rebuild(
        [_like(leaf_like, c, given[name]) if name in given else c for name, c in node.children]
    )


def _state_leaf_like(reference: Any, value: Any) -> Any:
    if value is None or isinstance(value, PartitionSpec) or not hasattr(reference, "shape"):
        return reference if isinstance(value, Mapping) else value
    return reference


def _param_like(reference: Any, value: Any) -> Any:
    like = _state_leaf_like(reference, value)
    if not (hasattr(like, "dtype") and hasattr(value, "dtype")) or value.dtype == like.dtype:
        return like
    if not _is_other_precision(like.dtype, value.dtype):
        return like
    is_placed = isinstance(like, jax.ShapeDtypeStruct) or getattr(like, "committed", False)
    sharding = like.sharding if is_placed else None
    return jax.ShapeDtypeStruct(like.shape, value.dtype, sharding=sharding)


def _is_other_precision(own: Any, other: Any) -> bool:
    """Whether both are floats, or both complex, and JAX holds the other as it is."""
    kinds = (jnp.floating, jnp.complexfloating)
    same_kind = any(jnp.issubdtype(own, k) and jnp.issubdtype(other, k) for k in kinds)
    return same_kind and jax.dtypes.canonicalize_dtype(other) == other


def wrap_optax_optimizer(optax_optimizer: Callable[P, Any]) -> Callable[P, OptaxWrapper]:
    """Makes a constructor of Optax optimizers one of T5X optimizer definitions.

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
    return _twins.wrap_into(OptaxWrapper, optax_optimizer)


chain = _twins.wrap_into(OptaxWrapper, _twins.chain_sequence, "chain")


_ABSENT = {
    "amos": "it lives in jestimator: `wrap_optax_optimizer(jestimator.amos.amos)`",
    "Adafactor": "it is in `opt_adafactor`, as it was in `t5x.adafactor`",
}


@functools.cache
def _twin(name: str) -> Callable[..., OptaxWrapper]:
    return _twins.wrap_into(OptaxWrapper, _twins.constructor(name, __name__), name)


def __getattr__(name: str) -> Callable[..., OptaxWrapper]:
    """Finds `adamw` and every other optimizer in the installed Optax, when it is asked for."""
    if name in _ABSENT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: {_ABSENT[name]}")
    return _twin(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_twins.optimizer_names()})
