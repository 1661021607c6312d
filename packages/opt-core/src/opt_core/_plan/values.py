"""What rules make of values: renamed, stacked, sliced, padded, or mapped by a function."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from opt_core._plan.leaves import LeafInfo, Schema, abstract, is_wide, shown
from opt_core._plan.plan import Request, Row, fitted
from opt_core._plan.rules import (
    Conversion,
    Map,
    Mapped,
    Pad,
    Padded,
    Rename,
    Sliced,
    Stack,
    Stacked,
    Taking,
    Unstack,
    expanded,
    function_name,
    sources_of,
)
from opt_core._trees import Names, path_str

_ADVICE = "make it by a `Map` of its own, or initialise it"


class RuledRows:
    """The rows of leaves that a rule takes from the checkpoint."""

    def __init__(
        self,
        saved: Schema,
        target: Schema,
        request: Request,
        unlike_init: Callable[[], Mapping[str, str]],
    ) -> None:
        self.had, self.kept = KeptDimensions(saved), KeptDimensions(target)
        self._saved = {leaf.name: leaf for leaf in saved.leaves if leaf.kind != "extra"}
        self._leaves, self._request = target.leaves, request
        self._allow = request.allow
        self._unlike_init = functools.cache(unlike_init)

    def taken(self, leaf: LeafInfo, action: Taking, match: re.Match[str]) -> Row:
        """Returns the row of a leaf that a rule takes from named leaves."""
        shape = leaf.shape if leaf.parameter is None else self.kept.shapes[leaf.parameter]
        is_following = leaf.parameter is not None and leaf.kind == "state"
        names = sources_of(action, match, shape)
        row = Row(leaf, "converted", names, by=action)
        try:
            if not names and isinstance(action, Stack):
                raise Refused(f"has no axis {action.axis} to stack")
            if isinstance(action, Rename):
                return fitted(
                    leaf, self._saved_leaves(names), ("rename",), "", self._allow, by=action
                )
            if self.kept.is_placeholder(leaf):
                return self._placeholder(row)
            if isinstance(action, Stack):
                return self._stacked(row, action.axis % len(shape), is_following)
            if isinstance(action, Unstack):
                return self._sliced(row, action, expanded(match, action.index), is_following)
            return self._mapped(row, action)
        except Refused as why:
            present = names if all(name in self._saved for name in names) else ()
            return dataclasses.replace(row, sources=present, problem=str(why))

    def _saved_leaves(self, names: Iterable[str]) -> list[LeafInfo]:
        for name in names:
            if name not in self._saved:
                raise Refused(f"the checkpoint has no `{name}`, as a rule says")
        return [self._saved[name] for name in names]

    def _placeholder(self, row: Row) -> Row:
        """What stands in for a factor that does not exist: only zeros are lost."""
        sources = self._saved_leaves(row.sources)
        for source in sources:
            if not self.had.is_placeholder(source):
                what = f"`{source.name}` {list(source.shape)} is not"
                raise Refused(f"is a placeholder, and {what}: another choice of what is factored")
        how = Mapped("stack", _first)
        return self._converted(row, sources, how, note="a placeholder")

    def _stacked(self, row: Row, axis: int, is_following: bool) -> Row:
        leaf = row.leaf
        kept = self.kept.of(leaf) if is_following else tuple(range(len(leaf.shape)))
        if axis not in kept:
            raise _refused_as(leaf, kept, f"not dimension {axis}, along which a rule stacks")
        at = kept.index(axis)
        before = tuple(i if i is None or i < axis else i - 1 for i in (*kept[:at], *kept[at + 1 :]))
        sources = self._saved_leaves(row.sources)
        note = ""
        if is_following:
            sources, note = self._keeping(sources, before)
        _check_shapes(sources, [*leaf.shape[:at], *leaf.shape[at + 1 :]])
        return self._converted(row, sources, Stacked("stack", at), note=note)

    def _sliced(self, row: Row, action: Unstack, text: str, is_following: bool) -> Row:
        leaf = row.leaf
        (source,) = self._saved_leaves(row.sources)
        rank = len(source.shape)
        if is_following and leaf.parameter is not None:
            rank = len(self.kept.shapes[leaf.parameter]) + 1
        axis = action.axis
        if not -rank <= axis < rank:
            raise Refused(f"`{source.name}` {list(source.shape)} has no axis {axis} to unstack")
        axis = axis % rank
        kept = self.kept.of(leaf) if is_following else tuple(range(len(leaf.shape)))
        before = tuple(i if i is None or i < axis else i + 1 for i in kept)
        at = next((n for n, i in enumerate(before) if i is not None and i > axis), len(before))
        note = ""
        if is_following:
            (source,), note = self._keeping([source], (*before[:at], axis, *before[at:]))
        shape = source.shape
        if at >= len(shape) or not text.isdecimal() or int(text) >= shape[at]:
            what = f"`{source.name}` {list(shape)}"
            raise Refused(f"{what} has no index {text!r} along {action.axis}")
        _check_shapes([source], [*leaf.shape[:at], shape[at], *leaf.shape[at:]])
        return self._converted(row, [source], Sliced("stack", at, int(text)), note=note)

    def _keeping(self, sources: list[LeafInfo], kept: Kept) -> tuple[list[LeafInfo], str]:
        """The sources, or with a note the other factors if those keep the dimensions."""
        if all(self.had.keeps(source, kept) for source in sources):
            return sources, ""
        others = [self.had.sibling(source, kept) for source in sources]
        siblings = [other for other in others if other is not None]
        if len(siblings) < len(sources):
            has = f"`{sources[0].name}` {list(sources[0].shape)} is not known to keep"
            raise Refused(f"needs {dims(kept)} of the saved parameter, which {has}: {_ADVICE}")
        return siblings, f"rows and columns change places: {dims(kept)} of the saved parameter"

    def _mapped(self, row: Row, action: Map) -> Row:
        leaf = row.leaf
        sources = self._saved_leaves(row.sources)
        kept = self.kept.of(leaf)
        note = ""
        if leaf.kind == "state" and leaf.parameter is not None and not self.kept.is_whole(leaf):
            if others := self._ruled_alike(leaf):
                raise _refused_as(leaf, kept, f"is made by the rule for `{others[0]}`")
            note = f", which makes {dims(kept)} of its parameter"
        result = _result_of(action.fn, sources)
        note = f"`{function_name(action.fn)}` of {_listed(sources)}{note}"
        if result.shape != leaf.shape:
            raise Refused(f"{note} is {list(result.shape)}, expected {list(leaf.shape)}")
        how = Mapped("map", action.fn)
        return self._converted(row, sources, how, note=note, dtype=str(result.dtype))

    def _ruled_alike(self, leaf: LeafInfo) -> list[str]:
        """Leaves of the same parameter with other dimensions that the same rule makes."""
        rule = self._request.rule(leaf.name)
        kept = self.kept.of(leaf)
        return [
            other.name
            for other in self._leaves
            if other.parameter == leaf.parameter
            and not self.kept.is_placeholder(other)
            and (self.kept.is_whole(other) or self.kept.of(other) != kept)
            and rule is not None
            and (other_rule := self._request.rule(other.name)) is not None
            and other_rule[0] == rule[0]
        ]

    def _converted(
        self,
        row: Row,
        sources: Sequence[LeafInfo],
        how: Conversion,
        kinds: tuple[str, ...] = (),
        *,
        dtype: str | None = None,
        note: str = "",
    ) -> Row:
        """A row whose shapes are checked; checks the dtype."""
        if dtype is None and any(source.dtype != sources[0].dtype for source in sources):
            raise Refused(f"`{sources[0].name}` and others of its stack have different dtypes")
        kinds, by = (*kinds, how.word), None if isinstance(row.by, str) else row.by
        return fitted(row.leaf, sources, kinds, note, self._allow, by=by, how=how, dtype=dtype)

    def padded(
        self, leaf: LeafInfo, action: Pad, source: LeafInfo, kinds: tuple[str, ...], note: str
    ) -> Row:
        """Returns the row of a leaf that a `Pad` matches, given its row without a rule."""
        plain = fitted(leaf, [source], kinds, note, self._allow, by=action)
        if leaf.parameter is None:
            return plain
        try:
            axis = self._padded_axis(leaf.parameter, action)
            kept = self.kept.of(leaf)
            if all(i is None for i in kept):
                return _as_it_was(plain, "it follows no dimension")
            (factor,), swap = self._keeping([source], kept)
            if axis not in kept:
                why = swap or f"it does not keep dimension {axis}"
                plain = fitted(leaf, [factor], kinds, note, self._allow, by=action)
                return _as_it_was(plain, why)
            return self._grown(plain, action, factor, kept.index(axis), kinds, swap or note)
        except Refused as why:
            return dataclasses.replace(plain, action="converted", problem=str(why))

    def unpadded(self, leaf: LeafInfo, action: Pad, source: LeafInfo) -> str:
        """Returns why a leaf without a rule changes if its parameter is padded."""
        if leaf.parameter is None or source.shape != leaf.shape:
            return ""
        row = self.padded(leaf, action, source, (), "")
        if row.problem or row.sources == (source.name,):
            return row.problem
        return f"{row.note}, and no rule says what becomes of this"

    def _padded_axis(self, parameter: Names, action: Pad) -> int:
        """The dimension of the parameter, non-negative."""
        shape, name = self.kept.shapes[parameter], path_str(parameter)
        if not -len(shape) <= action.axis < len(shape):
            raise Refused(f"`{name}` {list(shape)} has no dimension {action.axis} to pad")
        axis = action.axis % len(shape)
        if action.to != shape[axis]:
            has = f"has {shape[axis]} entries in the target"
            raise Refused(f"dimension {axis} of `{name}` {has}, and a rule pads to {action.to}")
        return axis

    def _grown(
        self, plain: Row, action: Pad, source: LeafInfo, at: int, kinds: tuple[str, ...], note: str
    ) -> Row:
        leaf, size = plain.leaf, source.shape[at]
        if leaf.shape[at] != action.to:
            raise Refused(f"{list(leaf.shape)} is a projection, which cannot be padded")
        _check_shapes([source], [*leaf.shape[:at], size, *leaf.shape[at + 1 :]])
        if size > action.to:
            has = f"`{source.name}` has {size} entries"
            raise Refused(f"{has}, and a rule pads to {action.to}: only a `Map` can drop entries")
        if size == action.to:
            return plain
        if wrong := self._wrong_entries(leaf, action.value):
            raise Refused(wrong)
        new = f"with {action.value:g}"
        if leaf.kind == "state":
            new = "as its parameter" if copies_parameter(leaf) else "as `init` makes it"
        grown = f"{size} -> {action.to} along {at} {new}"
        how = Padded("pad", at, action.value)
        grown = ", ".join(filter(None, (note, grown)))
        return self._converted(plain, [source], how, kinds, note=grown)

    def _wrong_entries(self, leaf: LeafInfo, value: float) -> str:
        """Why there are no new entries, of a parameter with the value; empty if there are."""
        if leaf.is_key:
            return "is a PRNG key, which has no value to pad with"
        dtype, parameter = jnp.dtype(leaf.dtype), self._dtypes[leaf.parameter or ()]
        is_float = jnp.issubdtype(dtype, jnp.inexact)
        if not is_float and jnp.issubdtype(jnp.dtype(parameter), jnp.inexact):
            return f"{leaf.dtype} for a parameter of {parameter} is a code, not a value to pad with"
        if leaf.kind == "state":
            return self._unlike_init().get(leaf.name, "")
        with np.errstate(all="ignore"):
            fits = is_float or bool(np.array(value).astype(dtype) == value)
        return "" if fits else f"{leaf.dtype} cannot hold {value}"

    @functools.cached_property
    def _dtypes(self) -> dict[Names, str]:
        return {leaf.path[1:]: leaf.dtype for leaf in self._leaves if leaf.kind == "params"}


def _first(*sources: Any) -> Any:
    return sources[0]


_NEED_VALUES: Final = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


class Refused(Exception):  # noqa: N818 - becomes the problem of a row
    """Why a rule cannot make a leaf."""


def _result_of(fn: Callable[..., Any], sources: Sequence[LeafInfo]) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a function's result."""
    shapes = [abstract(source) for source in sources]
    for source, leaf in zip(sources, shapes, strict=True):
        if not source.is_key and is_wide(leaf.dtype):
            raise Refused(
                f"JAX cannot hold {source.dtype} of `{source.name}` here: set `jax_enable_x64`"
            )
    name = function_name(fn)
    try:
        result = jax.eval_shape(fn, *shapes)
    except _NEED_VALUES as error:
        what = f"`{name}` of {_listed(sources)}"
        raise Refused(f"{what} needs values: write it with `jax.numpy`, for tracers") from error
    except Exception as error:  # whatever a user's function raises
        text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise Refused(f"`{name}` of {_listed(sources)} raises {text}") from error
    if not isinstance(result, jax.ShapeDtypeStruct):
        kind = type(result).__name__
        raise Refused(f"`{name}` of {_listed(sources)} returns {kind}, not one array")
    return result


