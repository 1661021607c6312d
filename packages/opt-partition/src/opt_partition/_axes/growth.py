"""Measures how state leaves grow with each dimension of the parameters.

A state dimension that grows by exactly the same amount as a parameter dimension indexes it; one
that grows proportionally is computed from it and others; one that never changes indexes nothing. A
probe that crosses a threshold (the size at which an optimizer factors, or the order of two sizes)
shows as a change of rank, or as growth that other probes do not confirm, and is discarded. A
dimension that doubles with a parameter dimension without growing by small amounts counts blocks of
it; whether it can be sharded in the same way is unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction

from opt_partition._axes.param_axes import Parameter
from opt_partition._axes.probing import Prober, Shape, first_line
from opt_partition._axes.verdicts import Verdict, Wanted
from opt_partition._trees import KeyPath

# Growth of each dimension of a leaf per unit of change; `None` if the rank changed.
_Growth = tuple[Fraction, ...] | None
_DOUBLE, _TREBLE = 4, 5


class Growths:
    """The growth of leaves with each dimension of the parameters; evaluated lazily."""

    def __init__(
        self,
        prober: Prober,
        table: Sequence[Parameter],
        kept: Sequence[int],
    ) -> None:
        self._prober, self._table, self._kept = prober, table, kept
        self._probes: dict[tuple[int, int], Mapping[KeyPath, Shape] | Exception] = {}
        self.rank = max((len(table[index].shape) for index in kept), default=0)

    def along(self, leaf: Wanted, dim: int) -> tuple[list[_Growth], Exception | None]:
        """Returns the growth of `leaf` in the successful probes of parameter dimension `dim`."""
        if leaf.parameter is not None and dim >= len(self._table[leaf.parameter].shape):
            return [(Fraction(0),) * len(leaf.shape)], None
        first = [self._growth(leaf, dim, number) for number in (0, 1)]
        growths = [g for g in first if not isinstance(g, Exception)]
        if len({*growths}) == 1 and None not in growths and len(growths) == 2:
            return growths, None
        more = [*first, *(self._growth(leaf, dim, number) for number in (2, 3))]
        errors = [g for g in more if isinstance(g, Exception)]
        if len(errors) == len(more):  # sizes may have to be multiples of something
            more = [self._growth(leaf, dim, number) for number in (_DOUBLE, _TREBLE)]
        return [g for g in more if not isinstance(g, Exception)], errors[0] if errors else None

    def doubles(self, leaf: Wanted, axis: int) -> list[int]:
        """Returns the parameter dimensions whose doubling doubles an axis of `leaf`."""
        if leaf.parameter is None:
            return []
        shape = self._table[leaf.parameter].shape
        dims = [dim for dim, size in enumerate(shape) if _change(size, _DOUBLE) == size]
        found = []
        for dim in dims:
            growth = self._growth(leaf, dim, _DOUBLE)
            if isinstance(growth, tuple) and growth[axis] > 0:
                grown = growth[axis] * shape[dim]
                if abs(grown - leaf.shape[axis]) <= 1:  # the last block may be partial
                    found.append(dim)
        return found

    def _growth(self, leaf: Wanted, dim: int, number: int) -> _Growth | Exception:
        shapes = self._probe(dim, number)
        if isinstance(shapes, Exception):
            return shapes
        shape = shapes.get(leaf.path)
        if shape is None or len(shape) != len(leaf.shape):
            return None
        if leaf.parameter is None:
            # A dimension that follows a parameter dimension has the same size.
            changes = [_change(size, number) for size in leaf.shape]
        else:
            changes = [_change(self._table[leaf.parameter].shape[dim], number)] * len(shape)
        grown = zip(shape, leaf.shape, changes, strict=True)
        return tuple(Fraction(new - old, change) for new, old, change in grown)

    def _probe(self, dim: int, number: int) -> Mapping[KeyPath, Shape] | Exception:
        key = dim, number
        if key not in self._probes:

            def change(_: int, shape: Shape) -> Shape:
                if dim >= len(shape):
                    return shape
                size = shape[dim] + _change(shape[dim], number)
                return (*shape[:dim], size, *shape[dim + 1 :])

            try:
                self._probes[key] = self._prober.shapes(self._kept, change)
            except Exception as error:  # it is a user's function: anything can happen
                self._probes[key] = error
        return self._probes[key]


def _change(size: int, number: int) -> int:
    """Returns the change of probe 0 to 3: minimal, in both directions, and never to size 0.

    Probe 4 doubles and probe 5 triples, unless the size is small.

    Examples:
      >>> [_change(8, number) for number in range(4)], [_change(1, number) for number in range(4)]
      ([1, -1, 2, -2], [1, 2, 3, 4])
    """
    both = (1, -1, 2, -2, size, 2 * size)
    return both[number] if size > 2 else number + 1


def judge(leaf: Wanted, growth: Growths) -> tuple[Verdict, ...]:
    agreed, doubts = [], []
    for dim in range(growth.rank):
        growths, error = growth.along(leaf, dim)
        counts = Counter(g for g in growths if g is not None).most_common(2)
        is_clear = bool(counts) and (len(counts) == 1 or counts[0][1] > counts[1][1])
        if is_clear and (counts[0][1] > 1 or len(growths) == 1):
            agreed.append((dim, counts[0][0]))
        elif error is not None:
            doubts.append(f"sizes cannot be changed: {first_line(error)}")
        else:
            doubts.append(f"changes of parameter dimension {dim} give inconsistent results")
    if doubts:
        return (Verdict(is_known=False, note=doubts[0]),) * len(leaf.shape)
    verdicts = [
        _judge_dimension({dim: g[axis] for dim, g in agreed if g[axis]})
        for axis in range(len(leaf.shape))
    ]
    for axis, verdict in enumerate(verdicts):
        if verdict == Verdict() and (dims := growth.doubles(leaf, axis)):
            blocks = " and ".join(f"{dim}" for dim in dims)
            note = f"counts blocks of parameter dimension {blocks}"
            verdicts[axis] = Verdict(is_known=False, note=note)
    return tuple(verdicts)


def _judge_dimension(growth: Mapping[int, Fraction]) -> Verdict:
    match list(growth.items()):
        case []:
            return Verdict()
        case [(dim, ratio)] if ratio == 1:
            return Verdict(dim)
        case [(dim, ratio)]:
            return Verdict(note=f"grows {ratio} times as much as parameter dimension {dim}")
        case several:
            dims = ", ".join(str(dim) for dim, _ in several)
            return Verdict(note=f"computed from the parameter dimensions {dims}")
