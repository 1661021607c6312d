"""Running the inner optimizer on the steps that emit, and leaving memory alone on the others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

Form = Literal["loop", "cond", "select"]
Body = Callable[[Any, Any], Any]


def check_form(form: str) -> None:
    """Raises unless `form` is one of those that `emit_if` knows."""
    if form not in get_args(Form):
        raise ValueError(f"`form` must be one of {', '.join(get_args(Form))}, found {form!r}.")


def emit_if(
    emit: jax.Array, body: Body, carry: Any, operands: Any, form: Form
) -> tuple[jax.Array, Any]:
    """Returns `body(carry, operands)` where `emit` is true, `carry` otherwise.

    Args:
      emit: a boolean scalar. Do not fold it where it is known: without it to order the emission
        by, XLA copies the accumulator that it reads.
      body: takes and returns what is carried; neither structure nor dtypes may change.
      carry: what an emission replaces.
      operands: what an emission only reads.
      form: how the choice is made. `"loop"`: a loop of no or one trip, whose carry stays where it
        is. `"cond"`: `lax.cond`, which copies what passes through it but has a reverse-mode
        derivative. `"select"`: both, and a choice between them.

    Returns:
      `emit`, known only after `body` has run, and what is carried.
    """
    if form == "cond":
        chosen: tuple[jax.Array, Any] = lax.cond(
            emit,
            lambda carry: (jnp.array(True), body(carry, operands)),
            lambda carry: (jnp.array(False), carry),
            carry,
        )
        return chosen
    if form == "select":
        emitted = body(carry, operands)
        return emit, jax.tree.map(lambda new, old: jnp.where(emit, new, old), emitted, carry)

    limit = emit.astype(jnp.int32)

    def trip(counted: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        count, carry = counted
        return count + 1, body(carry, _tied_to(count, operands))

    trips, carry = lax.while_loop(lambda counted: counted[0] < limit, trip, (jnp.int32(0), carry))
    return trips > 0, carry


def zeros_if(done: jax.Array, tree: Any, form: Form) -> Any:
    """Returns zeros where `done` is true, `tree` otherwise.

    Args:
      done: what `emit_if` returned. It orders the two: when this overwrites `tree`, all that reads
        it has been computed, so that XLA need not copy `tree` for the emission.
      tree: arrays.
      form: how the choice is made.
    """
    zeros = functools.partial(jax.tree.map, jnp.zeros_like)
    if form == "cond":
        form = "select"
    return emit_if(done, lambda carry, _: zeros(carry), tree, (), form)[1]


def _tied_to(count: jax.Array, tree: Any) -> Any:
    """Ties arrays to the loop's count: what does not depend on it, XLA computes before the loop.

    One by one, as all that passes a barrier together varies, under `shard_map`, over the same axes.
    """

    def tie(leaf: Any) -> Any:
        return lax.optimization_barrier((count, leaf))[1] if _is_plain_array(leaf) else leaf

    return jax.tree.map(tie, tree)


def _is_plain_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
