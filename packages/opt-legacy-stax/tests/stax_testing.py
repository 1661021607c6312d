"""What the tests share."""

from typing import Any

import jax


def same_structure(one: Any, other: Any) -> bool:
    """Whether two trees have the same containers."""
    first: Any = jax.tree.structure(one)
    second: Any = jax.tree.structure(other)
    return bool(first == second)
