"""Which microbatches are dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from opt_accumulate._microbatches.varying import any_over, axes_of_types
from opt_accumulate.errors import LossOutputError, OptionError

SkipFunction: TypeAlias = Literal["non_finite"] | Callable[[jax.Array, Any, jax.Array], Any]


def check_skip_function(skip_fn: Any) -> None:
    """Raises unless `skip_fn` can say what to drop.

    Raises:
      OptionError: it cannot.
    """
    named = isinstance(skip_fn, str) and skip_fn == "non_finite"
    if skip_fn is not None and not named and not callable(skip_fn):
        raise OptionError(
            "`skip_fn` must be None, 'non_finite', or a function of (loss, grads, weight) that "
            f"returns whether to drop the microbatch; it is {skip_fn!r}."
        )


def should_skip(
    skip_fn: SkipFunction | None, loss: jax.Array, grads: Any, weight: jax.Array
) -> jax.Array | None:
    """Returns whether to drop a microbatch; `None` where none ever is.

    Args:
      skip_fn: the rule.
      loss: as the loss function returned it.
      grads: its gradient.
      weight: that of the microbatch.

    Raises:
      LossOutputError: `skip_fn` returned something else than one truth value.

    Examples:
      >>> bool(should_skip('non_finite', jnp.float32(1), [jnp.array([jnp.inf])], jnp.int32(1)))
      True
    """
    if skip_fn is None:
        return None
    # Parts of one loss are dropped together, though gradients of parts of parameters differ.
    kept = axes_of_types((loss, weight))
    if skip_fn == "non_finite":
        return any_over(_not_finite((loss, grads, weight)), kept)
    skip = skip_fn(loss, grads, weight)
    dtype = getattr(skip, "dtype", type(skip))
    if isinstance(skip, tuple):
        raise LossOutputError(
            "`skip_fn` must return one truth value, not a tuple. Is it a `should_skip_update_fn` "
            "of `MultiSteps`? Here it is a function of (loss, grads, weight), or 'non_finite'."
        )
    if jnp.shape(skip) != () or dtype not in (bool, jnp.bool_):
        raise LossOutputError(
            f"`skip_fn` must return one truth value (shape (), bool), not {dtype} of shape "
            f"{jnp.shape(skip)}. Join several by `jnp.any`."
        )
    return any_over(jnp.asarray(skip), kept)


def _not_finite(tree: Any) -> jax.Array:
    finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    return ~jnp.stack(finite).all()
