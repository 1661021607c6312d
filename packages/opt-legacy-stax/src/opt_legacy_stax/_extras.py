"""The way off: functions that need Optax or opt-core, which only extras install."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from opt_legacy_stax._optimizers import Optimizer
from opt_legacy_stax.errors import MissingExtraError

if TYPE_CHECKING:
    import optax

    from opt_legacy_stax._bridge_core import TripleDef
    from opt_legacy_stax._bridge_optax import OptaxTriple, TripleTransformation
    from opt_legacy_stax._equivalents import OptaxEquivalent


def to_optax(triple: Optimizer) -> TripleTransformation:
    """Returns a triple as a transformation of Optax. Needs the extra `optax`.

    The transformation's state is a counter, and what the triple keeps for each parameter; the
    parameters are Optax's. `update` needs them. It returns differences, so that adding them may
    round; `apply(params, state, grads)` returns new parameters and state exactly as the triple's.

    Args:
      triple: an optimizer of this module, or one that `optimizer` made, here or in JAX's module.
        (JAX's own `sm3` cannot be traced; this module's goes on from its states.)

    Returns:
      An `optax.GradientTransformation` with `apply`, with `convert_state(state, i)`, which returns
      parameters and state to go on from a state of the triple before its update `i`, and
      `convert_state_back(params, state)`, which returns that state and `i`.

    Raises:
      MissingExtraError: Optax is not installed.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from opt_legacy_stax import momentum
      >>> triple, params = momentum(0.1, 0.9), {'w': jnp.ones(2)}
      >>> tx = optax.chain(optax.clip(0.5), to_optax(triple))
      >>> updates, _ = tx.update({'w': jnp.ones(2)}, tx.init(params), params)
      >>> optax.apply_updates(params, updates)['w'].tolist()
      [0.95, 0.95]
    """
    bridge: TripleTransformation = _module("_bridge_optax", "optax").to_optax(triple)
    return bridge


def from_optax(tx: optax.GradientTransformation) -> OptaxTriple:
    """Returns a transformation of Optax as a triple. Needs the extra `optax`.

    The number given to `update_fn` is not used: transformations count for themselves. Extra
    arguments of the transformation are keywords of `update_fn`. States can be saved and packed as
    those of other triples.

    Args:
      tx: a transformation of Optax.

    Returns:
      An `Optimizer` with `convert_state(params, opt_state)`, which returns a state to go on from
      those of Optax, and `convert_state_back(state)`, which returns them.

    Raises:
      MissingExtraError: Optax is not installed.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> opt_init, opt_update, get_params = from_optax(optax.sgd(0.1))
      >>> get_params(opt_update(0, jnp.ones(2), opt_init(jnp.zeros(2)))).tolist()
      [-0.1, -0.1]
    """
    bridge: OptaxTriple = _module("_bridge_optax", "optax").from_optax(tx)
    return bridge


def optax_equivalent(name: str, **kwargs: Any) -> OptaxEquivalent:
    """Returns one of the nine optimizers written in Optax's transformations.

    Needs the extra `optax`.

    Args:
      name: of the optimizer, such as `'adam'`.
      **kwargs: its arguments, by name.

    Returns:
      An object with `transformation`, an `optax.GradientTransformation`; `triple`, the optimizer;
      `is_exact`, whether both do the same operations in float32; `is_exact_for(params, grads)`,
      whether for their dtypes too; `convert_state(state, i)`, which returns parameters and state of
      Optax to go on from a state of the triple before its update `i`; and
      `convert_state_back(params, opt_state)`, which returns that state and `i`.

    Raises:
      NoEquivalentError: no transformation of Optax has the same mathematics.
      MissingExtraError: Optax is not installed.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> equivalent = optax_equivalent('adam', step_size=0.1)
      >>> state = equivalent.triple.init_fn(jnp.zeros(2))
      >>> params, opt_state = equivalent.convert_state(state, i=0)
      >>> updates, _ = equivalent.transformation.update(jnp.ones(2), opt_state, params)
      >>> optax.apply_updates(params, updates).tolist()
      [-0.1, -0.1]
    """
    equivalents = _module("_equivalents", "optax")
    found: OptaxEquivalent = equivalents.optax_equivalent(name, **kwargs)
    return found


def to_optimizer_def(triple: Optimizer) -> TripleDef:
    """Returns a triple as an optimizer definition of opt-core. Needs the extra `core`.

    An update is the triple's own, bit for bit, with `state.step` as its `i`. The target is the
    parameters, `state.param_states` what the triple keeps beside them.

    Args:
      triple: an optimizer of this module, of JAX's, or one that `optimizer` made.

    Returns:
      An `opt_core.OptimizerDef` with `derive_logical_axes`; with `convert_state(state, i)`, which
      returns an `opt_core.Optimizer` to go on from a state of the triple before its update `i`;
      and `convert_state_back(optimizer)`, which returns that state and `i`.

    Raises:
      MissingExtraError: opt-core is not installed.

    Examples:
      >>> import jax.numpy as jnp
      >>> from opt_legacy_stax import momentum
      >>> optimizer = to_optimizer_def(momentum(0.1, 0.9)).create({'w': jnp.zeros(2)})
      >>> optimizer = optimizer.apply_gradient({'w': jnp.ones(2)})
      >>> optimizer.target['w'].tolist(), int(optimizer.state.step)
      ([-0.1, -0.1], 1)
    """
    definition: TripleDef = _module("_bridge_core", "core").to_optimizer_def(triple)
    return definition


def _module(name: str, extra: str) -> ModuleType:
    """Imports the module that needs an extra."""
    try:
        if extra == "core":
            import opt_core  # noqa: F401
        else:
            import optax  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            f"this needs `{error.name}`. Install it with `pip install opt-legacy-stax[{extra}]`."
        ) from error
    return importlib.import_module(f"opt_legacy_stax.{name}")
