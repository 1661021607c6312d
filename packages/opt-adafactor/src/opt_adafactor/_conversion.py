"""States from the definition to Optax and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from opt_core import OptimizerState, path_names, path_str

from opt_adafactor._state import _AdafactorParamState, placeholder
from opt_adafactor._transformation import AdafactorState, require_optax
from opt_adafactor.errors import StateConversionError

_SLOTS = ("v_row", "v_col", "v")


def to_optax_state(state: OptimizerState, like: Any) -> Any:
    """Returns an Optax state that goes on where an `Adafactor` state is.

    Args:
      state: the state of an `Adafactor` optimizer.
      like: what the transformation's `init` returns for the same parameters: of `adafactor`,
        `scale_by_generalized_factored_rms` or `optax.adafactor`, alone or inside a chain.

    Returns:
      `like` with the statistics, the momentum and the counts of `state`, in the dtypes of `like`.

    Raises:
      ImportError: Optax is not installed.
      StateConversionError: `like` holds no Adafactor state or several, one without room for the
        momentum, or one of other parameters.

    Examples:
      >>> import optax
      >>> from opt_adafactor import Adafactor
      >>> params = {'w': jnp.ones((3, 2))}
      >>> optimizer = Adafactor(0.1).create(params).apply_gradient(params)
      >>> state = to_optax_state(optimizer.state, optax.adafactor(0.1).init(params))
      >>> int(state[0].count), state[0].v['w'][0].tolist()
      (1, [1.0, 1.0])
    """
    require_optax()
    import optax

    owner = _find(like, (AdafactorState, optax.FactoredState), "like")
    treedef: Any = jax.tree.structure(owner.v)
    states = _param_states(state.param_states, treedef)
    trees = {slot: treedef.unflatten([getattr(s, slot) for s in states]) for slot in _SLOTS}
    m = treedef.unflatten([s.m for s in states])
    has_momentum = any(np.shape(s.m) != (1,) for s in states)
    is_own = isinstance(owner, AdafactorState)
    has_room = owner.m is not None if is_own else bool(_all(like, (optax.EmaState,)))
    if has_momentum and not has_room:
        raise StateConversionError(
            "`state` has momentum, and `like` has no place for it: give the transformation that "
            "`beta1` (Optax's `momentum`) too"
        )

    def fill(node: Any) -> Any:
        if isinstance(node, AdafactorState):
            new_m = None if node.m is None else _pour(node.m, m, "m")
            return node._replace(count=_count(state.step), m=new_m, **_poured(node, trees))
        if isinstance(node, optax.FactoredState):
            return node._replace(count=_count(state.step), **_poured(node, trees))
        if isinstance(node, optax.EmaState):
            return node._replace(count=_count(state.step), ema=_pour(node.ema, m, "m"))
        return node._replace(count=_count(state.step))  # of a schedule

    kinds = (AdafactorState, optax.FactoredState, optax.EmaState, optax.ScaleByScheduleState)
    return jax.tree.map(
        lambda node: fill(node) if isinstance(node, kinds) else node,
        like,
        is_leaf=lambda node: isinstance(node, kinds),
    )


def from_optax_state(state: Any) -> OptimizerState:
    """Returns the `Adafactor` state that goes on where an Optax state is.

    Args:
      state: the state of `adafactor`, `scale_by_generalized_factored_rms` or `optax.adafactor`,
        alone or inside a chain. An `optax.EmaState` beside the statistics is taken as momentum.

    Returns:
      The state: statistics in float32, the momentum in its own dtype, placeholders as T5X has them.

    Raises:
      ImportError: Optax is not installed.
      StateConversionError: `state` holds no Adafactor state or several.

    Examples:
      >>> import optax
      >>> params = {'w': jnp.ones((256, 128))}
      >>> state = from_optax_state(optax.adafactor(0.1).init(params))
      >>> state.param_states['w'].v_row.shape, state.param_states['w'].m.shape
      ((128,), (1,))
    """
    require_optax()
    import optax

    owner = _find(state, (AdafactorState, optax.FactoredState), "state")
    m = owner.m if isinstance(owner, AdafactorState) else None
    if not isinstance(owner, AdafactorState) and (found := _all(state, (optax.EmaState,))):
        m = found[0].ema
    treedef: Any = jax.tree.structure(owner.v)
    leaves = jax.tree.leaves(owner.v)
    momenta = [placeholder() for _ in leaves] if m is None else treedef.flatten_up_to(m)
    rows, cols = (treedef.flatten_up_to(tree) for tree in (owner.v_row, owner.v_col))
    states = [
        _AdafactorParamState(_float32(row), _float32(col), _float32(v), jnp.array(moment))
        for row, col, v, moment in zip(rows, cols, leaves, momenta, strict=True)
    ]
    return OptimizerState(_count(owner.count), treedef.unflatten(states))


def _float32(slot: Any) -> jax.Array:
    return jnp.array(slot, jnp.float32)


def _all(state: Any, kinds: tuple[type, ...]) -> list[Any]:
    def is_kind(node: Any) -> bool:
        return isinstance(node, kinds)

    return [node for node in jax.tree.leaves(state, is_leaf=is_kind) if is_kind(node)]


def _find(state: Any, kinds: tuple[type, ...], argument: str) -> Any:
    found = _all(state, kinds)
    if len(found) != 1:
        raise StateConversionError(
            f"`{argument}` must hold the state of one Adafactor, found {len(found)} in a "
            f"{type(state).__name__}. Convert the states of several groups one by one."
        )
    return found[0]


def _param_states(param_states: Any, treedef: Any) -> list[_AdafactorParamState]:
    def is_state(node: Any) -> bool:
        return isinstance(node, _AdafactorParamState)

    states, found = jax.tree.flatten(param_states, is_leaf=is_state)
    if found != treedef or not all(map(is_state, states)):
        raise StateConversionError(
            "`state` and `like` are not of the same parameters:\n"
            f"  `state`: {found}\n  `like`: {treedef}"
        )
    return states


def _poured(node: Any, trees: dict[str, Any]) -> dict[str, Any]:
    return {slot: _pour(getattr(node, slot), trees[slot], slot) for slot in _SLOTS}


def _pour(reference: Any, tree: Any, slot: str) -> Any:
    def pour(path: Any, old: Any, new: Any) -> jax.Array:
        if np.shape(old) != np.shape(new):
            raise StateConversionError(
                f"`{slot}` of `{path_str(path_names(path))}`: expected shape {np.shape(old)}, as "
                f"in `like`, found {np.shape(new)}. Both must factor alike: compare "
                "`min_dim_size_to_factor` and the factor rules."
            )
        return jnp.array(new, old.dtype)

    poured: Callable[..., Any] = jax.tree_util.tree_map_with_path
    return poured(pour, reference, tree)


def _count(step: Any) -> jax.Array:
    return jnp.array(step, jnp.int32)