def _listed(sources: Sequence[LeafInfo]) -> str:
    """Dtypes and shapes for messages."""
    return ", ".join(map(shown, sources))


def _as_it_was(row: Row, why: str) -> Row:
    return row if row.problem or "reshape" in row.kinds else dataclasses.replace(row, note=why)


def _check_shapes(sources: Sequence[LeafInfo], expected: Sequence[int]) -> None:
    for source in sources:
        if list(source.shape) != list(expected):
            found = list(source.shape)
            raise Refused(f"expected `{source.name}` of {list(expected)}, found {found}")


def _refused_as(leaf: LeafInfo, kept: Kept, why: str) -> Refused:
    what = f"{list(leaf.shape)} keeps {dims(kept)} of its parameter"
    return Refused(f"{what} and {why}: {_ADVICE}")


# Which dimensions of a parameter a leaf keeps.

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
        """Returns the other factor of a leaf, if that keeps the dimensions."""
        if leaf.kept_by.name not in FACTORED or leaf.field[-1:] not in [(name,) for name in _MEANS]:
            return None
        other = _MEANS[1 - _MEANS.index(leaf.field[-1])]
        depth = len(leaf.path) - len(leaf.parameter or ())
        factor = self._schema.by_name.get(
            path_str((*leaf.path[: depth - 1], other, *leaf.path[depth:]))
        )
        return factor if factor is not None and self.keeps(factor, kept) else None


def copies_parameter(leaf: LeafInfo) -> bool:
    """Whether a leaf holds values of its parameter, all of its dimensions."""
    is_whole = leaf.dimensions is None or leaf.dimensions == tuple(range(len(leaf.shape)))
    return leaf.role == "params_copy" and leaf.parameter is not None and is_whole


def dims(kept: Kept) -> str:
    """Returns the dimensions that a leaf keeps as text: `'dimensions 0, 2'`."""
    numbers = [str(i) for i in kept if i is not None]
    if not numbers:
        return "no dimension"
    return f"dimension{'' if len(numbers) == 1 else 's'} {', '.join(numbers)}"
