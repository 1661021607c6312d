"""Functions of rules: their names, arguments and results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from opt_core._plan.names import is_wide
from opt_core._plan.schema import LeafInfo, shown
from opt_core.errors import LeafError

_NEED_VALUES: Final = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


class Refused(Exception):  # noqa: N818 - becomes the problem of a row
    """Why a rule cannot make a leaf."""


def result_of(fn: Callable[..., Any], sources: Sequence[LeafInfo]) -> jax.ShapeDtypeStruct | None:
    """Returns the shape and dtype of a function's result, `None` if computing it needs values."""
    given = [abstract(source) for source in sources]
    for source, leaf in zip(sources, given, strict=True):
        if not source.is_key and is_wide(leaf.dtype):
            raise Refused(
                f"JAX cannot hold {source.dtype} of `{source.name}` here: set `jax_enable_x64`"
            )
    name = function_name(fn)
    try:
        result = jax.eval_shape(fn, *given)
    except _NEED_VALUES:
        return None
    except Exception as error:  # whatever a user's function raises
        text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise Refused(f"`{name}` of {listed(sources)} raises {text}") from error
    if not isinstance(result, jax.ShapeDtypeStruct):
        kind = type(result).__name__
        raise Refused(f"`{name}` of {listed(sources)} returns {kind}, not one array")
    return result


def listed(sources: Sequence[LeafInfo]) -> str:
    """Returns dtypes and shapes for messages."""
    return ", ".join(map(shown, sources))


def abstract(leaf: LeafInfo, sharding: Any = None) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of a leaf, with a sharding.

    A Python scalar has no dtype of arrays; the result for it is not used.
    """
    if leaf.dtype == "python":
        return jax.ShapeDtypeStruct((), jnp.int32)
    dtype: Any = key_kind(leaf.dtype)[1] if leaf.is_key else jnp.dtype(leaf.dtype)
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)


def key_kind(name: str) -> tuple[str, Any]:
    """Returns the implementation and the dtype of typed PRNG keys such as `'key<fry>'`."""
    for impl in ("threefry2x32", "rbg", "unsafe_rbg"):
        found = jax.eval_shape(functools.partial(jax.random.key, impl=impl), 0).dtype
        if str(found) == name:
            return impl, found
    raise LeafError(f"`{name}` is not a type of PRNG keys of this JAX")


def function_name(fn: Any) -> str:
    """Returns the name of a function for messages."""
    return str(getattr(fn, "__name__", type(fn).__name__))
