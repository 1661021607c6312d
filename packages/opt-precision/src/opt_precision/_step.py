"""One step: the inner update is traced, split, and streamed leaf by leaf."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Literal
from jax.sharding import PartitionSpec

from opt_precision import _bits
from opt_precision._body import Body, Data, Part
from opt_precision._formats import Encoded, Format, decode, is_encoded
from opt_precision._memory import fetched, is_on_host
from opt_precision._mirrors import KeyPath, find_mirrors, path_str
from opt_precision._placement import Place, aligned, find_place, local_origin, without
from opt_precision._program import WHOLE, Kind, Program, Whole
from opt_precision._stream import stream
from opt_precision._weights import Weights
from opt_precision._work import Blocks, Operand, Shape, Work
from opt_precision.errors import StateError

NEAREST: Final = Weights("nearest")


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


class Arguments(NamedTuple):
    """What a step is given.

    Attributes:
      grads: a leaf per parameter.
      state: the inner state as it is stored.
      params: the parameters, or `None`.
      extras: what is kept besides each parameter; `None` where nothing is.
      extra_args: for the inner update.
      steps: how often weights and state were updated.
    """

    grads: Any
    state: Any
    params: Any
    extras: Sequence[Any]
    extra_args: Mapping[str, Any]
    steps: tuple[Any, Any]


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


def wide(leaf: Any) -> jax.ShapeDtypeStruct:
    """The type of a leaf as the inner transformation sees it."""
    if is_encoded(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, **_sharding(leaf.codes))
    dtype = leaf.dtype
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        dtype = np.dtype(np.float32)
    return jax.ShapeDtypeStruct(leaf.shape, dtype, **_sharding(leaf), **_weak(leaf, dtype))


def _sharding(leaf: Any) -> dict[str, Any]:
    sharding = jax.typeof(leaf).sharding
    return {} if sharding.mesh.empty or not sharding.mesh.explicit_axes else {"sharding": sharding}


def _weak(leaf: Any, dtype: Any) -> dict[str, Any]:
    is_weak = dtype == leaf.dtype and getattr(jax.typeof(leaf), "weak_type", False)
    return {"weak_type": True} if is_weak else {}


def same(leaf: Any) -> jax.ShapeDtypeStruct:
    """The type of a leaf of the state that is not encoded."""
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, **_sharding(leaf), **_weak(leaf, leaf.dtype)
    )


class _Leaf(NamedTuple):
    """A parameter, with the leaves of the state that mirror it.

    Attributes:
      at: the index of the parameter.
      path: of the parameter.
      shape: of all of them.
      mirrors: the indices of the leaves of the state.
    """

    at: int
    path: str
    shape: Shape
    mirrors: list[int]


class _Task(NamedTuple):
    """How one leaf is computed.

    Attributes:
      leaf: the parameter.
      operands: its arrays: the parameter, what is kept besides it, the gradient, the state, and
        what was computed whole.
      numbers: scalars that its equations use.
      body: the computation.
      unit: the axis and size of blocks that must not be cut apart, if there are any.
      is_cut: whether it is worth while to compute it piece by piece.
    """

    leaf: _Leaf
    operands: list[Operand]
    numbers: list[Any]
    body: Body
    unit: Blocks | None
    is_cut: bool


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
        self._is_in_place = is_in_place
        keyed, self._tree = jax.tree_util.tree_flatten_with_path(arguments.grads)
        self._grads = [_array(leaf) for _, leaf in keyed]
        self._params = self._flat_params()
        stored, self._state_tree = jax.tree_util.tree_flatten_with_path(
            arguments.state, is_leaf=is_encoded
        )
        self._paths: list[KeyPath] = [path for path, _ in stored]
        self._stored = [leaf if is_encoded(leaf) else _array(leaf) for _, leaf in stored]
        likes = self._params or self._grads
        shapes = [(path, tuple(like.shape)) for (path, _), like in zip(keyed, likes, strict=True)]
        state_shapes = [
            (path, tuple(leaf.shape)) for path, leaf in zip(self._paths, self._stored, strict=True)
        ]
        mirrors = find_mirrors(shapes, arguments.state, state_shapes)
        self._owners = [None if mirror is None else mirror.param for mirror in mirrors]
        self._leaves = [
            _Leaf(i, path_str(path), shape, [j for j, own in enumerate(self._owners) if own == i])
            for i, (path, shape) in enumerate(shapes)
        ]
        self._is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in self._grads)
        self._place = find_place(options.layout, likes)
        self._program = self._trace()
        self._whole = Whole(self._program, self._thunks())

    def _flat_params(self) -> list[jax.Array]:
        if self._given.params is None:
            return []
        leaves, tree = jax.tree.flatten(self._given.params)
        found: Any = tree
        if found != self._tree:
            raise StateError(
                f"gradients and parameters must have one structure:\n  parameters {found}\n"
                f"  gradients  {self._tree}"
            )
        return [_array(leaf) for leaf in leaves]

    def _trace(self) -> Program:
        """Traces the inner update on whole leaves."""
        static, arrays = _split_args(self._given.extra_args)
        number, state_number = len(self._grads), len(self._stored)
        params_number = len(self._params)

        def update(*flat: Any) -> list[Any]:
            grads = jax.tree.unflatten(self._tree, flat[:number])
            state = jax.tree.unflatten(self._state_tree, flat[number : number + state_number])
            rest = flat[number + state_number :]
            params = jax.tree.unflatten(self._tree, rest[:params_number]) if self._params else None
            if self._given.params is not None and not self._params:
                params = self._given.params  # a tree without leaves
            extra = static(rest[params_number:])
            updates, new = self._options.tx.update(grads, state, params, **extra)
            return [*self._checked_updates(updates), *self._checked_state(new)]

        avals = [
            *map(wide, self._grads),
            *(wide(leaf) if is_encoded(leaf) else same(leaf) for leaf in self._stored),
            *map(wide, self._params),
            *arrays,
        ]
        kinds = [
            *(
                Kind(leaf.at) if grad.shape == leaf.shape else WHOLE
                for leaf, grad in zip(self._leaves, self._grads, strict=True)
            ),
            *(WHOLE if owner is None else Kind(owner) for owner in self._owners),
            *(Kind(index) for index in range(params_number)),
            *(WHOLE for _ in arrays),
        ]
        self._arrays = arrays
        return Program(jax.make_jaxpr(update)(*avals), kinds)

    def _checked_updates(self, updates: Any) -> list[Any]:
        leaves = jax.tree.leaves(updates)
        if len(leaves) != len(self._leaves):
            raise StateError(
                f"the inner transformation made updates for {len(leaves)} leaves of "
                f"{len(self._leaves)}; a transformation that changes the tree cannot be wrapped"
            )
        for leaf, update in zip(self._leaves, leaves, strict=True):
            if tuple(update.shape) != leaf.shape:
                raise StateError(
                    f"the inner transformation made an update of shape {tuple(update.shape)} for "
                    f"{leaf.path} of shape {leaf.shape}"
                )
        return leaves

    def _checked_state(self, new: Any) -> list[Any]:
        leaves, tree = jax.tree.flatten(new)
        found: Any = tree
        if found != self._state_tree or any(
            jnp.shape(leaf) != tuple(old.shape)
            for leaf, old in zip(leaves, self._stored, strict=True)
        ):
            raise StateError(
                "the inner transformation returned another state than it was given; a state must "
                f"keep its structure and shapes from `init` on:\n  given    {self._state_tree}\n"
                f"  returned {found}"
            )
        return leaves

    def _thunks(self) -> list[Callable[[], Any]]:
        """What makes the arguments of the program for whole leaves."""
        params = [
            functools.partial(self._options.weights.value, param, extra)
            for param, extra in zip(self._params, self._given.extras, strict=False)
        ]
        return [
            *(functools.partial(_bits.widen, grad) for grad in self._grads),
            *(functools.partial(self._decoded, index) for index in range(len(self._stored))),
            *params,
            *(functools.partial(_identity, array) for array in self._arrays),
        ]

    def _decoded(self, index: int) -> jax.Array:
        """A whole leaf of the state as the inner transformation knows it."""
        leaf = self._stored[index]
        if not is_encoded(leaf):
            return fetched(leaf)
        leaf = jax.tree.map(fetched, leaf)
        owner = self._owners[index]
        if self._place.mesh is None or owner is None:
            return decode(leaf.format, leaf.codes, leaf.scale)
        spec = self._spec(owner, [leaf.format])
        arrays = [array for array in (leaf.codes, leaf.scale) if array is not None]
        made: jax.Array = _mapped(
            lambda codes, scale=None: decode(leaf.format, codes, scale),
            self._place.mesh,
            (spec,) * len(arrays),
            spec,
        )(*(_resharded(array, self._place, spec) for array in arrays))
        return made

    def _spec(self, index: int, formats: Sequence[Format]) -> PartitionSpec:
        """Where a leaf lies while it is computed: every block of it on one device."""
        spec = self._place.specs[index]
        for form in formats:
            if form.block and not aligned(
                self._place.mesh, spec, self._leaves[index].shape, form.axis, form.block
            ):
                return without(spec, form.axis)
        return spec

    def run(self) -> Results:
        """Computes everything."""
        outs = self._program.jaxpr.outvars
        number = len(self._leaves)
        tasks = [
            self._task(leaf, outs[leaf.at], [outs[number + j] for j in leaf.mirrors])
            for leaf in self._leaves
        ]
        found = self._sharded(tasks) if self._place.mesh is not None else self._local(tasks)
        state = [
            None if owner is not None else _as_before(old, self._whole(out))
            for owner, old, out in zip(self._owners, self._stored, outs[number:], strict=True)
        ]
        leaves: list[Any] = []
        extras: list[Any] = []
        for leaf in self._leaves:
            results = iter(found[leaf.at])
            leaves.append(next(results))
            extras.append(None if self._given.extras[leaf.at] is None else next(results))
            for j in leaf.mirrors:
                old = self._stored[j]
                if is_encoded(old):
                    codes = next(results)
                    scale = None if old.scale is None else next(results)
                    state[j] = Encoded(codes, scale, old.format)
                else:
                    state[j] = next(results)
        return Results(leaves, extras, jax.tree.unflatten(self._state_tree, state))

    def whole_leaves(self) -> list[str]:
        """The paths of the parameters whose updates or moments are not made element by element."""
        program, number = self._program, len(self._leaves)
        outs = program.jaxpr.outvars
        return [
            leaf.path
            for leaf in self._leaves
            if any(
                program.kind(out).leaf not in (leaf.at, -1)
                for out in (outs[leaf.at], *(outs[number + j] for j in leaf.mirrors))
                if not isinstance(out, Literal)
            )
        ]

    def _task(self, leaf: _Leaf, update: Any, states: Sequence[Any]) -> _Task:
        """How one leaf is computed."""
        program, stored = self._program, [self._stored[j] for j in leaf.mirrors]
        outs = [update, *states]
        own = [out for out in outs if program.kind(out).leaf in (leaf.at, -1)]
        equations, starts = program.elementwise(own)
        arguments = self._arguments_of(leaf)
        whole = dict.fromkeys(
            var
            for var in (*starts, *(out for out in outs if out not in own))
            if not isinstance(var, Literal) and var not in arguments
        )
        is_number = {var: var.aval.shape == () != leaf.shape for var in whole}
        arrays = [var for var in whole if not is_number[var]]
        names = [var for var in whole if is_number[var]]
        operands = [
            *self._operands(leaf, stored),
            *(Operand(self._whole(var)) for var in arrays),
        ]
        formats = [one.format if is_encoded(one) else None for one in stored]
        body = Body(
            equations=equations,
            outs=outs,
            arguments=arguments,
            arrays=arrays,
            names=names,
            formats=formats,
            weights=self._options.weights,
            has_params=bool(self._params),
            has_extra=self._given.extras[leaf.at] is not None,
            is_in_place=self._is_in_place,
            shape=leaf.shape,
        )
        blocked = [form for form in formats if form is not None and form.block]
        unit = None
        if blocked:
            unit = Blocks(blocked[0].axis, math.lcm(*(form.block for form in blocked)))
        numbers = [self._whole(var) for var in names]
        # Without codes the compiler needs no temporaries, and eager calls keep theirs anyway.
        is_kept = any(is_on_host(operand.value) for operand in operands)
        if is_kept and not self._is_traced:
            raise StateError(
                f"the state of {leaf.path} lies on the host, and is fetched piece by piece by a "
                "compiled step: call it under `jax.jit`"
            )
        is_coded = unit is not None or self._options.weights.method != "nearest"
        is_cut = self._is_traced and (is_coded or is_kept)
        return _Task(leaf, operands, numbers, body, unit, is_cut)

    def _arguments_of(self, leaf: _Leaf) -> dict[Any, int]:
        """The arguments of the program that have the leaf's elements: -1 its gradient, -2 itself.

        The others are the places of its mirrors.
        """
        invars = self._program.jaxpr.invars
        found: dict[Any, int] = {}
        if self._grads[leaf.at].shape == leaf.shape:
            found[invars[leaf.at]] = -1
        number = len(self._leaves)
        for place, j in enumerate(leaf.mirrors):
            found[invars[number + j]] = place
        if self._params:
            found[invars[number + len(self._stored) + leaf.at]] = -2
        return found

    def _operands(self, leaf: _Leaf, stored: Sequence[Any]) -> list[Operand]:
        """The arrays of a leaf that are there before the step, in the order of `Body`."""
        operands: list[Operand] = []
        grad = self._grads[leaf.at]
        if self._is_in_place:
            operands.append(Operand(self._params[leaf.at], is_result=True))
        else:
            like = self._params[leaf.at] if self._params else grad
            dtype = self._program.jaxpr.outvars[leaf.at].aval.dtype  # type: ignore[attr-defined]
            operands.append(Operand(jnp.zeros_like(like, dtype=dtype), is_result=True))
            if self._params:
                operands.append(Operand(self._params[leaf.at]))
        if (extra := self._given.extras[leaf.at]) is not None:
            operands.append(Operand(extra, is_result=True))
        if grad.shape == leaf.shape:
            operands.append(Operand(grad))
        for one in stored:
            if not is_encoded(one):
                operands.append(Operand(one, is_result=True))
                continue
            operands.append(Operand(one.codes, is_result=True))
            if one.scale is not None:
                blocks = Blocks(one.format.axis, one.format.block)
                operands.append(Operand(one.scale, blocks, is_result=True))
        return operands

    @property
    def _limit(self) -> int:
        """How many elements make one piece."""
        return max(1, self._options.chunk_bytes // 4)

    def _keys(self, tasks: Sequence[_Task]) -> jax.Array:
        """What tells the noise of each array from that of others: of one leaf after the other."""
        given, options = self._given, self._options
        weights = _bits.step_seed(options.weights.seed, given.steps[0])
        fields = _bits.step_seed(options.seed, given.steps[1])
        names, is_field = [], []
        for task in tasks:
            own = [path_str(self._paths[j]) for j in task.leaf.mirrors]
            names += [f"{task.leaf.path}#param", *own]
            is_field += [False, *(True for _ in own)]
        return _bits.noise_keys(jnp.where(np.asarray(is_field), fields, weights), names)

    @property
    def _zero(self) -> jax.Array:
        """A zero that the compiler does not know to be one."""
        step = self._given.steps[1] if isinstance(self._given.steps[1], jax.Array) else None
        step = self._given.steps[0] if step is None else step
        return jnp.minimum(jnp.asarray(step, jnp.int32), 0)

    def _local(self, tasks: Sequence[_Task]) -> list[list[jax.Array]]:
        works = []
        keys = self._keys(tasks)
        for task, first in zip(tasks, _first_keys(tasks), strict=True):
            shape = task.leaf.shape
            part = Part((0,) * len(shape), None)
            data = Data(task.numbers, keys, first)
            is_cut = task.is_cut and not self._place.is_hidden
            works.append(_work(task, task.operands, part, data, is_cut=is_cut))
        return stream(works, self._limit, self._zero)

    def _sharded(self, tasks: Sequence[_Task]) -> list[list[jax.Array]]:
        """The same on each device's part of every leaf; nothing is sent anywhere."""
        mesh = self._place.mesh
        specs = [
            self._spec(task.leaf.at, [form for form in task.body.formats if form]) for task in tasks
        ]

        def run(arrays: Any, numbers: Any, keys: jax.Array, zero: jax.Array) -> Any:
            works = []
            rows = zip(tasks, specs, arrays, numbers, _first_keys(tasks), strict=True)
            for task, spec, values, own, first in rows:
                shape = tuple(values[0].shape)
                operands = [
                    operand._replace(value=value)
                    for operand, value in zip(task.operands, values, strict=True)
                ]
                part = Part(local_origin(mesh, spec, shape), shape)
                data = Data(own, keys, first)
                works.append(_work(task, operands, part, data, is_cut=task.is_cut, place=str(spec)))
            return stream(works, self._limit, zero)

        arrays = [
            [_resharded(operand.value, self._place, spec) for operand in task.operands]
            for task, spec in zip(tasks, specs, strict=True)
        ]
        numbers = [task.numbers for task in tasks]
        whole = PartitionSpec()
        in_specs = (
            [[spec] * len(task.operands) for task, spec in zip(tasks, specs, strict=True)],
            *(whole, whole, whole),
        )
        out_specs = [
            [spec] * sum(operand.is_result for operand in task.operands)
            for task, spec in zip(tasks, specs, strict=True)
        ]
        inputs = arrays, numbers, self._keys(tasks), self._zero
        found = _mapped(run, mesh, in_specs, out_specs)(*inputs)
        return [
            [
                _back(new, old)
                for new, old in zip(
                    made,
                    [operand.value for operand in task.operands if operand.is_result],
                    strict=True,
                )
            ]
            for task, made in zip(tasks, found, strict=True)
        ]


