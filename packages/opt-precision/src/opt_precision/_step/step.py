"""One step: the inner update is traced, split, and streamed leaf by leaf."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from opt_precision import _bits
from opt_precision._formats import Encoded, decode, is_encoded
from opt_precision._mirrors import path_str
from opt_precision._step.arguments import Arguments, Flat, Leaf
from opt_precision._step.equations import Equation, Value
from opt_precision._step.extremes import feeding_extremes
from opt_precision._step.loops import after
from opt_precision._step.memory import fetched
from opt_precision._step.placement import find_place
from opt_precision._step.program import Program
from opt_precision._step.run import Made, mapped, resharded, run, spec_of
from opt_precision._step.tasks import Task, Tasks
from opt_precision._step.trace import trace
from opt_precision._step.whole import Thunk, Whole
from opt_precision._weights import Weights
from opt_precision.errors import StateError

NEAREST: Final = Weights("nearest")
_SMALL: Final = 1 << 16  # elements: of numbers and of the keys of many leaves


@dataclasses.dataclass(frozen=True)
class Options:
    """What a step needs to know.

    Attributes:
      tx: the inner transformation.
      weights: how parameters are rounded.
      seed: of the noise of the state.
      chunk_bytes: the float32 bytes of one piece.
      layout: where parameters lie; `None` if their types say so.
    """

    tx: optax.GradientTransformationExtraArgs
    weights: Weights = NEAREST
    seed: int = 0
    chunk_bytes: int = 64 << 20
    layout: Any = None

    @property
    def limit(self) -> int:
        """How many elements make one piece."""
        return max(1, self.chunk_bytes // 4)


class Results(NamedTuple):
    """What a step makes.

    Attributes:
      leaves: per parameter its new value, or its update.
      extras: per parameter what is kept besides it.
      state: the inner state as it is to be stored.
    """

    leaves: list[Any]
    extras: list[Any]
    state: Any


class Step:
    """One step on given arguments.

    Args:
      options: the options.
      arguments: the arguments.
      is_in_place: whether parameters are wanted, and not updates.
    """

    def __init__(self, options: Options, arguments: Arguments, *, is_in_place: bool) -> None:
        self._options = options
        self._given = arguments
        self._flat = Flat(arguments)
        self._place = find_place(options.layout, self._flat.likes)
        self._program, self._arrays = trace(options.tx, arguments, self._flat, options.weights)
        self._check_extremes()
        self._tasks = Tasks(self._flat, self._program, options.weights, is_in_place=is_in_place)
        self._whole = Whole(self._program, self._thunks(_same))

    def _check_extremes(self) -> None:
        flat = self._flat
        found = feeding_extremes(self._program, len(flat.grads), len(flat.stored))
        for j, extreme in sorted(found.items()):
            if is_encoded(flat.stored[j]):
                path, kept = path_str(flat.paths[j]), path_str(flat.paths[extreme])
                raise StateError(
                    f"{path} is stored in fewer bits, and the running maximum or minimum {kept} is "
                    "made of it, which would take every error of rounding and keep it. Leave the "
                    "field out: `select=by_field({...})` with the others."
                )

    def whole_leaves(self) -> list[str]:
        """The paths of the parameters whose updates or moments are not made element by element."""
        return self._tasks.whole_leaves()

    def run(self) -> Results:
        """Computes everything: numbers of all leaves, what is made by element, and the rest."""
        zero = self._reduced(self._zero)
        found: dict[int, list[jax.Array]] = {}
        alone, groups = self._groups()
        made = self._updated(alone, self._whole, zero)
        found |= zip([leaf.at for leaf in alone], made.results, strict=True)
        for group in groups:
            made = self._updated(group, self._group_whole(group, made.zero), made.zero)
            found |= zip([leaf.at for leaf in group], made.results, strict=True)
        return self._collected([found[leaf.at] for leaf in self._flat.leaves])

    def _reduced(self, zero: jax.Array) -> jax.Array:
        """Computes numbers of decoded leaves piece by piece, those first that others need."""
        if not self._flat.is_traced or self._place.is_hidden:
            return zero
        for level in _levels(self._program, self._tasks.is_streamed):
            of_leaves: dict[int, list[Equation]] = {}
            for equation in level:
                leaf = self._program.kind(equation.inputs[0]).leaf
                assert leaf is not None
                of_leaves.setdefault(leaf, []).append(equation)
            tasks = [
                self._tasks.reduction(self._flat.leaves[leaf], equations, self._whole)
                for leaf, equations in of_leaves.items()
            ]
            made = run(tasks, None, self._place, self._options.limit, zero)
            zero = made.zero
            for equations, results in zip(of_leaves.values(), made.results, strict=True):
                for equation, number in zip(equations, results, strict=True):
                    self._whole.set(equation.outputs[0], number)
        return zero

    def _groups(self) -> tuple[list[Leaf], list[list[Leaf]]]:
        """The leaves that are made by element, and groups of others to be made one by one.

        A group is not larger than the largest leaf in one, or a piece.
        """
        rows = zip(self._flat.leaves, self._tasks.elements, strict=True)
        whole = [leaf for leaf, elements in rows if elements.arrays]
        is_cut = self._flat.is_any_cut(self._options.weights) and not self._place.is_hidden
        if len(whole) < 2 or not is_cut:
            return self._flat.leaves, []
        most = max(self._options.limit, *map(_size, whole))
        groups: list[list[Leaf]] = [[]]
        for leaf in whole:
            if sum(map(_size, groups[-1])) + _size(leaf) > most:
                groups.append([])
            groups[-1].append(leaf)
        places = {leaf.at for leaf in whole}
        return [leaf for leaf in self._flat.leaves if leaf.at not in places], groups

    def _updated(self, leaves: Sequence[Leaf], whole: Whole, zero: jax.Array) -> Made:
        """Computes the new values of some leaves."""
        tasks = [self._tasks.update(leaf, whole) for leaf in leaves]
        return run(tasks, self._keys(tasks), self._place, self._options.limit, zero)

    def _group_whole(self, group: Sequence[Leaf], zero: jax.Array) -> Whole:
        """Computes what some leaves alone need, after those before them."""
        places = {leaf.at for leaf in group}
        own = frozenset(i for i, users in self._users.items() if users <= places)
        flat, arguments = self._flat, self._program.arguments
        thunks = self._thunks(functools.partial(after, zero=zero))
        number = len(flat.leaves)
        kept = [
            *(leaf.at for leaf in group),
            *(number + j for leaf in group for j in leaf.mirrors),
            *(number + len(flat.stored) + leaf.at for leaf in group if flat.params),
        ]
        given = {arguments[i]: thunks[arguments[i]] for i in kept}
        # Noise that is made of a key alone would be there for all leaves at once.
        return Whole(self._program, given, self._whole, own, functools.partial(_small_after, zero))

    @functools.cached_property
    def _users(self) -> dict[int, set[int]]:
        """For each equation the leaves that need it; -1 is what belongs to none."""
        program, number = self._program, len(self._flat.leaves)
        wanted: dict[int, list[Any]] = {
            leaf.at: [*elements.arrays, *elements.numbers]
            for leaf, elements in zip(self._flat.leaves, self._tasks.elements, strict=True)
        }
        wanted[-1] = [
            program.outs[number + j] for j, own in enumerate(self._flat.owners) if own is None
        ]
        users: dict[int, set[int]] = {}
        for leaf, values in wanted.items():
            for i in program.needed(values)[0]:
                users.setdefault(i, set()).add(leaf)
        return users

    def _collected(self, found: Sequence[Sequence[jax.Array]]) -> Results:
        """The results of all leaves, as trees."""
        flat, outs = self._flat, self._program.outs[len(self._flat.leaves) :]
        state = [
            None if owner is not None else _as_before(old, self._whole(out))
            for owner, old, out in zip(flat.owners, flat.stored, outs, strict=True)
        ]
        leaves: list[Any] = []
        extras: list[Any] = []
        for leaf, made in zip(flat.leaves, found, strict=True):
            results = iter(made)
            leaves.append(next(results))
            extras.append(None if flat.extras[leaf.at] is None else next(results))
            for j in leaf.mirrors:
                state[j] = _stored_like(flat.stored[j], results)
        return Results(leaves, extras, jax.tree.unflatten(flat.state_tree, state))

    def _thunks(self, passed: Callable[[jax.Array], jax.Array]) -> dict[Value, Thunk]:
        """What makes the arguments of the program, for whole leaves.

        Args:
          passed: what the arrays go through first.
        """
        flat, weights = self._flat, self._options.weights

        def grad(i: int) -> jax.Array:
            return _bits.widen(passed(flat.grads[i]))

        def param(i: int) -> jax.Array:
            extra = flat.extras[i]
            return weights.value(passed(flat.params[i]), None if extra is None else passed(extra))

        made = [
            *(functools.partial(grad, i) for i in range(len(flat.grads))),
            *(functools.partial(self._decoded, j, passed) for j in range(len(flat.stored))),
            *(functools.partial(param, i) for i in range(len(flat.params))),
            *(functools.partial(_same, array) for array in self._arrays),
        ]
        return dict(zip(self._program.arguments, made, strict=True))

    def _decoded(self, index: int, passed: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """A whole leaf of the state as the inner transformation knows it."""
        leaf, owner = self._flat.stored[index], self._flat.owners[index]
        if not is_encoded(leaf):
            return passed(fetched(leaf))
        leaf = jax.tree.map(lambda x: passed(fetched(x)), leaf)
        form = leaf.format
        if self._place.mesh is None or owner is None:
            return decode(form, leaf.codes, leaf.scale)
        spec = spec_of(self._place, owner, leaf.shape, [form])
        arrays = [array for array in (leaf.codes, leaf.scale) if array is not None]
        made: jax.Array = mapped(
            lambda codes, scale=None: decode(form, codes, scale),
            self._place.mesh,
            (spec,) * len(arrays),
            spec,
        )(*(resharded(array, spec) for array in arrays))
        return made

    def _keys(self, tasks: Sequence[Task]) -> jax.Array:
        """What tells the noise of each array from that of others: of one leaf after the other."""
        steps, options = self._given.steps, self._options
        names = [noise for task in tasks for noise in task.noises]
        weights = _bits.step_seed(options.weights.seed, steps[0])
        fields = _bits.step_seed(options.seed, steps[1])
        is_field = np.asarray([of_state for _, of_state in names], bool)
        return _bits.noise_keys(jnp.where(is_field, fields, weights), [name for name, _ in names])

    @property
    def _zero(self) -> jax.Array:
        """A zero that the compiler does not know to be one."""
        # Our own counts are never negative; of other integers in the state nothing is known.
        counts = [step for step in self._given.steps if isinstance(step, jax.Array)]
        if counts:
            return jnp.minimum(counts[0], 0)
        arrays = [x for x in self._flat.grads if x.size and jnp.issubdtype(x.dtype, jnp.floating)]
        return jnp.int32(0) if not arrays else _zero_of(arrays[0])


def _levels(program: Program, is_streamed: Callable[[Equation], bool]) -> Iterator[list[Equation]]:
    """Equations that are needed, each with those that need no others but those before them."""
    depth: dict[Value, int] = {}
    levels: dict[int, list[Equation]] = {}
    for i in program.needed(program.outs)[0]:
        equation = program.equations[i]
        given = (depth[x] for x in equation.inputs if isinstance(x, Value) and x in depth)
        level = max(given, default=0)
        if is_streamed(equation):
            levels.setdefault(level, []).append(equation)
            level += 1
        depth.update(dict.fromkeys(equation.outputs, level))
    for level in sorted(levels):
        yield levels[level]


def _zero_of(array: jax.Array) -> jax.Array:
    """A zero from an element of an array, whatever that is: no cube is 3 modulo 9."""
    first = lax.slice(array, (0,) * array.ndim, (1,) * array.ndim).reshape(())
    bits = lax.bitcast_convert_type(first.astype(jnp.float32), jnp.int32) & 255
    return (bits * bits * bits % 9 == 3).astype(jnp.int32)


def _size(leaf: Leaf) -> int:
    return int(np.prod(leaf.shape, dtype=np.int64))


def _small_after(zero: jax.Array, value: Any) -> Any:
    """What is small and not there before `zero` is; large arrays would be copied for it."""
    return after(value, zero) if jnp.size(value) <= _SMALL else value


def _same(value: Any) -> Any:
    return value


def _stored_like(old: Any, results: Iterator[jax.Array]) -> Any:
    """A leaf of the state, of the next results."""
    if not is_encoded(old):
        return next(results)
    codes = next(results)
    return Encoded(codes, None if old.scale is None else next(results), old.format)


def _as_before(old: Any, new: Any) -> Any:
    """A leaf of the state in the dtype that it had, not weakly typed unless it was."""
    if jnp.issubdtype(old.dtype, jax.dtypes.extended):
        return new
    new = jnp.asarray(new)
    if new.dtype == old.dtype and jax.typeof(new) == jax.typeof(old):
        return new
    return new.astype(old.dtype)
