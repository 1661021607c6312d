"""Communication of state and of values derived from it, summed per leaf and per parameter."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from opt_partition._verify.leaves import Leaf
from opt_partition._verify.moved import MOVES, Moved, listed, most_at_once, names
from opt_partition._verify.ownership import Owners
from opt_partition._verify.report import Finding, Severity, Unjudged


class StateMoves:
    """The communication of state in a step, assigned to leaves or parameters.

    Attributes:
      of_leaves: per leaf, the arrays that depend on state only, with the number of its elements
        that they communicate.
      of_params: the arrays that depend on state and on parameters or gradients, with the parameters
        whose budget they share.
      unjudged: the arrays that depend on state and belong to neither.
    """

    def __init__(self, moved: Sequence[Moved], inputs: Sequence[Leaf]) -> None:
        owners = Owners([leaf for leaf in inputs if leaf.role == "params"])
        self.owner: Callable[[Leaf], Leaf | None] = functools.cache(owners.of)
        self.of_leaves: defaultdict[Leaf, dict[Moved, int]] = defaultdict(dict)
        self.of_params: dict[Moved, tuple[Leaf, ...]] = {}
        self.unjudged: list[Unjudged] = []
        self._owners = functools.cache(self._owners_of)
        for array in moved:
            if array.state and array.size > 1 and array.row.group_size > 1:
                self._sort(array)

    def is_factor(self, leaf: Leaf) -> bool:
        """Whether a leaf is smaller than its parameter, e.g. the rows of a factored moment."""
        owner = self.owner(leaf)
        return owner is not None and leaf.size < owner.size

    def _sort(self, array: Moved) -> None:
        if array.row.kind not in MOVES and not self._gathers(array):
            if array.alone and array.directly:
                self._pass(array, "a sum over devices that depends on state only")
            return
        if array.directly:
            factors = [leaf for leaf in array.state if self.is_factor(leaf)]
            if array.alone or len(factors) == len(array.state):
                self._count(array)
                return
        params = self._owners(array.state, array.directly)
        if not array.directly:
            params = tuple(p for p in params if p.shard_size == array.elements)
        if params:
            self.of_params[array] = params
        elif array.row.kind in MOVES:
            self._pass(array, _NO_OWNER if array.directly else _NO_SIZE)

    def _owners_of(self, leaves: tuple[Leaf, ...], whole: bool) -> tuple[Leaf, ...]:
        """Returns the parameters of leaves; if `whole`, only of leaves that are not factors."""
        kept = (leaf for leaf in leaves if not (whole and self.is_factor(leaf)))
        return tuple(dict.fromkeys(p for p in map(self.owner, kept) if p is not None))

    def _count(self, array: Moved) -> None:
        """Adds an array to the sums of its leaves, with the number of elements of each."""
        shards = [leaf.shard_size for leaf in array.state]
        together = array.operand_elements > max(shards)
        for leaf, shard in zip(array.state, shards, strict=True):
            share = array.elements * shard // sum(shards) if together else array.elements
            self.of_leaves[leaf][array] = share

    def _pass(self, array: Moved, reason: str) -> None:
        self.unjudged.append(Unjudged(array.row, reason))

    def _gathers(self, reduce: Moved) -> bool:
        """Whether a sum over devices is a gather of shards, each padded with zeros."""
        if not reduce.directly:
            return False
        limits = [self._most(leaf) for leaf in reduce.state]
        held = sum(leaf.shard_size for leaf in reduce.state)
        whole = reduce.alone and reduce.elements > held
        return reduce.placed or (whole and reduce.elements in (*limits, sum(limits)))

    def _most(self, leaf: Leaf) -> int:
        """Returns the number of elements of a state leaf that a gather would bring to a device."""
        owner = self.owner(leaf)
        return leaf.size if owner is None else min(leaf.size, owner.shard_size)


def state_gathers(moves: StateMoves, severity: Severity) -> Iterator[Finding]:
    """Yields findings on state, or values derived from it, that is communicated too often."""
    for leaf, shares in moves.of_leaves.items():
        yield from _own_moves(leaf, shares, moves, severity)
    for arrays, params in _components(moves.of_params):
        yield from _update_moves(arrays, params, moves, severity)


def _own_moves(
    leaf: Leaf, shares: Mapping[Moved, int], moves: StateMoves, severity: Severity
) -> Iterator[Finding]:
    """Judges a leaf that is communicated by itself.

    It is an error from the size of its shard; for a factor, above the size of its parameter.
    """
    total = most_at_once(shares, shares.__getitem__)
    owner = moves.owner(leaf)
    factor = owner is not None and moves.is_factor(leaf)
    excused = total <= owner.size if factor and owner else total < leaf.shard_size
    if excused:
        moves.unjudged += [
            Unjudged(m.row, _NO_COUNT) for m in shares if m.row.per_iteration and not factor
        ]
        if not any(m.alone for m in shares):
            return
    yield _finding(
        "note" if excused else severity,
        leaf,
        f"{leaf.path} is communicated by itself: a device receives {total:,} elements per step of "
        f"a leaf of {leaf.size:,}, of which it holds {leaf.shard_size:,}, by "
        f"{listed(list(shares))}",
    )


def _update_moves(
    arrays: Sequence[Moved], params: Sequence[Leaf], moves: StateMoves, severity: Severity
) -> Iterator[Finding]:
    """Judges values derived from the state of `params`: only the update may be moved, and once."""
    kept = _without_stages(arrays)
    regions: defaultdict[tuple[str, ...], list[Moved]] = defaultdict(list)
    for moved in kept:
        regions[moved.step_loops].append(moved)
    sums = {
        region: most_at_once(inside, lambda moved: moved.elements)
        for region, inside in regions.items()
    }
    busiest = max(sums, key=sums.__getitem__)
    total, kept = sums[busiest], regions[busiest]
    leaves = list(dict.fromkeys(leaf for m in arrays if m.directly for leaf in m.state))
    budget = sum(_budget(p, arrays, leaves, moves) for p in params)
    excess = total - budget
    enough = min((leaf.shard_size for leaf in leaves), default=1)
    if excess <= 0:
        moves.unjudged += [Unjudged(m.row, _NO_COUNT) for m in kept if m.row.per_iteration]
        return
    yield _finding(
        severity if excess >= enough else "note",
        (leaves or list(arrays[0].state))[0],
        f"values derived from {names(leaves or arrays[0].state)} are communicated too often: a "
        f"device receives {total:,} elements per step, where {budget:,} of the new parameter or "
        f"its update would suffice, by {listed(kept)}",
    )


def _budget(param: Leaf, arrays: Sequence[Moved], leaves: Sequence[Leaf], moves: StateMoves) -> int:
    """Returns the elements of an update that a device needs: 0 if sharded like its parameter."""
    alike = all(
        leaf.shape == param.shape and leaf.mesh_axes == param.mesh_axes
        for leaf in leaves
        if moves.owner(leaf) is param
    )
    return 0 if alike and all(m.directly for m in arrays) else param.shard_size


def _without_stages(arrays: Sequence[Moved]) -> list[Moved]:
    """Keeps only the largest of several stages that bring an update to its parameter.

    XLA gathers over one mesh axis after another, and may permute the parts before or after. Values
    that go back to the state are not such stages, nor are those gathered and sliced again.
    """
    by_number = {array.number: array for array in arrays}
    dropped: set[Moved] = set()
    for array in arrays:
        for before in filter(None, map(by_number.get, array.follows)):
            permutes = {array.row.kind, before.row.kind} == {"collective-permute"}
            back = any(leaf.role == "state" for leaf in (*array.reaches, *before.reaches))
            if not permutes and not back and array.operand_elements >= before.elements:
                dropped.add(before if before.elements <= array.elements else array)
    return [array for array in arrays if array not in dropped]


def _components(
    of_params: Mapping[Moved, tuple[Leaf, ...]],
) -> Iterator[tuple[list[Moved], list[Leaf]]]:
    """Groups arrays with common parameters; yields each group with all its parameters."""
    parent: dict[Leaf, Leaf] = {}

    def find(leaf: Leaf) -> Leaf:
        while parent.setdefault(leaf, leaf) is not leaf:
            parent[leaf] = parent[parent[leaf]]
            leaf = parent[leaf]
        return leaf

    for params in of_params.values():
        for other in params[1:]:
            parent[find(other)] = find(params[0])
    arrays: defaultdict[Leaf, list[Moved]] = defaultdict(list)
    members: defaultdict[Leaf, dict[Leaf, None]] = defaultdict(dict)
    for array, params in of_params.items():
        root = find(params[0])
        arrays[root].append(array)
        members[root].update(dict.fromkeys(params))
    for root, group in arrays.items():
        yield group, list(members[root])


def _finding(severity: Severity, leaf: Leaf, said: str) -> Finding:
    remedy = (
        "; for optimizers that need whole matrices, such as Muon and GaLore, pass "
        "`state_gathers='any'`; `opt_matrix.muon(..., plan=plan)` moves each matrix once"
    )
    remedy *= severity == "error"
    return Finding("state gather", severity, leaf.path, said + remedy)


_NO_OWNER = "the state that it is derived from belongs to no parameter according to its path"
_NO_SIZE = "derived from state, but not elementwise, and not of the size of a parameter"
_NO_COUNT = "in a loop of unknown length"
