"""Every kind of target as an `opt_core.Optimizer`, and back.

The planner and the disk know only that kind. An adapter presents a target as one, and puts restored
leaves back into what the caller gave. Kinds are distinguished by `isinstance`, never by attributes.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import jax
from opt_core import Optimizer, OptimizerDef
from opt_core.extend import Names, View
from opt_core.protocols import Transformation

from opt_checkpoint._targets.training_state import TrainingState, optimizer_of, step_like

_OWN = frozenset({"step", "params", "opt_state"})


def view_of(target: Any, *, argument: str = "target") -> View:
    """Returns what the planner sees of a target.

    Args:
      target: of any supported kind.
      argument: its name in messages.

    Raises:
      TypeError: it is of another kind; lists those that are supported.
      TreeMismatchError: its state is not one of its transformation; lists every path.
    """
    if isinstance(target, Optimizer):
        return View(target)
    if isinstance(target, TrainingState):
        return _view_of_fields(target)
    # Without the module imported, there are no objects of its classes; Flax NNX takes a second to
    # import.
    if "flax.training.train_state" in sys.modules:
        from flax.training.train_state import TrainState

        if isinstance(target, TrainState):
            return _view_of_fields(target)
    if "flax.nnx" in sys.modules:
        from flax import nnx

        from opt_checkpoint._targets.nnx import view_of_pair

        if isinstance(target, nnx.Optimizer):
            raise TypeError(
                f"`{argument}`: an `nnx.Optimizer` holds no parameters: give the pair "
                "`(model, optimizer)`"
            )
        if type(target) is tuple and len(target) == 2 and isinstance(target[1], nnx.Optimizer):
            return view_of_pair(*target)
    raise TypeError(
        f"`{argument}`: expected an `opt_core.Optimizer`, a "
        "`TrainingState(tx, params, opt_state)` of plain Optax, a `flax.training.train_state."
        "TrainState`, or the pair `(model, nnx.Optimizer)`; found "
        f"{_shown(target)}{_remedy(target)}"
    )


def _remedy(target: Any) -> str:
    """What to write where someone passes what makes the state in place of the state."""
    if isinstance(target, OptimizerDef):
        return ": pass what `create(params)` of this definition returns"
    if isinstance(target, Transformation):
        return ": pass `TrainingState(tx, params, tx.init(params))`"
    return ""


def _view_of_fields(given: Any) -> View:
    """A `TrainingState` or a `TrainState`, which have the same fields, and subclasses more."""

    def put_back(optimizer: Optimizer, others: Mapping[Names, Any]) -> Any:
        return given.replace(
            step=step_like(given.step, optimizer.state.step),
            params=optimizer.target,
            opt_state=optimizer.state.param_states,
        )

    fields = [f.name for f in dataclasses.fields(given) if f.metadata.get("pytree_node", True)]
    more = [name for name in fields if name not in _OWN and jax.tree.leaves(getattr(given, name))]
    optimizer = optimizer_of(given.tx, given.params, given.opt_state, given.step)
    return View(optimizer, put_back, unsaved=tuple(more))


def _shown(target: Any) -> str:
    if type(target) is tuple:
        return f"a tuple of ({', '.join(type(part).__name__ for part in target)})"
    return type(target).__name__
