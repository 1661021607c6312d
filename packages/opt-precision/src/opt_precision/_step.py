"""One step: numbers first, then leaf by leaf what depends on them and on its elements."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var
from jax.sharding import NamedSharding, PartitionSpec

from opt_precision import _bits, _place, _program
from opt_precision._formats import Encoded, decode, encode, is_encoded
from opt_precision._loop import Block, Loop, block_shape, groups, run, run_on_mesh
from opt_precision._place import fetched
from opt_precision._program import Atom, Part, Program, type_of
from opt_precision._select import path_str
from opt_precision._update import EXTRA, GRADIENT, PARAMETER, Arguments, Leaf, Update, as_array
from opt_precision.errors import StateError

# Arrays of a loop besides those of a leaf.
_UPDATE: Final = -4  # what is made where it is not the parameter
_TOTALS: Final = -5  # the numbers that are made of elements
_OTHER: Final = -6  # what equations take that is not the leaf's, from here on downwards

# What makes one number of a block, what joins it to that of the blocks before, and what it begins
# with.
_REDUCTIONS: Final[Mapping[str, tuple[Any, Any, float]]] = {
    "reduce_max": (jnp.max, lax.max, -jnp.inf),
    "reduce_min": (jnp.min, lax.min, jnp.inf),
    "reduce_sum": (jnp.sum, lax.add, 0),
}


class Step:
    """One step on some arguments."""

    def __init__(self, arguments: Arguments) -> None:
        self._args = arguments
        self._update = update = Update(arguments)
        self._limit = arguments.moments.chunk_bytes // 4
        self._place = _place.find_place(
            arguments.moments.layout, [leaf.like for leaf in update.leaves]
        )
        _place.warn_of_crossing_blocks(
            self._place, [(x.path, x.shape, x.formats) for x in update.leaves]
        )
        self._is_cut = list(map(self._is_worth_a_loop, update.leaves))
        self._program = Program(update.closed)
        self._check_extremes()
        self._known: dict[Var, Any] = {**self._program.consts, **update.others}
        self._kinds = self._program.kinds({x: at for x, (at, _) in update.origin.items()})
        number = len(update.leaves)
        # The update of each leaf, and the leaves of the state that mirror it; and the other ones.
        self._outs: list[list[Atom]] = [[out] for out in self._program.outs[:number]]
        self._rest: list[Atom] = []
        for place, out in zip(update.places, self._program.outs[number:], strict=True):
            (self._rest if place is None else self._outs[place[0]]).append(out)

    def _is_worth_a_loop(self, leaf: Leaf) -> bool:
        """Whether a leaf is computed block by block: if it is rounded, or lies on the host.

        Without codes compilers need no temporaries, and eager calls keep theirs anyway.
        """
        if leaf.is_hosted and not self._is_traced:
            raise StateError(
                f"the state of {leaf.path} lies on the host, and is fetched block by block by a "
                "compiled step: call it under `jax.jit`"
            )
        is_rounded = bool(leaf.formats) or self._args.weights.is_met_by(leaf.like.dtype)
        return self._is_traced and not self._place.is_hidden and (is_rounded or leaf.is_hosted)

    @functools.cached_property
    def _is_traced(self) -> bool:
        grads = [leaf.arrays[GRADIENT] for leaf in self._update.leaves]
        return any(isinstance(grad, jax.core.Tracer) for grad in grads)

    def _check_extremes(self) -> None:
        update = self._update
        number = len(update.leaves), len(update.stored)
        for j, extreme in sorted(_program.feeding_extremes(self._program, *number).items()):
            if is_encoded(update.stored[j]):
                path, kept = path_str(update.paths[j]), path_str(update.paths[extreme])
                raise StateError(
                    f"{path} is stored in fewer bits, and the running maximum or minimum {kept} is "
                    "made of it, which would take every error of rounding and keep it. Leave the "
                    "field out: `select=by_field({...})` with the others."
                )

    def whole_leaves(self) -> list[str]:
        """The paths of the parameters whose updates or moments are not made element by element."""
        return [leaf.path for leaf in self._update.leaves if not self._is_elementwise(leaf)]

    def run(self) -> tuple[Any, Any, Any]:
        """Computes numbers of all leaves, then leaf by leaf the new values, and the rest.

        Returns:
          The new parameters, or their updates; what is kept besides each parameter; and the inner
          state as it is to be stored.
        """
        update, zero = self._update, self._zero
        if any(self._is_cut):
            zero = self._totals(zero)
        else:  # as it was traced
            closed = update.closed
            outs = jax.core.eval_jaxpr(
                closed.jaxpr, closed.consts, *map(self._value, self._program.arguments)
            )
            rows = zip(self._program.outs, outs, strict=True)
            self._known |= {out: value for out, value in rows if isinstance(out, Var)}
        loops = list(map(self._new_values, update.leaves))
        cut = {leaf.at: loops[leaf.at] for leaf in update.leaves if self._is_cut[leaf.at]}
        looped, _ = self._looped(cut, zero)
        new = [looped[at] if at in cut else _at_once(loop) for at, loop in enumerate(loops)]
        rest = map(self._value, self._rest)
        state = [
            _as_before(old, next(rest)) if place is None else new[place[0]][place[1]]
            for old, place in zip(update.stored, update.places, strict=True)
        ]
        made = [values[PARAMETER if self._args.is_in_place else _UPDATE] for values in new]
        extras = [values.get(EXTRA, optax.MaskedNode()) for values in new]
        return (
            jax.tree.unflatten(update.tree, made),
            jax.tree.unflatten(update.tree, extras),
            jax.tree.unflatten(update.state_tree, state),
        )

    # What equations make.

    def _is_elementwise(self, leaf: Leaf) -> bool:
        own = (leaf.at, _program.UNIFORM, _program.NUMBER)
        return all(isinstance(x, Literal) or self._kinds[x] in own for x in self._outs[leaf.at])

    def _is_number(self, value: Var) -> bool:
        return self._kinds[value] == _program.NUMBER

    def _value(self, atom: Atom) -> Any:
        """A value for whole leaves, computed when it is first needed."""
        if isinstance(atom, Literal):
            return atom.val
        if atom not in self._known:
            if atom in self._update.origin:
                self._known[atom] = self._whole(*self._update.origin[atom])
            else:
                part = self._program.part([atom], self._known.__contains__)
                self._known |= self._program.evaluate(part, self._value)
        return self._known[atom]

    def _whole(self, at: int, key: int) -> jax.Array:
        """A whole array of a leaf as the inner transformation sees it."""
        leaf, mesh = self._update.leaves[at], self._place.mesh
        own = {k: jax.tree.map(fetched, x) for k, x in leaf.arrays.items() if k in (key, EXTRA)}
        see = functools.partial(self._seen, key)
        if mesh is None or not is_encoded(own[key]):
            return see(own)
        spec = self._spec(leaf)
        codes = {key: jax.tree.map(lambda x: _place.resharded(x, spec), own[key])}
        decoded: jax.Array = _place.mapped(see, mesh, (spec,), spec)(codes)
        return decoded

    def _seen(self, key: int, arrays: Mapping[int, Any]) -> jax.Array:
        """An array of a leaf, or a block of it, as the inner transformation sees it."""
        array = arrays[key]
        if key == PARAMETER:
            return self._args.weights.value(array, arrays.get(EXTRA))
        if key == GRADIENT:
            return _bits.widen(array)
        return decode(array.format, array.codes, array.scale) if is_encoded(array) else array

    # Loops over the blocks of leaves.

    def _spec(self, leaf: Leaf) -> PartitionSpec:
        """Where a leaf lies while it is computed."""
        mesh, spec = self._place.mesh, self._place.specs[leaf.at]
        return _place.block_spec(mesh, spec, leaf.shape, leaf.formats)

    def _loop(
        self,
        leaf: Leaf,
        part: Part,
        held: dict[int, Any],
        made: Callable[..., dict[int, Any]],
        *more: Any,
        is_whole: bool = False,
        name: Hashable = None,
    ) -> Loop:
        """A loop in which equations run on blocks, and `made` takes what they make.

        That takes results, arrays, the block and `more` numbers, and returns the new `held`.
        """
        is_cut, jaxpr = self._is_cut[leaf.at], self._program.jaxpr(part)
        sources: list[int] = []
        arrays: dict[int, Any] = {}
        numbers: dict[int, Any] = {}
        for i, start in enumerate(part.starts):
            at, key = self._update.origin.get(start, (None, 0))
            if at != leaf.at:
                # Of what was computed before only the results themselves have to be cut.
                is_read = not part.indices and type_of(start).shape == leaf.shape
                key = _OTHER - i
                (arrays if is_read else numbers)[key] = self._value(start)
            sources.append(key)
        needed = {*sources, *([PARAMETER] if _UPDATE in held else [])}
        needed |= {EXTRA} if PARAMETER in needed else set()
        own = {key: x for key, x in leaf.arrays.items() if key in needed and key not in held}

        def body(numbers: Any, block: Block, held: Any, read: Any) -> dict[int, Any]:
            numbers, more = numbers
            arrays = {**read, **held}
            values = [self._seen(key, {**numbers, **arrays}) for key in sources]
            if is_whole:
                outs = jax.core.eval_jaxpr(jaxpr, (), *values)
            else:
                outs = _program.run_on_block(jaxpr, values, leaf.shape, block.shape)
            return made(list(map(as_array, outs)), arrays, block, *more)

        shape, block, spec = leaf.shape, leaf.shape, None
        if is_cut and (mesh := self._place.mesh) is not None:
            spec = self._spec(leaf)
            shape = block = _place.part_shape(mesh, spec, shape)
        if is_cut and not is_whole:
            sizes = [form for form in leaf.formats if form.block]
            units = {form.axis: math.lcm(*(form.block for form in sizes)) for form in sizes}
            block = block_shape(shape, self._limit, units)
        alike = (str(jaxpr), tuple(sources), spec, name) if is_cut else None
        return Loop(
            alike,
            shape,
            block,
            held=held,
            read={**own, **arrays},
            numbers=(numbers, more),
            body=body,
            begin=(0,) * len(shape),
            spec=spec,
        )

    def _totals(self, zero: jax.Array) -> jax.Array:
        """Computes numbers of decoded leaves block by block, those first that others need."""
        for level in _program.levels(self._program, self._is_total):
            of_leaves: dict[int, list[JaxprEqn]] = {}
            for eqn in level:
                of_leaves.setdefault(self._kinds[eqn.invars[0]], []).append(eqn)  # type: ignore[index]
            loops = {at: self._numbers_of(at, eqns) for at, eqns in of_leaves.items()}
            found, zero = self._looped(loops, zero)
            for at, eqns in of_leaves.items():
                for eqn, number in zip(eqns, found[at][_TOTALS], strict=True):
                    reduce, _, _ = _REDUCTIONS[eqn.primitive.name]
                    total = number if self._place.mesh is None else reduce(number)  # of all devices
                    self._known[eqn.outvars[0]] = total.reshape(type_of(eqn.outvars[0]).shape)
        return zero

    def _is_total(self, eqn: JaxprEqn) -> bool:
        """Whether an equation makes one number of decoded elements of a leaf.

        Compilers would hold all of these; sums over gradients alone they make in passing.
        """
        operand = eqn.invars[0] if eqn.invars else None
        if eqn.primitive.name not in _REDUCTIONS or not isinstance(operand, Var):
            return False
        at, aval = self._kinds[operand], type_of(operand)
        is_float = jnp.issubdtype(aval.dtype, jnp.floating)
        if at < 0 or not is_float or type_of(eqn.outvars[0]).size != 1 or not aval.size:
            return False
        starts = self._program.part([operand], self._is_number).starts
        is_of_gradient = all(self._update.origin.get(x) == (at, GRADIENT) for x in starts)
        return self._is_cut[at] and not is_of_gradient

    def _numbers_of(self, at: int, eqns: Sequence[JaxprEqn]) -> Loop:
        """What makes numbers of the elements of a leaf, each with those of the blocks before."""
        names = tuple(eqn.primitive.name for eqn in eqns)
        ways = [_REDUCTIONS[name] for name in names]

        def made(outs: Sequence[Any], arrays: Any, block: Block) -> dict[int, Any]:
            rows = zip(ways, arrays[_TOTALS], outs, strict=True)
            return {
                _TOTALS: [
                    join(before, reduce(jnp.broadcast_to(elements, block.shape)))
                    for (reduce, join, _), before, elements in rows
                ]
            }

        dtypes = [type_of(eqn.outvars[0]).dtype for eqn in eqns]
        first = [jnp.asarray(way[2], dtype) for way, dtype in zip(ways, dtypes, strict=True)]
        part = self._program.part([eqn.invars[0] for eqn in eqns], self._is_number)
        return self._loop(self._update.leaves[at], part, {_TOTALS: first}, made, name=names)

    def _new_values(self, leaf: Leaf) -> Loop:
        """What makes the new values of a leaf."""
        outs, is_in_place = self._outs[leaf.at], self._args.is_in_place
        strides, result = _bits.strides_of(leaf.shape), PARAMETER if is_in_place else _UPDATE
        held = {key: x for key, x in leaf.arrays.items() if key not in (GRADIENT, PARAMETER)}
        if is_in_place:
            held[PARAMETER] = leaf.arrays[PARAMETER]
        else:
            held[_UPDATE] = jnp.zeros_like(leaf.like, dtype=type_of(outs[0]).dtype)

        def made(
            outs: Sequence[Any], arrays: Mapping[int, Any], block: Block, keys: Any, first: Any
        ) -> dict[int, Any]:
            index = functools.cache(lambda: _bits.global_index(block.shape, block.origin, strides))

            def noise(number: int) -> jax.Array:
                key = lax.dynamic_index_in_dim(keys, first + np.uint32(number), keepdims=False)
                return _bits.noise_at(key, index())

            update, *states = outs
            value, extra = self._placed(arrays, update, functools.partial(noise, 0))
            new: dict[int, Any] = {result: value.astype(arrays[result].dtype)}
            if EXTRA in arrays:
                new[EXTRA] = extra
            for number, state in enumerate(states):
                new[number] = _stored(arrays[number], state, functools.partial(noise, number + 1))
            return new

        is_whole, part = False, None
        if self._is_cut[leaf.at]:
            if self._is_elementwise(leaf):
                part = self._program.part(outs, self._is_number)
            else:
                part = self._alone(leaf, outs)
                is_whole = part is not None
        if part is None:  # the values themselves, computed before
            part = Part([], [*dict.fromkeys(x for x in outs if isinstance(x, Var))], outs)
        # A number, not a constant: XLA for GPUs compiles kernels that are alike once.
        first = np.uint32(self._first_keys[leaf.at])
        return self._loop(leaf, part, held, made, self._keys, first, is_whole=is_whole)

    def _alone(self, leaf: Leaf, outs: Sequence[Atom]) -> Part | None:
        """What makes the new values of a whole leaf, if no other leaf takes part but by numbers."""
        if self._place.mesh is not None:
            return None
        for is_start in (lambda value: False, self._is_number):
            part = self._program.part(outs, is_start)
            owners = {self._update.origin[x][0] for x in part.starts if x in self._update.origin}
            if owners <= {leaf.at}:
                return part
        return None

    def _placed(
        self, arrays: Mapping[int, Any], update: jax.Array, noise: Callable[[], jax.Array]
    ) -> tuple[jax.Array, jax.Array | None]:
        """The new parameter, or the update that makes it, and what is kept besides it."""
        param, weights = arrays.get(PARAMETER), self._args.weights
        if param is None or (not self._args.is_in_place and weights.method == "nearest"):
            return update, None
        is_met = weights.is_met_by(param.dtype)
        is_random = is_met and weights.needs_noise
        new, extra = weights.place(param, arrays.get(EXTRA), update, noise() if is_random else None)
        if not self._args.is_in_place:
            new = _bits.widen(new) - _bits.widen(param) if is_met else update
        return new, extra

    @functools.cached_property
    def _keys(self) -> jax.Array:
        """What tells the noise of arrays from each other: of each parameter and of its mirrors."""
        args = self._args
        rows: list[tuple[str, bool]] = []
        for leaf in self._update.leaves:
            rows += [(f"{leaf.path}#param", False), *((name, True) for name in leaf.names)]
        weights = _bits.step_seed(args.weights.seed, args.step)
        fields = _bits.step_seed(args.moments.seed, args.step)
        is_field = np.asarray([of_state for _, of_state in rows], bool)
        return _bits.noise_keys(jnp.where(is_field, fields, weights), [name for name, _ in rows])

    @functools.cached_property
    def _first_keys(self) -> list[int]:
        numbers = (1 + len(leaf.names) for leaf in self._update.leaves)
        return list(itertools.accumulate(numbers, initial=0))

    def _looped(
        self, loops: Mapping[int, Loop], zero: jax.Array
    ) -> tuple[dict[int, Any], jax.Array]:
        """What loops make, by leaf, where their sources were; numbers of every device."""
        results: dict[int, Any] = {}
        for members in groups(loops, self._limit):
            own = [loops[at] for at in members]
            if (mesh := self._place.mesh) is None:
                found, zero = run(own, zero)
            else:
                found, zero = run_on_mesh(own, zero, mesh)
                found = [
                    jax.tree.map(functools.partial(self._moved_back, at), new, loop.held)
                    for at, new, loop in zip(members, found, own, strict=True)
                ]
            results |= zip(members, found, strict=True)
        return results, zero

    def _moved_back(self, at: int, new: jax.Array, old: jax.Array) -> jax.Array:
        leaf, spec = self._update.leaves[at], self._place.specs[at]
        is_elsewhere = new.shape == leaf.shape and self._spec(leaf) != spec
        lies = NamedSharding(self._place.mesh, spec) if is_elsewhere else None
        return _place.moved_back(new, old, lies)

    @property
    def _zero(self) -> jax.Array:
        """A zero that the compiler does not know to be one: a count is never negative."""
        return jnp.minimum(self._args.step, 0)


def _at_once(loop: Loop) -> Any:
    """The results of a leaf that is computed as a whole, with no order among leaves."""
    held, read = jax.tree.map(fetched, (loop.held, loop.read))
    results = loop.body(loop.numbers, Block(loop.shape, loop.begin), held, read)
    return jax.tree.map(_place.placed_like, results, loop.held)


def _stored(old: Any, new: jax.Array, noise: Callable[[], jax.Array]) -> Any:
    """A leaf of the state as it is stored."""
    if not is_encoded(old):
        return new.astype(old.dtype)
    form = old.format
    return Encoded(*encode(form, new, noise() if form.needs_noise else None, old.codes), form)


def _as_before(old: Any, new: Any) -> Any:
    """A leaf of the state in the dtype that it had, not weakly typed unless it was."""
    if jnp.issubdtype(old.dtype, jax.dtypes.extended):
        return new
    new = jnp.asarray(new)
    if new.dtype == old.dtype and jax.typeof(new) == jax.typeof(old):
        return new
    return new.astype(old.dtype)
