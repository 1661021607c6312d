"""Which dimensions of its parameter a leaf of the state keeps, in the target and in a checkpoint.

A first moment keeps all of them, a row of Adafactor all but one. Sizes alone do not say which: the
two factors of a square matrix look the same.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from opt_checkpoint._naming.schema import LeafInfo, Names, Schema, leaf_name, leaf_path

Kept = tuple[int | None, ...]
"""For each dimension of a leaf the dimension of the parameter that it is; `None` for no such."""

FACTORED = frozenset({"factored_rms", "adafactor"})
"""Their means over rows and columns differ in nothing but the dimensions that they keep."""

_MEANS = ("v_row", "v_col")


class KeptDimensions:
    """What leaves keep of their parameters.

    Definitions describe it. Where they do not, a leaf of the parameter's shape mirrors it, and of
    any other nothing is known.
    """

    def __init__(self, saved: Schema, schema: Schema) -> None:
        self._saved = saved
        self.saved_shapes = _shapes(saved)
        self.shapes = _shapes(schema)

    def is_of_like_parameter(self, source: LeafInfo, leaf: LeafInfo) -> bool:
        """Whether the parameters of two leaves have one shape."""
        shape = self.saved_shapes.get(source.parameter or ())
        return shape is not None and shape == self.shapes.get(leaf.parameter or ())

    def of_target(self, leaf: LeafInfo) -> Kept:
        """Returns what a leaf of the target keeps; only `None`s where it follows no parameter."""
        rank = len(leaf.shape)
        if leaf.parameter is None:
            return (None,) * rank
        shape = self.shapes[leaf.parameter]
        if leaf.kind == "params":
            return tuple(range(rank))
        if leaf.dimensions is not None:
            return leaf.dimensions
        return tuple(range(rank)) if leaf.shape == shape else (None,) * rank

    def keeps_all(self, leaf: LeafInfo) -> bool:
        """Whether a leaf of the target has the dimensions of its parameter, and no others."""
        if leaf.parameter is None:
            return False
        shape = self.shapes[leaf.parameter]
        return leaf.shape == shape and self.of_target(leaf) == tuple(range(len(shape)))

    def is_placeholder(self, leaf: LeafInfo) -> bool:
        """Whether a leaf of the target only stands where another parameter has a mean."""
        return (
            _may_be_placeholder(leaf)
            and leaf.parameter is not None
            and self.shapes[leaf.parameter] != leaf.shape
            and self.of_target(leaf) == (None,)
        )

    def was_placeholder(self, leaf: LeafInfo) -> bool:
        """The same of a leaf of the checkpoint."""
        shape = self.saved_shapes.get(leaf.parameter or ())
        return _may_be_placeholder(leaf) and shape is not None and shape != leaf.shape

    def had(self, leaf: LeafInfo, kept: Kept) -> bool:
        """Whether a leaf of the checkpoint is known to keep these dimensions of its parameter."""
        shape = self.saved_shapes.get(leaf.parameter or ())
        if leaf.parameter is None or shape is None or len(kept) != len(leaf.shape):
            return False
        if leaf.kind == "params" or leaf.dimensions is None:
            return leaf.shape == shape and kept == tuple(range(len(shape)))
        return leaf.dimensions == kept and _has_sizes(leaf.shape, kept, shape)

    def sibling(self, leaf: LeafInfo, kept: Kept) -> LeafInfo | None:
        """Returns the other factor of a leaf of the checkpoint, if that has the dimensions.

        Rows and columns are means over what they do not keep, whatever they are called.
        """
        fields = leaf.field
        if leaf.base not in FACTORED or fields[-1:] not in [(name,) for name in _MEANS]:
            return None
        other = _MEANS[1 - _MEANS.index(fields[-1])]
        depth = len(leaf.path) - len(leaf.parameter or ())
        path = (*leaf.path[: depth - 1], other, *leaf.path[depth:])
        found = self._by_name.get(leaf_name(path))
        is_other = found is not None and found.transformation == leaf.transformation
        return found if is_other and found is not None and self.had(found, kept) else None

    @functools.cached_property
    def _by_name(self) -> Mapping[str, LeafInfo]:
        return self._saved.by_name


def sm3_dimension(leaf: LeafInfo) -> int | None:
    """Returns which dimension an accumulator of `optax.scale_by_sm3` is for, `None` of others."""
    fields = leaf.field
    is_one = leaf.base == "sm3" and len(fields) > 1 and fields[-2] == "mu"
    return int(fields[-1]) if is_one and fields[-1].isdecimal() else None


def told(kept: Kept) -> str:
    """Returns the dimensions that a leaf keeps, for people to read: `'dimensions 0, 2'`."""
    numbers = [str(i) for i in kept if i is not None]
    if not numbers:
        return "no dimension"
    return f"dimension{'' if len(numbers) == 1 else 's'} {', '.join(numbers)}"


def _shapes(schema: Schema) -> dict[Names, tuple[int, ...]]:
    return {leaf.path[1:]: leaf.shape for leaf in schema.leaves if leaf.kind == "params"}


def _may_be_placeholder(leaf: LeafInfo) -> bool:
    fields = leaf.field if leaf.kind == "state" and leaf.transformation else ()
    is_mean = leaf.base in FACTORED and fields[-1:] in [(name,) for name in (*_MEANS, "v", "m")]
    return is_mean and leaf.shape == (1,)


def _has_sizes(sizes: Sequence[int], kept: Kept, shape: Sequence[int]) -> bool:
    return all(
        i is None or (i < len(shape) and size == shape[i])
        for size, i in zip(sizes, kept, strict=True)
    )


def with_dimension(name: str, index: int, before: int) -> str:
    """Returns the name of an accumulator of `sm3` with the dimension that it had."""
    path = list(leaf_path(name))
    for i in range(1, len(path) - 1):
        is_sm3 = path[i - 1].partition("#")[0] == "sm3"
        if is_sm3 and path[i : i + 2] == ["mu", str(index)]:
            path[i + 1] = str(before)
            return leaf_name(path)
    return name
