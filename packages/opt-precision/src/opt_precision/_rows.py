"""Small leaves that are alike as rows of one array, which are compiled once."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax import lax

from opt_precision._loops import as_floats, as_integers, loop, varying
from opt_precision._memory import is_on_host
from opt_precision._work import Work

# Of the elements of leaves that are copied: 4 MiB of float32.
_SMALL: Final = 1 << 20


def batches(works: Sequence[Work], limit: int) -> list[list[int]]:
    """Small leaves that are alike, as many together as have room, with results, in two pieces."""
    alike: dict[Hashable, list[int]] = {}
    for k, work in enumerate(works):
        is_small = work.is_looped and work.size <= _SMALL
        if is_small and not any(is_on_host(x.value) for x in work.operands):
            alike.setdefault(work.key, []).append(k)
    found = []
    for members in alike.values():
        one = works[members[0]]
        each = sum(x.nbytes for x in (*one.results, *(y.value for y in one.operands)))
        room = max(1, 8 * limit // each)
        found += [members[at : at + room] for at in range(0, len(members), room)]
    return [members for members in found if len(members) > 1]


def as_rows(
    works: Sequence[Work], rows: Sequence[jax.Array], index: Any, held: list[list[jax.Array]]
) -> list[list[jax.Array]]:
    """Computes leaves that are alike as rows of one array for each operand and each result."""
    one, results = works[0], zip(*held, strict=True)
    operands = [
        _stack(next(results) if each[0].is_result else [varying(x.value, index) for x in each])
        for each in zip(*(work.operands for work in works), strict=True)
    ]
    data = [jax.tree.leaves(work.data) for work in works]
    is_common = [all(x is y for y in rest) for x, *rest in zip(*data, strict=True)]
    tables = [
        each[0] if common else np.asarray(each) if isinstance(each[0], np.generic) else _stack(each)
        for each, common in zip(zip(*data, strict=True), is_common, strict=True)
    ]

    def body(index: Any, made: list[jax.Array]) -> list[jax.Array]:
        row = index.astype(np.uint32)
        at = functools.partial(lax.dynamic_index_in_dim, index=row, keepdims=False)
        own = [x if common else at(x) for x, common in zip(tables, is_common, strict=True)]
        values = [
            as_floats(at(x), operand.value.dtype)
            for x, operand in zip(operands, one.operands, strict=True)
        ]
        leaf = jax.tree.unflatten(jax.tree.structure(one.data), own)
        new = one.compute(leaf, None, (0,) * len(one.shape), values)
        return [
            lax.dynamic_update_index_in_dim(x, as_integers(y), row, 0)
            for x, y in zip(made, new, strict=True)
        ]

    kept = [x for x, operand in zip(operands, one.operands, strict=True) if operand.is_result]
    _, made = loop(body, index, len(works), kept)
    return [
        [
            as_floats(lax.dynamic_index_in_dim(x, row, keepdims=False), old.dtype)
            for x, old in zip(made, own, strict=True)
        ]
        for row, own in zip(rows, held, strict=True)
    ]


def _stack(arrays: Sequence[jax.Array]) -> jax.Array:
    joined = lax.concatenate([as_integers(x) if x.ndim else x[None] for x in arrays], 0)
    return joined.reshape(len(arrays), *arrays[0].shape)
