"""Logical axes as symbolic dimensions.

`init` is evaluated on parameters whose dimensions are symbolic (`jax.export.symbolic_shape`), with
one variable, of the true value 1, for each name and size: `embed` of size 96 is `96*d0`, divisible
by what 96 is divisible by. The shapes of the state then say what each of its dimensions is: `96*d0`
is `embed`, `10` a constant, `3*d0` counts blocks, `9216*d0*d1` is computed from two dimensions.

First, all sizes are a common multiple of the true ones, `96*(t + d0 - 1)` with any `t`: what `init`
gives each dimension then, it gives for all multiples. JAX refuses comparisons that depend on the
multiple (`n >= 128`, `min(m, 64)`). If there are any, `init` is evaluated without `t`, which
decides comparisons as for the true sizes; and again with all variables pinned to one of `_FACTORS`.
A size that is 64 at the true sizes and at 64 times the sizes is capped and follows no dimension.
Other differences are thresholds that are crossed there alone, and are no reason to doubt.

To JAX, different symbols are never equal. A branch on `m == n` is therefore taken as if they were
not: if the shapes of the state then differ from the true ones, the leaf is left to other sources.
"""

from __future__ import annotations

import contextlib
import fractions
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import export
from jax.tree_util import tree_leaves_with_path

from opt_partition._param_axes import Parameter

# Multiples of the sizes at which names are confirmed; the next one if `init` raises at one.
_FACTORS = (64, 2)
# Two numbers in one, or one of two parts; smaller fractions count blocks, which may be sharded.
_HALF = fractions.Fraction(1, 2)
_VARIABLE = re.compile(r"d\d+")
_LINEAR = re.compile(r"(?:(\d+)\*)?d\d+(?: [+-] \d+)?")
COMPUTED = "computed from parameter dimension {}"

# What distinguishes a parameter dimension, e.g. its logical name; and its size.
Key = tuple[Any, int]
# For each dimension of each parameter; `None` keeps it a number.
Keys = Sequence[tuple[Key | None, ...]]
Evaluate = Callable[[Sequence[jax.ShapeDtypeStruct]], Any]


def keys_of(axes: Sequence[Any], shape: Sequence[int]) -> tuple[Key | None, ...]:
    """Returns name and size of each dimension that has a name."""
    pairs = zip(axes, shape, strict=True)
    return tuple(None if axis is None else (axis, size) for axis, size in pairs)


class Origin(NamedTuple):
    """What one dimension of a state leaf is computed from."""

    key: Key | None = None  # the parameter dimension that it is
    keys: tuple[Key, ...] = ()  # those that it is computed from; none if it is constant
    note: str = ""  # what it is if it is not one of them, with `{}` for these dimensions
    is_known: bool = True  # whether it is known to be no parameter dimension without `key`


Origins = tuple[Origin, ...]
CONSTANT = Origin()


def symbolic_origins(
    evaluate: Evaluate,
    table: Sequence[Parameter],
    keys: Keys,
    state: Any,
) -> tuple[list[Origins | None], str]:
    """Returns the origins of each leaf, `None` if symbols change its shape; and an error or ''."""
    origins: list[Origins | None] = [None] * len(jax.tree.leaves(state))
    reason = ""
    # A symbol never has the size 1 or 0, which `init` may treat in a special way.
    has_small = any(key is not None and key[1] < 2 for row in keys for key in row)
    for smallest in (0, 2) if has_small else (0,):
        kept = [tuple(k if k and k[1] >= smallest else None for k in row) for row in keys]
        try:
            shown = _Symbols(evaluate, table, kept).origins(state)
        except Exception as error:  # it is a user's function: anything can happen
            reason = reason or first_line(error)
            continue
        origins = [b if a is None else a for a, b in zip(origins, shown, strict=True)]
        if None not in origins:
            break
    return origins, reason


def first_line(error: Exception) -> str:
    """Returns the type and message of an error, shortened to one line."""
    text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return text if len(text) < 120 else f"{text[:117]}..."


