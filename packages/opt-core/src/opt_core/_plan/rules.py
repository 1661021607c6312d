"""What a caller says about single leaves: which to take from where, to initialise, to drop."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp

from opt_core._plan.leaves import LeafInfo
from opt_core.errors import LeafError

Allowance: TypeAlias = Literal["initialise", "drop", "cast", "reshape", "regroup", "optimizer"]
"""A word of `allow=`: a change that the caller admits.

`initialise`: state that begins anew where training has gone on, or a parameter that the source
lacks. `drop`: trained state, or a parameter, without a successor. `cast`: another dtype, if every
value fits. `reshape`: another shape of the same size. `regroup`: a leaf whose parameter is in
another group, which is always admitted. `optimizer`: moments that go on under other mathematics.
"""

KINDS: Final = frozenset(get_args(Allowance))
FREE: Final = frozenset({"regroup"})
"""What needs no leave, and is a word all the same."""


def check_allowances(allow: Iterable[str]) -> frozenset[str]:
    """Returns the allowed changes as a set."""
    if isinstance(allow, str):
        raise TypeError(
            f"`allow` must be a set of words; found the string {allow!r}: give `{{{allow!r}}}`"
        )
    if unknown := sorted(frozenset(allow) - KINDS):
        raise ValueError(f"`allow`: expected words among {sorted(KINDS)}, found {unknown}")
    return frozenset(allow)


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
    Where the stacked parameter is factored the other way round, rows come from columns. An
    accumulator of `sm3` becomes the maximum over the layers.

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

    A leaf of the state is sliced along the dimension that follows the axis of its parameter. The
    accumulators of `sm3` are refused: they cover all slices together. Slices that are not used are
    dropped, with a line each: `params/layers/k[3]`.

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
        target. It is compiled where JAX can trace it; otherwise it gets concrete arrays.

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
    value: float | complex = 0


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


@dataclasses.dataclass(frozen=True)
class Permissions:
    """What is admitted: kinds, and rules for single leaves.

    Attributes:
      allow: kinds of changes.
      rules: patterns (regular expressions that match a whole name) with actions; the first that
        matches decides.
    """

    allow: frozenset[str]
    rules: tuple[tuple[re.Pattern[str], Action], ...]

    @classmethod
    def make(cls, allow: Iterable[str], rules: Sequence[Rule]) -> Permissions:
        """Checks and compiles."""
        allow = check_allowances(allow)
        return cls(allow, tuple(_compiled(rule) for rule in rules))

    def rule(self, name: str, *, drop: bool = False) -> tuple[int, Action, re.Match[str]] | None:
        """The first rule for a name of the target, or, with `drop`, of the checkpoint."""
        for i, (pattern, action) in enumerate(self.rules):
            found = pattern.fullmatch(name) if (action == "drop") == drop else None
            if found is not None:
                return i, action, found
        return None


def _compiled(rule: Any) -> tuple[re.Pattern[str], Any]:
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
    given = action  # as of any type: what fields hold is not known yet
    match action:
        case Stack() if "{i}" not in given.source:
            return "the source of a `Stack` must have `{i}`, the position along its axis"
        case Map():
            if not given.sources or not all(isinstance(x, str) for x in given.sources):
                return "the source of a `Map` must be a name or a tuple of names"
            if not callable(given.fn):
                return "the `fn` of a `Map` must be a function"
            try:
                hash(given.fn)
            except TypeError:
                return "the `fn` of a `Map` must be hashable, as for `jax.jit`"
        case Pad():
            if not (type(given.axis) is type(given.to) is int and given.to >= 0):
                return "`axis` of a `Pad` must be an integer and `to` a non-negative one"
            if not isinstance(given.value, bool | int | float | complex):
                return "`value` of a `Pad` must be a number"
        case str() if given not in _WORDS:
            return f"expected one of {sorted(_WORDS)}, or a `Rename`, `Stack`, `Map`, ..."
    is_action = isinstance(given, str | Taking | Pad)
    return "" if is_action else f"{type(given).__name__} is not an action"


def sources_of(action: Taking, found: re.Match[str], shape: Sequence[int]) -> tuple[str, ...]:
    """Returns the names in the checkpoint that a leaf of the target is made from."""
    # The shape is of the leaf, or of the parameter that it follows: it has the axis of a `Stack`.
    templates = action.sources if isinstance(action, Map) else (action.source,)
    names = tuple(expanded(found, template) for template in templates)
    if not isinstance(action, Stack):
        return names
    if not -len(shape) <= action.axis < len(shape):
        return ()
    return tuple(names[0].replace("{i}", str(i)) for i in range(shape[action.axis]))


def expanded(found: re.Match[str], template: str) -> str:
    """Returns a template with the groups of the pattern filled in."""
    try:
        return found.expand(template)
    except (re.error, IndexError) as error:
        raise ValueError(
            f"`rules`: {template!r} does not go with {found.re.pattern!r}: {error}"
        ) from None


def abstract(leaf: LeafInfo, sharding: Any = None) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of a leaf, with a sharding."""
    # A Python scalar has no dtype of arrays; the result for it is not used.
    if leaf.dtype == "python":
        return jax.ShapeDtypeStruct((), jnp.int32)
    dtype: Any = key_kind(leaf.dtype)[1] if leaf.is_key else jnp.dtype(leaf.dtype)
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)


def key_kind(name: str) -> tuple[str, Any]:
    """Returns the implementation and the dtype of typed PRNG keys such as `'key<fry>'`."""
    for impl in ("threefry2x32", "rbg", "unsafe_rbg"):
        found = jax.eval_shape(functools.partial(jax.random.key, impl=impl), 0).dtype
        if str(found) == name:
            return impl, found
    raise LeafError(f"`{name}` is not a type of PRNG keys of this JAX")


def function_name(fn: Any) -> str:
    """Returns the name of a function for messages."""
    return str(getattr(fn, "__name__", type(fn).__name__))
