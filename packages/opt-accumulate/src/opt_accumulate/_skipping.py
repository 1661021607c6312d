"""Which microbatches are dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from opt_accumulate.errors import LossOutputError, OptionError

SkipFunction: TypeAlias = Literal["non_finite"] | Callable[[jax.Array, Any, jax.Array], Any]


def check_skip_function(skip_fn: Any) -> None:
    """Raises unless `skip_fn` can say what to drop.

    Raises:
      OptionError: it cannot.
    """
    if skip_fn is not None and skip_fn != "non_finite" and not callable(skip_fn):
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
    if skip_fn == "non_finite":
        return _not_finite((loss, grads, weight))
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
    return jnp.asarray(skip)


def _not_finite(tree: Any) -> jax.Array:
    finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    return ~jnp.stack(finite).all()