def _first_keys(tasks: Sequence[_Task]) -> list[np.uint32]:
    """Where those of each leaf begin."""
    ends = itertools.accumulate(1 + len(task.leaf.mirrors) for task in tasks)
    return [np.uint32(first) for first in (0, *ends)][:-1]


def _work(
    task: _Task,
    operands: Sequence[Operand],
    part: Part,
    data: Data,
    *,
    is_cut: bool,
    place: str = "",
) -> Work:
    units = {} if task.unit is None else {task.unit.axis: task.unit.size}
    shape = task.leaf.shape if part.shape is None else part.shape
    types = tuple((x.value.shape, x.value.dtype, x.blocks, x.is_result) for x in operands)
    key = task.body.key(), types, place
    return Work(shape, operands, functools.partial(task.body, part), units, is_cut, data, key)


def _array(leaf: Any) -> Any:
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)


def _identity(value: Any) -> Any:
    return value


def _as_before(old: Any, new: Any) -> Any:
    """A leaf of the state in the dtype that it had, not weakly typed unless it was."""
    if jnp.issubdtype(old.dtype, jax.dtypes.extended):
        return new
    new = jnp.asarray(new)
    if new.dtype == old.dtype and jax.typeof(new) == jax.typeof(old):
        return new
    return new.astype(old.dtype)


