"""Verdicts on the collectives of a step: state that is communicated, gradients summed in full."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from opt_partition._collectives import Collective, Moved, moved_arrays
from opt_partition._display import listed
from opt_partition._hlo import Array, Module
from opt_partition._leaves import LeafReport, Traced, owners

Gradients = Literal["auto", "reduce-scatter", "any"]
StateGathers = Literal["error", "any"]
Severity = Literal["error", "warning", "note"]

# XLA for TPUs all-reduces anything smaller, whatever the program says, since it takes fewer rounds.
# Measured on v5e with libtpu 0.0.42: 16 KiB were all-reduced, 64 KiB were not.
_SMALL = 64 * 1024


@dataclasses.dataclass(frozen=True)
class Finding:
    """A problem, or something that could not be checked.

    Attributes:
      kind: `'sharding'`, `'dtype'`, `'state gather'`, `'gradient all-reduce'`, `'donation'`,
        `'ownership'` or `'keyword argument'`.
      severity: `verify` raises for an `'error'`.
      path: path of the leaf concerned, if any.
      message: the leaf, what was expected, and what was found.
    """

    kind: str
    severity: Severity
    path: str | None
    message: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.kind}: {self.message}"


@dataclasses.dataclass(frozen=True)
class Unjudged:
    """A collective that communicates values derived from state and could not be judged.

    Attributes:
      collective: the collective.
      reason: why it could not be judged.
    """

    collective: Collective
    reason: str

    def __str__(self) -> str:
        row = self.collective
        return f"{row.name}: {row.kind} of {row.array}, {listed(row.sources)}: {self.reason}"


class Judged(NamedTuple):
    """The judged collectives of a step; see `Report` for the fields."""

    collectives: tuple[Collective, ...]
    findings: tuple[Finding, ...]
    unjudged: tuple[Unjudged, ...]


def judge_collectives(
    module: Module,
    traced: Traced,
    inputs: Sequence[LeafReport],
    outputs: Sequence[LeafReport],
    mesh: Mapping[str, int],
    platform: str,
    *,
    gradients: Gradients = "auto",
    state_gathers: StateGathers = "error",
) -> Judged:
    """Judges the collectives of a compiled step."""
    moved = moved_arrays(module, traced, outputs, mesh)
    state = _StateMoves(moved, inputs, mesh, "error" if state_gathers == "error" else "note")
    findings = (
        *state.findings(),
        *_gradient_findings(moved, mesh, *_gradient_severities(gradients, platform)),
    )
    return Judged(tuple(array.row for array in moved), findings, tuple(state.unjudged))


class _StateMoves:
    """The communication of state in a step, assigned to leaves or parameters."""

    def __init__(
        self,
        moved: Sequence[Moved],
        inputs: Sequence[LeafReport],
        mesh: Mapping[str, int],
        severity: Severity,
    ) -> None:
        params = [leaf for leaf in inputs if leaf.role == "params"]
        self._owner = owners(params)
        self._mesh, self._severity = mesh, severity
        # Arrays that depend on state only, with the elements of each leaf that they communicate.
        self._of_leaves: defaultdict[LeafReport, dict[Moved, int]] = defaultdict(dict)
        # Those mixed with parameters or gradients, with the parameters whose budget they share.
        self._of_params: dict[Moved, tuple[LeafReport, ...]] = {}
        self._reductions: list[Moved] = []  # those reduced over devices into the leaf itself
        self.unjudged: list[Unjudged] = []
        for array in moved:
            if array.state and array.size > 1 and array.row.group_size > 1:
                self._sort(array)

    def findings(self) -> Iterator[Finding]:
        """Yields findings on state, or values derived from it, that is communicated too often."""
        for leaf, shares in self._of_leaves.items():
            yield from self._judge_leaf(leaf, shares)
        for arrays, params in _sharing(self._of_params):
            yield from self._judge_updates(arrays, params)

    def _is_factor(self, leaf: LeafReport) -> bool:
        """Whether a leaf is smaller than its parameter, e.g. the rows of a factored moment."""
        owner = self._owner(leaf)
        return owner is not None and leaf.size < owner.size

    def _sort(self, array: Moved) -> None:
        if not array.is_move and not self._is_gather(array):
            return
        if array.directly and (array.alone or all(map(self._is_factor, array.state))):
            self._count(array, array.state)
            return
        owners = dict.fromkeys(filter(None, map(self._owner, array.state)))
        params = tuple(p for p in owners if array.directly or p.shard_size == array.elements)
        if params:
            self._of_params[array] = params
        elif array.is_move:
            self.unjudged.append(Unjudged(array.row, _NO_OWNER if array.directly else _NO_SIZE))

    def _is_gather(self, reduce: Moved) -> bool:
        """Whether a reduction over devices is a gather of state; sorts it otherwise."""
        # Elements of different shards that are reduced into each other are no longer that state;
        # norms, means and factors a device has reduced before.
        ends = [leaf for leaf in reduce.reaches if leaf.role == "state"]
        if not reduce.directly:
            if any(
                reduce.elements >= leaf.shard_size and not self._is_factor(leaf) for leaf in ends
            ):
                self.unjudged.append(Unjudged(reduce.row, _COMPUTED))
            return False
        names = {leaf.name for leaf in ends}
        into = tuple(leaf for leaf in reduce.state if leaf.name in names)
        if into and (reduce.alone or any(_ways(reduce, leaf, self._mesh) > 1 for leaf in into)):
            self._count(reduce, into)
            self._reductions.append(reduce)
            return False
        if not into and reduce.placed:
            return True
        self.unjudged.append(Unjudged(reduce.row, _REPLICAS if into else _ELSEWHERE))
        return False

    def _count(self, array: Moved, leaves: Sequence[LeafReport]) -> None:
        """Adds an array to the sums of leaves, with the number of elements of each."""
        shards = [leaf.shard_size for leaf in leaves]
        together = array.operand_elements > max(shards)
        for leaf, shard in zip(leaves, shards, strict=True):
            share = array.elements * shard // sum(shards) if together else array.elements
            self._of_leaves[leaf][array] = share

    def _judge_leaf(self, leaf: LeafReport, shares: Mapping[Moved, int]) -> Iterator[Finding]:
        """Judges a leaf that is communicated by itself: its shard is too much, or its parameter."""
        total, owner = _most_at_once(shares), self._owner(leaf)
        is_factor = owner is not None and leaf.size < owner.size
        reduced = [array for array in shares if array in self._reductions]
        if total <= owner.size if owner and is_factor else total < leaf.shard_size:
            for array in shares:
                if array.row.per_iteration and not is_factor:
                    self.unjudged.append(Unjudged(array.row, _NO_COUNT))
                elif array in reduced:
                    self.unjudged.append(Unjudged(array.row, _PART))
            return
        what = "reduced over devices, shard by shard" if reduced else "communicated by itself"
        yield self._finding(
            leaf,
            f"{leaf.path} is {what}: a device receives {total:,} elements per step of "
            f"a leaf of {leaf.size:,}, of which it holds {leaf.shard_size:,}, by "
            f"{listed(list(shares))}",
        )

    def _judge_updates(
        self, arrays: Sequence[Moved], params: Sequence[LeafReport]
    ) -> Iterator[Finding]:
        """Judges values derived from state of `params`: only the update may be moved, and once."""
        regions: defaultdict[tuple[str, ...], dict[Moved, int]] = defaultdict(dict)
        for array in _without_stages(arrays):
            regions[array.step_loops][array] = array.elements
        kept = max(regions.values(), key=_most_at_once)
        total = _most_at_once(kept)
        leaves = list(dict.fromkeys(leaf for m in arrays if m.directly for leaf in m.state))
        direct = all(m.directly for m in arrays)
        budget = sum(p.shard_size for p in params if not (direct and self._is_alike(p, leaves)))
        if total - budget < min((leaf.shard_size for leaf in leaves), default=1):
            for array in kept:
                if array.row.per_iteration:
                    self.unjudged.append(Unjudged(array.row, _NO_COUNT))
            return
        named = leaves or list(arrays[0].state)
        yield self._finding(
            named[0],
            f"values derived from {listed([leaf.path for leaf in named])} are communicated too "
            f"often: a device receives {total:,} elements per step, where {budget:,} of the new "
            f"parameter or its update would suffice, by {listed(list(kept))}",
        )

    def _is_alike(self, param: LeafReport, leaves: Sequence[LeafReport]) -> bool:
        """Whether state is sharded like its parameter: no device needs another's update."""
        return all(
            leaf.shape == param.shape and leaf.mesh_axes == param.mesh_axes
            for leaf in leaves
            if self._owner(leaf) is param
        )

    def _finding(self, leaf: LeafReport, said: str) -> Finding:
        advice = _WHOLE * (self._severity == "error")
        return Finding("state gather", self._severity, leaf.path, said + advice)