class _Symbols:
    """A variable for each key, and evaluations of `init` on them."""

    def __init__(self, evaluate: Evaluate, table: Sequence[Parameter], keys: Keys) -> None:
        self._evaluate, self._table, self._keys = evaluate, table, keys
        distinct = dict.fromkeys(key for row in keys for key in row if key is not None)
        self._texts = {
            key: f"{key[1]}*d{i}" if key[1] > 1 else f"d{i}" for i, key in enumerate(distinct)
        }
        self._by_text = {text: key for key, text in self._texts.items()}
        self._by_variable = {f"d{i}": key for i, key in enumerate(distinct)}

    def origins(self, state: Any) -> list[Origins | None]:
        """Returns the origins of the dimensions of each leaf, or `None` if its shape differs."""
        leaves = jax.tree.leaves(state)
        if not self._texts:
            return [(CONSTANT,) * len(leaf.shape) for leaf in leaves]
        elsewhere: list[Any] = [None] * len(leaves)
        shown = self._at_all_multiples(state)
        if shown is None:
            shown = self._pinned(1, state)
            elsewhere = self._elsewhere(state)
        elif any(text not in self._by_text for text in _expressions(shown)):
            shown = self._pinned(1, state)  # which writes expressions in the simplest form
        origins = functools.cache(self._origins)
        return [*map(origins, (leaf.shape for leaf in leaves), shown, elsewhere)]

    def _at_all_multiples(self, state: Any) -> list[Any] | None:
        """Returns the dimensions of each leaf; `None` if `init` depends on the multiple."""
        texts = {
            key: f"{size}*t + {size}*d{i} - {size}"
            for i, key in enumerate(self._texts)
            for size in [max(1, key[1])]
        }
        try:
            shown = self._shapes(texts, 1, state)
        except Exception:
            return None
        is_cut = any("min(" in text or "max(" in text for text in _expressions(shown))
        return None if is_cut else shown

    def _pinned(self, factor: int, state: Any, *, by_path: bool = False) -> list[Any]:
        return self._shapes(self._texts, factor, state, by_path=by_path)

    def _elsewhere(self, state: Any) -> list[Any]:
        """Returns the dimensions at a multiple of the sizes."""
        for factor in _FACTORS:
            with contextlib.suppress(Exception):
                return self._pinned(factor, state, by_path=True)
        raise ValueError("`init` raises at multiples of the sizes")

    def _scope(self, factor: int) -> export.SymbolicScope:
        variables = self._by_variable
        return export.SymbolicScope([f"{v} {c} {factor}" for v in variables for c in (">=", "<=")])

    def _shapes(
        self, texts: Mapping[Key, str], factor: int, state: Any, *, by_path: bool = False
    ) -> list[tuple[str, ...] | None]:
        """Returns the dimensions, as text, of each leaf of `state`; `None` if it is not there.

        `texts` has the expression for each key, and `factor` is the value of the variables. If the
        structure of the state differs, no leaf is there; with `by_path`, those of the same path.
        """
        scope = self._scope(factor)
        # Each dimension is one object, which JAX compares much faster.
        dims: dict[Key | None, Any] = {
            key: export.symbolic_shape(text, scope=scope)[0] for key, text in texts.items()
        }
        short = {str(dims[key]): text for key, text in self._texts.items()}

        @functools.cache
        def struct(sizes: tuple[int, ...], dtype: Any, row: Any) -> jax.ShapeDtypeStruct:
            shape = (dims.get(*at) for at in zip(row, sizes, strict=True))
            return jax.ShapeDtypeStruct(tuple(shape), dtype)

        rows = zip(self._table, self._keys, strict=True)
        symbolic = self._evaluate([struct(p.shape, p.dtype, row) for p, row in rows])
        text = functools.cache(lambda shape: tuple(short.get(str(dim), str(dim)) for dim in shape))
        structures: list[Any] = [jax.tree.structure(tree) for tree in (symbolic, state)]
        if structures[0] == structures[1]:
            return [text(leaf.shape) for leaf in jax.tree.leaves(symbolic)]
        there = {path: text(leaf.shape) for path, leaf in tree_leaves_with_path(symbolic)}
        paths = [path for path, _ in tree_leaves_with_path(state)]
        if by_path or paths == [*there]:
            return [there.get(path) for path in paths]
        return [None] * len(paths)

    def _origins(
        self, sizes: Sequence[int], texts: Sequence[str] | None, elsewhere: Sequence[str] | None
    ) -> Origins | None:
        if texts is None or len(texts) != len(sizes):
            return None
        if elsewhere is None or len(elsewhere) != len(sizes):
            elsewhere = texts
        origins = [self._origin(*at) for at in zip(sizes, texts, elsewhere, strict=True)]
        return None if None in origins else tuple(origin for origin in origins if origin)

    def _origin(self, size: int, text: str, elsewhere: str) -> Origin | None:
        """Returns the origin of a dimension, or `None` if its size is not the true one."""
        if text.isdecimal():
            return CONSTANT if int(text) == size else None
        if text in self._by_text:
            key = self._by_text[text]
            if key[1] != size:
                return None
            if elsewhere.isdecimal() and int(elsewhere) >= size:
                return Origin(None, (key,), f"parameter dimension {{}} capped at {elsewhere}")
            return Origin(key, (key,))
        keys = tuple(self._by_variable[v] for v in dict.fromkeys(_VARIABLE.findall(text)))
        if not self._has_value(text, size, keys):
            return None
        return _computed(text, keys)

    def _has_value(self, text: str, size: int, keys: Sequence[Key]) -> bool:
        """Whether an expression has a value at the true sizes."""
        if any(key[1] == 0 for key in keys):  # stands for 1, as no symbol can be 0
            return size == 0
        (dimension,) = export.symbolic_shape(text, scope=self._true_scope)
        return bool(dimension >= size and dimension <= size)

    @functools.cached_property
    def _true_scope(self) -> export.SymbolicScope:
        return self._scope(1)


def _expressions(shown: Sequence[tuple[str, ...] | None]) -> set[str]:
    """Returns the dimensions that are no numbers."""
    return {text for shape in {*shown} for text in shape or () if not text.isdecimal()}


def _computed(text: str, keys: tuple[Key, ...]) -> Origin:
    """Returns the origin of a dimension that is no parameter dimension but computed from some."""
    if len(keys) == 1 and "^" not in text:
        found = _LINEAR.fullmatch(text)
        times = fractions.Fraction(int(found[1] or 1), max(1, keys[0][1])) if found else None
        if times is None or (times.denominator != 1 and times != _HALF):
            return Origin(None, keys, "counts blocks of parameter dimension {}", is_known=False)
    return Origin(None, keys, COMPUTED)
