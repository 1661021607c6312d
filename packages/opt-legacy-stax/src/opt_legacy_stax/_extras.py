"""Migration functions, which need the extras `optax` or `core`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from opt_legacy_stax._identity import triple_of
from opt_legacy_stax._optimizers import Optimizer
from opt_legacy_stax.errors import MissingExtraError

if TYPE_CHECKING:
    import optax

    from opt_legacy_stax._bridge_core import TripleDef
    from opt_legacy_stax._bridge_optax import OptaxTriple, TripleTransformation
    from opt_legacy_stax._equivalents import OptaxEquivalent


def to_optax(triple: Optimizer) -> TripleTransformation:
    """Wraps a triple as an Optax gradient transformation. Needs the extra `optax`.

    Its state has a counter and what the triple keeps besides the parameters: `update` needs
    `params`. It returns differences, which round by one unit in the last place when they are added.

    Args:
      triple: one of the nine optimizers, or one made by the `optimizer` decorator, of this module
        or of JAX's. (JAX's own `sm3` cannot be traced; this module's `sm3` accepts its states.)

    Returns:
      An `optax.GradientTransformation` with three more methods: `apply(params, state, grads)`,
      which returns new parameters and state exactly as the triple computes them;
      `convert_state(state, i)`, which returns the parameters and Optax state that continue from a
      triple state before update `i`; and `convert_state_back(params, state)`, its inverse.

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
    with needs("optax"):
        from opt_legacy_stax._bridge_optax import TripleTransformation

    return TripleTransformation(Optimizer(*triple_of(triple, "triple")))


def from_optax(tx: optax.GradientTransformation) -> OptaxTriple:
    """Wraps an Optax gradient transformation as a triple. Needs the extra `optax`.

    `update_fn` ignores the step `i`, since transformations keep their own counters, and forwards
    keyword arguments to transformations that take extra arguments.

    Args:
      tx: an Optax gradient transformation.

    Returns:
      An `Optimizer` with two more methods: `convert_state(params, opt_state)`, which returns the
      triple state that continues from an Optax state, and `convert_state_back(state)`, its inverse.

    Raises:
      MissingExtraError: Optax is not installed.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> opt_init, opt_update, get_params = from_optax(optax.sgd(0.1))
      >>> get_params(opt_update(0, jnp.ones(2), opt_init(jnp.zeros(2)))).tolist()
      [-0.1, -0.1]
    """
    with needs("optax"):
        from opt_legacy_stax._bridge_optax import OptaxTriple

    return OptaxTriple(tx)


def optax_equivalent(name: str, **kwargs: Any) -> OptaxEquivalent:
    """Returns one of the nine optimizers as a chain of Optax's. Needs the extra `optax`.

    Args:
      name: name of the optimizer, such as `'adam'`.
      **kwargs: its arguments, by keyword.

    Returns:
      An object with `transformation`, an `optax.GradientTransformation`; `triple`, the triple;
      `is_exact`, whether both perform the same operations in float32; `convert_state(state, i)`,
      which returns the parameters and Optax state that continue from a triple state before update
      `i`; and `convert_state_back(params, opt_state)`, its inverse.

    Raises:
      NoEquivalentError: no Optax transformation implements the same update rule.
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
    with needs("optax"):
        from opt_legacy_stax import _equivalents

    return _equivalents.optax_equivalent(name, **kwargs)


def to_optimizer_def(triple: Optimizer) -> TripleDef:
    """Wraps a triple as an opt-core optimizer definition. Needs the extra `core`.

    Updates are the triple's own, bit for bit, with `state.step` as `i`. The target holds the
    parameters, and `state.param_states` the rest of the triple's state.

    Args:
      triple: see `to_optax`.

    Returns:
      An `opt_core.OptimizerDef` with `derive_logical_axes` and two more methods:
      `convert_state(state, i)`, which returns the `opt_core.Optimizer` that continues from a triple
      state before update `i`, and `convert_state_back(optimizer)`, its inverse.

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
    with needs("core"):
        from opt_legacy_stax._bridge_core import TripleDef

    return TripleDef(triple_of(triple, "triple"))


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """Raises a `MissingExtraError` if an import of what an extra installs fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or extra).partition(".")[0]
        raise MissingExtraError(
            f"this function needs the package `{package}`. Install it with `pip install "
            f"opt-legacy-stax[{extra}]`."
        ) from error