def _sharing(
    of_params: Mapping[Moved, tuple[LeafReport, ...]],
) -> Iterator[tuple[list[Moved], list[LeafReport]]]:
    """Yields the arrays that share parameters, with these; one budget is theirs."""
    shared: dict[LeafReport, tuple[list[Moved], dict[LeafReport, None]]] = {}
    for array, params in of_params.items():
        arrays, members = [], dict[LeafReport, None]()
        for other, others in {id(s): s for s in map(shared.get, params) if s}.values():
            arrays += other
            members |= others
        arrays.append(array)
        members |= dict.fromkeys(params)
        shared |= dict.fromkeys(members, (arrays, members))
    for arrays, members in {id(s): s for s in shared.values()}.values():
        yield arrays, list(members)


def _without_stages(arrays: Sequence[Moved]) -> list[Moved]:
    """Keeps only the largest of several stages that bring an update to its parameter."""
    # XLA gathers over one mesh axis after another, and may permute the parts before or after. What
    # goes back to the state is not such a stage, nor is what was gathered and sliced again.
    by_number = {array.number: array for array in arrays}
    dropped: set[Moved] = set()
    for array in arrays:
        for before in filter(None, map(by_number.get, array.follows)):
            permutes = {array.row.kind, before.row.kind} == {"collective-permute"}
            back = any(leaf.role == "state" for leaf in (*array.reaches, *before.reaches))
            if not permutes and not back and array.operand_elements >= before.elements:
                dropped.add(before if before.elements <= array.elements else array)
    return [array for array in arrays if array not in dropped]


