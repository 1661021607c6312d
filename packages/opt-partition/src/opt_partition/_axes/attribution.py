"""For every dimension of a state: the parameter dimension that it indexes, and who says so.

The sources are asked in turn, and the first that knows decides: a rule for the type of the state,
the provenance that JAX's sharding-in-types tells, the effect of changed sizes, and an alignment of
shapes. What none of them knows falls back to "indexes nothing", which replicates it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from opt_partition._axes.alignment import align_shape
from opt_partition._axes.ask_rules import ask_rules
from opt_partition._axes.cases import Case, open_cases
from opt_partition._axes.differencing import difference
from opt_partition._axes.owners import Tracer, find_owners, identify_owners
from opt_partition._axes.param_axes import Axis, Parameter
from opt_partition._axes.probing import Prober
from opt_partition._axes.rules import ASK, Rules
from opt_partition._axes.verdicts import Wanted
from opt_partition._trees import KeyPath, is_index

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
      is_doubted: whether its sizes alone decided, and changes of them do not bear that out.
    """

    dim: int | None
    axis: Axis
    source: str
    note: str = ""
    is_disputed: bool = False
    is_doubted: bool = False


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
    tracer = Tracer(init, treedef, table)
    state, tags = tracer.first()
    cases = open_cases(params, state, table, tags)
    find_owners(cases, table, tracer)
    identify_owners(cases, prober, table, state)
    ask_rules(cases, state, table, rules)
    wanted = list(_unsettled(cases, table))
    verdicts = difference(prober, table, wanted, state) if wanted else {}
    for case in cases:
        case.verdicts = verdicts.get(case.key_path, ())
    leaves = [_decide(case, table) for case in cases]
    return Attributions(state, leaves, tracer.evaluations + prober.evaluations, tracer.notes)


def attribute_by_structure(
    params: Any, state: Any, table: Sequence[Parameter], rules: Rules
) -> Attributions:
    """Decides by rules and alignment alone, where there is a state but nothing that makes it."""
    cases = open_cases(params, state, table, None)
    for case in cases:
        case.owners = tuple(match.parameter for match in case.matches[:1])
    ask_rules(cases, state, table, rules)
    return Attributions(state, [_decide(case, table) for case in cases], 0, ())


def _unsettled(cases: Sequence[Case], table: Sequence[Parameter]) -> Iterator[Wanted]:
    """The leaves with a dimension that neither a rule nor provenance settles."""
    for case in cases:
        if all(_settled(case, axis, table) for axis in range(case.rank)):
            continue
        shape, place = tuple(case.leaf.shape), _place(case)
        if place is not None or any(case.tags):
            yield Wanted(case.key_path, shape, case.owner, place)
        else:  # one of several candidates is not for certain the parameter
            yield Wanted(case.key_path, shape, None, None, case.owners)


def _place(case: Case) -> tuple[int, int] | None:
    """Where the path of its parameter is in that of a leaf, if it can only be that."""
    if len(case.matches) != 1 or case.matches[0].parameter != case.owner:
        return None
    start, stop = case.matches[0].start, case.matches[0].stop
    # Numbers alone may count anything, in any order.
    is_named = start == stop or not all(map(is_index, case.key_path[start:stop]))
    return (start, stop) if is_named else None


def _settled(case: Case, axis: int, table: Sequence[Parameter]) -> bool:
    if case.answer is not None and (
        isinstance(case.answer, PartitionSpec) or case.answer[axis] != ASK
    ):
        return True
    return _from_tags(case, axis, table) is not None


def _decide(case: Case, table: Sequence[Parameter]) -> Attribution:
    # Changing sizes tells the parameter where the place does not, or misleads.
    owner = next((v.parameter for v in case.verdicts if v.parameter is not None), case.owner)
    parameter = table[owner] if owner is not None else None
    dimensions = tuple(_decide_dimension(case, axis, parameter, table) for axis in range(case.rank))
    follows = any(d.dim is not None for d in dimensions)
    follows |= case.owner is not None
    return Attribution(case.key_path, case.leaf, parameter if follows else None, dimensions)


def _decide_dimension(
    case: Case, axis: int, parameter: Parameter | None, table: Sequence[Parameter]
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
    notes = "; ".join(filter(None, [note, *disputes]))
    is_doubted = source == "alignment" and bool(note)
    return Dimension(dim, name, source, notes, bool(disputes), is_doubted)


def _disputes(first: tuple[str, int | None, str], source: str, dim: int | None) -> bool:
    """Whether a source contradicts the first one."""
    if dim == first[1] or source == "alignment":  # which only looks at sizes
        return False
    # A rule knows what indexes nothing though its size changes; that is what it is for.
    return not (first[0] == "rule" and first[1] is None and source == "differencing")


def _statements(
    case: Case, axis: int, parameter: Parameter | None, table: Sequence[Parameter]
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
        # Of two equal sizes either may be meant; without `init` a mirror is taken for one.
        is_clear = len({*parameter.shape}) == len(parameter.shape) or not case.verdicts
        aligned = align_shape(case.leaf.shape, parameter.shape) if is_clear else None
        doubt = case.verdicts[axis].note if case.verdicts else ""
        # That a size is found nowhere does not outweigh the doubt.
        if aligned is not None and (aligned[axis] is not None or not doubt):
            yield "alignment", aligned[axis], doubt


def _from_tags(case: Case, axis: int, table: Sequence[Parameter]) -> tuple[int | None, str] | None:
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
