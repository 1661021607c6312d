"""The arrays that the collectives of a step move: how often, where from, where to."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from opt_partition._verify.collectives import Collective, Site, rows, sites
from opt_partition._verify.hlo import Module
from opt_partition._verify.hlo_flow import Deps, trace
from opt_partition._verify.leaves import Leaf

# What these bring to a device is as it was, elsewhere. Others add something up.
MOVES = frozenset(
    {
        "all-gather",
        "all-to-all",
        "collective-broadcast",
        "collective-permute",
        "ragged-all-to-all",
    }
)


@dataclasses.dataclass(frozen=True, eq=False)
class Moved:
    """An array that a collective moves, where it comes from and where it goes.

    Attributes:
      row: the collective as it is reported.
      site: where it runs.
      number: its place among all of them.
      size: number of elements that a device has afterwards.
      count: how often it runs for one training step; a program may have several in a loop.
      step_loops: the loops of whole training steps that it is in.
      state: the sharded leaves of the state that it depends on; if it is computed from some of
        them element by element, these.
      directly: whether it is computed from `state` element by element.
      placed: whether elements of `state` were put at places of their own in it, so that a sum
        over devices gathers them.
      from_params: it depends on parameters.
      from_inputs: it depends on arguments that are neither parameters nor state.
      follows: numbers of those whose result it is computed from element by element.
      reaches: the results that are computed from it element by element.
    """

    row: Collective
    site: Site
    number: int
    size: int
    count: int = 1
    step_loops: tuple[str, ...] = ()
    state: tuple[Leaf, ...] = ()
    directly: bool = False
    placed: bool = False
    from_params: bool = False
    from_inputs: bool = False
    follows: tuple[int, ...] = ()
    reaches: tuple[Leaf, ...] = ()

    @property
    def counts(self) -> frozenset[int]:
        """How often it runs in none, one, ... and all of the loops around it, innermost first.

        The layers of a stack are an inner loop; microbatches and whole steps are outer ones.
        """
        trips = [times for _, times in reversed(self.site.loops)]
        return frozenset(itertools.accumulate(trips, operator.mul, initial=1))

    @property
    def elements(self) -> int:
        """Number of elements that a device gets in a training step."""
        return self.size * self.count

    @property
    def operand_elements(self) -> int:
        """Number of elements that a device puts in during a training step, zeros left out."""
        size = math.prod(self.row.operand_shape) * self.count
        return size if self.row.kind in MOVES else size // self.row.group_size

    @property
    def alone(self) -> bool:
        """Whether it depends on state and nothing else."""
        return not self.from_params and not self.from_inputs

    @property
    def is_vector(self) -> bool:
        """Whether it has no more than one dimension worth the name."""
        return sum(size > 1 for size in self.row.shape) < 2

    def __str__(self) -> str:
        over = f" over {'+'.join(self.row.axes)}" if self.row.axes else ""
        times = f", {self.row.count} times a step" if self.row.count > 1 else ""
        times = ", in each iteration of a loop" if self.row.per_iteration else times
        shape = ",".join(map(str, self.row.shape))
        return f"`{self.row.name}` to {self.row.dtype}[{shape}]{over}{times}"


def moved_arrays(
    module: Module, inputs: Sequence[Leaf], outputs: Sequence[Leaf], mesh: Mapping[str, int]
) -> list[Moved] | None:
    """Every array that a collective moves; `None` if arguments and program do not match."""
    used = [leaf for leaf in inputs if leaf.found is not None]
    if len(used) != len(module.computations[module.entry].parameters):
        return None
    state = [leaf for leaf in used if leaf.role == "state" and leaf.shard_size < leaf.size]
    numbers = {id(leaf): n for n, leaf in enumerate(state, _FIRST_LEAF)}
    first_tag = _FIRST_LEAF + len(state)
    places = [(s, n, row) for s in sites(module) for n, row in enumerate(rows(s, module, mesh))]
    parts = [(site.instruction.name, n) for site, n, _ in places]
    seeds = [Deps.of(numbers.get(id(leaf), _ROLE_BITS[leaf.role])) for leaf in used]
    all_state = (1 << first_tag) - (1 << _FIRST_LEAF)
    tags = {part: n for n, part in enumerate(parts, first_tag)}
    flow = trace(module, seeds, tags, (1 << _ROLE_BITS["params"], all_state))
    reaches: defaultdict[int, list[Leaf]] = defaultdict(list)
    for leaf, deps in zip(outputs, flow.outputs, strict=True):
        for n in _bits(deps.direct >> first_tag):
            reaches[n].append(leaf)

    @functools.cache
    def leaves(bits: int) -> tuple[Leaf, ...]:
        return tuple(state[n] for n in _bits(bits >> _FIRST_LEAF))

    found = []
    for n, ((site, _, row), part) in enumerate(zip(places, parts, strict=True)):
        deps = flow.moved.get(part, Deps())
        step_loops = dict(loop for loop in site.loops if loop[0] in flow.step_loops)
        direct, placed = deps.direct & all_state, deps.placed & all_state
        is_move = row.kind in MOVES
        depends = leaves((direct or (not is_move and placed) or deps.any) & all_state)
        found.append(
            Moved(
                row=dataclasses.replace(row, sources=_sources(depends, deps)),
                site=site,
                number=n,
                size=math.prod(row.shape),
                count=row.count // math.prod(step_loops.values()),
                step_loops=tuple(step_loops),
                state=depends,
                directly=bool(direct or (not is_move and placed)),
                placed=bool(placed),
                from_params=bool(deps.any >> _ROLE_BITS["params"] & 1),
                from_inputs=bool(deps.any >> _ROLE_BITS["other"] & 1),
                follows=tuple(_bits(deps.direct >> first_tag)) if depends else (),
                reaches=tuple(reaches[n]),
            )
        )
    return found


def most_at_once(moved: Iterable[Moved], size: Callable[[Moved], int]) -> int:
    """The largest sum of sizes that one run can reach: of each `conditional` one branch."""
    return _most([(m.site.branches, size(m)) for m in moved])


def _most(sizes: Sequence[tuple[tuple[tuple[str, int], ...], int]]) -> int:
    total = 0
    inside: defaultdict[str, defaultdict[int, list[tuple[tuple[tuple[str, int], ...], int]]]]
    inside = defaultdict(lambda: defaultdict(list))
    for branches, size in sizes:
        if branches:
            (name, branch), *rest = branches
            inside[name][branch].append((tuple(rest), size))
        else:
            total += size
    return total + sum(max(map(_most, of.values())) for of in inside.values())


def names(leaves: Iterable[Leaf], most: int = 4) -> str:
    """Paths of leaves in words."""
    return listed(list(dict.fromkeys(leaf.path for leaf in leaves)), most)


def listed(things: Sequence[object], most: int = 4) -> str:
    """The first few of some things in words."""
    more = f" and {len(things) - most} more" * (len(things) > most)
    return ", ".join(map(str, things[:most])) + more


def _sources(depends: tuple[Leaf, ...], deps: Deps) -> tuple[str, ...]:
    sources = tuple(leaf.path for leaf in depends)
    sources += ("params",) * (deps.any >> _ROLE_BITS["params"] & 1)
    return sources + ("inputs",) * (deps.any >> _ROLE_BITS["other"] & 1)


def _bits(number: int) -> Iterator[int]:
    """Yields the places of the ones of a number."""
    while number:
        low = number & -number
        yield low.bit_length() - 1
        number ^= low


_ROLE_BITS = {"params": 0, "other": 1, "state": 2}
_FIRST_LEAF = 3
