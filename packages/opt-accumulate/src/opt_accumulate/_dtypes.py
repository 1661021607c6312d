"""The dtypes of sums and states."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from opt_accumulate.errors import OptionError


def at_least_32_bits(dtype: Any) -> Any:
    """Returns a dtype that sums of `dtype` do not quickly overflow or lose digits in.

    Examples:
      >>> [str(at_least_32_bits(jnp.dtype(d))) for d in ('bfloat16', 'float64', 'bool', 'uint8')]
      ['float32', 'float64', 'int32', 'uint32']
    """
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bool_:
        return jnp.dtype(jnp.int32)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return dtype
    for kind, wide in (
        (jnp.floating, jnp.float32),
        (jnp.unsignedinteger, jnp.uint32),
        (jnp.integer, jnp.int32),
    ):
        if jnp.issubdtype(dtype, kind):
            return dtype if dtype.itemsize >= 4 else jnp.dtype(wide)
    return dtype


def inexact(dtype: Any) -> Any:
    """Returns the dtype of a mean of values of `dtype`.

    Examples:
      >>> [str(inexact(d)) for d in ('int32', 'bfloat16', 'complex64')]
      ['float32', 'float32', 'complex64']
    """
    wide = at_least_32_bits(dtype)
    return wide if jnp.issubdtype(wide, jnp.inexact) else jnp.dtype(jnp.float32)


def check_accumulator_dtype(wanted: Any) -> None:
    """Raises unless gradients can be summed in a dtype.

    Raises:
      OptionError: it is not a dtype of real floating-point numbers of 16 bits or more.
    """
    if wanted is None:
        return
    try:
        dtype = jnp.dtype(wanted)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise OptionError(
            "`accumulator_dtype` must be None, or a dtype that sums of gradients fit in: real "
            "floating-point numbers of 16 bits or more, such as 'float32'; it is "
            f"{wanted if dtype is None else dtype.name!r}."
        )


def accumulator_dtype_of(dtype: Any, wanted: Any) -> Any:
    """Returns the dtype that gradients of `dtype` are summed in.

    Args:
      dtype: that of the gradients.
      wanted: `None` for `dtype` itself; a dtype of 32 bits or more widens only (float64 stays
        float64), a smaller one is taken at its word. Complex gradients stay complex.

    Examples:
      >>> [str(accumulator_dtype_of(jnp.dtype(d), jnp.float32)) for d in ('bfloat16', 'complex64')]
      ['float32', 'complex64']
      >>> str(accumulator_dtype_of(jnp.dtype('float32'), jnp.bfloat16))
      'bfloat16'
    """
    dtype = jnp.dtype(dtype)
    if wanted is None:
        return dtype
    wanted = jnp.dtype(wanted)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.dtype(jnp.complex128) if wanted == jnp.float64 else dtype
    return wanted if wanted.itemsize < 4 or wanted.itemsize >= dtype.itemsize else dtype


def cast_like(tree: Any, like: Any) -> Any:
    """Returns `tree` in the dtypes of `like`, without weak types; random keys as they are."""

    def leaf(new: Any, old: Any) -> Any:
        dtype = jnp.result_type(old)
        if jnp.issubdtype(dtype, jax.dtypes.extended):
            return new
        return _cast(new, dtype)

    return jax.tree.map(leaf, tree, like)


def widen(accumulator: Any, grads: Any) -> Any:
    """Returns the accumulator in no narrower dtypes than those of `grads`.

    Optimizers compute in the dtype of what they get: bfloat16, chosen to save memory, is to be that
    of the accumulator alone.
    """

    def leaf(total: Any, grad: Any) -> Any:
        dtype = jnp.promote_types(jnp.result_type(total), jnp.result_type(grad))
        return total if _has(total, dtype) else jnp.asarray(total, dtype)

    return jax.tree.map(leaf, accumulator, grads)


def _cast(value: Any, dtype: Any) -> Any:
    return value if _has(value, dtype) else jax.lax.convert_element_type(value, dtype)


def _has(value: Any, dtype: Any) -> bool:
    """Whether a value is an array of that very dtype: JAX takes longer to find no cast to make."""
    return isinstance(value, jax.Array) and value.dtype == dtype and not value.weak_type
