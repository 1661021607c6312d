"""Which collectives a step should not have: gathers of state, all-reduces of gradients."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from opt_partition._verify.collectives import Collective, Site, rows, sites
from opt_partition._verify.hlo import Module
from opt_partition._verify.hlo_flow import Deps, trace
from opt_partition._verify.leaves import Leaf
from opt_partition._verify.ownership import Owners
from opt_partition._verify.report import Finding, Severity
from opt_partition._verify.roles import Keys


@dataclasses.dataclass(frozen=True)
class Moved:
    """An array that a collective moves, where it comes from and where it goes.

    Attributes:
      row: the collective as it is reported.
      site: where it runs.
      size: number of elements that a device has afterwards.
      state: the sharded leaves of the state that it depends on; if it is computed from some of
        them element by element, these.
      directly: whether it is computed from `state` element by element.
      from_params: it depends on parameters.
      from_inputs: it depends on arguments that are neither parameters nor state.
      reaches: the results that are computed from it element by element.
    """

    row: Collective
    site: Site
    size: int
    state: tuple[Leaf, ...] = ()
    directly: bool = False
    from_params: bool = False
    from_inputs: bool = False
    reaches: tuple[Leaf, ...] = ()

    @property
    def is_vector(self) -> bool:
        """Whether it has no more than one dimension worth the name."""
        return sum(size > 1 for size in self.row.shape) < 2

    def __str__(self) -> str:
        over = f" over {'+'.join(self.row.axes)}" if self.row.axes else ""
        times = f", {self.row.count} times a step" if self.row.count > 1 else ""
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
    found = [
        Moved(row, s, math.prod(row.shape)) for s in sites(module) for row in rows(s, module, mesh)
    ]
    parts = [(s.instruction.name, n) for s in sites(module) for n in range(len(s.parts))]
    seeds = [Deps.of(numbers.get(id(leaf), _ROLE_BITS[leaf.role])) for leaf in used]
    flow = trace(module, seeds, {part: n for n, part in enumerate(parts, first_tag)})
    reaches: defaultdict[int, list[Leaf]] = defaultdict(list)
    for leaf, deps in zip(outputs, flow.outputs, strict=True):
        for n in _bits(deps.direct >> first_tag):
            reaches[n].append(leaf)
    return [
        _traced(moved, flow.moved.get(part, Deps()), state, tuple(reaches[n]))
        for n, (moved, part) in enumerate(zip(found, parts, strict=True))
    ]


def state_gathers(
    moved: Sequence[Moved], inputs: Sequence[Leaf], severity: Severity
) -> Iterator[Finding]:
    """The collectives that bring the state, or what is made of it, to a device once too often."""
    owners = Owners([leaf for leaf in inputs if leaf.role == "params"])
    groups: defaultdict[frozenset[Keys], list[Moved]] = defaultdict(list)
    for gather in moved:
        alone = gather.directly and not gather.from_params and not gather.from_inputs
        is_sum = gather.row.kind == "all-reduce" and alone and _gathers(gather, owners)
        if not gather.state or not (gather.row.kind == "all-gather" or is_sum):
            continue
        if alone:
            yield _pure_gather(gather, owners, severity)
            continue
        params = [p for p in map(owners.of, gather.state) if p is not None]
        fitting = frozenset(p.name for p in params if p.shard_size == gather.size)
        if fitting:
            groups[fitting].append(gather)
        elif gather.directly and params and all(p.shard_size < gather.size for p in params):
            yield _gather_finding(
                gather,
                severity,
                f"gathers more of what is made of {_names(gather.state)} than the "
                f"{params[0].shard_size:,} elements of the parameter that a device holds",
            )
    for fitting, gathers in groups.items():
        if _most_at_once(gathers) > len(fitting):
            yield _gather_finding(
                gathers[0],
                severity,
                f"{_most_at_once(gathers)} gathers of what is made of "
                f"{_names([leaf for g in gathers for leaf in g.state])} in a step, where "
                f"{len(fitting)} would do, of the new parameter or of its update: "
                f"{', '.join(map(str, gathers))}",
            )


def gradient_all_reduces(
    moved: Sequence[Moved],
    mesh: Mapping[str, int],
    severity: Severity,
    of_vectors: Severity,
) -> Iterator[Finding]:
    """The all-reduces of gradients of which a device then uses its part."""
    for reduce in moved:
        if reduce.row.kind != "all-reduce" or reduce.size == 1 or not reduce.from_inputs:
            continue
        for leaf in reduce.reaches:
            if leaf.role == "other":
                continue
            ways = _ways(reduce, leaf, mesh)
            whole = leaf.shard_size * ways
            if ways > 1 and whole in (reduce.size, reduce.size * reduce.row.count):
                yield Finding(
                    "gradient all-reduce",
                    of_vectors if reduce.is_vector else severity,
                    leaf.path,
                    f"{reduce} sums a gradient on every device, of which {leaf.path} takes "
                    f"1/{ways}: a reduce-scatter would send half the bytes, now "
                    f"{reduce.row.total_bytes:,} a device and step",
                )
                break


def _pure_gather(gather: Moved, owners: Owners, severity: Severity) -> Finding:
    """A gather of state as it is: wrong, unless it is of what is smaller than its parameter."""
    leaf = gather.state[0]
    owner = owners.of(leaf)
    factor = owner is not None and leaf.size < owner.size
    in_part = gather.size < _most(leaf, owners)
    return _gather_finding(
        gather,
        "note" if factor or in_part else severity,
        f"gathers {_names(gather.state)}: a device gets {gather.size:,} elements of "
        f"{leaf.size:,} and should hold {leaf.shard_size:,}",
    )


def _gathers(reduce: Moved, owners: Owners) -> bool:
    """Whether an all-reduce is a gather: it sums shards, each at its place in zeros."""
    limits = [_most(leaf, owners) for leaf in reduce.state]
    held = sum(leaf.shard_size for leaf in reduce.state)
    return reduce.size > held and reduce.size in (*limits, sum(limits))


def _most(leaf: Leaf, owners: Owners) -> int:
    """The elements of a leaf of the state that no device should see at once."""
    owner = owners.of(leaf)
    return leaf.size if owner is None else min(leaf.size, owner.shard_size)


def _gather_finding(gather: Moved, severity: Severity, said: str) -> Finding:
    remedy = "; `state_gathers='any'` allows it, for optimizers that need whole matrices, as Muon "
    remedy = (remedy + "and GaLore do") * (severity == "error")
    return Finding("state gather", severity, gather.state[0].path, f"{gather}: {said}{remedy}")


def _most_at_once(gathers: Sequence[Moved]) -> int:
    """How many of the gathers one step can run: of a `conditional`, those of one branch."""
    branches = Counter(gather.site.branch for gather in gathers)
    always = branches.pop(None, 0)
    most: dict[str, int] = {}
    for branch, count in branches.items():
        assert branch is not None
        most[branch[0]] = max(count, most.get(branch[0], 0))
    return always + sum(most.values())


def _ways(reduce: Moved, leaf: Leaf, mesh: Mapping[str, int]) -> int:
    """Over how many devices of a group `leaf` is divided."""
    if reduce.row.axes is None or leaf.mesh_axes is None:
        return reduce.row.group_size
    divided = {axis for axes in leaf.mesh_axes for axis in axes}
    return math.prod(mesh[axis] for axis in reduce.row.axes if axis in divided)


def _traced(moved: Moved, deps: Deps, state: Sequence[Leaf], reaches: tuple[Leaf, ...]) -> Moved:
    """`moved`, with what it depends on in words."""

    def leaves(bits: int) -> tuple[Leaf, ...]:
        return tuple(state[n] for n in _bits(bits >> _FIRST_LEAF) if n < len(state))

    direct = leaves(deps.direct)
    depends = direct or leaves(deps.any)
    from_params = bool(deps.any >> _ROLE_BITS["params"] & 1)
    from_inputs = bool(deps.any >> _ROLE_BITS["other"] & 1)
    sources = tuple(leaf.path for leaf in depends)
    sources += ("params",) * from_params + ("inputs",) * from_inputs
    return dataclasses.replace(
        moved,
        row=dataclasses.replace(moved.row, sources=sources),
        state=depends,
        directly=bool(direct),
        from_params=from_params,
        from_inputs=from_inputs,
        reaches=reaches,
    )


def _names(leaves: Sequence[Leaf]) -> str:
    return ", ".join(dict.fromkeys(leaf.path for leaf in leaves))


def _bits(number: int) -> Iterator[int]:
    """Yields the places of the ones of a number."""
    while number:
        low = number & -number
        yield low.bit_length() - 1
        number ^= low


_ROLE_BITS = {"params": 0, "other": 1, "state": 2}
_FIRST_LEAF = 3
