"""Flax's `TrainState`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax.training import train_state
from opt_core import Optimizer

from opt_checkpoint._naming.schema import Names
from opt_checkpoint._targets.training_state import optimizer_of, step_like

_OWN = frozenset({"step", "params", "opt_state"})


@dataclasses.dataclass(frozen=True)
class OfTrainState:
    """A `TrainState`, or an object of a subclass, as the planner sees it."""

    given: train_state.TrainState
    optimizer: Optimizer

    @classmethod
    def of(cls, given: train_state.TrainState) -> OfTrainState:
        """Raises as `optimizer_of` does."""
        return cls(given, optimizer_of(given.tx, given.params, given.opt_state, given.step))

    @property
    def others(self) -> Mapping[Names, Any]:
        """None: all parameters are the optimizer's."""
        return {}

    @property
    def unsaved(self) -> tuple[str, ...]:
        """The fields with leaves that a subclass adds."""
        fields = dataclasses.fields(self.given)
        names = [f.name for f in fields if f.metadata.get("pytree_node", True)]
        return tuple(
            name
            for name in names
            if name not in _OWN and jax.tree.leaves(getattr(self.given, name))
        )

    def put_back(self, optimizer: Optimizer, others: Mapping[Names, Any]) -> train_state.TrainState:
        """Returns the state; fields of subclasses are as they were."""
        restored: train_state.TrainState = self.given.replace(
            step=step_like(self.given.step, optimizer.state.step),
            params=optimizer.target,
            opt_state=optimizer.state.param_states,
        )
        return restored
