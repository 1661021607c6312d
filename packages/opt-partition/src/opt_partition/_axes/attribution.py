"""For every dimension of a state: the parameter dimension that it indexes, and who says so.

The sources are asked in turn, and the first that knows decides: a rule for the type of the state,
the provenance that JAX's sharding-in-types tells, the effect of changed sizes, and an alignment of
shapes. What none of them knows falls back to "indexes nothing", which replicates it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from opt_partition._axes.alignment import align_shape
from opt_partition._axes.differencing import (
    Prober,
    Shape,
    Verdict,
    Wanted,
    difference,
    find_sources,
    first_line,
)
from opt_partition._axes.matching import Match, match_leaves
from opt_partition._axes.param_axes import Axis, Parameter
from opt_partition._axes.provenance import COLOURS, Tags, trace_provenance
from opt_partition._axes.rules import ASK, Answer, Rules, StateLeaf
from opt_partition._trees import KeyPath, flatten_with_paths, path_str

# From the most to the least trusted.
SOURCES = ("scalar", "rule", "provenance", "differencing", "alignment", "fallback")


@dataclasses.dataclass(frozen=True)
class Dimension:
    """The decision on one dimension of a state leaf.

    Attributes:
      dim: the parameter dimension that it indexes, or `None`.
      axis: its logical name.
      source: one of `SOURCES`.
      note: what there is to say about it.
      is_disputed: whether another source says otherwise.
    """

    dim: int | None
    axis: Axis
    source: str
    note: str = ""
    is_disputed: bool = False


@dataclasses.dataclass(frozen=True)
class Attribution:
    """The decisions on one state leaf.

    Attributes:
      key_path: its key path.
      leaf: its shape and dtype.
      parameter: the parameter that it follows, or `None`.
      dimensions: one decision per dimension.
    """

    key_path: KeyPath
    leaf: jax.ShapeDtypeStruct
    parameter: Parameter | None
    dimensions: tuple[Dimension, ...]


@dataclasses.dataclass
class _Case:
    """What is known of one state leaf so far."""

    key_path: KeyPath
    leaf: jax.ShapeDtypeStruct
    matches: tuple[Match, ...]
    tags: Tags = ()
    owners: tuple[int, ...] = ()
    colour: int | None = None
    answer: Answer = None
    verdicts: tuple[Verdict, ...] = ()

    @property
    def rank(self) -> int:
        return len(self.leaf.shape)

    @property
    def owner(self) -> int | None:
        return self.owners[0] if self.owners else None


@dataclasses.dataclass(frozen=True)
class Attributions:
    """The decisions on a whole state.

    Attributes:
      state: the state, as `jax.ShapeDtypeStruct`s.
      leaves: the decisions, in JAX's order.
      evaluations: how often `init` was evaluated for its shapes.
      notes: what holds for all leaves.
    """

    state: Any
    leaves: list[Attribution]
    evaluations: int
    notes: tuple[str, ...]


def attribute(
    init: Callable[[Any], Any], params: Any, table: Sequence[Parameter], rules: Rules
) -> Attributions:
    """Decides on every dimension of the state that `init` makes of `params`.

    Args:
      init: makes a state of parameters; only ever evaluated for its shapes.
      params: arrays or `jax.ShapeDtypeStruct`s.
      table: the same with their axes, in JAX's order.
      rules: rules by type.
    """
    treedef = jax.tree.structure(params)
    prober = Prober(init, treedef, table)
    tracer = _Tracer(init, treedef, table)
    state, tags = tracer.first()
    cases = _open_cases(params, state, table, tags)
    _find_owners(cases, table, tracer)
    _find_sources(cases, prober, len(table))
    _ask_rules(cases, state, table, rules)
    wanted = list(_unsettled(cases, table))
    verdicts = difference(prober, table, wanted) if wanted else {}
    for case in cases:
        case.verdicts = verdicts.get(case.key_path, ())
    leaves = [_decide(case, table) for case in cases]
    return Attributions(state, leaves, tracer.evaluations + prober.evaluations, tracer.notes)


def attribute_by_structure(
    params: Any, state: Any, table: Sequence[Parameter], rules: Rules
) -> Attributions:
    """Decides by rules and alignment alone, where there is a state but nothing that makes it."""
    cases = _open_cases(params, state, table, None)
    for case in cases:
        case.owners = tuple(match.parameter for match in case.matches[:1])
    _ask_rules(cases, state, table, rules)
    return Attributions(state, [_decide(case, table) for case in cases], 0, ())


class _Tracer:
    """Evaluates `init` for provenance, as often as it takes to tell the parameters apart."""

    def __init__(
        self, init: Callable[[Any], Any], treedef: Any, table: Sequence[Parameter]
    ) -> None:
        self._init, self._treedef, self._table = init, treedef, table
        self.evaluations = 0
        self.notes: tuple[str, ...] = ()
        self.digits = 0

    def first(self) -> tuple[Any, list[Tags] | None]:
        """The state, and its tags where `init` works on a mesh of `Explicit` axes."""
        try:
            return self._trace()
        except Exception as error:  # it is a user's function: anything can happen
            reason = first_line(error)
            self.notes = (f"no provenance: `init` does not work on an Explicit mesh ({reason})",)
        self.evaluations += 1
        leaves = [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in self._table]
        return jax.eval_shape(self._init, self._treedef.unflatten(leaves)), None

    def colours(self, digit: int) -> list[int]:
        """The colour of every parameter in evaluation `digit`."""
        return [number // COLOURS**digit % COLOURS for number in range(len(self._table))]

    def next_tags(self) -> list[Tags] | None:
        """The tags by further colours; `None` if there are none that tell any more apart."""
        if len(self._table) <= COLOURS**self.digits:
            return None
        return self._trace()[1]

    def _trace(self) -> tuple[Any, list[Tags]]:
        self.evaluations += 1
        colours = self.colours(self.digits)
        self.digits += 1
        return trace_provenance(self._init, self._treedef, self._table, colours)


def _open_cases(
    params: Any, state: Any, table: Sequence[Parameter], tags: list[Tags] | None
) -> list[_Case]:
    matches = match_leaves(params, state, table)
    cases = []
    for index, (path, leaf) in enumerate(flatten_with_paths(state)):
        nothing: Tags = ((),) * len(leaf.shape)
        cases.append(_Case(path, leaf, matches[index], tags[index] if tags else nothing))
    return cases


def _find_owners(cases: Sequence[_Case], table: Sequence[Parameter], tracer: _Tracer) -> None:
    """Finds the parameter of every leaf: by its place, held against the colours that it shows."""
    numbered: dict[tuple[Tags, Shape], tuple[int, ...]] = {}
    colours = tracer.colours(0)
    open_cases = []
    for number, case in enumerate(cases):
        placed = tuple(match.parameter for match in case.matches)
        if not any(case.tags):
            case.owners = placed if len({table[p].axes for p in placed}) <= 1 else ()
            continue
        case.owners = _owners(case, placed, table, colours)
        if not case.owners:
            key = case.tags, case.leaf.shape
            if key not in numbered:
                numbered[key] = _owners(case, range(len(table)), table, colours)
            case.owners = numbered[key]
            open_cases.append((number, case))
        elif len({table[p].axes for p in case.owners}) > 1:
            open_cases.append((number, case))
    _tell_apart(open_cases, tracer)
    for case in cases:
        if case.owner is not None and any(case.tags):
            case.colour = colours[case.owner]


def _find_sources(cases: Sequence[_Case], prober: Prober, number: int) -> None:
    """Finds the parameter of leaves that show no colours and whose place leaves several."""
    unclear = [c for c in cases if not c.owners and len(c.matches) > 1 and c.rank]
    if not unclear:
        return
    sources = find_sources(prober, number, [case.key_path for case in unclear])
    for case in unclear:
        if case.key_path in sources:
            case.owners = (sources[case.key_path],)


def _tell_apart(open_cases: Sequence[tuple[int, _Case]], tracer: _Tracer) -> None:
    """Looks at further colours until every leaf has one owner."""
    while any(len(case.owners) > 1 for _, case in open_cases):
        tags = tracer.next_tags()
        if tags is None:
            break
        colours = tracer.colours(tracer.digits - 1)
        for number, case in open_cases:
            shown = {tag.colour for each in tags[number] for tag in each}
            case.owners = tuple(p for p in case.owners if colours[p] in shown)


def _owners(
    case: _Case, candidates: Iterable[int], table: Sequence[Parameter], colours: Sequence[int]
) -> tuple[int, ...]:
    """Those of the candidates whose tags a leaf may show; a leaf may have a part of a parameter."""
    weak = [p for p in candidates if _may_own(case, table[p], colours[p], any_size=True)]
    return tuple(p for p in weak if _may_own(case, table[p], colours[p], any_size=False)) or (
        *weak,
    )


def _may_own(case: _Case, parameter: Parameter, colour: int, *, any_size: bool) -> bool:
    shape, is_shown = parameter.shape, False
    for tags, size in zip(case.tags, case.leaf.shape, strict=True):
        for tag in tags:
            if tag.colour != colour:
                continue
            is_shown = True
            if tag.dim >= len(shape):
                return False
            if len(tags) == 1 and shape[tag.dim] != size and not any_size:
                return False
    return is_shown


def _ask_rules(
    cases: Sequence[_Case], state: Any, table: Sequence[Parameter], rules: Rules
) -> None:
    """Asks the rules of the types around each leaf, outermost first."""
    for case, (enclosing, path) in zip(cases, _typed_leaves(state, rules, ()), strict=True):
        owner = table[case.owner] if case.owner is not None else None
        for node, depth in enclosing:
            shape, dtype = case.leaf.shape, case.leaf.dtype
            leaf = StateLeaf(node, path[depth:], shape, dtype, owner)
            case.answer = rules.by_type[type(node)](leaf)
            if case.answer is not None:
                _check_answer(case.answer, leaf)
                break


def _check_answer(answer: Sequence[Any] | PartitionSpec, leaf: StateLeaf) -> None:
    """Raises a `ValueError` where a rule says what cannot be."""
    wrong = None
    parameter = leaf.parameter.shape if leaf.parameter else None
    if len(answer) != len(leaf.shape):
        wrong = "it must have one entry per dimension"
    elif not isinstance(answer, PartitionSpec):
        for dim, size in zip(answer, leaf.shape, strict=True):
            if (
                dim is not None
                and dim != ASK
                and (not parameter or size not in parameter[dim:][:1])
            ):
                of = f"the parameter has shape {parameter}" if parameter else "it has no parameter"
                wrong = f"no dimension of size {size} is parameter dimension {dim}: {of}"
    if wrong:
        where = f"{type(leaf.state).__name__}/{path_str(leaf.key_path)}"
        raise ValueError(f"the rule for {where} of shape {leaf.shape} gave {answer!r}: {wrong}")


def _typed_leaves(
    tree: Any, rules: Rules, enclosing: tuple[tuple[Any, int], ...], path: KeyPath = ()
) -> Iterator[tuple[tuple[tuple[Any, int], ...], KeyPath]]:
    """Yields, for every leaf, the nodes of registered types around it, and its path."""
    inside = enclosing[-1][0] if enclosing else None

    def is_registered(node: Any) -> bool:
        return node is not inside and type(node) in rules.by_type

    for below, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_registered):
        here = (*path, *below)
        if is_registered(node):
            yield from _typed_leaves(node, rules, (*enclosing, (node, len(here))), here)
        else:
            yield enclosing, here


def _unsettled(cases: Sequence[_Case], table: Sequence[Parameter]) -> Iterator[Wanted]:
    """The leaves with a dimension that neither a rule nor provenance settles."""
    for case in cases:
        if all(_settled(case, axis, table) for axis in range(case.rank)):
            continue
        parameter = case.owner
        kind: Any = None
        if parameter is not None:
            own = table[parameter].key_path
            start = next((m.start for m in case.matches if m.parameter == parameter), None)
            if start is None:
                kind = case.key_path
            else:
                end = start + len(own)
                kind = case.key_path[:start], case.key_path[end:]
        yield Wanted(case.key_path, tuple(case.leaf.shape), parameter, kind)


def _settled(case: _Case, axis: int, table: Sequence[Parameter]) -> bool:
    if case.answer is not None and (
        isinstance(case.answer, PartitionSpec) or case.answer[axis] != ASK
    ):
        return True
    return _from_tags(case, axis, table) is not None


def _decide(case: _Case, table: Sequence[Parameter]) -> Attribution:
    owner = case.owner
    if owner is None:
        owner = next((v.parameter for v in case.verdicts if v.parameter is not None), None)
    parameter = table[owner] if owner is not None else None
    dimensions = tuple(_decide_dimension(case, axis, parameter, table) for axis in range(case.rank))
    follows = any(d.dim is not None for d in dimensions)
    follows |= parameter is not None and case.owner is not None
    return Attribution(case.key_path, case.leaf, parameter if follows else None, dimensions)


def _decide_dimension(
    case: _Case, axis: int, parameter: Parameter | None, table: Sequence[Parameter]
) -> Dimension:
    if isinstance(case.answer, PartitionSpec):
        return Dimension(None, case.answer[axis], "rule", "named by the rule")
    said = list(_statements(case, axis, parameter, table))
    if not said:
        reason = case.verdicts[axis].note if case.verdicts else "nothing is known of it"
        return Dimension(None, None, "fallback", reason)
    source, dim, note = said[0]
    disputes = [
        f"{source} says {dim}, {s} says {d}" for s, d, _ in said if _disputes(said[0], s, d)
    ]
    name = parameter.axes[dim] if parameter is not None and dim is not None else None
    return Dimension(dim, name, source, "; ".join(filter(None, [note, *disputes])), bool(disputes))


def _disputes(first: tuple[str, int | None, str], source: str, dim: int | None) -> bool:
    """Whether a source contradicts the first one."""
    if dim == first[1] or source == "alignment":  # which only looks at sizes
        return False
    # A rule knows what indexes nothing though its size changes; that is what it is for.
    return not (first[0] == "rule" and first[1] is None and source == "differencing")


def _statements(
    case: _Case, axis: int, parameter: Parameter | None, table: Sequence[Parameter]
) -> Iterator[tuple[str, int | None, str]]:
    """What the sources say, best first: the source, the parameter dimension, and a note."""
    if case.answer is not None and case.answer[axis] != ASK:
        yield "rule", case.answer[axis], ""  # type: ignore[misc]  # `ASK` is the only string
    if (tagged := _from_tags(case, axis, table)) is not None:
        yield "provenance", *tagged
    if case.verdicts and case.verdicts[axis].is_known:
        verdict = case.verdicts[axis]
        shape = parameter.shape if parameter is not None else ()
        if verdict.dim is None or case.leaf.shape[axis] == shape[verdict.dim]:
            yield "differencing", verdict.dim, verdict.note
        else:
            note = f"grows with parameter dimension {verdict.dim}, but is not its size"
            yield "differencing", None, note
    elif parameter is not None and case.answer is None:
        aligned = align_shape(case.leaf.shape, parameter.shape)
        if aligned is not None:
            yield "alignment", aligned[axis], ""


def _from_tags(case: _Case, axis: int, table: Sequence[Parameter]) -> tuple[int | None, str] | None:
    """The parameter dimension that provenance tells, and a note; `None` if it tells nothing."""
    tags = case.tags[axis]
    if not tags:
        return None
    if case.owner is None:
        return None, "made of several parameters"
    if len(tags) > 1:
        dims = ", ".join(str(tag.dim) for tag in tags)
        return None, f"made of the parameter dimensions {dims}"
    dim, shape = tags[0].dim, table[case.owner].shape
    if tags[0].colour != case.colour:
        return None, "follows another parameter than the other dimensions"
    if dim >= len(shape) or shape[dim] != case.leaf.shape[axis]:
        return None, f"a part of parameter dimension {dim}"
    return dim, ""
