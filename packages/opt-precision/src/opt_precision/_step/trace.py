"""The inner update as a program of flat arguments, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from opt_precision._formats import is_encoded
from opt_precision._step.arguments import Arguments, Flat, same, wide
from opt_precision._step.program import WHOLE, Kind, Program
from opt_precision._weights import Weights
from opt_precision.errors import StateError


def trace(tx: Any, given: Arguments, flat: Flat, weights: Weights) -> tuple[Program, list[Any]]:
    """Traces an update on whole leaves.

    Args:
      tx: the inner transformation.
      given: what the step is given.
      flat: the same, flat.
      weights: how parameters are rounded.

    Returns:
      The program, and its last arguments: arrays among the extra arguments. Those before are
      gradients, leaves of the state, and parameters. It returns updates and leaves of the state.

    Raises:
      StateError: updates or state are not as before.
    """
    put_back, arrays = _split_args(given.extra_args)
    number, state_number = len(flat.grads), len(flat.stored)
    params_number = len(flat.params)

    def update(*leaves: Any) -> list[Any]:
        grads = jax.tree.unflatten(flat.tree, leaves[:number])
        state = jax.tree.unflatten(flat.state_tree, leaves[number : number + state_number])
        rest = leaves[number + state_number :]
        params = jax.tree.unflatten(flat.tree, rest[:params_number]) if flat.params else None
        if given.params is not None and not flat.params:
            params = given.params  # a tree without leaves
        extra = put_back(rest[params_number:])
        updates, new = tx.update(grads, state, params, **extra)
        return [*_checked_updates(updates, flat), *_checked_state(new, flat)]

    avals = [
        *map(wide, flat.grads),
        *(wide(leaf) if is_encoded(leaf) else same(leaf) for leaf in flat.stored),
        *map(wide, flat.params),
        *arrays,
    ]
    kinds = [
        *(
            Kind(leaf.at) if grad.shape == leaf.shape else WHOLE
            for leaf, grad in zip(flat.leaves, flat.grads, strict=True)
        ),
        *(WHOLE if owner is None else Kind(owner) for owner in flat.owners),
        *(Kind(index) for index in range(params_number)),
        *(WHOLE for _ in arrays),
    ]
    try:
        closed = jax.make_jaxpr(update)(*avals)
    except (TypeError, ValueError) as error:
        if wrong := _other_shapes(flat):
            raise StateError(wrong) from error
        raise
    return Program(closed, kinds, is_split=flat.is_any_cut(weights)), arrays


def _other_shapes(flat: Flat) -> str:
    """Which gradients do not have the shape of their parameter."""
    return "; ".join(
        f"the gradient of {leaf.path} has shape {tuple(grad.shape)}, the parameter {leaf.shape}"
        for leaf, grad in zip(flat.leaves, flat.grads, strict=True)
        if tuple(grad.shape) != leaf.shape
    )


def _checked_updates(updates: Any, flat: Flat) -> list[Any]:
    leaves = jax.tree.leaves(updates)
    if len(leaves) != len(flat.leaves):
        raise StateError(
            f"the inner transformation made updates for {len(leaves)} leaves of "
            f"{len(flat.leaves)}; a transformation that changes the tree cannot be wrapped"
        )
    for leaf, update in zip(flat.leaves, leaves, strict=True):
        if tuple(update.shape) != leaf.shape:
            raise StateError(
                f"the inner transformation made an update of shape {tuple(update.shape)} for "
                f"{leaf.path} of shape {leaf.shape}"
            )
    return leaves


def _checked_state(new: Any, flat: Flat) -> list[Any]:
    leaves, tree = jax.tree.flatten(new)
    found: Any = tree
    if found != flat.state_tree or any(
        jnp.shape(leaf) != tuple(old.shape) for leaf, old in zip(leaves, flat.stored, strict=True)
    ):
        raise StateError(
            "the inner transformation returned another state than it was given; a state must "
            f"keep its structure and shapes from `init` on:\n  given    {flat.state_tree}\n"
            f"  returned {found}"
        )
    return leaves


def _split_args(extra_args: Mapping[str, Any]) -> tuple[Callable[[Sequence[Any]], Any], list[Any]]:
    """The arrays among the extra arguments, and the way to put them back."""
    leaves, tree = jax.tree.flatten(dict(extra_args))
    is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]

    def put_back(arrays: Sequence[Any]) -> Any:
        given = iter(arrays)
        return jax.tree.unflatten(
            tree, [next(given) if own else leaf for leaf, own in zip(leaves, is_array, strict=True)]
        )

    return put_back, [leaf for leaf, own in zip(leaves, is_array, strict=True) if own]
