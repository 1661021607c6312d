"""The arrays that the collectives of a step communicate: counts, sources and destinations."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from opt_partition._verify.collectives import Collective, Site, sites
from opt_partition._verify.expected import Role
from opt_partition._verify.flow import Deps, trace
from opt_partition._verify.hlo import Module
from opt_partition._verify.leaves import Leaf

# The other collectives bring values to a device unchanged.
_REDUCTIONS = ("all-reduce", "reduce-scatter")


@dataclasses.dataclass(frozen=True, eq=False)
class Moved:
    """An array that a collective communicates, with its sources and destinations."""

    row: Collective
    site: Site
    number: int  # among all such arrays
    count: int  # executions per training step; a program may run several steps in a loop
    step_loops: tuple[str, ...]
    # The sharded state that it depends on; only elementwise dependencies if there are any.
    state: tuple[Leaf, ...]
    directly: bool  # whether it is computed from `state` elementwise
    placed: bool  # whether a sum over devices gathers elements of `state`
    reduced: bool  # whether it is computed from `state` by a reduction on the device
    alone: bool  # whether it depends on state only
    from_inputs: bool  # whether it depends on arguments that are neither parameters nor state
    follows: tuple[int, ...]  # numbers of the arrays that it is computed from elementwise
    reaches: tuple[Leaf, ...]  # results that are computed from it elementwise
    adds_to: tuple[Leaf, ...]  # results computed from it elementwise or by a reduction

    @property
    def size(self) -> int:
        """Number of elements on a device afterwards."""
        return math.prod(self.row.shape)

    @property
    def elements(self) -> int:
        """Number of elements that a device receives per training step."""
        return self.size * self.count

    @property
    def operand_elements(self) -> int:
        """Number of elements that a device contributes per training step, without zeros."""
        size = math.prod(self.row.operand_shape) * self.count
        return size if self.is_move else size // self.row.group_size

    @property
    def is_move(self) -> bool:
        """Whether it brings values to a device unchanged, and does not reduce them."""
        return self.row.kind not in _REDUCTIONS

    def __str__(self) -> str:
        over = f" over {'+'.join(self.row.axes)}" if self.row.axes else ""
        times = f", {self.row.count} times per step" if self.row.count > 1 else ""
        times = ", in each iteration of a loop" if self.row.per_iteration else times
        shape = ",".join(map(str, self.row.shape))
        return f"`{self.row.name}` to {self.row.dtype}[{shape}]{over}{times}"


_ROLE_BITS: Mapping[Role, int] = {"params": 0, "other": 1, "state": 2}
_FIRST_LEAF = 3


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
    all_state = (1 << first_tag) - (1 << _FIRST_LEAF)
    places = sites(module, mesh)
    seeds = [Deps.of(numbers.get(id(leaf), _ROLE_BITS[leaf.role])) for leaf in used]
    tags = {site.part: n for n, site in enumerate(places, first_tag)}
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

    moved = []
    for n, site in enumerate(places):
        row, deps = site.row, flow.moved.get(site.part, Deps())
        step_loops = dict(loop for loop in site.loops if loop[0] in flow.step_loops)
        direct, placed = deps.direct & all_state, deps.placed & all_state
        if not direct and row.kind in _REDUCTIONS:
            direct = placed
        depends = leaves(direct or deps.any & all_state)
        sources = [leaf.path for leaf in depends]
        sources += ["params"] * (deps.any >> _ROLE_BITS["params"] & 1)
        sources += ["inputs"] * (deps.any >> _ROLE_BITS["other"] & 1)
        moved.append(
            Moved(
                row=dataclasses.replace(row, sources=tuple(sources)),
                site=site,
                number=n,
                count=row.count // math.prod(step_loops.values()),
                step_loops=tuple(step_loops),
                state=depends,
                directly=bool(direct),
                placed=bool(placed),
                reduced=bool(deps.reduced & all_state),
                alone=len(sources) == len(depends),
                from_inputs=bool(deps.any >> _ROLE_BITS["other"] & 1),
                follows=tuple(_bits(deps.direct >> first_tag)) if depends else (),
                reaches=tuple(reaches[n]),
                adds_to=tuple(adds_to[n]),
            )
        )
    return moved


def _bits(number: int) -> Iterator[int]:
    """Yields the positions of the set bits of a number."""
    while number:
        low = number & -number
        yield low.bit_length() - 1
        number ^= low
