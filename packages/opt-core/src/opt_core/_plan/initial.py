"""The state that a target's own `init` makes: for new leaves, and for new entries of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from opt_core._optimizer import Optimizer
from opt_core._plan.placement import init_leaves
from opt_core._plan.schema import Schema, shown
from opt_core._plan.view import View


def unlike_initial(view: View, schema: Schema) -> Mapping[str, str]:
    """Returns, by name, why `init` does not make leaves of a target's state as they are there.

    Args:
      view: the target.
      schema: of the target.
    """
    state, stored = view.optimizer.state, view.stored
    count = len(jax.tree.leaves(state))
    infos = [leaf for leaf in schema.leaves if leaf.kind == "state"]

    def make(params: Any) -> Any:
        made = view.optimizer.optimizer_def.create(params).state
        if stored is None:
            return made
        return made.replace(param_states=stored.plain_state(made.param_states))

    try:
        made = jax.tree.leaves(jax.eval_shape(make, view.optimizer.target))
    except Exception as error:  # whatever a user's `init` raises
        text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return dict.fromkeys((leaf.name for leaf in infos), f"`init` raises {text}")
    if len(made) != count:
        why = f"`init` makes {len(made)} leaves, the target's state has {count}"
        return dict.fromkeys((leaf.name for leaf in infos), why)
    return {
        leaf.name: f"`init` makes {shown(own)} here, expected {shown(leaf)}"
        for leaf, own in zip(infos, made, strict=True)
        if (tuple(own.shape), str(own.dtype)) != (leaf.shape, leaf.dtype)
    }


def initial_leaves(
    optimizer: Optimizer, wanted: Sequence[int], places: Sequence[Any], stored: Any
) -> dict[int, Any]:
    """Returns some leaves of a state as `init` makes them from the optimizer's parameters.

    Args:
      optimizer: with the restored parameters.
      wanted: positions among the leaves of the state, the step included.
      places: the shardings of all of them.
      stored: see `View`.
    """
    first = len(jax.tree.leaves(optimizer.state.step))
    found: dict[int, Any] = {i: jnp.zeros((), jnp.int32) for i in wanted if i < first}
    of_params = [i - first for i in wanted if i >= first]
    meshed = {i: x for i in of_params if isinstance(x := places[first + i], NamedSharding)}
    as_kept = {} if stored is None else {"as_kept": stored.plain_state}
    made = init_leaves(optimizer, of_params, meshed, **as_kept)
    return found | {first + i: leaf for i, leaf in made.items()}
