"""What a caller says about single leaves: which to take from where, to initialise, to drop."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Rename:
    r"""Takes a leaf from another name.

    Attributes:
      source: the name in the checkpoint; `\1`, `\2`, ... are the groups of the pattern.

    Examples:
      >>> rules = [(r'(.*)decoder/(.*)', Rename(r'\1model/\2'))]
    """

    source: str


@dataclasses.dataclass(frozen=True)
class Stack:
    r"""Stacks leaves of the checkpoint into one, e.g. those of layers under `nn.scan`.

    A leaf of the state is stacked along the dimension that follows the new axis of its parameter.
    Where the stacked parameter is factored the other way round, rows come from columns.

    Attributes:
      source: the names in the checkpoint; `{i}` counts from 0 to the size of the axis.
      axis: the position of the new axis in the parameter of the target.

    Examples:
      >>> rules = [(r'(.*)/layers/(.*)', Stack(r'\1/layers_{i}/\2'))]
    """

    source: str
    axis: int = 0


@dataclasses.dataclass(frozen=True)
class Unstack:
    r"""Takes a slice of a leaf of the checkpoint.

    A leaf of the state is sliced along the dimension that follows the axis of its parameter. Slices
    that are not used are dropped, with a line each: `params/layers/k[3]`.

    Attributes:
      source: the name in the checkpoint.
      index: the position of the slice, a template that becomes an integer.
      axis: which axis of the parameter in the checkpoint counts the slices.

    Examples:
      >>> rules = [(r'(.*)/layers_(\d+)/(.*)', Unstack(r'\1/layers/\3', index=r'\2'))]
    """

    source: str
    index: str
    axis: int = 0


@dataclasses.dataclass(frozen=True)
class Map:
    r"""Makes a leaf from leaves of the checkpoint by a function, e.g. one projection from three.

    A rule makes the leaves that its pattern matches: if it matches only the parameter, its moments
    are not carried over. Factored and projected state is refused by a rule that makes the parameter
    or its moments, and needs a rule of its own.

    Attributes:
      source: the name in the checkpoint, or several; `\1`, `\2`, ... are the groups of the pattern.
      fn: takes the arrays in the order of `source` and returns one, of the shape of the leaf in the
        target. JAX traces and compiles it: write it with `jax.numpy`.

    Examples:
      >>> import jax.numpy as jnp
      >>> fuse = lambda q, k, v: jnp.concatenate([q, k, v], axis=-1)
      >>> rules = [(r'(.*)/qkv/(.*)', Map((r'\1/q/\2', r'\1/k/\2', r'\1/v/\2'), fuse))]
      >>> rules = [(r'(.*)/kernel', Map(r'\1/kernel', jnp.transpose))]
    """

    source: str | tuple[str, ...]
    fn: Callable[..., Any]

    @property
    def sources(self) -> tuple[str, ...]:
        """The templates, one or several."""
        return (self.source,) if isinstance(self.source, str) else tuple(self.source)


@dataclasses.dataclass(frozen=True)
class Pad:
    r"""Takes a leaf from its own name and appends entries to one dimension, e.g. of a vocabulary.

    A leaf of the state grows along the dimension that follows the one of its parameter; leaves
    without such a dimension are unchanged. Its new entries are those that `init` makes for the
    grown parameter: zeros in Adam's moments, the initial step in `rprop`. A copy of the parameter,
    as `schedule_free` and `dog` keep, gets the new entries of that. So they train as in a new run,
    apart from what belongs to all entries, such as Adam's count.

    Attributes:
      axis: a dimension of the parameter.
      to: its size in the target, not below the saved one.
      value: of the new entries of a parameter.

    Examples:
      >>> rules = [(r'(.*)/embedding', Pad(axis=0, to=32128))]
      >>> rules = [(r'(.*)/embedding', Pad(axis=0, to=32128, value=0.02))]
    """

    axis: int
    to: int
    value: float = 0


Taking: TypeAlias = Rename | Stack | Unstack | Map
"""Actions that take a leaf from other names."""

Action: TypeAlias = Literal["initialise", "keep", "drop", "cast", "reshape"] | Taking | Pad
"""What a rule does with the leaves that its pattern matches.

