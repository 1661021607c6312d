"""Definitions as Optax transformations, for APIs that accept nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optax
from opt_core import MultiOptimizer, Optimizer, OptimizerDef, OptimizerState
from opt_core.protocols import Transformation

from opt_optax_bridge._signatures import accepted_keywords


def as_transformation(definition: OptimizerDef) -> optax.GradientTransformationExtraArgs:
    """Returns a definition as an Optax transformation.

    For APIs that accept nothing else: `optax.chain`, `TrainState.create(tx=...)`, `nnx.Optimizer`,
    loops with `tx.update`. An `OptaxWrapper` has `init` and `update` itself, and needs this only
    for type checkers, and for keywords to reach it through containers of Optax. Hyper-parameters
    and extra arguments are keywords of `update` (`learning_rate=`, `group_overrides=`). A keyword
    that the definition does not know is ignored, as in Optax, where a chain passes every keyword to
    all of its parts.

    The state is Optax's own for a wrapped optimizer, an `OptimizerState` for any other definition.
    A definition that returns parameters and not updates (`opt_adafactor.Adafactor`) is subtracted
    from them: adding its updates again is exact but for round-off.

    Args:
      definition: any `OptimizerDef`: groups, Adafactor, a wrapped optimizer.

    Raises:
      TypeError: `definition` is not an `OptimizerDef`.

    Examples:
      >>> import jax.numpy as jnp, opt_optax_bridge as opt
      >>> groups = MultiOptimizer(('w', opt.sgd(0.5)), ('b', opt.adam(0.1)), names=['w', 'b'])
      >>> tx = optax.chain(optax.clip(1.0), as_transformation(groups))
      >>> params = {'w': jnp.ones(1), 'b': jnp.ones(1)}
      >>> updates, state = tx.update({'w': jnp.ones(1), 'b': jnp.ones(1)}, tx.init(params), params)
      >>> updates['w'].tolist()
      [-0.5]
    """
    _check_definition(definition)
    if isinstance(definition, Transformation):
        return optax.GradientTransformationExtraArgs(definition.init, definition.update)

    def init(params: Any) -> Any:
        return initial_state(definition, params)

    def update(updates: Any, state: Any, params: Any = None, **keywords: Any) -> tuple[Any, Any]:
        if params is None:
            raise ValueError(
                f"`params`: a {type(definition).__name__} needs them; call "
                "`tx.update(grads, state, params)`"
            )
        return updated(definition, params, state, updates, keywords)

    return optax.GradientTransformationExtraArgs(init, update)


def initial_state(definition: OptimizerDef, params: Any) -> OptimizerState:
    """Returns the state of a definition; an error names the leaves that are not arrays."""
    try:
        return definition.init_state(params)
    except TypeError:
        definition.create(params)
        raise


def as_optax(transformation: Any) -> optax.GradientTransformation:
    """Returns a definition, or anything with `init` and `update`, as an Optax transformation."""
    if (wrapped := _wrapped(transformation)) is not None:
        transformation = wrapped
    if isinstance(transformation, OptimizerDef):
        return as_transformation(transformation)
    if isinstance(transformation, optax.GradientTransformation):
        return transformation
    return optax.GradientTransformationExtraArgs(transformation.init, transformation.update)


def _wrapped(definition: Any) -> Any:
    """The transformation of an `OptaxWrapper`; `None` for anything else."""
    return vars(definition).get("optax_optimizer") if isinstance(definition, OptimizerDef) else None


def _check_definition(definition: Any) -> None:
    if isinstance(definition, Optimizer):
        raise TypeError(
            "`as_transformation` takes a definition; got an Optimizer. Write "
            "`as_transformation(optimizer.optimizer_def)`."
        )
    if not isinstance(definition, OptimizerDef):
        is_transformation = isinstance(definition, Transformation)
        raise TypeError(
            f"`as_transformation` takes a definition; got a {type(definition).__name__}. "
            + (
                "It already is a transformation."
                if is_transformation
                else "Call its constructor first."
            )
        )


def updated(
    definition: OptimizerDef,
    params: Any,
    state: OptimizerState,
    grads: Any,
    keywords: Mapping[str, Any],
) -> tuple[Any, OptimizerState]:
    """Returns updates and state, with the keywords that the definition knows."""
    by_definition = {"hyper_params"}
    overrides: dict[str, Any] = {}
    if isinstance(definition, MultiOptimizer):
        by_definition.add("group_overrides")
        overrides["missing"] = "ignore"
    overrides |= {
        name: value
        for name, value in keywords.items()
        if name in by_definition or definition.has_hyper_param(name)
    }
    names = definition.extra_arg_names(keywords.keys() - overrides.keys())
    extra_args = {name: keywords[name] for name in names}
    if (tx := _wrapped(definition)) is not None:
        names = accepted_keywords(tx.update, extra_args)
        extra_args = {name: extra_args[name] for name in names}
    hyper_params = definition.update_hyper_params(**overrides)
    return definition.compute_updates(hyper_params, params, state, grads, **extra_args)
