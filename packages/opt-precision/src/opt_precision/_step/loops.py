"""Loops that the compiler keeps, and values that it does not know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from opt_precision._bits import sealed, uint_of


def loop(
    body: Callable[[Any, Any], Any], first: jax.Array, number: int, carry: Any
) -> tuple[jax.Array, Any]:
    """Returns the index after the last one, and what `body` made of `carry`.

    Args:
      body: from an index and the carry to the next one.
      first: the first index.
      number: how many there are.
      carry: a tree of arrays.
    """

    def step(state: Any) -> Any:
        index, carry = state
        return index + 1, body(index, carry)

    made: tuple[jax.Array, Any] = lax.while_loop(
        lambda state: state[0] < first + number, step, (first, carry)
    )
    return made


def hidden(numbers: Sequence[int], zero: jax.Array) -> list[jax.Array]:
    """Numbers that the compiler does not know; it makes machine code for each that it does.

    Args:
      numbers: each for a uint32: among those no index is looked for that counts from the end.
      zero: see `opt_precision._step.stream.stream`.
    """
    if not numbers:
        return []

    def step(state: Any) -> Any:
        index, found = state
        none = index.astype(jnp.uint32)
        return index + 1, [lax.add(number, none) for number in found]

    start: Any = zero, [np.uint32(number) for number in numbers]
    found: list[jax.Array] = lax.while_loop(lambda state: state[0] < zero + 1, step, start)[1]
    return found


def varying(x: jax.Array, index: Any) -> jax.Array:
    """The same, of which the compiler does not know that it is the same in every iteration.

    What depends on none, like squares of gradients and noise, it would compute before the loops,
    and hold for all leaves.
    """
    # One by one: what passes a barrier together varies, under `shard_map`, over the same axes.
    same: jax.Array = lax.optimization_barrier((x, index))[0]
    return same


def after(x: jax.Array, zero: jax.Array) -> jax.Array:
    """The same bits, which cannot be there before `zero` is: the order of what is computed.

    XLA on CPUs removes barriers. Arrays whose bits are no whole bytes stay as they are.

    Args:
      x: an array.
      zero: see `opt_precision._step.stream.stream`.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = after(jax.random.key_data(x), zero)
        key: jax.Array = jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        return key
    if jnp.issubdtype(x.dtype, jnp.floating):
        return sealed(x, zero)
    if jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits >= 8:
        return x + zero.astype(x.dtype)
    return x


def zero_of(x: jax.Array, zero: jax.Array) -> jax.Array:
    """A zero that cannot be there before `x` is.

    Args:
      x: an array that is not empty.
      zero: see `opt_precision._step.stream.stream`.
    """
    first = lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(())
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    bits = lax.bitcast_convert_type(first, uint_of(x)) if is_float else first
    return lax.bitwise_and(bits.astype(jnp.int32), zero)


def as_integers(x: jax.Array) -> jax.Array:
    """A short float as an integer: XLA on CPUs slices those in float32, and updates all of one."""
    if not (jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4):
        return x
    return lax.bitcast_convert_type(x, uint_of(x))


def as_floats(x: jax.Array, dtype: Any) -> jax.Array:
    """The way back from `as_integers`, to a dtype."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)
