"""The optimizer state, and the decorator that lifts optimizers of one array to trees."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey, PyTreeDef

from opt_legacy_stax._identity import ATTRIBUTE, Identity, identity_of_maker
from opt_legacy_stax._trees import difference, different_trees, leaf_paths, shown
from opt_legacy_stax.errors import LayoutError, StateChangedError, StepError

Array = Any
Params = Any
State = Any
Updates = Params  # gradients have the structure of the parameters
Step = Any  # a Python or NumPy number, or a scalar array

INT32_MIN, INT32_MAX = (int(end) for end in (np.iinfo(np.int32).min, np.iinfo(np.int32).max))


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


jax.tree_util.register_pytree_with_keys(
    OptimizerState,
    lambda state: (((GetAttrKey("packed_state"), state.packed_state),), state[1:]),
    lambda aux, children: OptimizerState(*children, *aux),
    lambda state: (state[:1], state[1:]),
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

    Dtypes of the state do not change over updates: what is computed in higher precision, as with
    float32 gradients of bfloat16 parameters, is cast back. With `upstream_numerics=True`, which the
    decorated function also takes, nothing is cast, as in JAX's module; it is passed on if
    `opt_maker` has an argument of that name. `save` identifies the optimizer by the name of
    `opt_maker`.

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
    identity, signature = identity_of_maker(opt_maker), inspect.signature(opt_maker)
    has_switch = _SWITCH.name in signature.parameters

    @functools.wraps(opt_maker)
    def make(*args: Any, upstream_numerics: bool = False, **kwargs: Any) -> Optimizer:
        if has_switch:
            kwargs[_SWITCH.name] = upstream_numerics
        return _lift(opt_maker(*args, **kwargs), not upstream_numerics, identity)

    parameters = {**signature.parameters, _SWITCH.name: _SWITCH}.values()
    make.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=sorted(parameters, key=lambda parameter: parameter.kind),
        return_annotation=Optimizer,
    )
    return make


def _lift(
    leaf_optimizer: LeafOptimizer, keeps_dtypes: bool, identity: Identity | None
) -> Optimizer:
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
            before = jax.tree.unflatten(subtree_def, old)
            with _naming("the update", tree_def, n):
                after = update_leaf(g, before)
            new, new_def = jax.tree.flatten(after)
            if new_def != subtree_def:
                raise StateChangedError(
                    "the update changed the structure of the state of parameter "
                    f"`{leaf_paths(tree_def)[n]}`:\n{difference(subtree_def, new_def)}\nReturn the "
                    "same containers as `init` does."
                )
            if keeps_dtypes:
                new = list(map(keep_dtype, old, new))
            # Arrays other than the parameter may change shape, e.g. a growing history.
            if list(map(np.shape, old)) != list(map(np.shape, new)):
                shapes = [np.shape(get_params(state)) for state in (before, after)]
                if shapes[0] != shapes[1]:
                    raise StateChangedError(
                        f"the update changed parameter `{leaf_paths(tree_def)[n]}` from shape "
                        f"{shapes[0]} to {shapes[1]}: its gradient has shape {np.shape(g)}. Pass "
                        "gradients with the shapes of the parameters."
                    )
            updated.append(new)
        return repacked(opt_state, updated)

    @functools.wraps(get_params)
    def tree_get_params(opt_state: OptimizerState) -> Params:
        check_state(opt_state, identity)
        return jax.tree.unflatten(opt_state[1], [get_params(s) for s in unpacked(opt_state)])

    setattr(tree_init, ATTRIBUTE, identity)
    return Optimizer(tree_init, tree_update, tree_get_params)


def _traced_once(update: Callable[..., State], i: Step, operands: Any) -> Callable[..., State]:
    """Returns `(g, state) -> state` at step `i`."""
    # Where a compiled caller traces it, arrays that are alike are updated by calls of one traced
    # function, which XLA inlines. Otherwise nothing is compiled that the caller did not ask for.
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


def unpacked(opt_state: Any) -> list[State]:
    """Returns the state of each parameter; inverts `pack`."""
    packed, _, subtree_defs = opt_state
    return list(map(jax.tree.unflatten, subtree_defs, packed))


def repacked(opt_state: Any, packed_state: Sequence[Any]) -> OptimizerState:
    """Returns `opt_state` with new leaves."""
    # The class is kept, so that a state of JAX's module can be carried through a `scan`.
    is_tuple = type(opt_state) is tuple
    kind: type[OptimizerState] = OptimizerState if is_tuple else type(opt_state)
    return kind(tuple(packed_state), opt_state[1], opt_state[2])


def check_step(i: Any) -> Any:
    """Returns integers as Python integers within int32; floats and JAX arrays as they are."""
    if isinstance(i, np.ndarray) and i.ndim == 0:
        i = i[()]
    if isinstance(i, int | np.integer | np.bool_):
        return max(INT32_MIN, min(int(i), INT32_MAX))
    if isinstance(i, float | np.floating):
        return i
    if isinstance(i, jax.Array) and i.ndim == 0:
        if i.dtype == jnp.bool_:
            return i.astype(jnp.int32)
        if jnp.issubdtype(i.dtype, jnp.integer) or jnp.issubdtype(i.dtype, jnp.floating):
            return i
    found = f"the function `{i.__name__}`" if hasattr(i, "__name__") else type(i).__name__
    if hasattr(i, "dtype"):
        found = f"an array of shape {i.shape} and dtype {i.dtype}"
    raise StepError(
        f"`i` must be the step number, a real scalar; got {found}. Call `update(i, grads, state)`: "
        "the step comes first."
    )


def is_state(value: Any) -> bool:
    """Whether a value is a packed state, of this module's class, JAX's, or a plain tuple."""
    match value if isinstance(value, tuple) else None:
        case tuple() | list() as packed, PyTreeDef() as tree_def, tuple() | list() as subtree_defs:
            are_trees = all(isinstance(each, PyTreeDef) for each in subtree_defs)
            return are_trees and len(packed) == len(subtree_defs) == tree_def.num_leaves
    return False


def check_state(value: Any, optimizer: Identity | None = None, argument: str = "opt_state") -> None:
    """Checks that a value is a packed state, with the entries of an optimizer if they are known."""
    if not is_state(value):
        raise LayoutError(
            f"`{argument}` must be an OptimizerState; got {shown(type(value).__name__)}. Pass the "
            "state that `init_fn` or `update_fn` returned, as in `update_fn(i, grads, opt_state)`."
        )
    if optimizer is None or not optimizer.keeps:
        return
    for n, subtree_def in enumerate(value[2]):
        kept = jax.tree.unflatten(subtree_def, [0] * subtree_def.num_leaves)
        entries = len(kept) if type(kept) is tuple else 1
        if entries != len(optimizer.keeps):
            found = f"a tuple of {entries}" if type(kept) is tuple else "not a tuple"
            raise LayoutError(
                f"`{argument}` is not a state of {optimizer}: for parameter "
                f"`{leaf_paths(value[1])[n]}` it is {found}. Pass a state of this optimizer; "
                "convert states of older JAX versions with `convert_old_layout`."
            )


def strong_param(x: Any) -> Any:
    """Returns weakly typed arrays and Python floats as strongly typed arrays."""
    # The first update would do the same, and a jitted update would then compile a second time.
    if type(x) in (float, complex) or (isinstance(x, jax.Array) and x.aval.weak_type):
        return jax.lax.convert_element_type(x, jnp.result_type(x))
    return x


def keep_dtypes(old: Any, packed_state: Sequence[Any]) -> OptimizerState:
    """Returns the state `old` with these leaves, cast to its floating-point dtypes."""
    columns = zip(old[0], packed_state, strict=True)
    return repacked(old, [list(map(keep_dtype, *leaves)) for leaves in columns])


def keep_dtype(old: Any, new: Any) -> Any:
    """Returns the array `new`, cast to the floating-point dtype of `old`."""
    if not hasattr(old, "dtype") or not isinstance(new, jax.Array):
        return new
    # A float that an update made of an integer, or a complex number of a real one, cannot be
    # rounded back.
    for kind in (jnp.floating, jnp.complexfloating):
        if jnp.issubdtype(old.dtype, kind) and jnp.issubdtype(new.dtype, kind):
            dtype = jax.dtypes.canonicalize_dtype(old.dtype)
            return new if dtype == new.dtype else new.astype(dtype)
    return new
