"""The state of an optimizer, and the decorator that takes functions of one array to trees.

The layout is that of `jax.example_libraries.optimizers`: what is kept for each parameter is
flattened to a list, in the order of the parameters, beside the two levels of tree definitions.
"""

from __future__ import annotations

import contextlib
import functools
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
Step = Any  # a number: Python's, NumPy's, or an array without axes


class OptimizerState(NamedTuple):
    """The state of an optimizer: a pytree whose leaves are those of `packed_state`.

    Attributes:
      packed_state: for each parameter, in the order of the tree, the list of leaves kept for it.
      tree_def: the structure of the parameters.
      subtree_defs: for each parameter, the structure of what is kept for it.
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
    """Three functions that are an optimizer.

    Attributes:
      init_fn: `(params) -> state`.
      update_fn: `(i, grads, state) -> state`, where `i` is the number of updates made before.
      params_fn: `(state) -> params`.
    """

    init_fn: InitFn
    update_fn: UpdateFn
    params_fn: ParamsFn


# What the functions of one array look like.
LeafOptimizer = tuple[Callable[..., State], Callable[..., State], Callable[[State], Array]]


def optimizer(opt_maker: Callable[..., Any]) -> Callable[..., Optimizer]:
    """Makes an optimizer of arrays one of trees.

    The dtypes of what is kept for a parameter do not change over updates: an update may compute in
    higher precision, as it does with float32 gradients of bfloat16 parameters, but is rounded back.
    A maker called with `upstream_numerics=True` is left alone, as JAX's module leaves it. Files
    know the optimizer by the name of the maker.

    Args:
      opt_maker: a function that returns `(init, update, get_params)` for one array: `init(x)` a
        pytree of arrays, `update(i, g, state)` one of the same structure, `get_params(state)` the
        parameter.

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

    @functools.wraps(opt_maker)
    def make(*args: Any, **kwargs: Any) -> Optimizer:
        is_exact = bool(kwargs.get("upstream_numerics", False))
        identity = made_by(opt_maker)
        made = lift(opt_maker(*args, **kwargs), keeps_dtypes=not is_exact, identity=identity)
        mark(made.init_fn, identity)
        return made

    return make


def lift(
    leaf_optimizer: LeafOptimizer, *, keeps_dtypes: bool, identity: Identity | None = None
) -> Optimizer:
    """Returns the optimizer of trees that treats every array by itself.

    Args:
      leaf_optimizer: `(init, update, get_params)` of one array.
      keeps_dtypes: whether updates are rounded to the dtypes of the state.
      identity: whose states they are.

    Raises (the functions returned):
      LayoutError: what should be a state is none, or of another optimizer.
      TreeMismatchError: gradients have another tree than the parameters.
      StateChangedError: the update of an array changed the structure of its state, or its shape.
      StepError: the step is no number.
    """
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
        # Exactly as upstream, a NumPy integer stays one: schedules make NumPy floats of it.
        i = step if keeps_dtypes else i
        updated = []
        for n, (g, old, subtree_def) in enumerate(zip(grads, packed, subtree_defs, strict=True)):
            with _naming("the update", tree_def, n):
                state = update(i, g, jax.tree.unflatten(subtree_def, old))
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


@contextlib.contextmanager
def _naming(what: str, tree_def: Any, n: int) -> Iterator[None]:
    """Notes on an exception which parameter it was about: JAX's know nothing of trees."""
    try:
        yield
    except Exception as error:
        error.add_note(f"This was {what} of parameter `{leaf_paths(tree_def)[n]}`.")
        raise


def pack(tree_def: Any, states: Sequence[State]) -> OptimizerState:
    """Returns the packed form of one state for each leaf of `tree_def`."""
    flattened = [jax.tree.flatten(state) for state in states]
    return OptimizerState(
        tuple(leaves for leaves, _ in flattened), tree_def, tuple(d for _, d in flattened)
    )


def repacked(opt_state: Any, packed_state: Sequence[Any]) -> OptimizerState:
    """Returns `opt_state` with other leaves, of the class that it has.

    A state of JAX's own module stays one, so that it can be the carry of a loop.
    """
    kind: type[OptimizerState] = type(opt_state)
    if kind is tuple:
        kind = OptimizerState
    return kind(tuple(packed_state), opt_state[1], opt_state[2])
