"""One step: numbers first, then leaf by leaf what depends on them and on its elements."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import NamedSharding, PartitionSpec

from opt_precision import _bits, _place, _program
from opt_precision._formats import Encoded, decode, encode, is_encoded
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
from opt_precision._storage import Weights
from opt_precision._stream import (
    REDUCTIONS,
    Numbers,
    Piece,
    Work,
    piece_shape,
    stream,
    stream_on_mesh,
)
from opt_precision._update import (
    COMPUTED,
    GRADIENT,
    NUMBER,
    PARAMETER,
    Arguments,
    Elements,
    Leaf,
    Update,
    as_array,
)
from opt_precision.errors import StateError


class Results(NamedTuple):
    """What a step makes."""

    tree: Any  # the structure of parameters
    leaves: list[Any]  # per parameter its new value, or its update
    extras: list[Any]  # per parameter what is kept besides it
    state: Any  # the inner state as it is to be stored


class Plan(NamedTuple):
    """How values of a leaf are computed."""

    leaf: Leaf  # the parameter
    jaxpr: Jaxpr  # what makes them of the leaf's elements, and of numbers
    starts: list[Var]  # what that takes, in the trace on whole leaves
    sources: list[int]  # what these are of the leaf
    piece: Shape  # the shape of blocks
    is_elementwise: bool = True  # whether an element needs only the same one of other arrays

    def of(self, source: int) -> list[Var]:
        """What it takes from one source."""
        return [x for x, own in zip(self.starts, self.sources, strict=True) if own == source]

    def outs(self, arrays: Elements, numbers: Numbers, weights: Weights, shape: Shape) -> list[Any]:
        """The values of a block."""
        known: dict[int, Any] = {
            i: decode(x.format, x.codes, x.scale) if is_encoded(x) else x
            for i, x in enumerate(arrays.state)
        }
        if arrays.grad is not None:
            known[GRADIENT] = _bits.widen(arrays.grad)
        if arrays.param is not None:
            known[PARAMETER] = weights.value(arrays.param, arrays.extra)
        in_order = {NUMBER: iter(numbers.values), COMPUTED: iter(arrays.computed)}
        values = [next(in_order[x]) if x in in_order else known[x] for x in self.sources]
        if self.is_elementwise:
            outs = run_on_block(self.jaxpr, values, self.leaf.shape, shape)
        else:
            outs = jax.core.eval_jaxpr(self.jaxpr, (), *values)
        return list(map(as_array, outs))


class Step:
    """One step on some arguments."""

    def __init__(self, arguments: Arguments) -> None:
        self._args = arguments
        self._update = update = Update(arguments)
        likes = [
            leaf.arrays.grad if leaf.arrays.param is None else leaf.arrays.param
            for leaf in update.leaves
        ]
        self._place = _place.find_place(arguments.layout, likes)
        _place.warn_of_crossing_blocks(
            self._place, [(x.path, x.shape, x.formats) for x in update.leaves]
        )
        self._is_traced = any(
            isinstance(leaf.arrays.grad, jax.core.Tracer) for leaf in update.leaves
        )
        # Which leaves are computed in a loop: those that are rounded, or lie on the host. Without
        # codes compilers need no temporaries, and eager calls keep theirs anyway.
        is_known = self._is_traced and not self._place.is_hidden
        self._is_cut = [
            is_known and (leaf.is_rounded(arguments.weights) or leaf.is_hosted)
            for leaf in update.leaves
        ]
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
        update, plans = self._update, self._plans
        cut = [plan for plan in plans if self._is_cut[plan.leaf.at]]
        zero = self._zero
        if cut:
            zero = self._totals(zero)
            wanted = ([*plan.of(NUMBER), *plan.of(COMPUTED)] for plan in plans)
            self._compute([*self._rest.values(), *itertools.chain.from_iterable(wanted)])
        else:  # as it was traced
            arguments = map(self._value, self._program.arguments)
            outs = jax.core.eval_jaxpr(self._closed.jaxpr, self._closed.consts, *arguments)
            rows = zip(self._program.outs, outs, strict=True)
            self._known |= {out: value for out, value in rows if isinstance(out, Var)}
        new = {
            plan.leaf.at: _at_once(self._work(plan))
            for plan in plans
            if not self._is_cut[plan.leaf.at]
        }
        results, _ = self._streamed(cut, [self._work(plan) for plan in cut], zero)
        new |= zip((plan.leaf.at for plan in cut), results, strict=True)
        leaves: list[Elements] = [new[leaf.at] for leaf in update.leaves]
        state = [
            _as_before(old, self._value(self._rest[j]))
            if owner is None
            else leaves[owner].state[place]
            for j, (old, (owner, place)) in enumerate(
                zip(update.stored, update.places[len(leaves) :], strict=False)
            )
        ]
        return Results(
            update.tree,
            [leaf.param for leaf in leaves],
            [leaf.extra for leaf in leaves],
            jax.tree.unflatten(update.state_tree, state),
        )

    @functools.cached_property
    def _plans(self) -> list[Plan]:
        """How the new values of each leaf are computed."""
        plans = []
        for leaf, outs in zip(self._update.leaves, self._outs, strict=True):
            own = (leaf.at, _program.UNIFORM, _program.NUMBER)
            is_elementwise = all(isinstance(x, Literal) or self._kinds[x] in own for x in outs)
            is_cut, piece = self._is_cut[leaf.at], self._piece(leaf)
            part = None
            if is_cut and is_elementwise:
                part = self._program.part(outs, self._is_number)
            elif is_cut and (part := self._alone(leaf, outs)) is not None:
                piece = leaf.shape
            if part is None:  # the values themselves, computed before
                part = Part([], [*dict.fromkeys(x for x in outs if isinstance(x, Var))], outs)
            plans.append(self._plan(leaf, part, piece, is_elementwise=is_elementwise))
        return plans

    def _plan(self, leaf: Leaf, part: Part, piece: Shape, *, is_elementwise: bool = True) -> Plan:
        """A plan, with the sources of what its equations start from."""
        sources = []
        for value in part.starts:
            owner, source = self._places.get(value, (None, NUMBER))
            if owner != leaf.at:
                is_computed = not part.indices and type_of(value).shape == leaf.shape
                source = COMPUTED if is_computed else NUMBER
            sources.append(source)
        jaxpr = self._program.jaxpr(part)
        return Plan(leaf, jaxpr, part.starts, sources, piece, is_elementwise)

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

    def _piece(self, leaf: Leaf) -> Shape:
        if not self._is_cut[leaf.at]:
            return leaf.shape
        blocked = [form for form in leaf.formats if form.block]
        units = {form.axis: math.lcm(*(form.block for form in blocked)) for form in blocked}
        return piece_shape(self._shape(leaf), self._args.limit, units, is_even=leaf.is_hosted)

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
        if source == PARAMETER:
            assert owner is not None
            return self._args.weights.value(array, self._update.leaves[owner].arrays.extra)
        if source == GRADIENT:
            return _bits.widen(array)
        return self._decoded(array, owner) if is_encoded(array) else fetched(array)

    def _decoded(self, leaf: Encoded, owner: int | None) -> jax.Array:
        """A whole leaf of the state as the inner transformation knows it."""
        leaf = jax.tree.map(fetched, leaf)

        def values(leaf: Encoded) -> jax.Array:
            return decode(leaf.format, leaf.codes, leaf.scale)

        if self._place.mesh is None or owner is None:
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
                plans.append(self._plan(leaf, part, self._piece(leaf)))
            self._compute(x for plan in plans for x in plan.of(NUMBER))
            rows = list(zip(plans, of_leaves.values(), strict=True))
            works = [self._total_work(plan, eqns) for plan, eqns in rows]
            names = [[eqn.primitive.name for eqn in eqns] for _, eqns in rows]
            found, zero = self._streamed(plans, works, zero, names)
            for (_, eqns), numbers in zip(rows, found, strict=True):
                outs = (eqn.outvars[0] for eqn in eqns)
                self._known |= {
                    out: number.reshape(type_of(out).shape)
                    for out, number in zip(outs, numbers, strict=True)
                }
        return zero

    def _is_total(self, eqn: JaxprEqn) -> bool:
        """Whether an equation makes one number of decoded elements of a leaf.

        Compilers would hold all of these; sums over gradients alone they make in passing.
        """
        operand = eqn.invars[0] if eqn.invars else None
        if eqn.primitive.name not in REDUCTIONS or not isinstance(operand, Var):
            return False
        at, aval = self._kinds[operand], type_of(operand)
        is_float = jnp.issubdtype(aval.dtype, jnp.floating)
        if at < 0 or not is_float or type_of(eqn.outvars[0]).size != 1 or not aval.size:
            return False
        starts = self._program.part([operand], self._is_number).starts
        is_of_gradient = all(self._places.get(x) == (at, GRADIENT) for x in starts)
        return self._is_cut[at] and not is_of_gradient

    def _total_work(self, plan: Plan, eqns: Sequence[JaxprEqn]) -> Work:
        """What makes numbers of the elements of a leaf, each with those of the blocks before."""
        weights, names = self._args.weights, tuple(eqn.primitive.name for eqn in eqns)

        def body(numbers: Numbers, piece: Piece, held: list[Any], read: Elements) -> list[Any]:
            joined = []
            outs = plan.outs(read, numbers, weights, piece.shape)
            for name, before, elements in zip(names, held, outs, strict=True):
                reduce, join, _, first = REDUCTIONS[name]
                elements = jnp.broadcast_to(elements, piece.shape)
                if piece.is_new is not None:
                    start = jnp.asarray(first, elements.dtype)
                    elements = jnp.where(piece.is_new, elements, start)
                joined.append(join(before, reduce(elements)))
            return joined

        rows = zip(names, eqns, strict=True)
        held = [
            jnp.asarray(REDUCTIONS[name][3], type_of(eqn.outvars[0]).dtype) for name, eqn in rows
        ]
        read = self._read(plan)
        if PARAMETER not in plan.sources:
            read = read._replace(param=None, extra=None)
        state = [x if i in plan.sources else None for i, x in enumerate(read.state)]
        read = read._replace(state=state)
        return self._work_of(plan, held, read, self._numbers(plan), body, names)

    def _work(self, plan: Plan) -> Work:
        """What makes the new values of a leaf."""
        leaf, weights, is_in_place = plan.leaf, self._args.weights, self._args.is_in_place
        strides = _bits.strides_of(leaf.shape)

        def body(numbers: Numbers, piece: Piece, held: Elements, read: Elements) -> Elements:
            param = held.param if is_in_place else read.param
            arrays = read._replace(param=param, extra=held.extra, state=held.state)
            update, *states = plan.outs(arrays, numbers, weights, piece.shape)
            begin = numbers.begin or (0,) * len(piece.shape)
            origin = [first + more for first, more in zip(begin, piece.origin, strict=True)]
            index = functools.cache(lambda: _bits.global_index(piece.shape, origin, strides))

            def noise(place: int) -> jax.Array:
                assert numbers.keys is not None
                key = lax.dynamic_index_in_dim(
                    numbers.keys, numbers.first + np.uint32(place), keepdims=False
                )
                return _bits.noise_at(key, index())

            new, kept = self._placed(param, held.extra, update, lambda: noise(0))
            state = [
                _stored(old, value, functools.partial(noise, place))
                for place, (old, value) in enumerate(zip(held.state, states, strict=True), 1)
            ]
            return Elements(new.astype(held.param.dtype), kept, state)

        arrays, read = leaf.arrays, self._read(plan)._replace(extra=None, state=())
        if is_in_place:
            held, read = (
                Elements(arrays.param, arrays.extra, arrays.state),
                read._replace(param=None),
            )
        else:
            like = arrays.grad if arrays.param is None else arrays.param
            buffer = jnp.zeros_like(like, dtype=type_of(self._outs[leaf.at][0]).dtype)
            held = Elements(buffer, arrays.extra, arrays.state)
        if leaf.is_hosted and not self._is_traced:
            raise StateError(
                f"the state of {leaf.path} lies on the host, and is fetched piece by piece by a "
                "compiled step: call it under `jax.jit`"
            )
        numbers = self._numbers(plan)._replace(keys=self._keys, first=self._first_keys[leaf.at])
        return self._work_of(plan, held, read, numbers, body, strides)

    def _read(self, plan: Plan) -> Elements:
        """The arrays of a leaf, with the gradient if it is needed."""
        computed = [self._value(x) for x in plan.of(COMPUTED)]
        arrays = plan.leaf.arrays._replace(computed=computed)
        return arrays if GRADIENT in plan.sources else arrays._replace(grad=None)

    def _numbers(self, plan: Plan) -> Numbers:
        return Numbers([self._value(x) for x in plan.of(NUMBER)])

    def _work_of(
        self, plan: Plan, held: Any, read: Any, numbers: Numbers, body: Any, more: Hashable
    ) -> Work:
        shape, key = self._shape(plan.leaf), None
        if shape == plan.piece:  # what may be alike: but for this, bodies differ in numbers alone
            key = str(plan.jaxpr), tuple(plan.sources), more
        return Work(shape, plan.piece, held, read, numbers, body, key)

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
    def _first_keys(self) -> list[np.uint32]:
        numbers = (1 + len(leaf.names) for leaf in self._update.leaves)
        return [np.uint32(first) for first in itertools.accumulate(numbers, initial=0)]

    def _streamed(
        self,
        plans: Sequence[Plan],
        works: Sequence[Work],
        zero: jax.Array,
        names: Sequence[Sequence[str]] = (),
    ) -> tuple[list[Any], jax.Array]:
        """Computes leaves; see `stream`."""
        mesh, limit = self._place.mesh, self._args.limit
        if mesh is None:
            return stream(works, limit, zero)
        specs = [self._spec(plan.leaf) for plan in plans]
        found, zero = stream_on_mesh(works, limit, zero, mesh, specs, names)
        results = [
            jax.tree.map(functools.partial(self._moved_back, plan.leaf), new, work.held)
            for plan, work, new in zip(plans, works, found, strict=True)
        ]
        return results, zero

    def _moved_back(self, leaf: Leaf, new: jax.Array, old: jax.Array) -> jax.Array:
        """A result of a leaf where its source was."""
        at, mesh = self._place.specs[leaf.at], self._place.mesh
        is_elsewhere = new.shape == leaf.shape and self._spec(leaf) != at
        return _place.moved_back(new, old, NamedSharding(mesh, at) if is_elsewhere else None)

    @property
    def _zero(self) -> jax.Array:
        """A zero that the compiler does not know to be one."""
        # Our own counts are never negative; of other integers in the state nothing is known.
        counts = [step for step in self._args.steps if isinstance(step, jax.Array)]
        if counts:
            return jnp.minimum(counts[0], 0)
        grads = [leaf.arrays.grad for leaf in self._update.leaves]
        arrays = [x for x in grads if x.size and jnp.issubdtype(x.dtype, jnp.floating)]
        return jnp.int32(0) if not arrays else _zero_of(arrays[0])


def _at_once(work: Work) -> Elements:
    """The results of a leaf that is computed as a whole, with no order among leaves."""
    held, read = jax.tree.map(fetched, (work.held, work.read))
    piece = Piece(work.shape, (0,) * len(work.shape))
    results: Elements = work.body(work.numbers, piece, held, read)
    placed: Elements = jax.tree.map(_place.placed_like, results, work.held)
    return placed


def _stored(old: Any, new: jax.Array, noise: Callable[[], jax.Array]) -> Any:
    """A leaf of the state as it is stored."""
    if not is_encoded(old):
        return new.astype(old.dtype)
    form = old.format
    return Encoded(*encode(form, new, noise() if form.needs_noise else None, old.codes), form)


def _zero_of(array: jax.Array) -> jax.Array:
    """A zero from an element of an array, whatever that is: no cube is 3 modulo 9."""
    first = lax.slice(array, (0,) * array.ndim, (1,) * array.ndim).reshape(())
    bits = lax.bitcast_convert_type(first.astype(jnp.float32), jnp.int32) & 255
    return (bits * bits * bits % 9 == 3).astype(jnp.int32)


def _as_before(old: Any, new: Any) -> Any:
    """A leaf of the state in the dtype that it had, not weakly typed unless it was."""
    if jnp.issubdtype(old.dtype, jax.dtypes.extended):
        return new
    new = jnp.asarray(new)
    if new.dtype == old.dtype and jax.typeof(new) == jax.typeof(old):
        return new
    return new.astype(old.dtype)
