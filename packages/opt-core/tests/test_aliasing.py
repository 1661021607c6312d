"""What `create` does to leaves: a buffer for each, and no weak types."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from core_testing import arrays, assert_same, bits, given
from hypothesis import strategies as st
from opt_core import strip_weak_type, unalias


def pointers(tree: Any) -> list[int]:
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) if x.size]


@given(
    pool=st.lists(arrays, min_size=1, max_size=3),
    picks=st.lists(st.integers(0, 2), max_size=6),
    apart=st.lists(st.integers(0, 2), max_size=2),
)
def test_every_leaf_has_a_buffer_of_its_own(
    pool: list[Any], picks: list[int], apart: list[int]
) -> None:
    tree = [pool[i % len(pool)] for i in picks]
    others = [pool[i % len(pool)] for i in apart]
    result = unalias(tree, apart_from=others)
    assert_same(result, tree)
    found = pointers(result)
    assert len(set(found)) == len(found)
    assert not set(found) & set(pointers(others))


def test_what_shares_nothing_is_not_copied() -> None:
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    deleted = jnp.ones(2)
    deleted.delete()
    tree = {"a": jnp.ones(2), "b": (jnp.ones(2), None, np.ones(2), 1.0, shape, shape)}
    result = unalias(tree, apart_from=(jnp.ones(2), deleted))
    assert all(a is b for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(tree), strict=True))


def test_views_and_typed_keys_share_a_buffer_too() -> None:
    x, key = jnp.ones((2, 3)), jax.random.key(1)
    view = x.reshape(2, 3)
    assert pointers(x) == pointers(view)
    assert pointers(unalias(view, apart_from=x)) != pointers(x)
    first, second = unalias((key, key))
    assert first is key
    assert_same(second, key)
    assert pointers(jax.random.key_data(second)) != pointers(jax.random.key_data(key))


def test_weak_arrays_become_strong_and_all_else_is_left_alone() -> None:
    weak = jnp.asarray(1.5)
    assert weak.weak_type
    assert bits(strip_weak_type(weak)) == bits(jnp.float32(1.5))
    assert not jax.jit(strip_weak_type)(weak).weak_type
    assert not strip_weak_type(jax.eval_shape(lambda: jnp.asarray(1.5))).weak_type
    shape = jax.ShapeDtypeStruct((2,), jnp.int32)
    tree = [jnp.ones(2), np.ones(2), 1.5, jax.random.key(0), "text", shape]
    assert all(a is b for a, b in zip(strip_weak_type(tree), tree, strict=True))
