from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from hypothesis import given
from hypothesis import strategies as st
from opt_checkpoint import LeafInfo
from opt_checkpoint._disk.storage import nest, store_key, to_store
from opt_checkpoint.errors import LeafError

paths = st.lists(st.text(), min_size=1, max_size=4).map(tuple)


@given(paths, paths)
def test_two_paths_never_share_a_key(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    # Orbax joins the components by a dot.
    assert (".".join(store_key(one)) == ".".join(store_key(other))) == (one == other)


@given(paths)
def test_keys_are_plain(path: tuple[str, ...]) -> None:
    for part in store_key(path):
        assert part
        assert all(c.isascii() and (c.isalnum() or c in "_-%") for c in part)


@given(st.sets(paths, max_size=8))
def test_nested_and_flat_again(keys: set[tuple[str, ...]]) -> None:
    flat = {key: i for i, key in enumerate(sorted(keys))}
    prefixes = {key[:k] for key in keys for k in range(len(key))}
    if prefixes & keys:
        with pytest.raises(LeafError, match="is the beginning of this one"):
            nest(flat)
    else:
        assert flatten_dict(nest(flat)) == flat


def info(leaf: Any, **changes: Any) -> LeafInfo:
    given: dict[str, Any] = {
        "path": ("state", "x"),
        "shape": np.shape(leaf),
        "dtype": str(leaf.dtype),
    }
    return LeafInfo(**{**given, "kind": "state", **changes})


def test_a_leaf_that_is_not_what_the_schema_says() -> None:
    x = jnp.zeros((2, 3))
    with pytest.raises(LeafError, match=r"`state/x`: expected float32\[3, 2\] as the schema says"):
        to_store(info(x, shape=(3, 2)), x)


def test_a_donated_leaf() -> None:
    x = jnp.zeros(3)
    what = info(x)
    x.delete()
    with pytest.raises(LeafError, match="has been donated or deleted: save it before the step"):
        to_store(what, x)


def test_an_abstract_leaf() -> None:
    x = jax.ShapeDtypeStruct((2,), jnp.float32)
    with pytest.raises(LeafError, match="which has no value"):
        to_store(info(x), x)


@pytest.mark.parametrize("dims", [65, 70])
def test_more_dimensions_than_can_be_read(dims: int) -> None:
    """JAX has such arrays, and NumPy has not."""
    x = jnp.zeros((0,) * dims)
    with pytest.raises(LeafError, match=f"`state/x`: expected at most 64 dimensions, found {dims}"):
        to_store(LeafInfo(("state", "x"), x.shape, "float32", "state"), x)


def test_as_many_keys_as_can_be_read() -> None:
    keys = jax.random.split(jax.random.key(0), (0,) * 64)
    what = LeafInfo(("extra", "k"), keys.shape, str(keys.dtype), "extra")
    with pytest.raises(LeafError, match="`extra/k`: expected at most 63 dimensions, found 64"):
        to_store(what, keys)
