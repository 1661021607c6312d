"""The state of an average, and which updates count."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from opt_accumulate._buffers import on_device
from opt_accumulate._guard.state import GuardState
from opt_accumulate._trees import children


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AverageState:
    """The state of `with_average`.

    Attributes:
      count: int32 scalar; updates of the parameters so far; saturates at 2**31 - 1.
      average: like the parameters, in the dtype of the average; `optax.MaskedNode()` in place of
        those that are not averaged.
      inner: the state of the optimizer.
    """

    count: Any
    average: Any
    inner: Any

    def eval_params(self, params: Any) -> Any:
        """Returns the average; see `HoldsEvalParams`."""
        del params
        return jax.tree.map(on_device, self.average)

    @staticmethod
    def describe_fields() -> dict[str, Any]:
        """Returns what the fields mean, as `opt_core.protocols.DescribesFields` asks."""
        return {"roles": {"count": "count", "average": "params_copy"}, "passes_on": True}


def has_updated(new: Any, old: Any) -> jax.Array | None:
    """Returns whether the step from one state to the next updated parameters; `None` for always.

    A `MultiSteps`, Optax's included, shows it in its count of steps, a guard in its last decision.
    Of several side by side, as in `optax.partition`, one that updated is enough.

    Args:
      new: the state of an optimizer after a step.
      old: its state before.
    """
    if isinstance(new, optax.MultiStepsState):
        stepped: jax.Array = jnp.asarray(new.gradient_step) != jnp.asarray(old.gradient_step)
        inside = has_updated(new.inner_opt_state, old.inner_opt_state)
        return stepped if inside is None else stepped & inside
    if isinstance(new, GuardState):
        inside = has_updated(new.inner, old.inner)
        made = ~jnp.asarray(new.was_skipped)
        return made if inside is None else made & inside
    pairs = zip(children(new), children(old), strict=True)
    found = [has_updated(one, other) for (_, one), (_, other) in pairs]
    known = [one for one in found if one is not None]
    return jnp.stack(known).any() if known else None
