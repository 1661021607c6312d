"""What rules make of values: renamed, stacked, sliced, padded, or mapped by a function."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from opt_core._paths import Names
from opt_core._plan.leaves import LeafInfo, leaf_name
from opt_core._plan.plan import Outcome, Row
from opt_core._plan.rules import (
    FREE,
    Kept,
    KeptDimensions,
    Map,
    Pad,
    Permissions,
    Refused,
    Rename,
    Stack,
    Taking,
    Unstack,
    copies_parameter,
    dims,
    expanded,
    function_name,
    listed,
    result_of,
    sm3_dimension,
    sources_of,
    with_dimension,
)

_ADVICE = "make it by a `Map` of its own, or initialise it"


class RuledRows:
    """Makes the rows of leaves that a rule makes from the checkpoint."""

    def __init__(
        self,
        saved: Mapping[str, LeafInfo],
        leaves: Sequence[LeafInfo],
        had: KeptDimensions,
        kept: KeptDimensions,
        permissions: Permissions,
        unlike_init: Callable[[], Mapping[str, str]],
    ) -> None:
        self._unlike_init = unlike_init
        self._saved, self._leaves, self._permissions = saved, leaves, permissions
        self._had, self._kept = had, kept

    def taken(self, leaf: LeafInfo, action: Taking, match: re.Match[str]) -> Row:
        """Returns the row of a leaf that a rule takes from named leaves."""
        shape = leaf.shape if leaf.parameter is None else self._kept.shapes[leaf.parameter]
        is_following = leaf.parameter is not None and leaf.kind == "state"
        names = sources_of(action, match, shape)
        row = Row(leaf, "converted", names, by=action)
        try:
            if not names and isinstance(action, Stack):
                raise Refused(f"has no axis {action.axis} to stack")
            if isinstance(action, Rename):
                (source,) = self._given(names)
                admitted = self._permissions.allow | {"rename"}
                row = fitted(leaf, source, ("rename",), "", admitted)
                return dataclasses.replace(row, by=action)
            if self._kept.is_placeholder(leaf):
                return self._placeholder(row)
            if isinstance(action, Stack):
                return self._stacked(row, action.axis % len(shape), is_following)
            if isinstance(action, Unstack):
                return self._sliced(row, action, expanded(match, action.index), is_following)
            return self._mapped(row, action)
        except Refused as why:
            present = names if all(name in self._saved for name in names) else ()
            return dataclasses.replace(row, sources=present, problem=str(why))

    def _given(self, names: Iterable[str]) -> list[LeafInfo]:
        for name in names:
            if name not in self._saved:
                raise Refused(f"the checkpoint has no `{name}`, as a rule says")
        return [self._saved[name] for name in names]

    def _placeholder(self, row: Row) -> Row:
        """What stands in for a factor that does not exist: only zeros are lost."""
        sources = self._given(row.sources)
        for source in sources:
            if not self._had.is_placeholder(source):
                what = f"`{source.name}` {list(source.shape)} is not"
                raise Refused(f"is a placeholder, and {what}: another choice of what is factored")
        return self._converted(row, sources, "stack", how="first", note="a placeholder")

    def _stacked(self, row: Row, axis: int, is_following: bool) -> Row:
        leaf = row.leaf
        kept = self._kept.of(leaf) if is_following else tuple(range(len(leaf.shape)))
        if is_following and (index := sm3_dimension(leaf)) is not None:
            return self._stacked_sm3(row, axis, index)
        if axis not in kept:
            raise _refused_as(leaf, kept, f"not dimension {axis}, along which a rule stacks")
        at = kept.index(axis)
        before = tuple(i if i is None or i < axis else i - 1 for i in (*kept[:at], *kept[at + 1 :]))
        sources = self._given(row.sources)
        note = ""
        if is_following:
            sources, note = self._keeping(sources, before)
        _check_shapes(sources, [*leaf.shape[:at], *leaf.shape[at + 1 :]])
        return self._converted(row, sources, "stack", how="stack", axis=at, note=note)

    def _stacked_sm3(self, row: Row, axis: int, index: int) -> Row:
        """An accumulator covers all entries of its index: the maximum over the layers does too."""
        before = 0 if index == axis else index - (index > axis)
        names = [with_dimension(name, index, before) for name in row.sources]
        sources = self._given(names)
        for source in sources:
            if sm3_dimension(source) != before:
                raise Refused(f"`{source.name}` is not an accumulator of `sm3`")
        if index == axis:
            note = "the maximum of each layer"
            return self._converted(row, sources, "stack", how="maxima", note=note)
        _check_shapes(sources, list(row.leaf.shape))
        note = "the maximum over the layers"
        return self._converted(row, sources, "stack", how="maximum", note=note)

    def _sliced(self, row: Row, action: Unstack, text: str, is_following: bool) -> Row:
        leaf = row.leaf
        (source,) = self._given(row.sources)
        if is_following and sm3_dimension(leaf) is not None:
            raise Refused("`sm3` accumulates over all slices together: initialise it by a rule")
        rank = len(source.shape)
        if is_following and leaf.parameter is not None:
            rank = len(self._kept.shapes[leaf.parameter]) + 1
        axis = action.axis
        if not -rank <= axis < rank:
            raise Refused(f"`{source.name}` {list(source.shape)} has no axis {axis} to unstack")
        axis = axis % rank
        kept = self._kept.of(leaf) if is_following else tuple(range(len(leaf.shape)))
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
        index = int(text)
        return self._converted(row, [source], "stack", how="slice", axis=at, index=index, note=note)

    def _keeping(self, sources: list[LeafInfo], kept: Kept) -> tuple[list[LeafInfo], str]:
        """The sources, or with a note the other factors if those keep the dimensions."""
        if all(self._had.keeps(source, kept) for source in sources):
            return sources, ""
        others = [self._had.sibling(source, kept) for source in sources]
        found = [other for other in others if other is not None]
        if len(found) < len(sources):
            has = f"`{sources[0].name}` {list(sources[0].shape)} is not known to keep"
            raise Refused(f"needs {dims(kept)} of the saved parameter, which {has}: {_ADVICE}")
        return found, f"rows and columns change places: {dims(kept)} of the saved parameter"

    def _mapped(self, row: Row, action: Map) -> Row:
        leaf = row.leaf
        sources = self._given(row.sources)
        kept = self._kept.of(leaf)
        note = ""
        if leaf.kind == "state" and leaf.parameter is not None and not self._kept.is_whole(leaf):
            if others := self._ruled_alike(leaf):
                raise _refused_as(leaf, kept, f"is made by the rule for `{others[0]}`")
            note = f", which makes {dims(kept)} of its parameter"
        result = result_of(action.fn, sources)
        note = f"`{function_name(action.fn)}` of {listed(sources)}{note}"
        if result is None:
            note += "; checked when it is applied"
            row = dataclasses.replace(row, is_opaque=True)
            return self._converted(row, sources, "map", how="map", note=note)
        if result.shape != leaf.shape:
            raise Refused(f"{note} is {list(result.shape)}, expected {list(leaf.shape)}")
        return self._converted(row, sources, "map", how="map", note=note, dtype=str(result.dtype))

    def _ruled_alike(self, leaf: LeafInfo) -> list[str]:
        """Leaves of the same parameter with other dimensions that the same rule makes."""
        rule = self._permissions.rule(leaf.name)
        kept = self._kept.of(leaf)
        return [
            other.name
            for other in self._leaves
            if other.parameter == leaf.parameter
            and not self._kept.is_placeholder(other)
            and (self._kept.is_whole(other) or self._kept.of(other) != kept)
            and rule is not None
            and (found := self._permissions.rule(other.name)) is not None
            and found[0] == rule[0]
        ]

    def _converted(
        self,
        row: Row,
        sources: Sequence[LeafInfo],
        kind: str,
        kinds: tuple[str, ...] = (),
        *,
        dtype: str = "",
        note: str = "",
        **fields: Any,
    ) -> Row:
        """A row whose shapes are checked; checks the dtype."""
        leaf = row.leaf
        if kind != "map":
            dtype = sources[0].dtype
            if any(source.dtype != dtype for source in sources):
                raise Refused(f"`{sources[0].name}` and others of its stack have different dtypes")
        casts, problem = cast_kinds(dtype, leaf.dtype) if dtype else ((), "")
        notes = [row.note, note, f"{dtype} -> {leaf.dtype}" if casts else ""]
        return dataclasses.replace(
            row,
            sources=tuple(source.name for source in sources),
            kinds=(*kinds, kind, *casts),
            note=", ".join(filter(None, notes)),
            problem=problem,
            is_admitted={*kinds, *casts} <= self._permissions.allow | FREE,
            **fields,
        )

    def padded(
        self, leaf: LeafInfo, action: Pad, source: LeafInfo, kinds: tuple[str, ...], note: str
    ) -> Row:
        """Returns the row of a leaf that a `Pad` matches, given its row without a rule."""
        allow = self._permissions.allow
        plain = dataclasses.replace(fitted(leaf, source, kinds, note, allow), by=action)
        if leaf.parameter is None:
            return plain
        try:
            axis = self._padded_axis(leaf.parameter, action)
            kept = self._kept.of(leaf)
            if all(i is None for i in kept):
                return _as_it_was(plain, "it follows no dimension")
            (found,), swap = self._keeping([source], kept)
            if axis not in kept:
                why = swap or f"it does not keep dimension {axis}"
                plain = fitted(leaf, found, kinds, note, allow)
                return _as_it_was(dataclasses.replace(plain, by=action), why)
            return self._grown(plain, action, found, kept.index(axis), kinds, swap or note)
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
        shape, name = self._kept.shapes[parameter], leaf_name(parameter)
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
        row = dataclasses.replace(plain, action="converted", sources=(source.name,), note=note)
        new = f"with {action.value:g}"
        if leaf.kind == "state":
            new = "as its parameter" if copies_parameter(leaf) else "as `init` makes it"
        grown = f"{size} -> {action.to} along {at} {new}"
        return self._converted(row, [source], "pad", kinds, how="pad", axis=at, note=grown)

    def _wrong_entries(self, leaf: LeafInfo, value: float | complex) -> str:
        """Why there are no new entries, of a parameter with the value; empty if there are."""
        if leaf.is_key:
            return "is a PRNG key, which has no value to pad with"
        dtype, parameter = jnp.dtype(leaf.dtype), self._dtypes[leaf.parameter or ()]
        is_float = jnp.issubdtype(dtype, jnp.inexact)
        if not is_float and jnp.issubdtype(jnp.dtype(parameter), jnp.inexact):
            return f"{leaf.dtype} for a parameter of {parameter} is a code, not a value to pad with"
        if leaf.kind == "state":
            return self._unlike_init().get(leaf.name, "")
        fits = not isinstance(value, complex) or jnp.issubdtype(dtype, jnp.complexfloating)
        if fits and not is_float:
            with np.errstate(all="ignore"):
                fits = bool(np.array(value).astype(dtype) == value)
        return "" if fits else f"{leaf.dtype} cannot hold {value}"

    @functools.cached_property
    def _dtypes(self) -> dict[Names, str]:
        return {leaf.path[1:]: leaf.dtype for leaf in self._leaves if leaf.kind == "params"}


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


def fitted(
    leaf: LeafInfo,
    source: LeafInfo,
    kinds: tuple[str, ...],
    note: str,
    admitted: frozenset[str],
) -> Row:
    """Returns the row of a leaf that comes from one other."""
    problem = ""
    if source.shape != leaf.shape:
        if math.prod(source.shape) == math.prod(leaf.shape):
            kinds = (*kinds, "reshape")
            note = f"{list(source.shape)} -> {list(leaf.shape)}"
        else:
            problem = f"expected {list(leaf.shape)}, found {list(source.shape)}"
    casts, wrong = cast_kinds(source.dtype, leaf.dtype)
    if casts and not wrong:
        note = f"{source.dtype} -> {leaf.dtype}"
    kinds, problem = (*kinds, *casts), problem or wrong
    action: Outcome = "renamed" if kinds or source.name != leaf.name else "kept"
    if problem or {"cast", "reshape"} & {*kinds}:
        action = "converted"
    return Row(
        leaf,
        action,
        (source.name,),
        kinds,
        note=note,
        problem=problem,
        is_admitted=set(kinds) <= admitted | FREE | _free_casts(leaf, source),
        value=source.value,
    )


def _free_casts(leaf: LeafInfo, source: LeafInfo) -> frozenset[str]:
    """`cast` where state that is computed from updates goes on in another float dtype."""
    is_state = bool(leaf.transformation) and not leaf.is_key and not source.is_key
    kinds = (jnp.floating, jnp.complexfloating)
    dtypes = [jnp.dtype(x.dtype) for x in (leaf, source)] if is_state else []
    is_float = any(dtypes and all(jnp.issubdtype(x, kind) for x in dtypes) for kind in kinds)
    return frozenset({"cast"}) if is_float else frozenset()


def cast_kinds(source: str, leaf: str) -> tuple[tuple[str, ...], str]:
    """Returns what must be admitted for another dtype, and what makes it impossible."""
    if source == leaf:
        return (), ""
    wrong = f"expected {leaf}, found {source}"
    if source.startswith("key<") or leaf.startswith("key<"):
        return (), f"{wrong}: keys cannot be cast"
    old, new = jnp.dtype(source), jnp.dtype(leaf)
    is_complex = jnp.issubdtype(old, jnp.complexfloating)
    if is_complex and not jnp.issubdtype(new, jnp.complexfloating):
        return (), f"{wrong}: an imaginary part would be lost"
    return ("cast",), ""
