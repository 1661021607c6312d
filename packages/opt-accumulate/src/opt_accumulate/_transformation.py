"""Transformations that take and return parameters, besides Optax's `init` and `update`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax


class ParamsTransformation(optax.GradientTransformationExtraArgs):
    """A `optax.GradientTransformationExtraArgs` that has `apply` too.

    It goes wherever the pair goes: into `optax.chain`, `optax.partition`, a training loop that
    calls `update`. Where a step may not be made, `apply` is the cheaper way to make it, since
    nothing of the parameters' size is returned to say so.

    Attributes:
      init: from the parameters to a state.
      update: from `(grads, state, params, **extra_args)` to updates and a state.
    """

    init: Callable[..., Any]
    update: Callable[..., tuple[Any, Any]]

    def __new__(cls, init: Any, update: Any, apply: Any = None) -> ParamsTransformation:
        """Takes the functions; without `apply` there is the one that the other two imply."""
        self = super().__new__(cls, init, update)
        if apply is not None:
            vars(self)["apply"] = apply
        return self

    def apply(self, params: Any, state: Any, grads: Any, **extra_args: Any) -> tuple[Any, Any]:
        """Makes one step.

        Args:
          params: the parameters.
          state: the state.
          grads: the gradients.
          **extra_args: those of `update`.

        Returns:
          The new parameters and the new state.
        """
        updates, state = self.update(grads, state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (*self, *(vars(self)[name] for name in ("apply",) if name in vars(self)))
