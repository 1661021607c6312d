"""Attribution of every state dimension to the parameter dimension that it indexes.

Sources are consulted in order, and the first one with an answer decides: a rule for the type of the
state, the provenance reported by JAX's sharding-in-types, the effect of changed sizes, and an
alignment of shapes. If none has an answer, the dimension is taken to index nothing, and is
replicated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from opt_partition._axes.alignment import align_shape
from opt_partition._axes.apply_rules import apply_rules
from opt_partition._axes.cases import Case, open_cases
from opt_partition._axes.differencing import difference
from opt_partition._axes.owners import ProvenanceEvaluator, find_owners, identify_owners
from opt_partition._axes.param_axes import Axis, Parameter
from opt_partition._axes.probing import Prober
from opt_partition._axes.rules import ASK, Rules
from opt_partition._axes.verdicts import Wanted
from opt_partition._trees import KeyPath, is_index

# From most to least trusted.
SOURCES = ("scalar", "rule", "provenance", "differencing", "alignment", "fallback")


@dataclasses.dataclass(frozen=True)
class Dimension:
    """The attribution of one dimension of a state leaf.

    Attributes:
      dim: the parameter dimension that it indexes, or `None`.
      axis: its logical name.
      source: the source that decided, one of `SOURCES`.
      note: additional explanation.
      is_disputed: whether another source contradicts it.
      is_doubted: whether it was decided by size alone, and changing sizes does not confirm it.
    """

    dim: int | None
    axis: Axis
    source: str
    note: str = ""
    is_disputed: bool = False
    is_doubted: bool = False


@dataclasses.dataclass(frozen=True)
class Attribution:
    """The attribution of one state leaf.

    Attributes:
      key_path: its key path.
      leaf: its shape and dtype.
      parameter: the parameter that it belongs to, or `None`.
      dimensions: the attribution of each dimension.
    """

    key_path: KeyPath
    leaf: jax.ShapeDtypeStruct
    parameter: Parameter | None
    dimensions: tuple[Dimension, ...]


@dataclasses.dataclass(frozen=True)
class Attributions:
    """The attribution of a whole state.

    Attributes:
      state: the state, as `jax.ShapeDtypeStruct`s.
      leaves: the attribution of each leaf, in JAX's order.
      evaluations: number of abstract evaluations of `init`.
      notes: notes on the state as a whole.
    """

    state: Any
    leaves: list[Attribution]
    evaluations: int
    notes: tuple[str, ...]


def attribute(
    init: Callable[[Any], Any], params: Any, table: Sequence[Parameter], rules: Rules
) -> Attributions:
    """Attributes every dimension of the state that `init` creates for `params`.

    Args:
      init: creates a state for parameters; only evaluated abstractly.
      params: arrays or `jax.ShapeDtypeStruct`s.
      table: the parameters with their axes, in JAX's order.
      rules: rules by type.
    """
    treedef = jax.tree.structure(params)
    prober = Prober(init, treedef, table)
    evaluator = ProvenanceEvaluator(init, treedef, table)
    state, tags = evaluator.first()
    cases = open_cases(params, state, table, tags)
    find_owners(cases, table, evaluator)
    identify_owners(cases, prober, table, state)
    apply_rules(cases, state, table, rules)
    wanted = list(_unsettled(cases, table))
    verdicts = difference(prober, table, wanted, state) if wanted else {}
    for case in cases:
        case.verdicts = verdicts.get(case.key_path, ())
    leaves = [_decide(case, table) for case in cases]
    return Attributions(state, leaves, evaluator.evaluations + prober.evaluations, evaluator.notes)


def attribute_by_structure(
    params: Any, state: Any, table: Sequence[Parameter], rules: Rules
) -> Attributions:
    """Attributes dimensions by rules and alignment alone, for a state without its `init`."""
    cases = open_cases(params, state, table, None)
    for case in cases:
        case.owners = tuple(match.parameter for match in case.matches[:1])
    apply_rules(cases, state, table, rules)
    return Attributions(state, [_decide(case, table) for case in cases], 0, ())


def _unsettled(cases: Sequence[Case], table: Sequence[Parameter]) -> Iterator[Wanted]:
    """Yields the leaves with a dimension that neither a rule nor provenance determines."""
    for case in cases:
        if all(_settled(case, axis, table) for axis in range(case.rank)):
            continue
        shape, place = tuple(case.leaf.shape), _place(case)
        if place is not None or any(case.tags):
            yield Wanted(case.key_path, shape, case.owner, place)
        else:  # the parameter is only one of several candidates
            yield Wanted(case.key_path, shape, None, None, case.owners)


def _place(case: Case) -> tuple[int, int] | None:
    """Returns the position of the parameter's path in that of a leaf, if it is unambiguous."""
    if len(case.matches) != 1 or case.matches[0].parameter != case.owner:
        return None
    start, stop = case.matches[0].start, case.matches[0].stop
    # Numeric keys alone may count anything, in any order.
    is_named = start == stop or not all(map(is_index, case.key_path[start:stop]))
    return (start, stop) if is_named else None


def _settled(case: Case, axis: int, table: Sequence[Parameter]) -> bool:
    if case.answer is not None and (
        isinstance(case.answer, PartitionSpec) or case.answer[axis] != ASK
    ):
        return True
    return _from_tags(case, axis, table) is not None


def _decide(case: Case, table: Sequence[Parameter]) -> Attribution:
    # Changing sizes identifies the parameter where the path does not, or is misleading.
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
        reason = case.verdicts[axis].note if case.verdicts else "nothing is known about it"
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
    if dim == first[1] or source == "alignment":  # which is based on sizes only
        return False
    # Rules exist for dimensions that index nothing although their sizes change.
    return not (first[0] == "rule" and first[1] is None and source == "differencing")


def _statements(
    case: Case, axis: int, parameter: Parameter | None, table: Sequence[Parameter]
) -> Iterator[tuple[str, int | None, str]]:
    """Yields the statements of the sources, most trusted first: source, dimension, note."""
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
        # With two equal sizes either may be meant; without `init`, equal shapes count as a match.
        is_clear = len({*parameter.shape}) == len(parameter.shape) or not case.verdicts
        aligned = align_shape(case.leaf.shape, parameter.shape) if is_clear else None
        doubt = case.verdicts[axis].note if case.verdicts else ""
        # A size without a match does not outweigh the doubt.
        if aligned is not None and (aligned[axis] is not None or not doubt):
            yield "alignment", aligned[axis], doubt


def _from_tags(case: Case, axis: int, table: Sequence[Parameter]) -> tuple[int | None, str] | None:
    """Returns the parameter dimension known from provenance and a note, or `None`."""
    tags = case.tags[axis]
    if not tags:
        return None
    if case.owner is None:
        return None, "computed from several parameters"
    if len(tags) > 1:
        dims = ", ".join(str(tag.dim) for tag in tags)
        return None, f"computed from the parameter dimensions {dims}"
    dim, shape = tags[0].dim, table[case.owner].shape
    if tags[0].colour != case.colour:
        return None, "follows a different parameter than the other dimensions"
    if dim >= len(shape) or shape[dim] != case.leaf.shape[axis]:
        return None, f"a part of parameter dimension {dim}"
    return dim, ""
