"""The arrays that the collectives of a step communicate: counts, sources and destinations."""

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

# These bring values to a device unchanged. The others reduce.
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
    """An array that a collective communicates, with its sources and destinations.

    Attributes:
      row: the collective as reported.
      site: where it occurs.
      number: its index among all such arrays.
      size: number of elements on a device afterwards.
      count: executions per training step; a program may run several steps in a loop.
      step_loops: the enclosing loops over whole training steps.
      state: the sharded state leaves that it depends on; only those with an elementwise dependency
        if there are any.
      directly: whether it is computed from `state` elementwise.
      placed: whether elements of `state` were written to distinct positions in it, so that a sum
        over devices gathers them.
      reduced: the sharded state leaves that it is computed from by a reduction on the device, and
        otherwise elementwise.
      from_params: whether it depends on parameters.
      from_inputs: whether it depends on arguments that are neither parameters nor state.
      follows: numbers of the arrays from whose result it is computed elementwise.
      reaches: the results of the step that are computed from it elementwise.
      adds_to: the results that are computed from it elementwise or by a reduction on the device.
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
    reduced: tuple[Leaf, ...] = ()
    from_params: bool = False
    from_inputs: bool = False
    follows: tuple[int, ...] = ()
    reaches: tuple[Leaf, ...] = ()
    adds_to: tuple[Leaf, ...] = ()

    @property
    def counts(self) -> frozenset[int]:
        """Number of executions within none, one, ... and all enclosing loops, innermost first.

        Layers of a stack are inner loops; microbatches and whole steps are outer ones.
        """
        trips = [times for _, times in reversed(self.site.loops)]
        return frozenset(itertools.accumulate(trips, operator.mul, initial=1))

    @property
    def elements(self) -> int:
        """Number of elements that a device receives per training step."""
        return self.size * self.count

    @property
    def operand_elements(self) -> int:
        """Number of elements that a device contributes per training step, without zeros."""
        size = math.prod(self.row.operand_shape) * self.count
        return size if self.row.kind in MOVES else size // self.row.group_size

    @property
    def alone(self) -> bool:
        """Whether it depends on state only."""
        return not self.from_params and not self.from_inputs

    @property
    def is_vector(self) -> bool:
        """Whether at most one dimension has a size above 1."""
        return sum(size > 1 for size in self.row.shape) < 2

    def __str__(self) -> str:
        over = f" over {'+'.join(self.row.axes)}" if self.row.axes else ""
        times = f", {self.row.count} times per step" if self.row.count > 1 else ""
        times = ", in each iteration of a loop" if self.row.per_iteration else times
        shape = ",".join(map(str, self.row.shape))
        return f"`{self.row.name}` to {self.row.dtype}[{shape}]{over}{times}"


def moved_arrays(
    module: Module, inputs: Sequence[Leaf], outputs: Sequence[Leaf], mesh: Mapping[str, int]
) -> list[Moved] | None:
    """Returns every array communicated; `None` if arguments and program do not match."""
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
    adds_to: defaultdict[int, list[Leaf]] = defaultdict(list)
    for leaf, deps in zip(outputs, flow.outputs, strict=True):
        for n in _bits(deps.direct >> first_tag):
            reaches[n].append(leaf)
        for n in _bits((deps.direct | deps.reduced) >> first_tag):
            adds_to[n].append(leaf)

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
                reduced=leaves(deps.reduced & all_state),
                from_params=bool(deps.any >> _ROLE_BITS["params"] & 1),
                from_inputs=bool(deps.any >> _ROLE_BITS["other"] & 1),
                follows=tuple(_bits(deps.direct >> first_tag)) if depends else (),
                reaches=tuple(reaches[n]),
                adds_to=tuple(adds_to[n]),
            )
        )
    return found


def most_at_once(moved: Iterable[Moved], size: Callable[[Moved], int]) -> int:
    """Returns the maximum sum of sizes in one run, taking one branch of each `conditional`."""
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
    """Formats the paths of leaves."""
    return listed(list(dict.fromkeys(leaf.path for leaf in leaves)), most)


def listed(things: Sequence[object], most: int = 4) -> str:
    """Formats the first few items of a list."""
    more = f" and {len(things) - most} more" * (len(things) > most)
    return ", ".join(map(str, things[:most])) + more


def _sources(depends: tuple[Leaf, ...], deps: Deps) -> tuple[str, ...]:
    sources = tuple(leaf.path for leaf in depends)
    sources += ("params",) * (deps.any >> _ROLE_BITS["params"] & 1)
    return sources + ("inputs",) * (deps.any >> _ROLE_BITS["other"] & 1)


def _bits(number: int) -> Iterator[int]:
    """Yields the positions of the set bits of a number."""
    while number:
        low = number & -number
        yield low.bit_length() - 1
        number ^= low


_ROLE_BITS = {"params": 0, "other": 1, "state": 2}
_FIRST_LEAF = 3