`'keep'` keeps the target's own value. The others are as in `allow=`, for these leaves only;
`'drop'` matches names in the checkpoint, all others names in the target. Only leaves that are not
used are dropped: to reinitialise a leaf that the checkpoint has, say `'initialise'`.
"""

Rule: TypeAlias = tuple[str, Action]
_WORDS = frozenset({"initialise", "keep", "drop", "cast", "reshape"})


def compiled(rule: Any) -> tuple[re.Pattern[str], Any]:
    """Returns a rule with its pattern compiled; raises a `TypeError` or a `ValueError`."""
    if not isinstance(rule, tuple | list) or len(rule) != 2 or not isinstance(rule[0], str):
        raise TypeError(f"`rules`: expected pairs of a pattern and an action, found {rule!r}")
    pattern, action = rule
    if wrong := _wrong(action):
        kind = ValueError if isinstance(action, str | Stack) else TypeError
        raise kind(f"`rules`: {wrong}; found {action!r} for {pattern!r}")
    try:
        return re.compile(pattern, re.DOTALL), action
    except re.error as error:
        raise ValueError(f"`rules`: {pattern!r} is not a regular expression: {error}") from None


def _wrong(action: Any) -> str:
    """What is wrong with an action; empty if nothing is."""
    rule = action  # as of any type: what fields hold is not known yet
    match action:
        case Stack() if "{i}" not in rule.source:
            return "the source of a `Stack` must have `{i}`, the position along its axis"
        case Map():
            if not rule.sources or not all(isinstance(x, str) for x in rule.sources):
                return "the source of a `Map` must be a name or a tuple of names"
            if not callable(rule.fn):
                return "the `fn` of a `Map` must be a function"
            try:
                hash(rule.fn)
            except TypeError:
                return "the `fn` of a `Map` must be hashable, as for `jax.jit`"
        case Pad():
            if not (type(rule.axis) is type(rule.to) is int and rule.to >= 0):
                return "`axis` of a `Pad` must be an integer and `to` a non-negative one"
            if not isinstance(rule.value, bool | int | float):
                return "`value` of a `Pad` must be a real number"
        case str() if rule not in _WORDS:
            return f"expected one of {sorted(_WORDS)}, or a `Rename`, `Stack`, `Map`, ..."
    is_action = isinstance(rule, str | Taking | Pad)
    return "" if is_action else f"{type(rule).__name__} is not an action"


def sources_of(action: Taking, match: re.Match[str], shape: Sequence[int]) -> tuple[str, ...]:
    """Returns the names in the checkpoint that a leaf of the target comes from."""
    # The shape is of the leaf, or of the parameter that it follows: it has the axis of a `Stack`.
    templates = action.sources if isinstance(action, Map) else (action.source,)
    names = tuple(expanded(match, template) for template in templates)
    if not isinstance(action, Stack):
        return names
    if not -len(shape) <= action.axis < len(shape):
        return ()
    return tuple(names[0].replace("{i}", str(i)) for i in range(shape[action.axis]))


def expanded(match: re.Match[str], template: str) -> str:
    """Returns a template with the groups of the pattern filled in."""
    try:
        return match.expand(template)
    except (re.error, IndexError) as error:
        raise ValueError(
            f"`rules`: {template!r} does not go with {match.re.pattern!r}: {error}"
        ) from None


def function_name(fn: Any) -> str:
    """Returns the name of a function for messages."""
    return str(getattr(fn, "__name__", type(fn).__name__))


# How the values of a leaf are computed from leaves of the source, and how both are sharded.


Spec = list[Any]


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A way to make a leaf."""

    word: str  # what `Row.kinds` has for it.

    def values(self, sources: Sequence[Any], shape: tuple[int, ...]) -> Any:
        """Returns the leaf, of that shape."""
        raise NotImplementedError

    def source_spec(self, spec: Spec) -> Spec:
        """Returns how to shard a source for a leaf with a spec."""
        return spec

    def leaf_spec(self, spec: Spec) -> Spec:
        """Returns how the leaf is sharded if a source has a spec, as far as that has entries."""
        return spec


@dataclasses.dataclass(frozen=True)
class Stacked(Conversion):
    """The sources along a new axis."""

    axis: int

    def values(self, sources: Sequence[Any], shape: tuple[int, ...]) -> Any:
        return jnp.stack(sources, self.axis)

    def source_spec(self, spec: Spec) -> Spec:
        return _without(spec, self.axis)

    def leaf_spec(self, spec: Spec) -> Spec:
        return _with(spec, self.axis)


@dataclasses.dataclass(frozen=True)
class Sliced(Conversion):
    """One entry along an axis of the source."""

    axis: int
    index: int

    def values(self, sources: Sequence[Any], shape: tuple[int, ...]) -> Any:
        return jax.lax.index_in_dim(sources[0], self.index, self.axis, keepdims=False)

    def source_spec(self, spec: Spec) -> Spec:
        return _with(spec, self.axis)

    def leaf_spec(self, spec: Spec) -> Spec:
        return _without(spec, self.axis)

    def __str__(self) -> str:
        return f"[{', '.join([*[':'] * self.axis, str(self.index)])}]"


@dataclasses.dataclass(frozen=True)
class Padded(Conversion):
    """The source with more entries along an axis: a value, or those of a second, longer leaf."""

    axis: int
    value: float

    def values(self, sources: Sequence[Any], shape: tuple[int, ...]) -> Any:
        old, size = sources[0], shape[self.axis]
        if len(sources) == 2:
            new = jax.lax.slice_in_dim(sources[1], old.shape[self.axis], size, axis=self.axis)
        else:
            missing = (*shape[: self.axis], size - old.shape[self.axis], *shape[self.axis + 1 :])
            new = jnp.full(missing, self.value, old.dtype)
        return jnp.concatenate([old, new], self.axis)

    def source_spec(self, spec: Spec) -> Spec:
        return _with(_without(spec, self.axis), self.axis)


@dataclasses.dataclass(frozen=True)
class Mapped(Conversion):
    """What a function makes of the sources."""

    fn: Callable[..., Any]  # takes them one by one

    def values(self, sources: Sequence[Any], shape: tuple[int, ...]) -> Any:
        return self.fn(*sources)


def _with(spec: Spec, axis: int) -> Spec:
    return [*spec[:axis], None, *spec[axis:]]


def _without(spec: Spec, axis: int) -> Spec:
    return [*spec[:axis], *spec[axis + 1 :]]