def _split_args(extra_args: Mapping[str, Any]) -> tuple[Callable[[Sequence[Any]], Any], list[Any]]:
    """The arrays among the extra arguments, and the way to put them back."""
    leaves, tree = jax.tree.flatten(dict(extra_args))
    is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]

    def put_back(arrays: Sequence[Any]) -> Any:
        given = iter(arrays)
        return jax.tree.unflatten(
            tree, [next(given) if own else leaf for leaf, own in zip(leaves, is_array, strict=True)]
        )

    return put_back, [leaf for leaf, own in zip(leaves, is_array, strict=True) if own]


def _mapped(function: Any, mesh: Any, in_specs: Any, out_specs: Any) -> Any:
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def _resharded(array: jax.Array, place: Place, spec: PartitionSpec) -> jax.Array:
    """An array in the places that blocks need; for types that say where it is."""
    sharding = jax.typeof(array).sharding
    if sharding.mesh.empty or not sharding.mesh.explicit_axes or sharding.spec == spec:
        return array
    moved: jax.Array = jax.sharding.reshard(array, spec)
    return moved


def _back(new: jax.Array, old: jax.Array) -> jax.Array:
    """A result where its source was, if types say where that is."""
    sharding = jax.typeof(old).sharding
    is_same = jax.typeof(new).sharding == sharding
    if sharding.mesh.empty or not sharding.mesh.explicit_axes or is_same:
        return new
    moved: jax.Array = jax.sharding.reshard(new, sharding.spec)
    return moved
