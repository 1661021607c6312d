"""One step: numbers first, then leaf by leaf what depends on them and on its elements."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import NamedSharding, PartitionSpec

from opt_precision import _bits, _place, _program
from opt_precision._formats import Encoded, decode, encode, is_encoded
from opt_precision._loop import Block, Loop, block_shape, groups, run, run_on_mesh
from opt_precision._place import fetched
from opt_precision._program import (
    Atom,
    Part,
    Program,
    feeding_extremes,
    levels,
    run_on_block,
    type_of,
)
from opt_precision._select import Shape, path_str
from opt_precision._update import (
    COMPUTED,
    EXTRA,
    GRADIENT,
    NUMBER,
    PARAMETER,
    Arguments,
    Leaf,
    Update,
    as_array,
)
from opt_precision.errors import StateError

_UPDATE: Final = -6  # what is made of a leaf where it is not the parameter

# What makes one number of a block, what joins it to that of the blocks before, and what it begins
# with.
_REDUCTIONS: Final[Mapping[str, tuple[Any, Any, float]]] = {
    "reduce_max": (jnp.max, lax.max, -jnp.inf),
    "reduce_min": (jnp.min, lax.min, jnp.inf),
    "reduce_sum": (jnp.sum, lax.add, 0),
}


class Results(NamedTuple):
    """What a step makes."""

    tree: Any  # the structure of parameters
    leaves: list[Any]  # per parameter its new value, or its update
    extras: list[Any]  # per parameter what is kept besides it
    state: Any  # the inner state as it is to be stored


class Plan(NamedTuple):
    """How values of a leaf are computed."""

    leaf: Leaf
    jaxpr: Jaxpr  # what makes them of the leaf's elements, and of numbers
    starts: list[Var]  # what that takes, in the trace on whole leaves
    sources: list[int]  # what these are of the leaf
    block: Shape  # the shape of blocks
    is_elementwise: bool = True  # whether an element needs only the same one of other arrays

    def of(self, source: int) -> list[Var]:
        """What it takes from one source."""
        return [x for x, own in zip(self.starts, self.sources, strict=True) if own == source]


class Step:
    """One step on some arguments."""

    def __init__(self, arguments: Arguments) -> None:
        self._args = arguments
        self._update = update = Update(arguments)
        self._place = _place.find_place(arguments.layout, [leaf.like for leaf in update.leaves])
        _place.warn_of_crossing_blocks(
            self._place, [(x.path, x.shape, x.formats) for x in update.leaves]
        )
        self._is_cut = list(map(self._is_worth_a_loop, update.leaves))
        self._closed = update.trace()
        self._program = Program(self._closed)
        self._check_extremes()
        values = self._program.arguments
        self._arguments = dict(zip(values, update.arguments, strict=True))
        self._places = dict(zip(values, update.places, strict=True))
        self._kinds = self._program.kinds(
            [_program.WHOLE if owner is None else owner for owner, _ in update.places]
        )
        self._known: dict[Var, Any] = dict(self._program.consts)
        # The update of each leaf, and the leaves of the state that mirror it; and the other ones.
        number = len(update.leaves)
        self._outs: list[list[Atom]] = [[out] for out in self._program.outs[:number]]
        self._rest: dict[int, Atom] = {}
        stored = zip(update.places[number:], self._program.outs[number:], strict=False)
        for j, ((owner, _), out) in enumerate(stored):
            if owner is None:
                self._rest[j] = out
            else:
                self._outs[owner].append(out)

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
        if not any(map(is_encoded, update.stored)):
            return
        feeding = feeding_extremes(self._program, len(update.leaves), len(update.stored))
        for j, extreme in sorted(feeding.items()):
            if is_encoded(update.stored[j]):
                path, kept = path_str(update.paths[j]), path_str(update.paths[extreme])
                raise StateError(
                    f"{path} is stored in fewer bits, and the running maximum or minimum {kept} is "
                    "made of it, which would take every error of rounding and keep it. Leave the "
                    "field out: `select=by_field({...})` with the others."
                )

    def whole_leaves(self) -> list[str]:
        """The paths of the parameters whose updates or moments are not made element by element."""
        return [plan.leaf.path for plan in self._plans if not plan.is_elementwise]

    def run(self) -> Results:
        """Computes numbers of all leaves, then leaf by leaf the new values, and the rest."""
        update, zero = self._update, self._zero
        if any(self._is_cut):
            zero = self._totals(zero)
            wanted = ([*plan.of(NUMBER), *plan.of(COMPUTED)] for plan in self._plans)
            self._compute([*self._rest.values(), *itertools.chain.from_iterable(wanted)])
        else:  # as it was traced
            arguments = map(self._value, self._program.arguments)
            outs = jax.core.eval_jaxpr(self._closed.jaxpr, self._closed.consts, *arguments)
            rows = zip(self._program.outs, outs, strict=True)
            self._known |= {out: value for out, value in rows if isinstance(out, Var)}
        loops = list(map(self._new_values, self._plans))
        cut = [plan for plan in self._plans if self._is_cut[plan.leaf.at]]
        found, _ = self._looped(cut, [loops[plan.leaf.at] for plan in cut], zero)
        looped = iter(found)
        new: list[dict[int, Any]] = [
            next(looped) if is_cut else _at_once(loop)
            for is_cut, loop in zip(self._is_cut, loops, strict=True)
        ]
        stored = zip(update.stored, update.places[len(new) :], strict=False)
        state = [
            _as_before(old, self._value(self._rest[j])) if owner is None else new[owner][source]
            for j, (old, (owner, source)) in enumerate(stored)
        ]
        return Results(
            update.tree,
            [values[PARAMETER if self._args.is_in_place else _UPDATE] for values in new],
            [values.get(EXTRA) for values in new],
            jax.tree.unflatten(update.state_tree, state),
        )

    @functools.cached_property
    def _plans(self) -> list[Plan]:
        """How the new values of each leaf are computed."""
        plans = []
        for leaf, outs in zip(self._update.leaves, self._outs, strict=True):
            own = (leaf.at, _program.UNIFORM, _program.NUMBER)
            is_elementwise = all(isinstance(x, Literal) or self._kinds[x] in own for x in outs)
            is_cut, block = self._is_cut[leaf.at], self._block(leaf)
            part = None
            if is_cut and is_elementwise:
                part = self._program.part(outs, self._is_number)
            elif is_cut and (part := self._alone(leaf, outs)) is not None:
                block = leaf.shape
            if part is None:  # the values themselves, computed before
                part = Part([], [*dict.fromkeys(x for x in outs if isinstance(x, Var))], outs)
            plans.append(self._plan(leaf, part, block, is_elementwise=is_elementwise))
        return plans

    def _plan(self, leaf: Leaf, part: Part, block: Shape, *, is_elementwise: bool = True) -> Plan:
        """A plan, with the sources of what its equations start from."""
        sources = []
        for value in part.starts:
            owner, source = self._places.get(value, (None, NUMBER))
            if owner != leaf.at:
                is_computed = not part.indices and type_of(value).shape == leaf.shape
                source = COMPUTED if is_computed else NUMBER
            sources.append(source)
        jaxpr = self._program.jaxpr(part)
        return Plan(leaf, jaxpr, part.starts, sources, block, is_elementwise)

    def _alone(self, leaf: Leaf, outs: Sequence[Atom]) -> Part | None:
        """What makes the new values of a whole leaf, if no other leaf takes part but by numbers."""
        if self._place.mesh is not None:
            return None
        for is_start in (lambda value: False, self._is_number):
            part = self._program.part(outs, is_start)
            if {self._places.get(x, (None, NUMBER))[0] for x in part.starts} <= {leaf.at, None}:
                return part
        return None

    def _is_number(self, value: Var) -> bool:
        return self._kinds[value] == _program.NUMBER

    def _spec(self, leaf: Leaf) -> PartitionSpec:
        mesh, spec = self._place.mesh, self._place.specs[leaf.at]
        return _place.block_spec(mesh, spec, leaf.shape, leaf.formats)

    def _shape(self, leaf: Leaf) -> Shape:
        """What each device has of a leaf."""
        mesh = self._place.mesh
        if mesh is None or not self._is_cut[leaf.at]:
            return leaf.shape
        return _place.part_shape(mesh, self._spec(leaf), leaf.shape)

    def _block(self, leaf: Leaf) -> Shape:
        if not self._is_cut[leaf.at]:
            return leaf.shape
        blocked = [form for form in leaf.formats if form.block]
        units = {form.axis: math.lcm(*(form.block for form in blocked)) for form in blocked}
        return block_shape(self._shape(leaf), self._args.limit, units)

    def _compute(self, wanted: Iterable[Atom]) -> None:
        """Computes values for whole leaves."""
        missing = dict.fromkeys(
            x for x in wanted if not isinstance(x, Literal) and x not in self._known
        )
        part = self._program.part(missing, self._known.__contains__)
        values = self._program.evaluate(part, self._value)
        self._known.update(zip(missing, values, strict=True))

    def _value(self, atom: Atom) -> Any:
        """A value that was computed, or an argument for a whole leaf."""
        if isinstance(atom, Literal):
            return atom.val
        if atom in self._known:
            return self._known[atom]
        array, (owner, source) = self._arguments[atom], self._places[atom]
        if owner is None or not is_encoded(array):
            array = jax.tree.map(fetched, array)
            return self._seen(source, array, None if owner is None else self._extra(owner))
        return self._decoded(array, owner)

    def _extra(self, at: int) -> Any:
        return self._update.leaves[at].arrays.get(EXTRA)

    def _seen(self, source: int, array: Any, extra: Any) -> jax.Array:
        """An array of a leaf, or a block of it, as the inner transformation sees it."""
        if source == PARAMETER:
            return self._args.weights.value(array, extra)
        if source == GRADIENT:
            return _bits.widen(array)
        return decode(array.format, array.codes, array.scale) if is_encoded(array) else array

    def _decoded(self, leaf: Encoded, owner: int) -> jax.Array:
        """A whole leaf of the state as the inner transformation knows it."""
        leaf = jax.tree.map(fetched, leaf)

        def values(leaf: Encoded) -> jax.Array:
            return decode(leaf.format, leaf.codes, leaf.scale)

        if self._place.mesh is None:
            return values(leaf)
        lies = self._place.specs[owner]
        spec = _place.block_spec(self._place.mesh, lies, leaf.shape, [leaf.format])
        on_mesh = _place.mapped(values, self._place.mesh, (spec,), spec)
        decoded: jax.Array = on_mesh(jax.tree.map(lambda x: _place.resharded(x, spec), leaf))
        return decoded

    def _totals(self, zero: jax.Array) -> jax.Array:
        """Computes numbers of decoded leaves block by block, those first that others need."""
        for level in levels(self._program, self._is_total):
            of_leaves: dict[int, list[JaxprEqn]] = {}
            for eqn in level:
                of_leaves.setdefault(self._kinds[eqn.invars[0]], []).append(eqn)  # type: ignore[index]
            plans = []
            for at, eqns in of_leaves.items():
                leaf = self._update.leaves[at]
                part = self._program.part([eqn.invars[0] for eqn in eqns], self._is_number)
                plans.append(self._plan(leaf, part, self._block(leaf)))
            self._compute(x for plan in plans for x in plan.of(NUMBER))
            rows = list(zip(plans, of_leaves.values(), strict=True))
            loops = [self._numbers_of(plan, eqns) for plan, eqns in rows]
            names = [tuple(eqn.primitive.name for eqn in eqns) for _, eqns in rows]
            found, zero = self._looped(plans, loops, zero, names)
            for (_, eqns), numbers in zip(rows, found, strict=True):
                for eqn, number in zip(eqns, numbers, strict=True):
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
        is_of_gradient = all(self._places.get(x) == (at, GRADIENT) for x in starts)
        return self._is_cut[at] and not is_of_gradient

    def _numbers_of(self, plan: Plan, eqns: Sequence[JaxprEqn]) -> Loop:
        """What makes numbers of the elements of a leaf, each with those of the blocks before."""
        ways = [_REDUCTIONS[eqn.primitive.name] for eqn in eqns]

        def body(numbers: list[Any], block: Block, held: list[Any], read: Any) -> list[Any]:
            outs = self._outs_of(plan, read, numbers, block.shape)
            return [
                join(before, reduce(jnp.broadcast_to(elements, block.shape)))
                for (reduce, join, _), before, elements in zip(ways, held, outs, strict=True)
            ]

        held = [
            jnp.asarray(first, type_of(eqn.outvars[0]).dtype)
            for (_, _, first), eqn in zip(ways, eqns, strict=True)
        ]
        return self._loop(plan, held, self._read(plan), self._numbers(plan), body)

    def _new_values(self, plan: Plan) -> Loop:
        """What makes the new values of a leaf."""
        leaf = plan.leaf
        strides = _bits.strides_of(leaf.shape)
        made = PARAMETER if self._args.is_in_place else _UPDATE

        def body(
            numbers: Any, block: Block, held: dict[int, Any], read: dict[int, Any]
        ) -> dict[int, Any]:
            values, keys, first = numbers
            arrays = {**read, **held}
            update, *states = self._outs_of(plan, arrays, values, block.shape)
            index = functools.cache(lambda: _bits.global_index(block.shape, block.origin, strides))

            def noise(place: int) -> jax.Array:
                at = first + np.uint32(place)
                key = lax.dynamic_index_in_dim(keys, at, keepdims=False)
                return _bits.noise_at(key, index())

            param, extra = arrays.get(PARAMETER), arrays.get(EXTRA)
            value, kept = self._placed(param, extra, update, lambda: noise(0))
            new: dict[int, Any] = {made: value.astype(held[made].dtype)}
            if EXTRA in held:
                new[EXTRA] = kept
            for place, state in enumerate(states):
                new[place] = _stored(held[place], state, functools.partial(noise, place + 1))
            return new

        held = {key: x for key, x in leaf.arrays.items() if key not in (GRADIENT, PARAMETER)}
        if made == PARAMETER:
            held[PARAMETER] = leaf.arrays[PARAMETER]
        else:
            dtype = type_of(self._outs[leaf.at][0]).dtype
            held[_UPDATE] = jnp.zeros_like(leaf.like, dtype=dtype)
        read = {key: x for key, x in self._read(plan).items() if key not in held}
        if PARAMETER in leaf.arrays and PARAMETER not in held:
            read[PARAMETER] = leaf.arrays[PARAMETER]
        # A number, not a constant: XLA for GPUs compiles kernels that are alike once.
        first = np.uint32(self._first_keys[leaf.at])
        return self._loop(plan, held, read, (self._numbers(plan), self._keys, first), body)

    def _outs_of(
        self, plan: Plan, arrays: dict[int, Any], numbers: Sequence[Any], shape: Shape
    ) -> list[Any]:
        """The values of a block."""
        in_order = {NUMBER: iter(numbers), COMPUTED: iter(arrays.get(COMPUTED, ()))}
        operands = [
            next(in_order[source])
            if source in in_order
            else self._seen(source, arrays[source], arrays.get(EXTRA))
            for source in plan.sources
        ]
        if plan.is_elementwise:
            outs = run_on_block(plan.jaxpr, operands, plan.leaf.shape, shape)
        else:
            outs = jax.core.eval_jaxpr(plan.jaxpr, (), *operands)
        return list(map(as_array, outs))

    def _read(self, plan: Plan) -> dict[int, Any]:
        """The arrays of a leaf that a plan takes."""
        needed = {*plan.sources, *([EXTRA] if PARAMETER in plan.sources else [])}
        arrays = {key: array for key, array in plan.leaf.arrays.items() if key in needed}
        if computed := plan.of(COMPUTED):
            arrays[COMPUTED] = list(map(self._value, computed))
        return arrays

    def _numbers(self, plan: Plan) -> list[Any]:
        return list(map(self._value, plan.of(NUMBER)))

    def _loop(self, plan: Plan, held: Any, read: Any, numbers: Any, body: Any) -> Loop:
        shape = self._shape(plan.leaf)
        return Loop(shape, plan.block, held, read, numbers, body, (0,) * len(shape))

    def _placed(
        self,
        param: jax.Array | None,
        extra: jax.Array | None,
        update: jax.Array,
        noise: Callable[[], jax.Array],
    ) -> tuple[jax.Array, jax.Array | None]:
        """The new parameter, or the update that makes it, and what is kept besides it."""
        weights = self._args.weights
        if param is None or (not self._args.is_in_place and weights.method == "nearest"):
            return update, None
        is_met = weights.is_met_by(param.dtype)
        is_random = is_met and weights.needs_noise
        new, kept = weights.place(param, extra, update, noise() if is_random else None)
        if not self._args.is_in_place:
            new = _bits.widen(new) - _bits.widen(param) if is_met else update
        return new, kept

    @functools.cached_property
    def _keys(self) -> jax.Array:
        """What tells the noise of arrays from each other: of each parameter and of its mirrors."""
        args = self._args
        rows: list[tuple[str, bool]] = []
        for leaf in self._update.leaves:
            rows += [(f"{leaf.path}#param", False), *((name, True) for name in leaf.names)]
        weights = _bits.step_seed(args.weights.seed, args.steps[0])
        fields = _bits.step_seed(args.seed, args.steps[1])
        is_field = np.asarray([of_state for _, of_state in rows], bool)
        return _bits.noise_keys(jnp.where(is_field, fields, weights), [name for name, _ in rows])

    @functools.cached_property
    def _first_keys(self) -> list[int]:
        numbers = (1 + len(leaf.names) for leaf in self._update.leaves)
        return list(itertools.accumulate(numbers, initial=0))

    def _looped(
        self,
        plans: Sequence[Plan],
        loops: Sequence[Loop],
        zero: jax.Array,
        names: Sequence[Hashable] = (),
    ) -> tuple[list[Any], jax.Array]:
        """What loops make, where their sources were; numbers of every device."""
        mesh = self._place.mesh
        specs = [None if mesh is None else self._spec(plan.leaf) for plan in plans]
        keys = [
            (str(plan.jaxpr), tuple(plan.sources), spec, more)
            for plan, spec, more in itertools.zip_longest(plans, specs, names)
        ]
        results: dict[int, Any] = {}
        for members in groups(loops, keys, self._args.limit):
            own, spec = [loops[k] for k in members], specs[members[0]]
            found, zero = run(own, zero) if spec is None else run_on_mesh(own, zero, mesh, spec)
            results |= zip(members, found, strict=True)
        if mesh is not None:
            for k, plan in enumerate(plans):
                back = functools.partial(self._moved_back, plan.leaf)
                results[k] = jax.tree.map(back, results[k], loops[k].held)
        return [results[k] for k in range(len(loops))], zero

    def _moved_back(self, leaf: Leaf, new: jax.Array, old: jax.Array) -> jax.Array:
        at = self._place.specs[leaf.at]
        is_elsewhere = new.shape == leaf.shape and self._spec(leaf) != at
        lies = NamedSharding(self._place.mesh, at) if is_elsewhere else None
        return _place.moved_back(new, old, lies)

    @property
    def _zero(self) -> jax.Array:
        """A zero that the compiler does not know to be one: our own counts are never negative."""
        counts = [step for step in self._args.steps if isinstance(step, jax.Array)]
        return jnp.minimum(counts[0], 0) if counts else lax.optimization_barrier(jnp.int32(0))


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
