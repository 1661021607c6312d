"""Flax NNX: a model and its `nnx.Optimizer`.

Variables are pytree nodes with one child. A bare tree has the child in their place, so that leaves
have the names of Linen and plain Optax, without `value` at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

import jax
from flax import nnx
from opt_core import Optimizer
from opt_core.extend import Names, View, flatten_with_paths, named_leaves

from opt_checkpoint._targets import optimizer_of, step_like

bare: Any = getattr(nnx, "as_pure", None) or nnx.pure  # until Flax 0.12.1
_MODEL, _OPTIMIZER = ("0",), ("1",)
_STEP, _OPT_STATE = (*_OPTIMIZER, "step"), (*_OPTIMIZER, "opt_state")


def view_of_pair(model: Any, optimizer: Any) -> View:
    """Returns the pair as the planner sees it; raises as `optimizer_of` does."""
    graphdef, state = nnx.split((model, optimizer))
    params = bare(nnx.state(model, optimizer.wrt))
    step = bare(optimizer.step)
    # the state in the graph, where `nnx.Optimizer` updates its variables
    view = optimizer_of(optimizer.tx, params, bare(optimizer.opt_state), step)
    trained = {names for names, _ in flatten_with_paths(params)}
    flat = named_leaves(bare(state))
    others = {
        names[1:]: leaf for names, leaf in flat if names[:1] == _MODEL and names[1:] not in trained
    }

    def put_back(optimizer: Optimizer, others: Mapping[Names, Any]) -> tuple[Any, Any]:
        """Returns a new pair, merged by `nnx.merge`; the given one is unchanged."""
        new = {(*_MODEL, *names): leaf for names, leaf in others.items()}
        new |= {(*_MODEL, *names): leaf for names, leaf in flatten_with_paths(optimizer.target)}
        states = flatten_with_paths(optimizer.state.param_states)
        new |= {(*_OPT_STATE, *names): leaf for names, leaf in states}
        new[_STEP] = step_like(step, optimizer.state.step)
        leaves, structure = jax.tree.flatten(state)
        # what else a subclass of the optimizer keeps is unchanged
        merged = [new.get(names, leaf) for (names, _), leaf in zip(flat, leaves, strict=True)]
        pair: tuple[Any, Any] = nnx.merge(graphdef, jax.tree.unflatten(structure, merged))
        if isinstance(pair[1], KnowsPlacement):
            pair[1].place(pair[0])  # one that was made of shapes does not know that of parameters
        return pair

    places = optimizer.placement if isinstance(optimizer, KnowsPlacement) else None
    if places is not None:  # as trees
        target, states = map(jax.tree.structure, (view.target, view.state.param_states))
        places = SimpleNamespace(
            params=jax.tree.unflatten(target, places.params),
            state=jax.tree.unflatten(states, places.state),
        )
    return View(view, put_back, others, placement=places)


@runtime_checkable
class KnowsPlacement(Protocol):
    """An `nnx.Optimizer` that knows where its leaves lie, as that of opt-nnx."""

    @property
    def placement(self) -> Any:
        """Sequences of shardings, in JAX's order, as `params` and `state`; `None` without any."""

    def place(self, model: Any) -> None:
        """Puts everything where it lies."""
