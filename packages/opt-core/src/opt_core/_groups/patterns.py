"""Patterns, which select leaves of a tree by paths, shapes, dtypes and logical axes, not values."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
from flax import traverse_util

from opt_core._paths import Names, flatten_with_paths, path_names, path_str
from opt_core._state_dict import to_state_dict
from opt_core.errors import GroupError

LogicalAxes: TypeAlias = Mapping[Names, frozenset[str]]


class Rest(enum.Enum):
    """The type of `REST`."""

    REST = "rest"


REST = Rest.REST
"""In place of a pattern: the leaves that no other group selects."""


@runtime_checkable
class Traversal(Protocol):
    """An object that selects leaves of a tree, like the traversals of `flax.traverse_util`."""

    def iterate(self, inputs: Any) -> Iterable[Any]:
        """Yields the selected parts of `inputs`."""
        ...

    def update(self, fn: Callable[[Any], Any], inputs: Any) -> Any:
        """Returns `inputs` with `fn` applied to the selected parts."""
        ...


@dataclasses.dataclass(frozen=True)
class Except:
    """The leaves that one pattern matches and another does not."""

    pattern: Any
    excluded: Any

    def __str__(self) -> str:
        return f"{pattern_str(self.pattern)} but not {pattern_str(self.excluded)}"


def has_shape(leaf: Any) -> bool:
    """Whether it is an array, abstract or not."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


class Leaf:
    """What a pattern may read of a leaf: its path, and `info`, its shape and dtype if known."""

    __slots__ = ("info", "names", "path")

    def __init__(self, names: Names, value: Any) -> None:
        self.names, self.path = names, path_str(names)
        self.info: Any
        if has_shape(value):
            self.info = jax.ShapeDtypeStruct(value.shape, value.dtype)
        elif isinstance(value, bool | int | float | complex):
            self.info = jax.ShapeDtypeStruct((), jnp.result_type(value))
        else:
            self.info = _NotAnArray(self.path, type(value).__name__)


class _NotAnArray:
    """Stands for a leaf of which only the path can be asked."""

    __slots__ = ("_kind", "_path")

    def __init__(self, path: str, kind: str) -> None:
        self._path, self._kind = path, kind

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise GroupError(
            f"a pattern asks for `{name}` of `{self._path}`, which is not an array but a "
            f"{self._kind}: decide by the path"
        )


def pattern_str(pattern: Any) -> str:
    """Returns a pattern as text."""
    match pattern:
        case Except():
            return str(pattern)
        case str():
            return repr(pattern)
        case re.Pattern():
            return repr(pattern.pattern)
        case Rest():
            return "the rest"
        case Set():
            return f"axes {', '.join(sorted(pattern))}"
    name = getattr(pattern, "__name__", None) if callable(pattern) else None
    return name if isinstance(name, str) else type(pattern).__name__


def check_pattern(pattern: Any) -> None:
    """Raises a `TypeError` unless `pattern` is one, a `GroupError` for an invalid expression."""
    match pattern:
        case str():
            try:
                re.compile(pattern)
            except re.error as error:
                raise GroupError(
                    f"{pattern!r} is not a valid regular expression: {error}"
                ) from None
            return
        case re.Pattern() if isinstance(pattern.pattern, bytes):
            raise GroupError(f"{pattern.pattern!r}: paths are text, not bytes; compile a text")
        case Set():
            if not pattern or not all(isinstance(name, str) for name in pattern):
                raise GroupError("a set of logical axes needs one name or more, all of them text")
            return
    if not (isinstance(pattern, re.Pattern | Rest | Except | Traversal) or callable(pattern)):
        raise TypeError(
            "a pattern is a regular expression for the whole path, a function of `(path, leaf)`, "
            f"a set of logical axes, or a traversal; got a {type(pattern).__name__}"
        )


def described(tree: Any) -> tuple[list[Leaf], Any]:
    """Returns what patterns may read of every leaf, in order, and the structure."""
    _check_names(tree)
    treedef: Any = jax.tree.structure(tree)
    return [Leaf(names, x) for names, x in flatten_with_paths(tree) if x is not None], treedef


