"""Which parameter dimension a state dimension depends on, found by changing sizes.

`init` is evaluated for its shapes with one dimension of the parameters a little larger or smaller.
A state dimension that grows exactly as much indexes that dimension; one that grows in proportion is
made of it and others; one that never changes indexes nothing. A probe that crosses a threshold (a
size from which on an optimizer factors, the order of two sizes) shows as a change of rank, or as
growth that other probes do not confirm, and is not believed. One that doubles with a dimension and
yet does not grow with it counts blocks of that; whether it may be sharded likewise is not known.

Only one parameter of each kind is looked at; an empty node stands for the others.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax
import optax

from opt_partition._axes.param_axes import Parameter
from opt_partition._trees import KeyPath, flatten_with_paths

Shape = tuple[int, ...]
# How much each dimension of a leaf grew per unit of change; `None` where its rank changed.
_Growth = tuple[Fraction, ...] | None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What changing sizes tells of one state dimension.

    Attributes:
      dim: the parameter dimension that it indexes; `None` if it indexes none.
      parameter: the index of the parameter, where it had to be found.
      is_known: whether the probes agree.
      note: why it indexes none, or why they do not agree.
    """

    dim: int | None = None
    parameter: int | None = None
    is_known: bool = True
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A state leaf to look at.

    Attributes:
      path: its key path.
      shape: its shape.
      parameter: the index of the parameter that it belongs to, if that is known.
      kind: leaves of one kind behave alike, but for the parameter they belong to.
    """

    path: KeyPath
    shape: Shape
    parameter: int | None
    kind: Any


_AMOUNTS = 17  # by which sizes are changed to tell parameters apart; small, for thresholds
_DOUBLE, _TREBLE = 4, 5
_NUMBER = re.compile(r"\d+")


class Prober:
    """Evaluates `init` for the shapes it makes of changed parameters.

    Attributes:
      evaluations: how often it did.
    """

    def __init__(
        self, init: Callable[[Any], Any], treedef: Any, table: Sequence[Parameter]
    ) -> None:
        self._init = init
        self._treedef = treedef
        self._table = table
        self.evaluations = 0

    def shapes(
        self, kept: Iterable[int], change: Callable[[int, Shape], Shape] = lambda _, shape: shape
    ) -> dict[KeyPath, Shape]:
        """Returns the shape of every state leaf by path.

        Args:
          kept: the parameters to keep; an empty node takes the place of the others.
          change: from index and shape of a parameter to the shape it shall have.
        """
        self.evaluations += 1
        kept = {*kept}
        leaves = [
            jax.ShapeDtypeStruct(change(index, parameter.shape), parameter.dtype)
            if index in kept
            else optax.MaskedNode()
            for index, parameter in enumerate(self._table)
        ]
        # A new function each time: JAX remembers what it evaluated by the function.
        state = jax.eval_shape(lambda params: self._init(params), self._treedef.unflatten(leaves))
        return {path: tuple(leaf.shape) for path, leaf in flatten_with_paths(state)}


def difference(
    prober: Prober, table: Sequence[Parameter], wanted: Sequence[Wanted]
) -> dict[KeyPath, tuple[Verdict, ...]]:
    """Returns a verdict for every dimension of every wanted leaf.

    One parameter of each kind is tried first, all of them for what that does not settle.
    """
    found: dict[KeyPath, tuple[Verdict, ...]] = {}
    for kept in (_representatives(table, wanted), range(len(table))):
        open_leaves = [leaf for leaf in wanted if leaf.path not in found]
        if not open_leaves:
            break
        found |= _difference_among(prober, table, list(kept), open_leaves)
    return found


def _representatives(table: Sequence[Parameter], wanted: Sequence[Wanted]) -> list[int]:
    """One parameter of each shape, dtype and kinds of leaves."""
    kinds: dict[int, list[Any]] = {index: [] for index in range(len(table))}
    is_complete = all(leaf.parameter is not None for leaf in wanted)
    for leaf in wanted:
        if leaf.parameter is not None:
            kinds[leaf.parameter].append((leaf.kind, leaf.shape))
    first: dict[Any, int] = {}
    for index, parameter in enumerate(table):
        if kinds[index] or not is_complete:
            first.setdefault((_kind(parameter), *kinds[index]), index)
    return sorted(first.values())


def _kind(parameter: Parameter) -> Any:
    """What parameters have in common that `init` may be taken to treat alike.

    The same layer of a stack has the same name but for numbers.
    """
    return parameter.shape, parameter.dtype, _NUMBER.sub("#", parameter.path)


def _difference_among(
    prober: Prober, table: Sequence[Parameter], kept: list[int], wanted: Sequence[Wanted]
) -> dict[KeyPath, tuple[Verdict, ...]]:
    """The verdicts on those leaves that exist, with the same shape, where only some are kept."""
    is_all = len(kept) == len(table)
    try:
        baseline = prober.shapes(kept)
    except Exception as error:  # it is a user's function: anything can happen
        return _nothing(wanted, error) if is_all else {}
    there = [leaf for leaf in wanted if baseline.get(leaf.path) == leaf.shape]
    growth = _Growths(prober, table, kept)
    verdicts = {leaf.path: _judge(leaf, growth) for leaf in there}
    verdicts = _identify(prober, table, kept, baseline, there, verdicts)
    verdicts = _confirm(prober, table, kept, there, verdicts)
    if not is_all:
        # What the kept parameters say holds for all of their kind.
        spoken = {
            (leaf.kind, leaf.shape, _kind(table[leaf.parameter])): verdicts[leaf.path]
            for leaf in there
            if leaf.parameter is not None
            and all(verdict.parameter is None for verdict in verdicts[leaf.path])
        }
        for leaf in wanted:
            if leaf.parameter is None or leaf.path in verdicts:
                continue
            key = leaf.kind, leaf.shape, _kind(table[leaf.parameter])
            if key in spoken:
                verdicts[leaf.path] = spoken[key]
    return verdicts


def _nothing(wanted: Sequence[Wanted], error: Exception) -> dict[KeyPath, tuple[Verdict, ...]]:
    verdict = Verdict(is_known=False, note=f"sizes cannot be changed: {first_line(error)}")
    return {leaf.path: (verdict,) * len(leaf.shape) for leaf in wanted}


class _Growths:
    """How the wanted leaves grow with each dimension of the parameters; probed as needed."""

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
        """The growth of `leaf` in the probes of parameter dimension `dim` that count."""
        if leaf.parameter is not None and dim >= len(self._table[leaf.parameter].shape):
            return [(Fraction(0),) * len(leaf.shape)], None
        first = [self._growth(leaf, dim, number) for number in (0, 1)]
        growths = [g for g in first if not isinstance(g, Exception)]
        if len({*growths}) == 1 and None not in growths and len(growths) == 2:
            return growths, None
        more = [*first, *(self._growth(leaf, dim, number) for number in (2, 3))]
        errors = [g for g in more if isinstance(g, Exception)]
        if len(errors) == len(more):  # sizes that must divide by something
            more = [self._growth(leaf, dim, number) for number in (_DOUBLE, _TREBLE)]
        return [g for g in more if not isinstance(g, Exception)], errors[0] if errors else None

    def doubles(self, leaf: Wanted, axis: int) -> list[int]:
        """The parameter dimensions that an axis of `leaf` doubles with."""
        if leaf.parameter is None:
            return []
        shape = self._table[leaf.parameter].shape
        dims = [dim for dim, size in enumerate(shape) if _change(size, _DOUBLE) == size]
        found = []
        for dim in dims:
            growth = self._growth(leaf, dim, _DOUBLE)
            if isinstance(growth, tuple) and growth[axis] > 0:
                grown = growth[axis] * shape[dim]
                if abs(grown - leaf.shape[axis]) <= 1:  # the last block may be a part of one
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
            # A dimension that follows one has its size.
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
    """The change of probe 0 to 3: as small as can be, to both sides, and never to nothing.

    Probe 4 doubles and probe 5 trebles, where that is no small change.

    Examples:
      >>> [_change(8, number) for number in range(4)], [_change(1, number) for number in range(4)]
      ([1, -1, 2, -2], [1, 2, 3, 4])
    """
    both = (1, -1, 2, -2, size, 2 * size)
    return both[number] if size > 2 else number + 1


def _judge(leaf: Wanted, growth: _Growths) -> tuple[Verdict, ...]:
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
            doubts.append(f"changes of parameter dimension {dim} do not agree")
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
            return Verdict(note=f"made of the parameter dimensions {dims}")


def find_sources(prober: Prober, number: int, paths: Sequence[KeyPath]) -> dict[KeyPath, int]:
    """Returns the one of `number` parameters whose sizes each of these leaves follows, if any."""
    try:
        return _sources(prober, range(number), prober.shapes(range(number)), paths)
    except Exception:  # it is a user's function: anything can happen
        return {}


def _identify(
    prober: Prober,
    table: Sequence[Parameter],
    kept: Sequence[int],
    baseline: Mapping[KeyPath, Shape],
    wanted: Sequence[Wanted],
    verdicts: Mapping[KeyPath, tuple[Verdict, ...]],
) -> dict[KeyPath, tuple[Verdict, ...]]:
    """Finds the parameter of leaves that follow one, where their path does not tell which."""
    result = dict(verdicts)
    nameless = [
        leaf
        for leaf in wanted
        if leaf.parameter is None and any(v.dim is not None for v in verdicts[leaf.path])
    ]
    if not nameless:
        return result
    try:
        sources = _sources(prober, kept, baseline, [leaf.path for leaf in nameless])
    except Exception:  # sizes that must agree with one another, say
        sources = {}
    for leaf in nameless:
        source = sources.get(leaf.path)
        if source is None:
            source = _any_owner(table, kept, leaf, verdicts[leaf.path])
        result[leaf.path] = tuple(
            verdict
            if verdict.dim is None
            else dataclasses.replace(verdict, parameter=source)
            if source is not None
            else Verdict(is_known=False, note="the parameter that it follows cannot be told")
            for verdict in verdicts[leaf.path]
        )
    return result


def _any_owner(
    table: Sequence[Parameter], kept: Sequence[int], leaf: Wanted, verdicts: Sequence[Verdict]
) -> int | None:
    """The first of all parameters that a leaf may follow, if they have the same names."""
    able = [index for index in kept if _fits(table[index], leaf, verdicts)]
    return able[0] if able and len({table[index].axes for index in able}) == 1 else None


def _fits(parameter: Parameter, leaf: Wanted, verdicts: Sequence[Verdict]) -> bool:
    """Whether the dimensions that `leaf` follows are there and have its sizes."""
    return all(
        verdict.dim is None or parameter.shape[verdict.dim :][:1] == (size,)
        for verdict, size in zip(verdicts, leaf.shape, strict=True)
    )


def _confirm(
    prober: Prober,
    table: Sequence[Parameter],
    kept: Sequence[int],
    wanted: Sequence[Wanted],
    verdicts: Mapping[KeyPath, tuple[Verdict, ...]],
) -> dict[KeyPath, tuple[Verdict, ...]]:
    """Changes every dimension by another amount: whether a leaf follows the parameter in its place.

    A leaf that grows exactly as another parameter does, and as only that one, follows that one.
    """
    result = dict(verdicts)
    placed = [leaf for leaf in wanted if leaf.parameter is not None]
    followers = [leaf for leaf in placed if any(v.dim is not None for v in verdicts[leaf.path])]
    if not followers or len(kept) < 2:
        return result
    rank = max(len(table[index].shape) for index in kept)
    numbers = {index: number for number, index in enumerate(kept)}

    def change(index: int, shape: Shape) -> Shape:
        first = numbers[index] * rank
        return tuple(size + 1 + (first + dim) % _AMOUNTS for dim, size in enumerate(shape))

    try:
        grown = prober.shapes(kept, change)
    except Exception:  # it is a user's function: anything can happen
        return result
    changed = {index: change(index, table[index].shape) for index in kept}
    for leaf in followers:
        dims = [verdict.dim for verdict in verdicts[leaf.path]]

        def explains(index: int, leaf: Wanted = leaf, dims: Sequence[int | None] = dims) -> bool:
            """Whether `leaf` has grown as it would if it followed that parameter."""
            new = grown.get(leaf.path, ())
            return (
                _fits(table[index], leaf, verdicts[leaf.path])
                and len(new) == len(dims)
                and all(
                    dim is None or size == changed[index][dim]
                    for dim, size in zip(dims, new, strict=True)
                )
            )

        if explains(_index(leaf)):
            continue
        others = [index for index in kept if explains(index)]
        if len(others) == 1:
            result[leaf.path] = tuple(
                verdict
                if verdict.dim is None
                else dataclasses.replace(verdict, parameter=others[0])
                for verdict in verdicts[leaf.path]
            )
    return result


def _index(leaf: Wanted) -> int:
    assert leaf.parameter is not None, "only leaves with a place are confirmed"
    return leaf.parameter


def _sources(
    prober: Prober,
    kept: Sequence[int],
    baseline: Mapping[KeyPath, Shape],
    paths: Sequence[KeyPath],
) -> dict[KeyPath, int]:
    """The one parameter whose sizes each leaf follows: its number, bit by bit."""

    def moved(indices: set[int]) -> set[KeyPath]:
        shapes = prober.shapes(
            kept, lambda index, shape: tuple(n + (index in indices) for n in shape)
        )
        return {path for path in paths if shapes.get(path) != baseline[path]}

    numbers = dict.fromkeys(paths, 0)
    for bit in range(max(len(kept) - 1, 0).bit_length()):
        ones = moved({index for n, index in enumerate(kept) if n >> bit & 1})
        zeros = moved({index for n, index in enumerate(kept) if not n >> bit & 1})
        for path in list(numbers):
            if (path in ones) == (path in zeros):
                del numbers[path]
            elif path in ones:
                numbers[path] |= 1 << bit
    return {path: kept[number] for path, number in numbers.items()}


def first_line(error: Exception) -> str:
    """Returns type and message of an error, on one line that is not too long.

    Examples:
      >>> first_line(KeyError('w'))
      "KeyError: 'w'"
    """
    text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return text if len(text) < 120 else f"{text[:117]}..."
