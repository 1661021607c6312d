"""Cutting batches: sizes, order, errors."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from opt_accumulate._microbatches.batch import (
    Sizes,
    Split,
    batch_rows,
    fold,
    row_numbers,
    take,
    take_last,
    unfold,
)
from opt_accumulate.errors import BatchError


@hypothesis.given(rows=st.integers(1, 24), size=st.integers(1, 30))
@hypothesis.settings(max_examples=25, deadline=None)
def test_every_row_is_in_one_microbatch_and_finds_back(rows: int, size: int) -> None:
    split = Sizes(None, size, smaller_last=True).of(rows)
    batch = {"x": jnp.arange(rows)}
    folded = fold(batch, split)
    parts = [np.asarray(take(folded, i)["x"]) for i in range(split.num)]
    for i, part in enumerate(parts):
        np.testing.assert_array_equal(part, row_numbers(split, i))
    last = np.asarray(take_last(batch, split)["x"])
    assert sorted([*np.concatenate(parts), *last]) == list(range(rows))
    assert len(last) == split.last < split.size == min(size, rows)
    np.testing.assert_array_equal([*unfold(jnp.stack(parts), split), *last], np.arange(rows))


def test_keys_numpy_arrays_and_structures_are_leaves_like_any() -> None:
    batch: Any = {
        "key": jax.random.split(jax.random.key(0), 6),
        "x": [np.arange(12.0).reshape(6, 2)],
    }
    part = take(fold(batch, Split(num=3, size=2, last=0)), 1)
    assert (part["key"] == batch["key"][jnp.array([1, 4])]).all()
    assert part["x"][0].tolist() == [[2.0, 3.0], [8.0, 9.0]]


def test_sizes_on_devices_are_those_of_the_whole_batch_divided() -> None:
    assert Sizes(4, None).of(64, 8) == Split(num=4, size=2, last=0)
    assert Sizes(None, 16).of(64, 8) == Split(num=4, size=2, last=0)
    assert Sizes(None, 24, smaller_last=True).of(64, 8) == Split(num=2, size=3, last=2)


@pytest.mark.parametrize(
    ("sizes", "rows", "devices", "words"),
    [
        (
            Sizes(5, None),
            12,
            1,
            (
                "`batch` has 12 rows, which do not divide into microbatches: `num_microbatches` "
                "is 5. Take one of 1, 2, 3, 4, 6, 12; or pad the batch with rows of weight 0; or "
                "give `microbatch_size` with `smaller_last=True`."
            ),
        ),
        (Sizes(13, None), 12, 1, "`num_microbatches` is 13. Take one of 1, 2, 3, 4, 6, 12;"),
        (Sizes(None, 8), 12, 1, "`microbatch_size` is 8. Take one of 1, 2, 3, 4, 6, 12;"),
        (
            Sizes(None, 16),
            24,
            4,
            (
                "`batch` has 6 rows on each of 4 devices, which do not divide into microbatches: "
                "`microbatch_size` is 16. Take one of 4, 8, 12, 24;"
            ),
        ),
        (
            Sizes(2, None),
            13,
            4,
            (
                "`batch` has 13 rows and `num_microbatches` is 2: the rows must divide evenly over "
                "the 4 devices of `data_axes`. Pad the batch"
            ),
        ),
        (Sizes(None, 6), 24, 4, "`batch` has 24 rows and `microbatch_size` is 6: the rows must"),
    ],
)
def test_rows_that_do_not_divide(sizes: Sizes, rows: int, devices: int, words: str) -> None:
    with pytest.raises(BatchError) as error:
        sizes.of(rows, devices)
    assert words in str(error.value)


def test_scalars_are_in_every_microbatch_as_they_are() -> None:
    scalars = {"int": 3, "array": jnp.float32(2), "key": jax.random.key(0), "train": True}
    batch = {**scalars, "numpy": np.array(1.5), "x": np.arange(7), "none": None}
    assert batch_rows(batch) == 7
    split = Split(num=3, size=2, last=1)
    for part in (take(fold(batch, split), 2), take_last(batch, split)):
        assert all(part[name] is batch[name] for name in batch if name != "x")
    assert take(fold(batch, split), 2)["x"].tolist() == [2, 5]


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({}, "`batch` has no rows: expected a tree whose arrays share their first dimension, fo"),
        (
            {"x": np.float32(3), "step": {"count": 3}},
            "arrays share their first dimension, found only scalars: step/count, x.",
        ),
        (
            {"x": np.ones((3, 2)), "y": [np.ones(4)]},
            "same number of rows (first dimension):\n  x: 3 rows of (2,)\n  y/0: 4 rows of ()\n",
        ),
        ({"x": np.ones((0, 2)), "y": np.ones(0)}, "`batch` has 0 rows: x, y"),
    ],
)
def test_batches_without_common_rows(batch: Any, words: str) -> None:
    with pytest.raises(BatchError) as error:
        batch_rows(batch)
    assert words in str(error.value)
