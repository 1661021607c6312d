"""One step: numbers first, then leaf by leaf what is made of them and of its own elements."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import NamedSharding, PartitionSpec

from opt_precision import _bits, _program
from opt_precision._arguments import Arguments, Flat, Leaf, Update
from opt_precision._formats import Encoded, decode, is_encoded
from opt_precision._memory import fetched, is_on_host, placed_like
from opt_precision._mesh import (
    axis_names,
    find_place,
    inside,
    local_origin,
    mapped,
    moved_back,
    part_shape,
    resharded,
    spec_of,
)
from opt_precision._mirrors import path_str
from opt_precision._program import Atom, Pairs, Part, Program, feeding_extremes, type_of
from opt_precision._stream import Blocks, Operand, Piece, Shape, Work, piece_shape, stream
from opt_precision._update import (
    GRADIENT,
    NUMBER,
    PARAMETER,
    REDUCTIONS,
    Inputs,
    NewValues,
    Numbers,
    Totals,
    first_number,
    strides_of,
)
from opt_precision._weights import Weights
from opt_precision.errors import StateError

NEAREST: Final = Weights("nearest")


@dataclasses.dataclass(frozen=True)
class Options:
    """What a step needs to know."""

    tx: optax.GradientTransformationExtraArgs  # the inner transformation
    weights: Weights = NEAREST  # how parameters are rounded
    seed: int = 0  # of the noise of the state
    chunk_bytes: int = 64 << 20  # the float32 bytes of one block
    layout: Any = None  # where parameters lie; `None` if their types say so

    @property
    def limit(self) -> int:
        """How many elements make one block."""
        return max(1, self.chunk_bytes // 4)


class Results(NamedTuple):
    """What a step makes."""

    leaves: list[Any]  # per parameter its new value, or its update
    extras: list[Any]  # per parameter what is kept besides it
    state: Any  # the inner state as it is to be stored


class Plan(NamedTuple):
    """How the new values of a leaf are computed."""

    leaf: Leaf  # the parameter
    outs: list[Atom]  # the update, and each leaf of the state that mirrors the parameter
    # What makes them of the leaf itself; `None` if they are computed for whole leaves first.
    jaxpr: Jaxpr | None
    starts: list[Var]  # what that takes, in the trace on whole leaves
    sources: list[int]  # where these come from, see `opt_precision._update`
    piece: Shape  # the shape of blocks
    is_elementwise: bool  # whether an element needs nothing but the same element of other arrays

    @property
    def numbers(self) -> list[Var]:
        """What it takes besides the leaf itself."""
        return _of_numbers(self.starts, self.sources)


def _of_numbers(starts: Sequence[Var], sources: Sequence[int]) -> list[Var]:
    rows = zip(starts, sources, strict=True)
    return [value for value, source in rows if source == NUMBER]


class Step:
    """One step on some arguments."""

    def __init__(self, options: Options, arguments: Arguments, *, is_in_place: bool) -> None:
        self._options = options
        self._given = arguments
        self._is_in_place = is_in_place
        self._flat = flat = Flat(arguments)
        self._place = find_place(options.layout, flat.likes)
        self._update = Update(options.tx, arguments, flat)
        self._closed = self._update.trace()
        self._program = Program(self._closed)
        self._check_extremes()
        number = len(flat.leaves)
        self._owners = self._update.owners
        self._kinds = self._program.kinds(
            [_program.WHOLE if owner is None else owner for owner in self._owners]
        )
        self._index = {value: i for i, value in enumerate(self._program.arguments)}
        self._known: dict[Var, Any] = dict(self._program.consts)
        self._outs, self._state_outs = self._program.outs[:number], self._program.outs[number:]

    def _check_extremes(self) -> None:
        flat = self._flat
        if not any(map(is_encoded, flat.stored)):
            return
        feeding = feeding_extremes(self._program, len(flat.grads), len(flat.stored))
        for j, extreme in sorted(feeding.items()):
            if is_encoded(flat.stored[j]):
                path, kept = path_str(flat.paths[j]), path_str(flat.paths[extreme])
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
        flat, plans = self._flat, self._plans
        cut = [plan for plan in plans if self._is_cut(plan.leaf)]
        zero = self._totals(self._zero) if cut else None
        if cut:
            wanted = [[*plan.numbers] if plan.jaxpr is not None else plan.outs for plan in plans]
            owners = zip(flat.owners, self._state_outs, strict=True)
            rest = [out for owner, out in owners if owner is None]
            self._compute([*rest, *itertools.chain.from_iterable(wanted)])
        else:  # as it was traced
            arguments = [self._argument(i) for i in range(len(self._index))]
            made = jax.core.eval_jaxpr(self._closed.jaxpr, self._closed.consts, *arguments)
            rows = zip(self._program.outs, made, strict=True)
            self._known |= {out: value for out, value in rows if isinstance(out, Var)}
        works = [self._work(plan) for plan in cut]
        new = {
            plan.leaf.at: _at_once(self._work(plan))
            for plan in plans
            if not self._is_cut(plan.leaf)
        }
        if zero is not None:
            leaves = [plan.leaf for plan in cut]
            results, _ = self._streamed(leaves, works, zero)
            new |= zip((leaf.at for leaf in leaves), results, strict=True)
        return self._collected([new[leaf.at] for leaf in flat.leaves])

    def _is_cut(self, leaf: Leaf) -> bool:
        return not self._place.is_hidden and self._flat.is_cut(leaf, self._options.weights)

    @functools.cached_property
    def _plans(self) -> list[Plan]:
        """How the new values of each leaf are computed."""
        plans = []
        for leaf, part in zip(self._flat.leaves, self._parts, strict=True):
            outs, piece, jaxpr = self._outs_of(leaf), self._pieces[leaf.at], None
            is_elementwise = part is not None
            if part is not None and self._is_cut(leaf):
                jaxpr = self._on_blocks(part)
                is_elementwise = jaxpr is not None
            if not is_elementwise and self._is_cut(leaf):
                piece, part = self._piece(leaf), self._alone(leaf, outs)
                if part is not None:
                    piece, jaxpr = leaf.shape, self._program.jaxpr(part)
            starts = part.starts if part is not None and jaxpr is not None else []
            sources = self._sources(leaf, starts)
            plans.append(Plan(leaf, outs, jaxpr, starts, sources, piece, is_elementwise))
        return plans

    def _outs_of(self, leaf: Leaf) -> list[Atom]:
        return [self._outs[leaf.at], *(self._state_outs[j] for j in leaf.mirrors)]

    @functools.cached_property
    def _parts(self) -> list[Part | None]:
        """What makes the new values of each leaf, if it treats each element by itself."""
        parts: list[Part | None] = []
        for leaf in self._flat.leaves:
            outs = self._outs_of(leaf)
            own = (leaf.at, _program.UNIFORM, _program.NUMBER)
            is_elementwise = all(isinstance(x, Literal) or self._kinds[x] in own for x in outs)
            parts.append(self._program.part(outs, self._is_number) if is_elementwise else None)
        return parts

    @functools.cached_property
    def _pieces(self) -> list[Shape]:
        """The shapes of leaves in the second trace."""
        rows = zip(self._flat.leaves, self._parts, strict=True)
        return [
            leaf.shape if part is None or not self._is_cut(leaf) else self._piece(leaf)
            for leaf, part in rows
        ]

    @functools.cached_property
    def _on_blocks(self) -> Callable[[Part], Jaxpr | None]:
        """From equations of a leaf to those of its blocks; `None` where they are others."""
        program, shapes = self._program, [leaf.shape for leaf in self._flat.leaves]
        if self._place.mesh is None and shapes == self._pieces:
            return program.jaxpr
        try:
            with inside(self._place.mesh):
                block = Program(self._update.trace_blocks(self._pieces))
        except Exception:  # of whatever class: the function takes no leaves of other shapes
            return lambda part: None
        pairs = Pairs(program, block)

        def jaxpr(part: Part) -> Jaxpr | None:
            of_blocks = pairs.of(part)
            return None if of_blocks is None else block.jaxpr(of_blocks)

        return jaxpr

    def _alone(self, leaf: Leaf, outs: Sequence[Atom]) -> Part | None:
        """What makes the new values of a whole leaf, if no other leaf takes part but by numbers."""
        if self._place.mesh is not None:
            return None
        for is_start in (lambda value: False, self._is_number):
            part = self._program.part(outs, is_start)
            owners = {self._owners[self._index[x]] for x in part.starts if x in self._index}
            if owners <= {leaf.at, None}:
                return part
        return None

    def _is_number(self, value: Var) -> bool:
        return self._kinds[value] == _program.NUMBER

    def _spec(self, leaf: Leaf) -> PartitionSpec:
        return spec_of(self._place, leaf.at, leaf.shape, self._flat.formats(leaf))

    def _shape(self, leaf: Leaf) -> Shape:
        """What each device has of a leaf."""
        mesh = self._place.mesh
        return leaf.shape if mesh is None else part_shape(mesh, self._spec(leaf), leaf.shape)

    def _piece(self, leaf: Leaf) -> Shape:
        blocked = [form for form in self._flat.formats(leaf) if form.block]
        units = {form.axis: math.lcm(*(form.block for form in blocked)) for form in blocked}
        stored = [self._flat.stored[j] for j in leaf.mirrors]
        is_hosted = any(map(is_on_host, jax.tree.leaves(stored)))
        return piece_shape(self._shape(leaf), self._options.limit, units, is_even=is_hosted)

    def _sources(self, leaf: Leaf, starts: Sequence[Var]) -> list[int]:
        """Where what a leaf's equations start from comes from: see `opt_precision._update`."""
        flat, number = self._flat, len(self._flat.leaves)
        places = {number + j: place for place, j in enumerate(leaf.mirrors)}
        places[number + len(flat.stored) + leaf.at] = PARAMETER
        if flat.grads[leaf.at].shape == leaf.shape:
            places[leaf.at] = GRADIENT
        return [places.get(self._index.get(value, -1), NUMBER) for value in starts]

    def _compute(self, wanted: Iterable[Atom]) -> None:
        """Computes values for whole leaves."""
        missing = dict.fromkeys(
            x for x in wanted if not isinstance(x, Literal) and x not in self._known
        )
        part = self._program.part(missing, self._known.__contains__)
        values = self._program.evaluate(part, [self._value(start) for start in part.starts])
        self._known.update(zip(missing, values, strict=True))

    def _value(self, atom: Atom) -> Any:
        """A value that was computed, or an argument."""
        if isinstance(atom, Literal):
            return atom.val
        return self._known[atom] if atom in self._known else self._argument(self._index[atom])

    def _argument(self, i: int) -> Any:
        """An argument of the update, for a whole leaf."""
        flat = self._flat
        if i < len(flat.grads):
            return _bits.widen(flat.grads[i])
        i -= len(flat.grads)
        if i < len(flat.stored):
            return self._decoded(i)
        i -= len(flat.stored)
        if i < len(flat.params):
            return self._options.weights.value(flat.params[i], flat.extras[i])
        return self._update.arrays[i - len(flat.params)]

    def _decoded(self, index: int) -> jax.Array:
        """A whole leaf of the state as the inner transformation knows it."""
        leaf, owner = self._flat.stored[index], self._flat.owners[index]
        if not is_encoded(leaf):
            return fetched(leaf)
        form, arrays = leaf.format, list(map(fetched, jax.tree.leaves(leaf)))

        def values(codes: jax.Array, scale: jax.Array | None = None) -> jax.Array:
            return decode(form, codes, scale)

        if self._place.mesh is None or owner is None:
            return values(*arrays)
        spec = spec_of(self._place, owner, leaf.shape, [form])
        on_mesh = mapped(values, self._place.mesh, (spec,) * len(arrays), spec)
        made: jax.Array = on_mesh(*(resharded(array, spec) for array in arrays))
        return made

    def _totals(self, zero: jax.Array) -> jax.Array:
        """Computes numbers of decoded leaves block by block, those first that others need."""
        program = self._program
        for level in _levels(program, self._is_total):
            of_leaves: dict[int, list[JaxprEqn]] = {}
            for eqn in level:
                [operand] = eqn.invars
                assert isinstance(operand, Var)
                of_leaves.setdefault(self._kinds[operand], []).append(eqn)
            rows = []
            for at, eqns in of_leaves.items():
                part = program.part([eqn.invars[0] for eqn in eqns], self._is_number)
                if (jaxpr := self._on_blocks(part)) is not None:  # or they are made of whole leaves
                    leaf = self._flat.leaves[at]
                    sources = self._sources(leaf, part.starts)
                    rows.append((leaf, eqns, jaxpr, _of_numbers(part.starts, sources), sources))
            self._compute(x for *_, numbers, _ in rows for x in numbers)
            works = [self._total_work(*row) for row in rows]
            found, zero = self._streamed([leaf for leaf, *_ in rows], works, zero)
            for (_, eqns, *_), numbers in zip(rows, found, strict=True):
                made = (eqn.outvars[0] for eqn in eqns)
                self._known |= {
                    out: number.reshape(type_of(out).shape)
                    for out, number in zip(made, numbers, strict=True)
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
        leaf = self._flat.leaves[at]
        if not self._is_cut(leaf) or (self._parts[at] is None and self._place.mesh is not None):
            return False
        starts = self._program.part([operand], self._is_number).starts
        return not set(self._sources(leaf, starts)) <= {GRADIENT}

    def _total_work(
        self,
        leaf: Leaf,
        eqns: Sequence[JaxprEqn],
        jaxpr: Jaxpr,
        numbers: Sequence[Var],
        sources: Sequence[int],
    ) -> Work:
        """What makes numbers of the elements of a leaf."""
        whole = leaf
        used = [k for k in range(len(leaf.mirrors)) if k in sources]
        leaf = leaf._replace(mirrors=[leaf.mirrors[k] for k in used])
        sources = [used.index(x) if x >= 0 else x for x in sources]
        inputs = self._inputs(leaf, jaxpr, sources, has_params=PARAMETER in sources)
        body = Totals(inputs, [eqn.primitive.name for eqn in eqns])
        operands = [
            Operand(
                first_number(name, type_of(eqn.outvars[0]).dtype), is_result=True, is_total=True
            )
            for name, eqn in zip(body.names, eqns, strict=True)
        ]
        if inputs.has_params:
            operands.append(Operand(self._flat.params[leaf.at]))
        if inputs.has_extra:
            operands.append(Operand(self._flat.extras[leaf.at]))
        operands += self._read(leaf, sources, is_result=False)
        needed = Numbers([self._value(x) for x in numbers])
        return _work(whole, self._shape(whole), self._pieces[leaf.at], operands, body, needed)

    def _work(self, plan: Plan) -> Work:
        """What makes the new values of a leaf."""
        flat, leaf, sources = self._flat, plan.leaf, plan.sources
        # Updates of whole leaves are operands, after those of the state.
        inputs = self._inputs(leaf, plan.jaxpr, sources, has_params=bool(flat.params))
        body = NewValues(inputs, self._is_in_place, strides_of(leaf.shape))
        operands = [*self._buffers(leaf, plan), *self._read(leaf, sources, is_result=True)]
        numbers: list[Any] = []
        if plan.jaxpr is None:
            operands += [
                Operand(jnp.broadcast_to(self._value(out), leaf.shape)) for out in plan.outs
            ]
        else:
            numbers = [self._value(x) for x in plan.numbers]
        if not flat.is_traced and any(is_on_host(operand.value) for operand in operands):
            raise StateError(
                f"the state of {leaf.path} lies on the host, and is fetched piece by piece by a "
                "compiled step: call it under `jax.jit`"
            )
        is_cut = self._is_cut(leaf)
        shape = self._shape(leaf) if is_cut else leaf.shape
        piece = plan.piece if is_cut else leaf.shape
        return _work(
            leaf,
            shape,
            piece,
            operands,
            body,
            Numbers(numbers, self._keys, self._first_keys[leaf.at]),
        )

    def _inputs(
        self, leaf: Leaf, jaxpr: Jaxpr | None, sources: Sequence[int], *, has_params: bool
    ) -> Inputs:
        stored = [self._flat.stored[j] for j in leaf.mirrors]
        formats = [one.format if is_encoded(one) else None for one in stored]
        has_extra = has_params and self._flat.extras[leaf.at] is not None
        return Inputs(jaxpr, sources, formats, self._options.weights, has_params, has_extra)

    def _buffers(self, leaf: Leaf, plan: Plan) -> list[Operand]:
        """What takes up the new parameter or the update, the parameter, and what is kept too."""
        flat, operands = self._flat, []
        if self._is_in_place:
            operands.append(Operand(flat.params[leaf.at], is_result=True))
        else:
            buffer = jnp.zeros_like(flat.likes[leaf.at], dtype=type_of(plan.outs[0]).dtype)
            operands.append(Operand(buffer, is_result=True))
            operands += [Operand(flat.params[leaf.at])] if flat.params else []
        if (extra := flat.extras[leaf.at]) is not None:
            operands.append(Operand(extra, is_result=True))
        return operands

    def _read(self, leaf: Leaf, sources: Sequence[int], *, is_result: bool) -> list[Operand]:
        """The gradient, if it is a source, and the leaves of the state."""
        operands = [Operand(self._flat.grads[leaf.at])] if GRADIENT in sources else []
        for one in (self._flat.stored[j] for j in leaf.mirrors):
            if not is_encoded(one):
                operands.append(Operand(one, is_result=is_result))
                continue
            operands.append(Operand(one.codes, is_result=is_result))
            if one.scale is not None:
                blocks = Blocks(one.format.axis, one.format.block)
                operands.append(Operand(one.scale, blocks, is_result=is_result))
        return operands

    @functools.cached_property
    def _keys(self) -> jax.Array:
        """What tells the noise of arrays from each other: of each parameter and of its mirrors."""
        flat, steps, options = self._flat, self._given.steps, self._options
        rows: list[tuple[str, bool]] = []
        for leaf in flat.leaves:
            rows.append((f"{leaf.path}#param", False))
            rows += [(path_str(flat.paths[j]), True) for j in leaf.mirrors]
        weights = _bits.step_seed(options.weights.seed, steps[0])
        fields = _bits.step_seed(options.seed, steps[1])
        is_field = np.asarray([of_state for _, of_state in rows], bool)
        return _bits.noise_keys(jnp.where(is_field, fields, weights), [name for name, _ in rows])

    @functools.cached_property
    def _first_keys(self) -> list[np.uint32]:
        numbers = (1 + len(leaf.mirrors) for leaf in self._flat.leaves)
        return [np.uint32(first) for first in itertools.accumulate(numbers, initial=0)]

    def _streamed(
        self, leaves: Sequence[Leaf], works: Sequence[Work], zero: jax.Array
    ) -> tuple[list[list[jax.Array]], jax.Array]:
        """Computes leaves, on a mesh each device its part of all; nothing but numbers is sent."""
        mesh, limit, nowhere = self._place.mesh, self._options.limit, PartitionSpec()
        if mesh is None:
            return stream(works, limit, zero)
        specs = [self._spec(leaf) for leaf in leaves]
        own_specs = [
            [nowhere if operand.is_total else spec for operand in work.operands]
            for work, spec in zip(works, specs, strict=True)
        ]

        def parts(arrays: Any, numbers: Any, zero: jax.Array) -> Any:
            local = []
            for work, spec, values, own in zip(works, specs, arrays, numbers, strict=True):
                operands = [
                    operand._replace(value=value)
                    for operand, value in zip(work.operands, values, strict=True)
                ]
                own = own._replace(begin=local_origin(mesh, spec, work.shape))
                local.append(work._replace(operands=operands, numbers=own))
            made, zero = stream(local, limit, zero)
            return _across(works, specs, made), zero

        arrays = [
            [resharded(x.value, spec) for x, spec in zip(work.operands, row, strict=True)]
            for work, row in zip(works, own_specs, strict=True)
        ]
        out_specs = [
            [spec for x, spec in zip(work.operands, row, strict=True) if x.is_result]
            for work, row in zip(works, own_specs, strict=True)
        ]
        run = mapped(parts, mesh, (own_specs, nowhere, nowhere), (out_specs, nowhere))
        found, zero = run(arrays, [work.numbers for work in works], zero)
        results = []
        for leaf, work, spec, made in zip(leaves, works, specs, found, strict=True):
            at = self._place.specs[leaf.at]
            lies = NamedSharding(mesh, at) if spec != at else None
            olds = [x for x in work.operands if x.is_result]
            results.append(
                [
                    moved_back(new, old.value, None if old.blocks or old.is_total else lies)
                    for new, old in zip(made, olds, strict=True)
                ]
            )
        return results, zero

    def _collected(self, new: Sequence[Sequence[jax.Array]]) -> Results:
        """The results of all leaves, as trees."""
        flat = self._flat
        state = [
            None if owner is not None else _as_before(old, self._value(out))
            for owner, old, out in zip(flat.owners, flat.stored, self._state_outs, strict=True)
        ]
        leaves: list[Any] = []
        extras: list[Any] = []
        for leaf, made in zip(flat.leaves, new, strict=True):
            results = iter(made)
            leaves.append(next(results))
            extras.append(None if flat.extras[leaf.at] is None else next(results))
            for j in leaf.mirrors:
                state[j] = _stored_like(flat.stored[j], results)
        return Results(leaves, extras, jax.tree.unflatten(flat.state_tree, state))

    @property
    def _zero(self) -> jax.Array:
        """A zero that the compiler does not know to be one."""
        # Our own counts are never negative; of other integers in the state nothing is known.
        counts = [step for step in self._given.steps if isinstance(step, jax.Array)]
        if counts:
            return jnp.minimum(counts[0], 0)
        arrays = [x for x in self._flat.grads if x.size and jnp.issubdtype(x.dtype, jnp.floating)]
        return jnp.int32(0) if not arrays else _zero_of(arrays[0])


def _work(
    leaf: Leaf, shape: Shape, piece: Shape, operands: Sequence[Operand], body: Any, numbers: Numbers
) -> Work:
    types = tuple((x.value.dtype, x.blocks, x.is_result, x.is_total) for x in operands)
    is_small = shape == piece and not any(is_on_host(x.value) for x in operands)
    key = (body.key, shape, types) if is_small else object()
    return Work(shape, piece, operands, body, numbers, key)


def _at_once(work: Work) -> list[jax.Array]:
    """The results of a leaf that is computed as a whole, with no order among leaves."""
    values = [fetched(operand.value) for operand in work.operands]
    made = work.body(work.numbers, Piece(work.shape, (0,) * len(work.shape)), values)
    return [placed_like(new, old) for new, old in zip(made, work.results, strict=True)]


def _across(
    works: Sequence[Work], specs: Sequence[PartitionSpec], made: list[list[jax.Array]]
) -> list[list[jax.Array]]:
    """Numbers of all devices: those that are alike are sent together."""
    alike: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    for k, (work, spec) in enumerate(zip(works, specs, strict=True)):
        axes = tuple(name for entry in spec for name in axis_names(entry))
        if isinstance(work.body, Totals) and axes:
            for i, name in enumerate(work.body.names):
                alike[name, axes, made[k][i].dtype].append((k, i))
    for (name, axes, _), places in alike.items():
        numbers = REDUCTIONS[name][2](jnp.stack([made[k][i] for k, i in places]), axes)
        for (k, i), number in zip(places, numbers, strict=True):
            made[k][i] = number
    return made


def _levels(program: Program, is_total: Any) -> Iterator[list[JaxprEqn]]:
    """Equations that are needed, each with those that need no others but those before them."""
    depth: dict[Var, int] = {}
    levels: dict[int, list[JaxprEqn]] = {}
    for i in program.part(program.outs).indices:
        eqn = program.equations[i]
        level = max((depth.get(x, 0) for x in eqn.invars if isinstance(x, Var)), default=0)
        if is_total(eqn):
            levels.setdefault(level, []).append(eqn)
            level += 1
        depth.update(dict.fromkeys(eqn.outvars, level))
    for level in sorted(levels):
        yield levels[level]


def _zero_of(array: jax.Array) -> jax.Array:
    """A zero from an element of an array, whatever that is: no cube is 3 modulo 9."""
    first = lax.slice(array, (0,) * array.ndim, (1,) * array.ndim).reshape(())
    bits = lax.bitcast_convert_type(first.astype(jnp.float32), jnp.int32) & 255
    return (bits * bits * bits % 9 == 3).astype(jnp.int32)


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
