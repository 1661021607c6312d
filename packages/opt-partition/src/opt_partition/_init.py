"""The accepted sources of a state: a transformation, its `init`, or an opt-core optimizer.

Definitions and optimizers are recognised by their methods, as this package does not depend on
opt-core.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, runtime_checkable

Init: TypeAlias = Callable[[Any], Any]


@runtime_checkable
class HasInit(Protocol):
    """An Optax transformation, or any other object with an `init` method."""

    def init(self, params: Any) -> Any:
        """Returns the state for `params`."""


@runtime_checkable
class HasInitState(Protocol):
    """An `opt_core.OptimizerDef`."""

    def init_state(self, params: Any) -> Any:
        """Returns the state for `params`."""


@runtime_checkable
class HasDefinition(Protocol):
    """An `opt_core.Optimizer`."""

    @property
    def optimizer_def(self) -> HasInitState:
        """The definition."""

    @property
    def target(self) -> Any:
        """The parameters."""


StateMaker: TypeAlias = HasInit | HasInitState | HasDefinition | Init


def init_of(maker: StateMaker) -> Init:
    """Returns the function from parameters to state, of the argument `tx` of a public function."""
    match maker:
        case HasDefinition():
            return maker.optimizer_def.init_state
        case HasInitState():
            return maker.init_state
        case HasInit():
            return maker.init
    if not callable(maker):
        raise TypeError(
            "`tx` must be an Optax transformation, its `init`, or a definition or optimizer of "
            f"opt-core; got {type(maker).__name__}. Call the constructor first."
        )
    return maker


def params_of(maker: StateMaker, params: Any) -> Any:
    """Returns `params`, or those of an optimizer if `params` is `None`."""
    return maker.target if params is None and isinstance(maker, HasDefinition) else params
