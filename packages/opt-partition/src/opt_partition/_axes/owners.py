"""Identification of the parameter that each state leaf belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from opt_partition._axes.cases import Case
from opt_partition._axes.param_axes import Parameter
from opt_partition._axes.probing import Prober, Shape, first_line, shapes_of
from opt_partition._axes.provenance import COLOURS, Tags, trace_provenance
from opt_partition._axes.sources import CAREFUL, FAST, find_sources


class ProvenanceEvaluator:
    """Evaluates `init` for provenance, as often as needed to distinguish the parameters."""

    def __init__(
        self, init: Callable[[Any], Any], treedef: Any, table: Sequence[Parameter]
    ) -> None:
        self._init, self._treedef, self._table = init, treedef, table
        self.evaluations = 0
        self.notes: tuple[str, ...] = ()
        self.digits = 0

    def first(self) -> tuple[Any, list[Tags] | None]:
        """Returns the state, and its tags if `init` works on a mesh of `Explicit` axes."""
        try:
            return self._trace()
        except Exception as error:  # it is a user's function: anything can happen
            reason = first_line(error)
            self.notes = (f"no provenance: `init` does not work on an Explicit mesh ({reason})",)
        self.evaluations += 1
        leaves = [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in self._table]
        try:
            return jax.eval_shape(self._init, self._treedef.unflatten(leaves)), None
        except Exception as error:
            error.add_note(
                "`init` must work under `jax.eval_shape`, on shapes without values. Make sure to "
                "pass a transformation or its `init`, not a constructor that has not been called."
            )
            raise

    def colours(self, digit: int) -> list[int]:
        """Returns the colour of every parameter in evaluation `digit`."""
        return [number // COLOURS**digit % COLOURS for number in range(len(self._table))]

    def next_tags(self) -> list[Tags] | None:
        """Returns tags with the next colours, or `None` if the parameters are all distinguished."""
        if len(self._table) <= COLOURS**self.digits:
            return None
        return self._trace()[1]

    def _trace(self) -> tuple[Any, list[Tags]]:
        self.evaluations += 1
        colours = self.colours(self.digits)
        self.digits += 1
        return trace_provenance(self._init, self._treedef, self._table, colours)


def find_owners(
    cases: Sequence[Case], table: Sequence[Parameter], evaluator: ProvenanceEvaluator
) -> None:
    """Finds the parameter of every leaf by its path, checked against the colours in its tags."""
    numbered: dict[tuple[Tags, Shape], tuple[int, ...]] = {}
    colours = evaluator.colours(0)
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
    _tell_apart(open_cases, evaluator)
    for case in cases:
        if case.owner is not None and any(case.tags):
            case.colour = colours[case.owner]


def identify_owners(
    cases: Sequence[Case], prober: Prober, table: Sequence[Parameter], state: Any
) -> None:
    """Finds the parameter of leaves without tags whose path matches several."""
    unclear = [c for c in cases if not c.owners and len(c.matches) > 1 and c.rank]
    if not unclear:
        return
    paths = [case.key_path for case in unclear]
    sources = find_sources(prober, table, shapes_of(state), paths, (*FAST, *CAREFUL))
    for case in unclear:
        if case.key_path in sources:
            case.owners = (sources[case.key_path].parameter,)


def _tell_apart(open_cases: Sequence[tuple[int, Case]], evaluator: ProvenanceEvaluator) -> None:
    """Evaluates with further colours until every leaf has a single owner."""
    while any(len(case.owners) > 1 for _, case in open_cases):
        tags = evaluator.next_tags()
        if tags is None:
            break
        colours = evaluator.colours(evaluator.digits - 1)
        for number, case in open_cases:
            shown = {tag.colour for each in tags[number] for tag in each}
            case.owners = tuple(p for p in case.owners if colours[p] in shown)


def _owners(
    case: Case, candidates: Iterable[int], table: Sequence[Parameter], colours: Sequence[int]
) -> tuple[int, ...]:
    """Returns the candidates consistent with the tags of a leaf, preferring equal sizes."""
    weak = [p for p in candidates if _may_own(case, table[p], colours[p], any_size=True)]
    return tuple(p for p in weak if _may_own(case, table[p], colours[p], any_size=False)) or (
        *weak,
    )


def _may_own(case: Case, parameter: Parameter, colour: int, *, any_size: bool) -> bool:
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
