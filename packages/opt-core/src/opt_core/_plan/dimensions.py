"""Which dimensions of a parameter a leaf keeps, where its description does not say it."""

from __future__ import annotations

from opt_core._paths import Names
from opt_core._plan.leaves import LeafInfo, Schema, leaf_name, leaf_path

Kept = tuple[int | None, ...]
"""For each dimension of a leaf that of the parameter; `None` if it follows none."""

FACTORED = frozenset({"factored_rms", "adafactor"})
"""Their means over rows and columns differ only in the dimensions that they keep."""

_MEANS = ("v_row", "v_col")


class KeptDimensions:
    """What the leaves of a checkpoint, or of a target, keep of their parameters.

    Definitions describe it. Otherwise a leaf of the parameter's shape mirrors it, and nothing is
    known of others.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        params = (leaf for leaf in schema.leaves if leaf.kind == "params")
        self.shapes: dict[Names | None, tuple[int, ...]] = {x.path[1:]: x.shape for x in params}

    def of(self, leaf: LeafInfo) -> Kept:
        """Returns what a leaf keeps; only `None`s if it follows no parameter."""
        if leaf.dimensions is not None:
            return leaf.dimensions
        is_like = leaf.kind == "params" or leaf.shape == self.shapes.get(leaf.parameter)
        return tuple(range(len(leaf.shape))) if is_like else (None,) * len(leaf.shape)

    def is_whole(self, leaf: LeafInfo) -> bool:
        """Whether a leaf has the dimensions of its parameter, and no others."""
        is_like = leaf.shape == self.shapes.get(leaf.parameter)
        return is_like and self.of(leaf) == tuple(range(len(leaf.shape)))

    def is_placeholder(self, leaf: LeafInfo) -> bool:
        """Whether a leaf is a placeholder where another parameter has a mean."""
        is_mean = leaf.kept_by.name in FACTORED and leaf.field[-1:] in [
            (n,) for n in (*_MEANS, "v", "m")
        ]
        is_one = leaf.shape == (1,) != self.shapes.get(leaf.parameter, (1,))
        return is_mean and is_one and self.of(leaf) == (None,)

    def keeps(self, leaf: LeafInfo, kept: Kept) -> bool:
        """Whether a leaf is known to keep these dimensions of its parameter."""
        shape = self.shapes.get(leaf.parameter)
        if shape is None or self.of(leaf) != kept or len(kept) != len(leaf.shape):
            return False
        if leaf.dimensions is None:
            return leaf.shape == shape
        sizes = zip(leaf.shape, kept, strict=True)
        return all(i is None or (i < len(shape) and size == shape[i]) for size, i in sizes)

    def sibling(self, leaf: LeafInfo, kept: Kept) -> LeafInfo | None:
        """Returns the other factor of a leaf, if that keeps the dimensions.

        Rows and columns are means over what they do not keep, whatever their names.
        """
        if leaf.kept_by.name not in FACTORED or leaf.field[-1:] not in [(name,) for name in _MEANS]:
            return None
        other = _MEANS[1 - _MEANS.index(leaf.field[-1])]
        depth = len(leaf.path) - len(leaf.parameter or ())
        found = self._schema.by_name.get(
            leaf_name((*leaf.path[: depth - 1], other, *leaf.path[depth:]))
        )
        return found if found is not None and self.keeps(found, kept) else None


def copies_parameter(leaf: LeafInfo) -> bool:
    """Whether a leaf holds values of its parameter, all of its dimensions."""
    is_whole = leaf.dimensions is None or leaf.dimensions == tuple(range(len(leaf.shape)))
    return leaf.role == "params_copy" and leaf.parameter is not None and is_whole


def sm3_dimension(leaf: LeafInfo) -> int | None:
    """Returns the dimension of an accumulator of `optax.scale_by_sm3`, `None` for others."""
    fields = leaf.field
    is_one = leaf.kept_by.name == "sm3" and len(fields) > 1 and fields[-2] == "mu"
    return int(fields[-1]) if is_one and fields[-1].isdecimal() else None


def dims(kept: Kept) -> str:
    """Returns the dimensions that a leaf keeps as text: `'dimensions 0, 2'`."""
    numbers = [str(i) for i in kept if i is not None]
    if not numbers:
        return "no dimension"
    return f"dimension{'' if len(numbers) == 1 else 's'} {', '.join(numbers)}"


def with_dimension(name: str, index: int, before: int) -> str:
    """Returns the name of an accumulator of `sm3` with its former dimension."""
    path = list(leaf_path(name))
    for i in range(1, len(path) - 1):
        is_sm3 = path[i - 1].partition("#")[0] == "sm3"
        if is_sm3 and path[i : i + 2] == ["mu", str(index)]:
            path[i + 1] = str(before)
            return leaf_name(path)
    return name
