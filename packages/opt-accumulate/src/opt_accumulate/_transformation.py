"""Transformations that take and return parameters, besides Optax's `init` and `update`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax


class ParamsTransformation(optax.GradientTransformationExtraArgs):
    """A `optax.GradientTransformationExtraArgs` with a third function, `apply`.

    It goes wherever the pair goes: into `optax.chain`, `optax.partition`, a training loop that
    calls `update`. Where a step may not be made, `apply` is the cheaper way to make it, since
    nothing of the parameters' size is returned to say so.

    Attributes:
      init: from the parameters to a state.
      update: from `(grads, state, params, **extra_args)` to updates and a state.
      apply: from `(params, state, grads, **extra_args)` to parameters and a state.
    """

    init: Callable[..., Any]
    update: Callable[..., tuple[Any, Any]]
    apply: Callable[..., tuple[Any, Any]]

    def __new__(cls, init: Any, update: Any, apply: Any) -> ParamsTransformation:
        """Takes the three functions."""
        self = super().__new__(cls, init, update)
        self.apply = apply
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.init, self.update, self.apply
