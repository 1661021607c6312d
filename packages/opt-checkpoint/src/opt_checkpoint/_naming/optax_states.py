"""Raw Optax states as optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from opt_core import Optimizer, OptimizerState, flatten_with_paths, path_str, strong_types
from opt_core.errors import TreeMismatchError
from opt_optax_bridge import OptaxWrapper

from opt_checkpoint._naming.names import leaf_infos


def wrap_optax_state(tx: Any, params: Any, opt_state: Any, *, step: Any = None) -> Optimizer:
    """Returns the optimizer that parameters and a state of Optax make, as they are.

    `optimizer.target` and `optimizer.state.param_states` give them back, `named_state` their names.

    Args:
      tx: the transformation, or an `OptaxWrapper` of it.
      params: pytree of parameters; arrays or `jax.ShapeDtypeStruct`s.
      opt_state: what `tx.init(params)` returns, or `tx.update` since.
      step: how many updates have been made; by default the `count` that the state keeps, 0 where
        it keeps none.

    Returns:
      The optimizer; nothing is copied, no value changes. Python numbers become arrays.

    Raises:
      TreeMismatchError: the state is not one of `tx` for these parameters; lists every path.
      ValueError: the state keeps several counts that differ, and `step` does not say which.

    Examples:
      >>> import optax
      >>> tx, params = optax.adam(0.1), {'w': jnp.ones(2)}
      >>> optimizer = wrap_optax_state(tx, params, tx.init(params))
      >>> int(optimizer.state.step), optimizer.state.param_states[0].mu['w'].tolist()
      (0, [0.0, 0.0])
    """
    definition = tx if isinstance(tx, OptaxWrapper) else OptaxWrapper(tx)
    expected = jax.eval_shape(definition.init_state, params).param_states
    if problems := list(_differences(expected, opt_state)):
        raise TreeMismatchError(
            "`opt_state` is no state of `tx` for these `params`:\n  " + "\n  ".join(problems)
        )
    state = OptimizerState(jnp.zeros((), jnp.int32), strong_types(jax.tree.map(_array, opt_state)))
    optimizer = Optimizer(definition, state, params)
    if step is None:
        step = _count(optimizer)
    return optimizer.replace(state=state.replace(step=jnp.asarray(step, jnp.int32)))


def _array(leaf: Any) -> Any:
    return leaf if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else jnp.asarray(leaf)


def _differences(expected: Any, found: Any) -> Iterator[str]:
    wanted = {names: leaf for names, leaf in flatten_with_paths(expected) if leaf is not None}
    given = {names: leaf for names, leaf in flatten_with_paths(found) if leaf is not None}
    for names in wanted:
        if names not in given:
            yield f"`{path_str(names)}`: expected {_shown(wanted[names])}, found nothing"
    for names, leaf in given.items():
        if names not in wanted:
            yield f"`{path_str(names)}`: expected nothing, found {_shown(leaf)}"
        elif _shown(leaf) != _shown(wanted[names]):
            yield f"`{path_str(names)}`: expected {_shown(wanted[names])}, found {_shown(leaf)}"
    before: Any = jax.tree.structure(expected)
    after: Any = jax.tree.structure(found)
    if wanted.keys() == given.keys() and before != after:
        yield f"containers: expected {before}, found {after}"


def _shown(leaf: Any) -> str:
    dtype = leaf.dtype if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.result_type(leaf)
    return f"{dtype}{list(np.shape(leaf))}"


def _count(optimizer: Optimizer) -> int:
    infos = leaf_infos(optimizer)
    leaves = [*jax.tree.leaves(optimizer.target), *jax.tree.leaves(optimizer.state)]
    counts = {
        info.name: int(leaf)
        for info, leaf in zip(infos, leaves, strict=True)
        if info.path[-1] == "count" and not info.shape and isinstance(leaf, jax.Array)
    }
    steps = {info.name for info in infos if info.path[-1] in ("mini_step", "gradient_step")}
    if len(set(counts.values())) > 1 or steps:
        told = ", ".join(f"`{name}` {value}" for name, value in counts.items())
        raise ValueError(
            f"`step`: say how many updates have been made; the state does not: {told or steps}"
        )
    return next(iter(counts.values()), 0)
