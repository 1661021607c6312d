"""What moves of the state, and of what is made of it: summed per leaf and per parameter."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from opt_partition._verify.leaves import Leaf
from opt_partition._verify.moved import MOVES, Moved, listed, most_at_once, names
from opt_partition._verify.ownership import Owners
from opt_partition._verify.report import Finding, Severity, Unjudged


class StateMoves:
    """The movements of state in a step, each with the leaves or parameters that it is held against.

    Attributes:
      of_leaves: what depends on state alone, with the elements of each leaf that move.
      of_params: what depends on state and on parameters or gradients, by what it is made of: the
        parameters whose budget it shares.
      unjudged: what depends on state and fits neither.
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
        """Whether a leaf is smaller than its parameter, as the rows of a second moment."""
        owner = self.owner(leaf)
        return owner is not None and leaf.size < owner.size

    def _sort(self, array: Moved) -> None:
        if array.row.kind not in MOVES and not self._gathers(array):
            if array.alone and array.directly:
                self._pass(array, "a sum over devices of state alone")
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
        """The parameters that leaves belong to; `whole`: those not smaller than these."""
        kept = (leaf for leaf in leaves if not (whole and self.is_factor(leaf)))
        return tuple(dict.fromkeys(p for p in map(self.owner, kept) if p is not None))

    def _count(self, array: Moved) -> None:
        """Adds an array to the sums of the leaves in it, as many elements as it has of each."""
        shards = [leaf.shard_size for leaf in array.state]
        together = array.operand_elements > max(shards)
        for leaf, shard in zip(array.state, shards, strict=True):
            share = array.elements * shard // sum(shards) if together else array.elements
            self.of_leaves[leaf][array] = share

    def _pass(self, array: Moved, reason: str) -> None:
        self.unjudged.append(Unjudged(array.row, reason))

    def _gathers(self, reduce: Moved) -> bool:
        """Whether a sum over devices is a gather: of shards, each at its place in zeros."""
        if not reduce.directly:
            return False
        limits = [self._most(leaf) for leaf in reduce.state]
        held = sum(leaf.shard_size for leaf in reduce.state)
        whole = reduce.alone and reduce.elements > held
        return reduce.placed or (whole and reduce.elements in (*limits, sum(limits)))

    def _most(self, leaf: Leaf) -> int:
        """The elements of a leaf of the state that no device should see at once."""
        owner = self.owner(leaf)
        return leaf.size if owner is None else min(leaf.size, owner.shard_size)


def state_gathers(moves: StateMoves, severity: Severity) -> Iterator[Finding]:
    """The state, or what is made of it, that is brought to a device once too often."""
    for leaf, shares in moves.of_leaves.items():
        yield from _own_moves(leaf, shares, moves, severity)
    for arrays, params in _components(moves.of_params):
        yield from _update_moves(arrays, params, moves, severity)


def _own_moves(
    leaf: Leaf, shares: Mapping[Moved, int], moves: StateMoves, severity: Severity
) -> Iterator[Finding]:
    """Of a leaf that moves by itself: wrong from the size of its shard, of a factor's parameter."""
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
        f"{leaf.path} moves by itself: a device gets {total:,} elements a step of a leaf of "
        f"{leaf.size:,}, of which it holds {leaf.shard_size:,}, by {listed(list(shares))}",
    )


def _update_moves(
    arrays: Sequence[Moved], params: Sequence[Leaf], moves: StateMoves, severity: Severity
) -> Iterator[Finding]:
    """Of what is made of the state of `params` and of gradients: the update may move, once."""
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
        f"what is made of {names(leaves or arrays[0].state)} moves too often: a device gets "
        f"{total:,} elements a step, where {budget:,} would do, of the new parameter or of its "
        f"update, by {listed(kept)}",
    )


def _budget(param: Leaf, arrays: Sequence[Moved], leaves: Sequence[Leaf], moves: StateMoves) -> int:
    """The elements of an update that a device must get: none where state lies as its parameter."""
    alike = all(
        leaf.shape == param.shape and leaf.mesh_axes == param.mesh_axes
        for leaf in leaves
        if moves.owner(leaf) is param
    )
    return 0 if alike and all(m.directly for m in arrays) else param.shard_size


def _without_stages(arrays: Sequence[Moved]) -> list[Moved]:
    """Of the stages by which an update gets to its parameter, the largest alone.

    XLA gathers over one mesh axis after the other, and may put the parts in order before or after.
    What goes back to the state is not on that way, nor is what was gathered and sliced again.
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
    """Groups the arrays that have parameters in common, with all parameters of the group."""
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
    remedy = "; `state_gathers='any'` allows it, for optimizers that need whole matrices, as Muon "
    remedy = (remedy + "and GaLore do") * (severity == "error")
    return Finding("state gather", severity, leaf.path, said + remedy)


_NO_OWNER = "the state that it is made of belongs to no parameter by its path"
_NO_SIZE = "made of state, but not element by element, and not as large as a parameter"
_NO_COUNT = "in a loop whose length is not known"