def _most_at_once(sizes: Mapping[Moved, int], depth: int = 0) -> int:
    """Returns the sum of sizes in one run: of each `conditional`, the branch with the largest."""
    total = 0
    branches: defaultdict[str, defaultdict[int, dict[Moved, int]]]
    branches = defaultdict(lambda: defaultdict(dict))
    for array, size in sizes.items():
        if len(array.where.branches) > depth:
            conditional, number = array.where.branches[depth]
            branches[conditional][number][array] = size
        else:
            total += size
    return total + sum(
        max(_most_at_once(branch, depth + 1) for branch in of_conditional.values())
        for of_conditional in branches.values()
    )


_WHOLE = (
    "; optimizers that need whole matrices, such as Muon and GaLore, pass `state_gathers='any'`; "
    "for Muon, write `opt_matrix.muon(learning_rate, plan=...)` with a plan of "
    "`opt_matrix.plan_matrices`, which hands them out"
)
_NO_OWNER = "the state that it is derived from belongs to no parameter according to its path"
_NO_SIZE = "derived from state, but not elementwise, and not of the size of a parameter"
_NO_COUNT = "in a loop of unknown length"
_COMPUTED = "a reduction over devices of sums or products of state, which ends in the state"
_ELSEWHERE = "a reduction over devices of state, which does not end in that state"
_PART = "a reduction over devices of a part of the state, or of a factor"
_REPLICAS = "a reduction over devices that hold the same state, mixed with other values"


