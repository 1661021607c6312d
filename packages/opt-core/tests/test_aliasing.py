from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from core_testing import arrays, assert_same, given
from hypothesis import strategies as st
from opt_core import unalias


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
    tree = {"a": jnp.ones(2), "b": (jnp.ones(2), None, np.ones(2), 1.0)}
    result = unalias(tree, apart_from=jnp.ones(2))
    assert all(a is b for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(tree), strict=True))


def test_views_share_a_buffer() -> None:
    x = jnp.ones((2, 3))
    view = x.reshape(2, 3)
    assert pointers(x) == pointers(view)
    assert pointers(unalias(view, apart_from=x)) != pointers(x)


def test_typed_keys_are_copied() -> None:
    key = jax.random.key(1)
    first, second = unalias((key, key))
    assert first is key
    assert second is not key
    assert_same(second, key)
    assert pointers(jax.random.key_data(second)) != pointers(jax.random.key_data(key))


def test_deleted_arrays_are_left_alone() -> None:
    x = jnp.ones(2)
    x.delete()
    y = jnp.ones(2)
    assert unalias(y, apart_from=x) is y


def test_abstract_leaves_are_left_alone() -> None:
    leaf = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert unalias((leaf, leaf)) == (leaf, leaf)
