"""What a caller says about leaves: take this from there, start that anew, let go of those."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, TypeAlias, get_args

from opt_checkpoint._naming.schema import LeafInfo

Kind: TypeAlias = Literal["initialise", "drop", "cast", "reshape", "regroup", "optimizer"]
"""What a plan may do beside matching:

* `'initialise'`: a leaf of the target that the checkpoint lacks, as `init` makes it;
* `'drop'`: a leaf of the checkpoint that the target has no place for;
* `'cast'`: another dtype, where every value fits;
* `'reshape'`: another shape of the same size;
* `'regroup'`: a leaf whose parameter is in another group, or in none any more;
* `'optimizer'`: other transformations, or others in their order.
"""

KINDS: Final = frozenset(get_args(Kind))


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

    Attributes:
      source: the names in the checkpoint; `{i}` counts from 0 to the size of the axis.
      axis: where the new axis is in the target.

    Examples:
      >>> rules = [(r'(.*)/layers/(.*)', Stack(r'\1/layers_{i}/\2'))]
    """

    source: str
    axis: int = 0


@dataclasses.dataclass(frozen=True)
class Unstack:
    r"""Takes a slice of a leaf of the checkpoint.

    Attributes:
      source: the name in the checkpoint.
      index: the position of the slice: a template that becomes an integer.
      axis: which axis of the leaf in the checkpoint counts the slices.

    Examples:
      >>> rules = [(r'(.*)/layers_(\d+)/(.*)', Unstack(r'\1/layers/\3', index=r'\2'))]
    """

    source: str
    index: str
    axis: int = 0


Action: TypeAlias = (
    Literal["initialise", "keep", "drop", "cast", "reshape"] | Rename | Stack | Unstack
)
"""What a rule does with the leaves that its pattern matches.

`'keep'` leaves the target's own value. The others are as in `Kind`, for these leaves alone;
`'drop'` speaks of names in the checkpoint, all others of names in the target. What is dropped is
what nothing takes: to start a leaf anew that the checkpoint has, say `'initialise'` of its name.
"""

Rule: TypeAlias = tuple[str, Action]
_WORDS = frozenset({"initialise", "keep", "drop", "cast", "reshape"})


@dataclasses.dataclass(frozen=True)
class Policy:
    """What is admitted: kinds, and rules for leaves.

    Attributes:
      allow: kinds of changes.
      rules: patterns (regular expressions that match a whole name) with actions; the first that
        matches decides.
    """

    allow: frozenset[str]
    rules: tuple[tuple[re.Pattern[str], Action], ...]

    @classmethod
    def make(cls, allow: Iterable[str], rules: Sequence[Rule]) -> Policy:
        """Checks and compiles.

        Raises:
          TypeError: `allow` is one string, or an action is none.
          ValueError: a kind, a word or a regular expression is wrong.
        """
        if isinstance(allow, str):
            raise TypeError(f"`allow` must be a set of kinds; found the string {allow!r}")
        allow = frozenset(allow)
        if unknown := sorted(allow - KINDS):
            raise ValueError(f"`allow`: expected kinds among {sorted(KINDS)}, found {unknown}")
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
    if isinstance(action, str) and action not in _WORDS:
        raise ValueError(
            f"`rules`: the action for {pattern!r} must be one of {sorted(_WORDS)}, a `Rename`, "
            f"`Stack` or `Unstack`; found {action!r}"
        )
    if not isinstance(action, str | Rename | Stack | Unstack):
        raise TypeError(f"`rules`: {type(action).__name__} is no action for {pattern!r}")
    if isinstance(action, Stack) and "{i}" not in action.source:
        raise ValueError(
            f"`rules`: the source of a `Stack` must have `{{i}}`, the position along its axis; "
            f"found {action.source!r} for {pattern!r}"
        )
    try:
        return re.compile(pattern, re.DOTALL), action
    except re.error as error:
        raise ValueError(f"`rules`: {pattern!r} is no regular expression: {error}") from None


def sources_of(
    action: Rename | Stack | Unstack, found: re.Match[str], leaf: LeafInfo
) -> tuple[str, ...]:
    """Returns the names in the checkpoint that a leaf of the target is made from."""
    name = expanded(found, action.source)
    if not isinstance(action, Stack):
        return (name,)
    if not -len(leaf.shape) <= action.axis < len(leaf.shape):
        return ()
    return tuple(name.replace("{i}", str(i)) for i in range(leaf.shape[action.axis]))


def expanded(found: re.Match[str], template: str) -> str:
    """Returns a template with the groups of the pattern filled in.

    Raises:
      ValueError: the pattern has no such group.
    """
    try:
        return found.expand(template)
    except (re.error, IndexError) as error:
        raise ValueError(
            f"`rules`: {template!r} does not go with {found.re.pattern!r}: {error}"
        ) from None