def _gradient_severities(gradients: Gradients, platform: str) -> tuple[Severity, Severity]:
    """Returns the severities of an all-reduce of a matrix, and of a vector or a small array."""
    if gradients != "auto":
        severity: Severity = "note" if gradients == "any" else "error"
        return severity, "warning" if platform == "tpu" and severity == "error" else severity
    return "warning" if platform == "cpu" else "error", "warning"


def _gradient_findings(
    moved: Sequence[Moved], mesh: Mapping[str, int], severity: Severity, of_small: Severity
) -> Iterator[Finding]:
    """Yields the all-reduces and gathers of gradients of which each device uses only a part."""
    for reduce in moved:
        if reduce.row.kind != "all-reduce" or reduce.size == 1 or not reduce.from_inputs:
            continue
        for leaf in reduce.reaches:
            ways = 1 if leaf.role == "other" else _ways(reduce, leaf, mesh)
            if ways > 1 and leaf.shard_size * ways in _in_loops(reduce, reduce.size):
                is_vector = sum(size > 1 for size in reduce.row.shape) < 2
                small = is_vector or _operand_bytes(reduce) < _SMALL
                kind = of_small if small else severity
                yield _gradient_finding(reduce, leaf, ways, kind, "all-reduces", "half")
                break
    # Gathers whose result, or its sums on a device, end in a leaf.
    gathers: defaultdict[LeafReport, list[Moved]] = defaultdict(list)
    for gather in moved:
        if gather.row.kind == "all-gather" and gather.from_inputs and not gather.directly:
            for leaf in gather.adds_to:
                if leaf.role != "other":
                    gathers[leaf].append(gather)
    for leaf, (first, *rest) in gathers.items():
        # In the loops that the first of them is in: those add up in each iteration.
        together = [first, *(gather for gather in rest if gather.where.loops == first.where.loops)]
        size = sum(math.prod(gather.row.operand_shape) for gather in together)
        ways = _ways(first, leaf, mesh)
        if ways > 1 and leaf.shard_size * ways in _in_loops(first, size):
            kind = of_small if _operand_bytes(first) < _SMALL else severity
            does, share = "gathers the summands of", f"1/{first.row.group_size}"
            yield _gradient_finding(first, leaf, ways, kind, does, share)


def _in_loops(moved: Moved, size: int) -> set[int]:
    """Returns the elements moved in one iteration, in all of the innermost loop, the next, ..."""
    trips = [times for _, times in reversed(moved.where.loops)]
    return set(itertools.accumulate(trips, operator.mul, initial=size))


def _operand_bytes(moved: Moved) -> int:
    return Array(moved.row.dtype, moved.row.operand_shape).bytes


def _ways(moved: Moved, leaf: LeafReport, mesh: Mapping[str, int]) -> int:
    """Returns the number of devices of a group that `leaf` is sharded over."""
    if moved.row.axes is None or leaf.mesh_axes is None:
        return moved.row.group_size
    divided = {axis for axes in leaf.mesh_axes for axis in axes}
    return math.prod(mesh[axis] for axis in moved.row.axes if axis in divided)


def _gradient_finding(
    moved: Moved, leaf: LeafReport, ways: int, severity: Severity, does: str, share: str
) -> Finding:
    sent = moved.row.bytes * moved.count
    return Finding(
        "gradient all-reduce",
        severity,
        leaf.path,
        f"{moved} {does} a gradient of which {leaf.path} uses only 1/{ways} per device: a "
        f"reduce-scatter would send {share} of these {sent:,} bytes per device and step",
    )
