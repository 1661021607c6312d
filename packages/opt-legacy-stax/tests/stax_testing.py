"""What the tests share."""

from typing import Any

import jax
import numpy as np
import opt_legacy_stax as ours

# What each optimizer keeps for an array, its parameter included.
KEEPS = {"sgd": 1, "momentum": 2, "nesterov": 2, "rmsprop": 2, "adagrad": 3, "adam": 3}
KEEPS |= {"rmsprop_momentum": 3, "adamax": 3, "sm3": 4}
NAMES = list(KEEPS)


def triple_of(name: str, module: Any = ours, rate: Any = 0.1, **options: Any) -> Any:
    rest = (0.9,) if name in ("momentum", "nesterov") else ()
    return getattr(module, name)(rate, *rest, **options)


def same_structure(one: Any, other: Any) -> bool:
    """Whether two trees have the same containers."""
    first: Any = jax.tree.structure(one)
    second: Any = jax.tree.structure(other)
    return bool(first == second)


def assert_same(found: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
