"""Tracing what is done to each leaf once for all leaves that are alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
from jax.interpreters.partial_eval import DynamicJaxprTracer

_F = TypeVar("_F", bound=Callable[..., Any])


def traced_once(function: _F, *operands: Any) -> _F:
    """Returns a function of leaves that a compiled caller traces once for leaves that are alike.

    Each leaf is then a call of one function, which XLA inlines: the compiled program is the same.
    Elsewhere the function runs as it is, since nothing is to be compiled that nobody asked for.

    Args:
      function: of arrays; what else is traced it must take as an argument.
      *operands: trees that hold its arguments.
    """
    is_traced = any(isinstance(leaf, DynamicJaxprTracer) for leaf in jax.tree.leaves(operands))
    return cast(_F, jax.jit(function)) if is_traced else function