def _check_names(tree: Any) -> None:
    """Raises a `GroupError` if two nodes of the tree have one path."""
    known: dict[Names, Any] = {}
    for keys, _ in jax.tree_util.tree_leaves_with_path(tree):
        names = path_names(keys)
        for n in range(1, len(names) + 1):
            other = known.setdefault(names[:n], keys[:n])
            if other != keys[:n]:
                both = " and ".join(f"`{jax.tree_util.keystr(path)}`" for path in (other, keys[:n]))
                raise GroupError(
                    f"{both} have the same path, `{path_str(names[:n])}`, and could not be "
                    "distinguished; rename one of the keys"
                )


def positions_of(pattern: Any, tree: Any, axes: LogicalAxes | None) -> frozenset[int]:
    """Returns the positions of the leaves of `tree` that a pattern matches."""
    leaves, treedef = described(tree)
    return matched(pattern, treedef, leaves, axes)


def matched(
    pattern: Any, treedef: Any, leaves: Sequence[Leaf], axes: LogicalAxes | None
) -> frozenset[int]:
    """Returns the positions of the leaves that a pattern, any but `REST`, matches."""
    match pattern:
        case Except(inner, excluded):
            return matched(inner, treedef, leaves, axes) - matched(excluded, treedef, leaves, axes)
        case str() | re.Pattern():
            expression = re.compile(pattern)
            return frozenset(i for i, x in enumerate(leaves) if expression.fullmatch(x.path))
        case Set():
            if axes is None:
                raise GroupError(
                    f"{pattern_str(pattern)}: the logical axes are not known. Pass `param_axes=` "
                    "to `from_rules`, or call `set_param_axes` first."
                )
            if without := [f"`{x.path}`" for x in leaves if x.names not in axes]:
                raise GroupError(
                    f"{pattern_str(pattern)}: `param_axes` have nothing for "
                    f"{', '.join(without)}. Give one `PartitionSpec`, or `None`, for every "
                    "parameter."
                )
            return frozenset(i for i, x in enumerate(leaves) if set(pattern) <= axes[x.names])
    try:
        if isinstance(pattern, Traversal):
            return _traversed(pattern, treedef, leaves)
        return frozenset(i for i, x in enumerate(leaves) if _answer(pattern, x))
    except GroupError:
        raise
    except Exception as error:  # of the pattern's own code
        raise GroupError(
            f"{pattern_str(pattern)}: {error}. A pattern is a function of `(path, leaf)`, and sees "
            "the shape and dtype of a leaf, never its values."
        ) from error


def _answer(pattern: Callable[[str, Any], Any], leaf: Leaf) -> bool:
    answer = pattern(leaf.path, leaf.info)
    if isinstance(answer, str | bytes):
        raise GroupError(
            f"{pattern_str(pattern)} returns {answer!r} for `{leaf.path}`: a pattern says whether "
            "a leaf is of its group, not which group a leaf is of"
        )
    return bool(answer)


def _traversed(traversal: Traversal, treedef: Any, leaves: Sequence[Leaf]) -> frozenset[int]:
    tree = treedef.unflatten([leaf.info for leaf in leaves])
    if isinstance(traversal, traverse_util.ModelParamTraversal):
        # It knows nested dicts alone.
        positions = to_state_dict(treedef.unflatten(range(len(leaves))))
        tree = jax.tree.map(lambda i: leaves[i].info, positions)
    selected = {id(leaf) for part in traversal.iterate(tree) for leaf in jax.tree.leaves(part)}
    return frozenset(i for i, x in enumerate(leaves) if id(x.info) in selected)


def logical_axes_by_path(param_axes: Any) -> dict[Names, frozenset[str]]:
    """Returns the names of the logical axes of every leaf."""
    by_path: dict[Names, frozenset[str]] = {}
    for names, spec in flatten_with_paths(param_axes):
        parts = [part if isinstance(part, tuple) else (part,) for part in tuple(spec or ())]
        by_path[names] = frozenset(name for part in parts for name in part if name is not None)
    return by_path
