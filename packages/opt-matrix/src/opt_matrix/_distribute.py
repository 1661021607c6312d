"""Any computation with whole matrices, shared out over a mesh."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from opt_matrix._groups import Group, size
from opt_matrix._matrices import Matrices, leaves_by_path, path_str
from opt_matrix._plan import MAX_GROUP_BYTES, MatrixPlan, plan_matrices, scope
from opt_matrix._transfer import on_whole_matrices, place_like, placed, split
from opt_matrix.errors import OptionError, PlanError


@dataclasses.dataclass(frozen=True, eq=False)
class Distributed:
    """A function of matrices, applied to the leaves of a tree as planned; made by `distribute`.

    Attributes:
      plan: who computes with what.
      fn: of `[matrices, rows, columns]`, or of that and its state.
      init_fn: makes the state; `None` where there is none.
    """

    plan: MatrixPlan
    fn: Callable[..., Any]
    init_fn: Callable[..., Any] | None = None

    def init(self) -> tuple[Any, ...]:
        """Returns the state of each group, made on the devices that hold it."""
        init_fn = self.init_fn
        if init_fn is None:
            return ()

        def init_group(group: Group) -> Any:
            parts = size(self.plan.mesh_shape, group.stack_axes)
            numbers = jnp.asarray(self.plan.numbers(group)).reshape(parts, -1)
            here = numbers[lax.axis_index(group.stack_axes) if group.stack_axes else 0]
            rows, columns = group.shape
            states = [
                init_fn(jax.ShapeDtypeStruct((len(here), rows, width), group.kind.dtype), here)
                for width in group.kind.split or (columns,)
            ]
            for leaf in jax.tree.leaves(states):
                if leaf.shape[:1] != here.shape:
                    raise OptionError(
                        f"`init` must return arrays with a row for each of {len(here)} matrices; "
                        f"got one of shape {leaf.shape} for {group.leaves[0]}"
                    )
            return tuple(states) if group.kind.split else states[0]

        def body() -> tuple[Any, ...]:
            return tuple(map(init_group, self.plan.groups))

        states: tuple[Any, ...] = _shard_map(body, self.plan.mesh, (), self._state_specs)()
        return states

    def apply(
        self,
        tree: Any,
        state: Sequence[Any] = (),
        *others: Any,
        prepare: Callable[..., Any] | None = None,
        scalars: Any = (),
    ) -> tuple[Any, tuple[Any, ...]]:
        """Returns what the function makes of the matrices of a tree, and the new state.

        Args:
          tree: like the parameters that were planned for. Leaves that hold no matrices may be left
            out, and come back as they are.
          state: what `init` or the last call returned; `()` where there is none.
          *others: trees like `tree`, for `prepare`.
          prepare: makes what the function is applied to, element by element, of `scalars`, a part
            of a leaf of `tree` and that of each of `others`, when the turn of a group has come.
          scalars: numbers for `prepare`, the same on all devices.

        Raises:
          PlanError: the tree is not the one that was planned for.
          OptionError: the function returns other shapes than it was given.
        """
        plan, leaves = self.plan, leaves_by_path(tree)
        _check_tree(plan, leaves)
        if len(state) != (len(plan.groups) if self.init_fn else 0):
            raise PlanError(
                f"`state` is of {len(state)} groups, and the plan has {len(plan.groups)}: it was "
                "made for another one"
            )
        specs = {path: layout.partition_spec for path, layout in plan.layouts.items()}
        body = functools.partial(self._body, prepare or (lambda _, x: x))
        trees = tuple(
            {path: placed(each[path], specs[path]) for path in plan.layouts}
            for each in (leaves, *map(leaves_by_path, others))
        )
        in_specs = (PartitionSpec(), (specs,) * len(trees), self._state_specs)
        mapped = _shard_map(body, plan.mesh, in_specs, (specs, self._state_specs))
        stacks = tuple(
            jax.tree.map(functools.partial(placed, spec=spec), each)
            for each, spec in zip(state, self._state_specs, strict=True)
        )
        results, stacks = mapped(scalars, trees, stacks)

        new = jax.tree_util.tree_map_with_path(lambda p, leaf: results.get(path_str(p), leaf), tree)
        return new, jax.tree.map(place_like, stacks, tuple(state))  # as ZeRO may have placed it

    def restack(self, state: Sequence[Any], before: MatrixPlan) -> tuple[Any, ...]:
        """Returns the state of the same matrices under another plan, in the stacks of this one.

        For a run that goes on with another mesh or another `max_group_bytes`.

        Args:
          state: of `before`, on the devices of this plan or on the host.
          before: the plan that it was made for, perhaps on an `AbstractMesh`.

        Raises:
          PlanError: the plans are of other matrices, or the state is not of `before`.
        """
        plan = self.plan
        _check_same_matrices(before, plan)
        if len(state) != len(before.groups):
            raise PlanError(
                f"`state` is of {len(state)} groups, and `before` has {len(before.groups)}"
            )
        states, specs = [], self._state_specs
        for group, spec, start in zip(plan.groups, specs, self.init(), strict=True):
            olds = [
                n for n, old in enumerate(before.groups) if old.kind.family == group.kind.family
            ]
            order = np.concatenate([before.numbers(before.groups[n]) for n in olds])
            rows = {number: row for row, number in enumerate(order) if number >= 0}
            found = [rows.get(number) for number in plan.numbers(group)]
            move = functools.partial(_moved_rows, found, spec)
            states.append(jax.tree.map(move, start, *(state[n] for n in olds)))
        place = _shard_map(lambda *states: states, plan.mesh, specs, specs)
        restacked: tuple[Any, ...] = place(*states)
        return restacked

    @property
    def _state_specs(self) -> tuple[PartitionSpec, ...]:
        """The layout of the state of each group: all its leaves have a row for each matrix."""
        groups = () if self.init_fn is None else self.plan.groups
        return tuple(PartitionSpec(group.stack_axes or None) for group in groups)

    def _body(
        self,
        prepare: Callable[..., Any],
        scalars: Any,
        trees: tuple[dict[str, jax.Array], ...],
        states: tuple[Any, ...],
    ) -> tuple[dict[str, jax.Array], tuple[Any, ...]]:
        """What each device does, one group after the other: that bounds what is alive at a time."""
        plan = self.plan
        first, *others = (
            {path: plan.layouts[path].dims.stacked(leaf) for path, leaf in leaves.items()}
            for leaves in trees
        )
        results = {}  # written over the first tree: no second copy of what was donated
        for path, block in first.items():
            new = jax.eval_shape(prepare, scalars, block, *(each[path] for each in others))
            results[path] = block.astype(jnp.promote_types(block.dtype, new.dtype))

        def compute(group: Group, state: Any, last: Any, turn: Any, leaves: Any) -> Any:
            """Returns leaves with the results of a group, its stack of them, and its new state."""
            starts = [start + turn * group.count for start, _ in group.parts]
            counts = [stop - start for start, stop in group.parts]
            prepared = []
            for path, start, count in zip(group.leaves, starts, counts, strict=True):
                parts = [
                    lax.dynamic_slice_in_dim(each[path], start, count) for each in (leaves, *others)
                ]
                parts[0] = _after(last, parts[0].astype(first[path].dtype))
                prepared.append(prepare(scalars, *parts).astype(group.kind.dtype))
            function = functools.partial(self._compute, group, state)
            whole = jnp.concatenate(prepared)
            stack, state = on_whole_matrices(function, group, plan.mesh_shape, whole)
            pieces = jnp.split(stack, list(itertools.accumulate(counts))[:-1])
            written = {
                path: lax.dynamic_update_slice_in_dim(
                    leaves[path], piece.astype(leaves[path].dtype), start, 0
                )
                for path, start, piece in zip(group.leaves, starts, pieces, strict=True)
            }
            return written, stack, state

        new_states = []
        last: jax.Array | None = None
        for number, turns in _loops(plan.groups, has_state=bool(states)):
            group, state = plan.groups[number], states[number] if states else None
            leaves = {path: results[path] for path in group.leaves}
            step = functools.partial(compute, group, state, last)
            with jax.named_scope(scope(number)):
                if turns == 1:
                    leaves, last, state = step(0, leaves)
                else:
                    leaves = lax.fori_loop(0, turns, lambda n, x, step=step: step(n, x)[0], leaves)
                    (last,) = leaves.values()
            results |= leaves
            new_states.append(state)
        leaves = {
            path: plan.layouts[path].dims.unstacked(results[path], leaf.shape)
            for path, leaf in trees[0].items()
        }
        return leaves, tuple(new_states) if states else ()

    def _compute(self, group: Group, state: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        """Returns what the function makes of a stack, in the dtype of the group, and its state."""
        if group.way.split:
            y = split(self.fn, group, x)
        elif self.init_fn is None:
            y = side_by_side(self.fn, group.kind.split, x)
        elif not group.kind.split:
            y, state = self.fn(x, state)
        else:
            parts = _parts(group.kind.split, x)
            results = [self.fn(part, own) for part, own in zip(parts, state, strict=True)]
            y = jnp.concatenate([y for y, _ in results], axis=-1)
            state = tuple(new for _, new in results)
        if y.shape != x.shape:
            raise OptionError(
                f"`fn` must return stacks as it is given; of {group.leaves[0]} it was given "
                f"{x.shape} and has returned {y.shape}"
            )
        return y.astype(group.kind.dtype), state


class PlannedTransformation(optax.GradientTransformation):
    """A transformation with state in the stacks of a plan.

    Attributes:
      plan: who computes with what.
      restack: of a state and its plan, that state in the stacks of `plan`; see `Distributed`.
    """

    plan: MatrixPlan
    restack: Callable[[Any, MatrixPlan], Any]

    def __new__(
        cls, init: Any, update: Any, plan: MatrixPlan, restack: Callable[[Any, MatrixPlan], Any]
    ) -> PlannedTransformation:
        """Takes the functions, and the attributes."""
        self = super().__new__(cls, init, update)
        self.plan, self.restack = plan, restack
        return self


def distribute(
    fn: Callable[..., Any],
    params: Any,
    shardings: Any,
    mesh: Mesh | AbstractMesh,
    *,
    matrices: Matrices | None = None,
    init: Callable[..., Any] | None = None,
    max_group_bytes: int = MAX_GROUP_BYTES,
    world_axes: Sequence[str] | None = None,
) -> Distributed:
    """Shares out a computation with whole matrices over a mesh.

    Args:
      fn: maps stacks `[matrices, rows, columns]` to the same shape, each matrix for itself. With
        `init`, maps a stack and its state to a stack and the new state. `fn.dtype`, where there is
        one, is what matrices are sent in, and `fn.flops(rows, columns)` what one costs.
      params: arrays or `jax.ShapeDtypeStruct`s; see `plan_matrices` for this and what follows.
      shardings: where each leaf lies.
      mesh: an `AbstractMesh` is enough for a plan; to compute, set the mesh with `jax.set_mesh`.
      matrices: which leaves hold matrices, those of two dimensions by default.
      init: makes the state of some matrices from a `jax.ShapeDtypeStruct` of their stack and their
        numbers `[matrices]`, which do not depend on the mesh (padding has -1). Each leaf of the
        state has a row for each matrix. It stays on the device that computes with the matrix.
      max_group_bytes: bounds the temporaries.
      world_axes: the mesh axes that whole matrices may be handed out over.

    Raises:
      UndecidedError: `matrices` does not decide a leaf.
      PlanError: parameters, shardings and mesh do not fit together.

    Examples:
      >>> mesh = jax.make_mesh((1,), ('x',))
      >>> params = {'w': jnp.array([[0.0, 2.0], [1.0, 0.0]])}
      >>> def inverse(x):
      ...     return jnp.linalg.inv(x)
      >>> inverses, _ = jax.jit(distribute(inverse, params, None, mesh).apply)(params)
      >>> inverses['w'].tolist()
      [[0.0, 1.0], [0.5, 0.0]]
    """
    if not callable(fn):
        raise OptionError(f"`fn` must be a function of a stack of matrices; got {fn!r}")
    plan = plan_matrices(
        params,
        shardings,
        mesh,
        Matrices.by_rank2() if matrices is None else matrices,
        fn=fn,
        max_group_bytes=max_group_bytes,
        world_axes=world_axes,
    )
    return Distributed(plan, fn, init)


def side_by_side(fn: Callable[..., Any], widths: Sequence[int], x: jax.Array) -> jax.Array:
    """Returns what a function makes of matrices of these widths that lie in one; `()` is one."""
    return jnp.concatenate([fn(part) for part in _parts(widths, x)], -1) if widths else fn(x)


def _loops(groups: Sequence[Group], *, has_state: bool) -> list[tuple[int, int]]:
    """The first group of each loop, and how many equal parts of one leaf it computes in turn."""
    loops: list[tuple[int, int]] = []  # of groups with state, each by itself
    for number, group in enumerate(groups):
        if loops and not has_state and group.continues(groups[number - 1]):
            first, turns = loops.pop()
            loops.append((first, turns + 1))
        else:
            loops.append((number, 1))
    return loops


def _parts(widths: Sequence[int], x: jax.Array) -> list[jax.Array]:
    return jnp.split(x, list(itertools.accumulate(widths))[:-1], axis=-1)


def _after(first: jax.Array | None, x: jax.Array) -> jax.Array:
    """Returns `x`, as something that is not known before `first` is."""
    # XLA drops an `optimization_barrier` before it orders instructions, and would then have the
    # buffers of several groups at a time. What it cannot prove to be zero is added to the bits.
    if first is None:
        return x
    known = lax.bitcast_convert_type(first.ravel()[0], _bits_of(first)).astype(jnp.uint32)
    zero = known % lax.optimization_barrier(jnp.uint32(1))
    bits = lax.bitcast_convert_type(x, _bits_of(x))
    return lax.bitcast_convert_type(bits + zero.astype(bits.dtype), x.dtype)


def _bits_of(x: jax.Array) -> Any:
    return jnp.dtype(f"uint{8 * x.dtype.itemsize}")


def _moved_rows(
    rows: Sequence[int | None], spec: PartitionSpec, start: jax.Array, *parts: Any
) -> Any:
    """Returns these rows of the concatenated parts; of `start`, where there is none."""
    stack = jnp.concatenate([placed(part, PartitionSpec()) for part in parts])
    moved = stack[np.array([row or 0 for row in rows])].astype(start.dtype)
    is_moved = np.array([row is not None for row in rows]).reshape(-1, *[1] * (start.ndim - 1))
    return placed(jnp.where(is_moved, moved, placed(start, PartitionSpec())), spec)


def _check_tree(plan: MatrixPlan, leaves: Mapping[str, Any]) -> None:
    plan.dims_of(leaves)  # raises an error for leaves that were not planned for
    problems = [f"{path}: planned, and not there" for path in plan.layouts if path not in leaves]
    problems += [
        f"{path}: planned with the shape {layout.shape}, and is {tuple(leaves[path].shape)}"
        for path, layout in plan.layouts.items()
        if path in leaves and tuple(leaves[path].shape) != layout.shape
    ]
    mesh, current = plan.mesh, jax.sharding.get_abstract_mesh()
    if isinstance(mesh, AbstractMesh) and mesh.explicit_axes and current.empty:
        problems += [
            f"{path}: planned for an abstract mesh, and lies on none; use `jax.set_mesh`"
            for path, leaf in leaves.items()
            if jax.typeof(leaf).sharding.mesh.empty
        ]
    if problems:
        raise PlanError("the tree is not the one that was planned for:\n  " + "\n  ".join(problems))


def _check_same_matrices(before: MatrixPlan, after: MatrixPlan) -> None:
    old, new = (
        {path: (layout.shape, layout.dims) for path, layout in plan.layouts.items()}
        for plan in (before, after)
    )
    if others := [path for path in {**old, **new} if old.get(path) != new.get(path)]:
        raise PlanError(f"`before` is a plan of other matrices; they differ in {others}")


def _shard_map(
    body: Callable[..., Any], mesh: Mesh | AbstractMesh, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    if isinstance(mesh, AbstractMesh):
        current = jax.sharding.get_abstract_mesh()
        if not current.empty and dict(current.shape) != dict(mesh.shape):
            raise PlanError(
                f"the plan is for an abstract mesh of {dict(mesh.shape)}: compute under "
                f"`jax.set_mesh` of such a mesh; set is {dict(current.shape)}"
            )
        mesh = mesh if current.empty else current
    # Without the check of varying axes: it does not know that what is gathered is the same.
    mapped: Callable[..., Any] = jax.shard_map(
        body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return mapped
