"""The table of groups: how it is written, how it divides a tree, and who knows logical axes.

Which leaves belong to which group is a `Division`; the states of the groups carry it along.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Protocol, TypeAlias, runtime_checkable

import flax.serialization
import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.tree_util import DictKey

from opt_core._optimizer import Optimizer, OptimizerDef
from opt_core._state_dict import to_state_dict
from opt_core._trees import (
    Names,
    differences,
    flatten_with_paths,
    named_leaves,
    parts_at,
    path_names,
    path_str,
)
from opt_core.errors import GroupError
from opt_core.protocols import Transformation

MARKER = ()
"""Without leaves: stands where a leaf belongs to another group."""


@dataclasses.dataclass(frozen=True, eq=False)
class Division:
    """A tree of parameters, divided into groups."""

    names: tuple[str, ...]  # of all groups, in the order of the table
    trained: tuple[str, ...]  # of those that are not frozen
    owners: tuple[int, ...]  # for every leaf the position of its group in `names`
    treedef: Any  # the containers of the parameters

    @functools.cached_property
    def paths(self) -> tuple[Names, ...]:
        """The names along the path of every leaf."""
        positions = named_leaves(self.treedef.unflatten(range(len(self.owners))))
        return tuple(names for names, _ in positions)

    @functools.cached_property
    def members(self) -> Mapping[str, tuple[int, ...]]:
        """The positions of the leaves of every group."""
        members: dict[str, list[int]] = {name: [] for name in self.names}
        for position, owner in enumerate(self.owners):
            members[self.names[owner]].append(position)
        return {name: tuple(positions) for name, positions in members.items()}

    @property
    def frozen(self) -> tuple[int, ...]:
        """The positions of the leaves that are not updated."""
        is_frozen = [name not in self.trained for name in self.names]
        return tuple(i for i, owner in enumerate(self.owners) if is_frozen[owner])

    def leaves(self, tree: Any) -> list[Any]:
        """Returns what a tree has at the places of the parameters: arrays, axes, `None`."""
        leaves, structure = jax.tree.flatten(tree)
        if structure == self.treedef:
            return leaves
        parts = parts_at(self.treedef, tree)  # numbers stand for the leaves
        if parts is None:
            expected = self.treedef.unflatten(range(len(self.owners)))
            raise GroupError(
                "the state was made for parameters in other containers:\n"
                + "\n".join(differences(expected, tree, lambda _: "a leaf"))
                + "\nCreate the optimizer with these parameters, or take `regroup` for its state."
            )
        return [jax.tree.map(leaves.__getitem__, part) for part in parts]

    def cut(self, group: str, tree: Any) -> Any:
        """Returns the part of a tree that the definition of a group sees."""
        # It has the containers of all parameters, and `()` where a leaf belongs to another group.
        owner = self.names.index(group)
        pairs = zip(self.leaves(tree), self.owners, strict=True)
        return self.treedef.unflatten([part if i == owner else MARKER for part, i in pairs])

    def paste(self, group: str, tree: Any, leaves: list[Any]) -> None:
        """Puts the leaves of a group, in a tree as `cut` returns it, into the list of all."""
        parts = self.leaves(tree)
        for i in self.members[group]:
            leaves[i] = parts[i]

    @functools.cached_property
    def _value(self) -> tuple[int, Any]:
        value = self.names, self.trained, self.owners, self.treedef
        return hash(value), value

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Division) and self._value == other._value

    def __hash__(self) -> int:
        return self._value[0]

    def __reduce__(self) -> Any:  # without the hash: those of strings differ between processes
        return Division, (self.names, self.trained, self.owners, self.treedef)

    def __deepcopy__(self, memo: Any) -> Division:
        return self

    def __repr__(self) -> str:
        counts = (f"{name}: {len(members)}" for name, members in self.members.items())
        return f"Division({', '.join(counts)})"


@jax.tree_util.register_pytree_with_keys_class
class GroupStates(Mapping[str, Any]):
    """The states of groups by name: an immutable mapping, and a pytree.

    Args:
      states: the `param_states` of every group that is not frozen.
      division: which leaves of the parameters belong to which group; static.

    Examples:
      >>> from opt_core import MultiOptimizer, OptimizerDef, OptimizerState
      >>> class Sgd(OptimizerDef):
      ...     def init_state(self, params):
      ...         return OptimizerState(0, ())
      >>> definition = MultiOptimizer((r'.*kernel', Sgd(None)), names=['kernels'])
      >>> optimizer = definition.create({'kernel': 1.0, 'bias': 2.0})
      >>> optimizer.state.param_states
      GroupStates({'kernels': ()})
      >>> optimizer.state.param_states.division
      Division(kernels: 1, rest: 1)
    """

    __slots__ = ("_states", "division")

    def __init__(self, states: Mapping[str, Any], division: Division) -> None:
        self._states = {name: states[name] for name in division.trained}
        self.division = division

    def __getitem__(self, name: str) -> Any:
        return self._states[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def __repr__(self) -> str:
        return f"GroupStates({self._states!r})"

    def tree_flatten_with_keys(self) -> tuple[list[tuple[DictKey, Any]], Division]:
        """Returns the states with their keys, and what is static; for JAX."""
        return [(DictKey(name), state) for name, state in self._states.items()], self.division

    def tree_flatten(self) -> tuple[list[Any], Division]:
        """Returns the states, and what is static; for JAX."""
        return list(self._states.values()), self.division

    @classmethod
    def tree_unflatten(cls, division: Division, states: Iterable[Any]) -> GroupStates:
        """Rebuilds it; for JAX."""
        return cls(dict(zip(division.trained, states, strict=True)), division)


flax.serialization.register_serialization_state(
    GroupStates,
    lambda groups: {name: flax.serialization.to_state_dict(groups[name]) for name in groups},
    lambda groups, written: GroupStates(
        {
            name: flax.serialization.from_state_dict(groups[name], written[name], name=name)
            for name in groups
        },
        groups.division,
    ),
)


# State dicts: one tree with an entry per parameter, as Flax and T5X wrote it, or one per group.


def written_states(optimizer: Optimizer) -> dict[str, Any]:
    """Returns the `param_states` of a state dict, under that name; nothing if there are none."""
    if (merged := _merged(optimizer)) is not None:
        return {"param_states": to_state_dict(merged)}
    entries = {name: _written(part) for name, part in _split(optimizer).items()}
    entries = {
        name: entry for name, entry in entries.items() if entry or not isinstance(entry, Mapping)
    }
    return {"param_states": entries} if entries else {}


def to_layout(optimizer: Optimizer) -> Any:
    """Returns the states in the containers of a state dict."""
    if (merged := _merged(optimizer)) is not None:
        return merged
    states: dict[str, Any] = {}
    for name, part in _split(optimizer).items():
        if isinstance(part.state.param_states, GroupStates):
            states[name] = to_layout(part)
        elif _restores_itself(part.optimizer_def):
            states[name] = _written(part)
        else:
            states[name] = part.state.param_states
    return GroupStates(states, optimizer.state.param_states.division)


def from_layout(optimizer: Optimizer, layout: Any) -> GroupStates:
    """Returns the states of which `to_layout` made a layout, which has been restored."""
    division = optimizer.state.param_states.division
    is_grouped = isinstance(layout, GroupStates)
    states: dict[str, Any] = {}
    for name, part in _split(optimizer).items():
        states[name] = layout[name] if is_grouped else division.cut(name, layout)
        if isinstance(part.state.param_states, GroupStates):
            states[name] = from_layout(part, states[name])
        elif _restores_itself(part.optimizer_def):
            step, entry = (to_state_dict(x) for x in (part.state.step, states[name]))
            written = {"step": step, "param_states": entry}
            state_dict = {"target": to_state_dict(part.target), "state": written}
            _, restored = part.optimizer_def.restore_state(part.target, part.state, state_dict)
            states[name] = restored.param_states
    return GroupStates(states, division)


def _merged(optimizer: Optimizer) -> Any:
    """The states as one tree with an entry per parameter; `None` where that is not so."""
    parts = _split(optimizer)  # an error if the state is of other groups, or of none
    division = optimizer.state.param_states.division
    positions = division.treedef.unflatten(range(len(division.owners)))
    entries: list[Any] = [None] * len(division.owners)
    for name, part in parts.items():
        states = part.state.param_states
        if isinstance(states, GroupStates):
            states = _merged(part)
        elif _writes_itself(part.optimizer_def) or _restores_itself(part.optimizer_def):
            return None  # it has a layout of its own
        structure: Any = jax.tree.structure(division.cut(name, positions))
        if states is None or parts_at(structure, states) is None:
            return None
        division.paste(name, states, entries)
    return division.treedef.unflatten(entries)


def _split(optimizer: Optimizer) -> dict[str, Optimizer]:
    definition: Any = optimizer.optimizer_def
    parts: dict[str, Optimizer] = definition.split(optimizer)
    return parts


def _written(part: Optimizer) -> Any:
    state = part.optimizer_def.state_dict(part.target, part.state)["state"]
    return state.get("param_states", {})


def _writes_itself(definition: OptimizerDef) -> bool:
    return type(definition).state_dict is not OptimizerDef.state_dict


def _restores_itself(definition: OptimizerDef) -> bool:
    return type(definition).restore_state is not OptimizerDef.restore_state


_LISTED = 50
_NO_ARRAY: Any = object()
_ADVICE = (
    "A pattern must match the whole path of a leaf. Every leaf needs exactly one group: make the "
    "patterns disjoint, or say `rest=FROZEN` or `rest=` a definition."
)

Pair: TypeAlias = tuple[Any, OptimizerDef]
Rule: TypeAlias = Pair | tuple[str, Any, OptimizerDef]


class Frozen(OptimizerDef):
    """The type of `FROZEN`."""

    def __repr__(self) -> str:
        return "FROZEN"


FROZEN = Frozen(None)
"""The definition of leaves that have no state and are not updated."""


@dataclasses.dataclass(frozen=True)
class Group:
    """One row of the table of groups.

    Attributes:
      name: of the group in overrides, reports and state dicts.
      pattern: selects its leaves.
      definition: how they are updated, or `FROZEN`.
    """

    name: str
    pattern: Any
    definition: OptimizerDef

    @property
    def is_frozen(self) -> bool:
        """Whether the group is not updated."""
        return isinstance(self.definition, Frozen)

    def __str__(self) -> str:
        return f"`{self.name}` ({pattern_str(self.pattern)})"


def divide(
    groups: Sequence[Group],
    tree: Any,
    axes: LogicalAxes | None,
    *,
    may_be_empty: Callable[[Group], bool],
) -> Division:
    """Returns how the patterns of a table divide the parameters; lists all that is wrong."""
    leaves, treedef = described(tree)
    matches = [
        frozenset[int]()
        if isinstance(group.pattern, Rest)
        else matched(group.pattern, treedef, leaves, axes)
        for group in groups
    ]
    rest = [i for i, group in enumerate(groups) if isinstance(group.pattern, Rest)]
    owners: list[int] = []
    problems: list[str] = []
    for position, leaf in enumerate(leaves):
        claims = [i for i, match in enumerate(matches) if position in match] or rest
        if len(claims) != 1:
            names = " and ".join(str(groups[i]) for i in claims)
            problems.append(f"`{leaf.path}` is matched by " + (names or "no group"))
        owners.append(claims[0] if claims else -1)
    for group, match in zip(groups, matches, strict=True):
        if not match and not may_be_empty(group):
            problems.append(f"{group} matches no parameter" + _hint(group.pattern, leaves))
    if problems:
        more = [f"... and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else []
        lines = [f"  {line}" for line in (*problems[:_LISTED], *more)]
        raise GroupError("\n".join(["the groups do not divide the parameters:", *lines, _ADVICE]))
    trained = tuple(group.name for group in groups if not group.is_frozen)
    return Division(tuple(group.name for group in groups), trained, tuple(owners), treedef)


def _hint(pattern: Any, leaves: Sequence[Leaf]) -> str:
    if not isinstance(pattern, str | re.Pattern):
        return ""
    count = sum(1 for leaf in leaves if re.search(pattern, leaf.path))
    return f"; a part of the path matches for {count}: write '.*' around it" if count else ""


def groups_of_pairs(
    pairs: Sequence[Any], names: Sequence[str] | None, rest: OptimizerDef
) -> list[Group]:
    """Returns the table of `(pattern, definition)` pairs, given as varargs or as one sequence."""
    if len(pairs) == 1 and isinstance(pairs[0], Iterable) and not _is_pair(pairs[0]):
        pairs = list(pairs[0])
    if not pairs:
        raise GroupError("there is no group: pass `(pattern, definition)` pairs")
    if names is None:
        return groups_of_rules(pairs, rest)
    if len(names) != len(pairs):
        raise GroupError(f"`names` has {len(names)} names for {len(pairs)} groups; give one each")
    rows = groups_of_rules(pairs, rest)
    named = zip(rows, [*names, "rest"], strict=True)
    return [dataclasses.replace(row, name=name) for row, name in named]


def _is_pair(value: Any) -> bool:
    """Whether it is a pair, right or wrong, and not a sequence of pairs."""
    has_two = isinstance(value, tuple | list) and len(value) == 2
    return has_two and (isinstance(value[1], OptimizerDef) or not _is_row(value[0]))


def _is_row(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) in (2, 3)


def groups_of_rules(rules: Iterable[Any], rest: OptimizerDef | None) -> list[Group]:
    """Returns the table of `(pattern, definition)` or `(name, pattern, definition)` rows."""
    groups = []
    for position, row in enumerate(rules):
        if not _is_row(row):
            raise TypeError(
                f"group {position} must be `(pattern, definition)` or `(name, pattern, "
                f"definition)`; got a {type(row).__name__}"
            )
        groups.append(Group(*row) if len(row) == 3 else Group(str(position), *row))
    return groups if rest is None else [*groups, Group("rest", REST, rest)]


def check_groups(groups: Sequence[Group]) -> None:
    """Raises a `GroupError` or a `TypeError` for a table that is invalid for every tree."""
    if not groups:
        raise GroupError("there is no group: pass `(pattern, definition)` pairs")
    names: list[Any] = [group.name for group in groups]
    for name, group in zip(names, groups, strict=True):
        if not isinstance(name, str) or name in ("", ".") or "/" in name:
            raise GroupError(f"a group's name is text without `/`, and not `.`; got {name!r}")
        if names.count(name) > 1:
            raise GroupError(f"two groups are called `{group.name}`; rename one")
        check_pattern(group.pattern)
        if not isinstance(group.definition, OptimizerDef):
            raise _no_definition(group, group.definition)


def _no_definition(group: Group, value: Any) -> TypeError:
    hint = (
        " (wrap it: `opt_optax_bridge.OptaxWrapper(tx)`; or write `opt_optax_bridge.adamw(...)` "
        "for `optax.adamw(...)`, `opt_optax_bridge.chain(...)` for `optax.chain(...)`)"
    )
    found = f"{type(value).__name__} for a definition{hint * isinstance(value, Transformation)}"
    return TypeError(f"group {group} has a {found}")


def with_axes(groups: Sequence[Group], param_axes: Any, known: LogicalAxes) -> list[Group]:
    """Returns the table with copies of definitions that take axes, which now know them."""
    # A group whose pattern reads the shape of leaves gets the axes of all leaves that it may have:
    # those that paths and axes assign to no other group.
    axes = dict(flatten_with_paths(param_axes))
    tree = jax.tree.map(lambda _: _NO_ARRAY, param_axes, is_leaf=lambda x: x is None)
    leaves, treedef = described(tree)
    decided = [_decided(group, treedef, leaves, known) for group in groups]
    taken = frozenset[int]().union(*(members for members in decided if members is not None))
    free = frozenset(range(len(leaves))) - taken
    informed = []
    for group, members in zip(groups, decided, strict=True):
        # No method with a default: T5X's trainer asks `hasattr`, and then the model must have axes.
        if hasattr(group.definition, "set_param_axes"):
            names = [leaves[i].names for i in sorted(free if members is None else members)]
            definition = copy.copy(group.definition)
            definition.set_param_axes(_nested(names, axes))
            group = dataclasses.replace(group, definition=definition)
        informed.append(group)
    return informed


def _decided(
    group: Group, treedef: Any, leaves: Sequence[Leaf], known: LogicalAxes
) -> frozenset[int] | None:
    """The matches of a pattern; `None` if paths and axes do not determine them."""
    if isinstance(group.pattern, Rest):
        return None
    try:
        return matched(group.pattern, treedef, leaves, known)
    except GroupError:
        return None


def _nested(paths: Iterable[Names], axes: Mapping[Names, Any]) -> Any:
    """Nested dicts, whatever the containers of the parameters."""
    root: dict[str, Any] = {}
    for names in paths:
        if not names:
            return axes[names]
        node = root
        for name in names[:-1]:
            node = node.setdefault(name, {})
        node[names[-1]] = axes[names]
    return root


# Patterns select leaves by paths, shapes, dtypes and logical axes, never by values.


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

    def update(self, fn: Callable[[Any], Any], inputs: Any) -> Any:
        """Returns `inputs` with `fn` applied to the selected parts."""


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
    return [Leaf(*pair) for pair in named_leaves(tree)], treedef


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
