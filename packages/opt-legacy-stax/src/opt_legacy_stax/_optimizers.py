"""The optimizer state, and the decorator that lifts optimizers of one array to trees.

The layout is that of `jax.example_libraries.optimizers`: a list of leaves per parameter, in the
order of the parameters, plus tree definitions for the parameters and for each list.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.tree_util import GetAttrKey

from opt_legacy_stax._dtypes import keep_dtypes, strong_param
from opt_legacy_stax._identity import Identity, made_by, mark
from opt_legacy_stax._states import check_state
from opt_legacy_stax._steps import check_step
from opt_legacy_stax._trees import (
    changed_shape,
    changed_structure,
    different_trees,
    leaf_paths,
)

Array = Any
Params = Any
State = Any
Updates = Params  # gradients have the structure of the parameters
Step = Any  # a Python or NumPy number, or a scalar array


class OptimizerState(NamedTuple):
    """The state of an optimizer: a pytree with the leaves of `packed_state`.

    Attributes:
      packed_state: the list of state leaves of each parameter, in the order of the parameters.
      tree_def: the tree structure of the parameters.
      subtree_defs: the tree structure of the state of each parameter.
    """

    packed_state: Any
    tree_def: Any
    subtree_defs: Any


def _unflatten(aux: Any, children: Any) -> OptimizerState:
    (packed_state,) = children
    tree_def, subtree_defs = aux
    return OptimizerState(packed_state, tree_def, subtree_defs)


jax.tree_util.register_pytree_with_keys(
    OptimizerState,
    lambda state: (
        ((GetAttrKey("packed_state"), state.packed_state),),
        (state.tree_def, state.subtree_defs),
    ),
    _unflatten,
    lambda state: ((state.packed_state,), (state.tree_def, state.subtree_defs)),
)


InitFn = Callable[[Params], OptimizerState]
UpdateFn = Callable[[Step, Updates, OptimizerState], OptimizerState]
ParamsFn = Callable[[OptimizerState], Params]


class Optimizer(NamedTuple):
    """An optimizer: a triple of functions.

    Attributes:
      init_fn: `(params) -> state`.
      update_fn: `(i, grads, state) -> state`, where `i` counts the updates from 0.
      params_fn: `(state) -> params`.
    """

    init_fn: InitFn
    update_fn: UpdateFn
    params_fn: ParamsFn


_SWITCH = inspect.Parameter(
    "upstream_numerics", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool
)
# `(init, update, get_params)` for a single array.
LeafOptimizer = tuple[Callable[..., State], Callable[..., State], Callable[[State], Array]]


def optimizer(opt_maker: Callable[..., Any]) -> Callable[..., Optimizer]:
    """Decorator that lifts an optimizer of a single array to pytrees.

    The dtypes of the state do not change over updates: an update may be computed in higher
    precision, as with float32 gradients of bfloat16 parameters, but is cast back. The decorated
    function also takes `upstream_numerics=True`, with which nothing is cast, as in JAX's module; it
    is passed on if `opt_maker` has an argument of that name. `save` identifies the optimizer by the
    name of `opt_maker`.

    Args:
      opt_maker: a function that returns `(init, update, get_params)` for one array: `init(x)`
        returns a pytree of arrays, `update(i, g, state)` a pytree of the same structure, and
        `get_params(state)` the parameter.

    Returns:
      A function with the arguments of `opt_maker` that returns an `Optimizer`.

    Examples:
      >>> import jax.numpy as jnp
      >>> @optimizer
      ... def signs(rate):
      ...     return lambda x: x, lambda i, g, x: x - rate * jnp.sign(g), lambda x: x
      >>> opt_init, opt_update, get_params = signs(0.5)
      >>> state = opt_update(0, {'w': jnp.array([3.0, -2.0])}, opt_init({'w': jnp.zeros(2)}))
      >>> get_params(state)['w'].tolist()
      [-0.5, 0.5]
    """
    identity, signature = made_by(opt_maker), inspect.signature(opt_maker)
    has_switch = _SWITCH.name in signature.parameters

    @functools.wraps(opt_maker)
    def make(*args: Any, upstream_numerics: bool = False, **kwargs: Any) -> Optimizer:
        if has_switch:
            kwargs[_SWITCH.name] = upstream_numerics
        leaf_optimizer = opt_maker(*args, **kwargs)
        made = lift(leaf_optimizer, keeps_dtypes=not upstream_numerics, identity=identity)
        mark(made.init_fn, identity)
        return made

    parameters = {**signature.parameters, _SWITCH.name: _SWITCH}.values()
    make.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=sorted(parameters, key=lambda parameter: parameter.kind),
        return_annotation=Optimizer,
    )
    return make


def lift(
    leaf_optimizer: LeafOptimizer, *, keeps_dtypes: bool, identity: Identity | None = None
) -> Optimizer:
    """Returns the optimizer that applies a single-array optimizer to every leaf."""
    init, update, get_params = leaf_optimizer

    @functools.wraps(init)
    def tree_init(x0_tree: Params) -> OptimizerState:
        leaves, tree_def = jax.tree.flatten(x0_tree)
        if keeps_dtypes:
            leaves = [strong_param(x) for x in leaves]
        states = []
        for n, x in enumerate(leaves):
            with _naming("the state", tree_def, n):
                states.append(init(x))
        return pack(tree_def, states)

    @functools.wraps(update)
    def tree_update(i: Step, grad_tree: Updates, opt_state: OptimizerState) -> OptimizerState:
        check_state(opt_state, identity)
        packed, tree_def, subtree_defs = opt_state
        grads, grads_def = jax.tree.flatten(grad_tree)
        if grads_def != tree_def:
            raise different_trees(tree_def, grads_def)
        step = check_step(i)
        # Upstream passes NumPy integers on, from which schedules compute NumPy floats.
        i = step if keeps_dtypes else i
        updated = []
        update_leaf = _traced_once(update, i, (grads, packed))
        for n, (g, old, subtree_def) in enumerate(zip(grads, packed, subtree_defs, strict=True)):
            with _naming("the update", tree_def, n):
                state = update_leaf(g, jax.tree.unflatten(subtree_def, old))
            new, new_def = jax.tree.flatten(state)
            if new_def != subtree_def:
                raise changed_structure(tree_def, n, subtree_def, new_def)
            if keeps_dtypes:
                new = keep_dtypes(old, new)
            error = changed_shape(tree_def, n, get_params, subtree_def, old, new, g)
            if error is not None:
                raise error
            updated.append(new)
        return repacked(opt_state, updated)

    @functools.wraps(get_params)
    def tree_get_params(opt_state: OptimizerState) -> Params:
        check_state(opt_state, identity)
        packed, tree_def, subtree_defs = opt_state
        states = map(jax.tree.unflatten, subtree_defs, packed)
        return jax.tree.unflatten(tree_def, [get_params(state) for state in states])

    return Optimizer(tree_init, tree_update, tree_get_params)


def _traced_once(update: Callable[..., State], i: Step, operands: Any) -> Callable[..., State]:
    """Returns `(g, state) -> state` at step `i`.

    Where a compiled caller traces it, arrays that are alike are updated by calls of one traced
    function, which XLA inlines. Otherwise it runs as it is: nothing is compiled that the caller
    did not ask for.
    """
    leaves = jax.tree.leaves(operands)
    is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
    if not is_traced or not all(isinstance(leaf, jax.Array) for leaf in leaves):
        return functools.partial(update, i)
    # A new function each time, as `update` may depend on what has changed since the last trace.
    if not isinstance(i, jax.Array):
        return jax.jit(lambda g, state: update(i, g, state))  # schedules may branch on a constant
    return functools.partial(jax.jit(lambda i, g, state: update(i, g, state)), i)


@contextlib.contextmanager
def _naming(what: str, tree_def: Any, n: int) -> Iterator[None]:
    """Adds the path of the parameter to exceptions: those raised by JAX do not name it."""
    try:
        yield
    except Exception as error:
        error.add_note(f"While computing {what} of parameter `{leaf_paths(tree_def)[n]}`.")
        raise


def pack(tree_def: Any, states: Sequence[State]) -> OptimizerState:
    """Packs per-parameter states, one for each leaf of `tree_def`, into an `OptimizerState`."""
    flattened = [jax.tree.flatten(state) for state in states]
    return OptimizerState(
        tuple(leaves for leaves, _ in flattened), tree_def, tuple(d for _, d in flattened)
    )


def repacked(opt_state: Any, packed_state: Sequence[Any]) -> OptimizerState:
    """Returns `opt_state` with new leaves.

    The class is kept, so that a state of JAX's module can be carried through a `scan`.
    """
    kind: type[OptimizerState] = type(opt_state)
    if kind is tuple:
        kind = OptimizerState
    return kind(tuple(packed_state), opt_state[1], opt_state[2])
