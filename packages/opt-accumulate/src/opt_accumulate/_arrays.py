"""Dtypes of sums and states, buffers that may be donated, and arrays in host memory."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import DynamicJaxprTracer

from opt_accumulate.errors import OptionError

_F = TypeVar("_F", bound=Callable[..., Any])


def at_least_32_bits(dtype: Any) -> Any:
    """Returns a dtype that sums of `dtype` do not quickly overflow or lose digits in."""
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bool_:
        return jnp.dtype(jnp.int32)
    for kind, wide in (
        (jnp.floating, jnp.float32),
        (jnp.unsignedinteger, jnp.uint32),
        (jnp.integer, jnp.int32),
    ):
        if jnp.issubdtype(dtype, kind):
            return dtype if dtype.itemsize >= 4 else jnp.dtype(wide)
    return dtype


def inexact(dtype: Any) -> Any:
    """Returns the dtype of a mean of values of `dtype`."""
    wide = at_least_32_bits(dtype)
    return wide if jnp.issubdtype(wide, jnp.inexact) else jnp.dtype(jnp.float32)


def check_dtype(argument: str, wanted: Any, bits: int) -> None:
    """Raises an `OptionError` unless a dtype has real numbers of at least so many bits."""
    try:
        is_wide = wanted is not None and jnp.finfo(wanted).bits >= bits
        is_real = is_wide and jnp.issubdtype(wanted, jnp.floating)
    except (TypeError, ValueError):
        is_real = False
    if not is_real:
        raise OptionError(
            f"`{argument}` must be a dtype of real floating-point numbers of {bits} bits or more, "
            f"such as 'float32'; it is {wanted!r}."
        )


def accumulator_dtype_of(dtype: Any, wanted: Any) -> Any:
    """Returns the dtype that gradients of `dtype` are summed in."""
    # 32 bits or more only widen: float64 stays float64. Fewer are taken at their word.
    dtype = jnp.dtype(dtype)
    if wanted is None:
        return dtype
    wanted = jnp.dtype(jax.dtypes.canonicalize_dtype(wanted))
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.dtype(jnp.complex128) if wanted == jnp.float64 else dtype
    truncates = jnp.issubdtype(dtype, jnp.floating) and 4 <= wanted.itemsize < dtype.itemsize
    return dtype if truncates else wanted


def cast_like(tree: Any, like: Any) -> Any:
    """Returns `tree` in the dtypes of `like`, without weak types; random keys as they are."""

    def leaf(new: Any, old: Any) -> Any:
        dtype = jnp.result_type(old)
        is_key = jnp.issubdtype(dtype, jax.dtypes.extended)
        return new if is_key or _has(new, dtype) else jax.lax.convert_element_type(new, dtype)

    return jax.tree.map(leaf, tree, like)


def widen(accumulator: Any, grads: Any) -> Any:
    """Returns the accumulator in no narrower dtypes than those of `grads`."""
    # Optimizers compute in the dtype of what they get: bfloat16 is to be the accumulator's alone.

    def leaf(total: Any, grad: Any) -> Any:
        dtype = jnp.promote_types(jnp.result_type(total), jnp.result_type(grad))
        return total if _has(total, dtype) else jnp.asarray(total, dtype)

    return jax.tree.map(leaf, accumulator, grads)


def _has(value: Any, dtype: Any) -> bool:
    """Whether a value is an array of that very dtype: JAX takes longer to find no cast to make."""
    return isinstance(value, jax.Array) and value.dtype == dtype and not value.weak_type


def traced_once(function: _F, *operands: Any) -> _F:
    """Returns a function of leaves that a compiled caller traces once for leaves that are alike."""
    # Each leaf is then a call of one function, which XLA inlines. Elsewhere the function runs as it
    # is, since nothing is to be compiled that nobody asked for.
    is_traced = any(isinstance(leaf, DynamicJaxprTracer) for leaf in jax.tree.leaves(operands))
    return cast(_F, jax.jit(function)) if is_traced else function


def own_buffers(state: Any, *, apart_from: Any) -> Any:
    """Copies the arrays of `state` whose memory occurs before in it, or in `apart_from`."""
    # Some optimizers keep the initial parameters: donating both would donate one buffer twice,
    # which XLA refuses. Arrays that are not one object may share one: `jax.device_put` to where an
    # array lies makes such.
    seen: set[int] = set().union(*map(_buffers, jax.tree.leaves(apart_from)))

    def own(leaf: Any) -> Any:
        buffers = _buffers(leaf)
        if not buffers.isdisjoint(seen):
            return jnp.copy(leaf)
        seen.update(buffers)
        return leaf

    return jax.tree.map(own, state)


def _buffers(leaf: Any) -> Set[int]:
    """Returns where the memory of an array is: one address for each shard of this process."""
    if not isinstance(leaf, jax.Array):
        return frozenset()
    if isinstance(leaf, jax.core.Tracer) or leaf.is_deleted():
        return {id(leaf)}
    return {shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards}


def on_device(leaf: Any) -> Any:
    """Returns an array in the memory of its devices; one that is there already as it is."""
    return jax.device_put(leaf, jax.memory.Space.Device) if _is_on_host(leaf) else leaf


def put_beside(leaf: Any, other: Any) -> Any:
    """Returns an array of device memory where `other` lies: on the host, if that does."""
    return jax.device_put(leaf, jax.memory.Space.Host) if _is_on_host(other) else leaf


def _is_on_host(leaf: Any) -> bool:
    # Explicit in types: operations on arrays of two memories are errors.
    if not isinstance(leaf, jax.Array):
        return False
    return bool(jax.typeof(leaf).memory_space == jax.memory.Space.Host)
