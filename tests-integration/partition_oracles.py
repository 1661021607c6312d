"""Which dimension of a parameter a dimension of the state indexes, asked of Optax itself."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec
from jax.tree_util import keystr
from opt_partition import Explanation
from optax_table import TABLE, Case

Shape = tuple[int, ...]
Tree = Any
# For each dimension of each state leaf its logical name, `None` or `UNKNOWN`, by path.
Axes = dict[str, tuple[Any, ...]]
UNKNOWN = "?"
STEPS = 3  # two mini-steps fill an accumulator, a third leaves something in it
CHANGE = 2

# Sizes that repeat, within a parameter and among them; some that do not divide by the mesh.
EQUAL: dict[str, Any] = {
    "scalar": (),
    "bias": (16,),
    "square": (16, 16),
    "odd": (6, 10),
    "layers": {"w": (8, 8, 8)},
    "empty": (0, 16),
}


def is_shape(node: Any) -> bool:
    return isinstance(node, tuple) and all(isinstance(size, int) for size in node)


def path_of(path: Any) -> str:
    return keystr(path, simple=True, separator="/")


def structs(shapes: Tree, case: Case) -> Tree:
    """The parameters as shapes, without those that the transformation cannot work with."""
    kept = {name: shape for name, shape in shapes.items() if name not in case.without}
    return case.wrap(
        jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, case.dtype), kept, is_leaf=is_shape)
    )


def names(params: Tree) -> Tree:
    """A logical name for every dimension of every parameter, each only there."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: PartitionSpec(*(f"{path_of(path)}:{d}" for d in range(leaf.ndim))),
        params,
    )


def dimensions(params: Tree) -> Iterator[tuple[str, int]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        yield from ((path_of(path), dim) for dim in range(leaf.ndim))


def derived(explanation: Explanation) -> Axes:
    return {row.path: row.axes for row in explanation.rows}


def leaf_shapes(tree: Tree) -> dict[str, Shape]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_of(path): tuple(leaf.shape) for path, leaf in leaves}


def disagreements(ours: Axes, theirs: Axes) -> list[str]:
    assert ours.keys() == theirs.keys()
    return [
        f"{path}: derived {ours[path]}, oracle {theirs[path]}"
        for path in ours
        if any(
            mine != other
            for mine, other in zip(ours[path], theirs[path], strict=True)
            if other != UNKNOWN
        )
    ]


def axes_by_sizes(init: Callable[[Tree], Tree], params: Tree) -> Axes:
    sizes = leaf_shapes(params)

    def evaluate(target: str | None = None, dim: int = 0) -> dict[str, Shape]:
        def resized(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            if path_of(path) != target:
                return leaf
            shape = [*leaf.shape]
            shape[dim] += CHANGE
            return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

        changed = jax.tree_util.tree_map_with_path(resized, params)
        return leaf_shapes(jax.eval_shape(lambda p: init(p), changed))

    before = evaluate()
    moved = defaultdict(list)
    for path, dim in dimensions(params):
        for leaf, after in evaluate(path, dim).items():
            for axis, (old, new) in enumerate(zip(before[leaf], after, strict=True)):
                if old != new:
                    follows = old == sizes[path][dim] and new == old + CHANGE
                    moved[leaf, axis].append(f"{path}:{dim}" if follows else None)
    return {
        leaf: tuple(_only(moved[leaf, axis]) for axis in range(len(shape)))
        for leaf, shape in before.items()
    }


def _only(found: list[Any]) -> Any:
    return found[0] if len(found) == 1 else None


def loss(params: Tree, targets: Tree) -> jax.Array:
    """What varies in the targets varies in its gradient and in the diagonal of its Hessian."""

    def distance(p: jax.Array, t: jax.Array) -> jax.Array:
        square = jnp.real((p - t) * jnp.conj(p - t))
        return jnp.sum(square / 2 + square**2 / 20)

    distances = jax.tree.map(distance, params, targets)
    return sum(jax.tree.leaves(distances), start=jnp.zeros(()))


@functools.cache
def training_step(name: str) -> Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]:
    """A step of training on `EQUAL`: parameters, state and targets to parameters and state."""
    case = TABLE[name]
    return step_of(case, case.build(structs(EQUAL, case)))


def extras_of(
    case: Case, value_fn: Callable[[Tree], jax.Array], params: Tree
) -> tuple[Tree, dict[str, Any]]:
    """Gradients, and the extra arguments that an update wants besides."""
    value, grads = jax.value_and_grad(value_fn)(case.fast(params))
    grads = jax.tree.map(jnp.conj, grads)
    known = {
        "value": value,
        "grad": grads,
        "value_fn": value_fn,
        "obj_fn": value_fn,
        "grad_fn": lambda p, _: jax.grad(value_fn)(p),
        "sum_sq_diff_grads": jax.tree.map(jnp.square, grads),
        "sample_size": 4,
    }
    return grads, {extra: known[extra] for extra in case.extras}


def step_of(case: Case, tx: Any) -> Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]:
    def step(params: Tree, state: Tree, targets: Tree) -> tuple[Tree, Tree]:
        grads, extras = extras_of(case, lambda p: loss(p, case.fast(targets)), params)
        updates, state = tx.update(case.gradients(grads), state, params, **extras)
        # Some leaves change between weak types and others: the program would be compiled again.
        state = jax.tree.map(strongly_typed, state)
        return optax.apply_updates(params, updates), state

    return step


def strongly_typed(leaf: jax.Array) -> jax.Array:
    return leaf if is_key(leaf) else jax.lax.convert_element_type(leaf, leaf.dtype)


def is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


# The programs are run a few times each: most of the time would go into optimizing them.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@functools.cache
def on_one_device(name: str) -> Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]:
    return jax.jit(training_step(name), compiler_options=QUICK)


def first_state(name: str, params: Tree) -> Tree:
    """The state, each leaf a buffer of its own, and of no weak type."""
    state = TABLE[name].build(structs(EQUAL, TABLE[name])).init(params)
    return jax.tree.map(lambda leaf: jnp.array(leaf, leaf.dtype, copy=True), state)


def train(name: str, data: list[Tree]) -> tuple[Tree, Tree]:
    """Parameters and state after a step for each tree of targets; the first tree begins."""
    params, *targets = data
    state = first_state(name, params)
    for target in targets:
        params, state = on_one_device(name)(params, state, target)
    return params, state


def varying(params: Tree, path: str | None = None, dim: int = 0) -> list[Tree]:
    """Data that varies along one dimension of one parameter, and along nothing if there is none.

    So do the signs of the gradients, and those of the products of one with the next.
    """
    rng = np.random.default_rng(0)

    def leaf(at: Any, struct: jax.ShapeDtypeStruct, level: float, size: float, run: int) -> Any:
        values = np.full(struct.shape, level)
        if path_of(at) == path:
            length = struct.shape[dim]
            signs = (-1.0) ** (np.arange(length) // run)
            along = signs * rng.uniform(size / 2, size, length)
            values = values + along.reshape([-1] + [1] * (struct.ndim - 1 - dim))
        if jnp.issubdtype(struct.dtype, jnp.complexfloating):
            values = values * (1 + 0.5j)
        return values.astype(struct.dtype)

    kinds = ((1.0, 0.1, 1), (0.4, 4.0, 1), (1.7, 4.0, 2), (-0.3, 4.0, 1))
    return [
        jax.tree_util.tree_map_with_path(
            functools.partial(leaf, level=level, size=size, run=run), params
        )
        for level, size, run in kinds
    ]


def numbers(tree: Tree) -> dict[str, np.ndarray]:
    """The leaves as arrays of plain numbers."""
    result = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if is_key(leaf):
            continue
        array = np.asarray(leaf)
        result[path_of(path)] = array if array.dtype.kind == "c" else array.astype(np.float64)
    return result


def shard_bytes(tree: Tree) -> list[int]:
    """Bytes of what each device holds."""
    held = dict.fromkeys(jax.devices(), 0)
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            data = jax.random.key_data(shard.data) if is_key(leaf) else shard.data
            held[shard.device] += data.nbytes
    return list(held.values())


def axes_by_variation(name: str, params: Tree) -> Axes:
    def varies(data: list[Tree]) -> dict[tuple[str, int], bool]:
        result = {}
        for leaf, array in numbers(train(name, data)[1]).items():
            for axis in range(array.ndim):
                if array.size:
                    spread = np.max(np.ptp(array, axis=axis))
                    result[leaf, axis] = bool(spread > 1e-3 * np.max(np.abs(array)))
        return result

    always = varies(varying(params))
    sizes = leaf_shapes(params)
    follows = defaultdict(list)
    for path, dim in dimensions(params):
        # The slow copy of a parameter, which overwrites the fast one, varies it as well.
        if path.startswith("slow/"):
            continue
        if all(sizes[path]) and sizes[path][dim] > 1:
            for key, is_so in varies(varying(params, path, dim)).items():
                if is_so and not always[key]:
                    follows[key].append(f"{path}:{dim}")
    shapes = leaf_shapes(jax.eval_shape(TABLE[name].build(params).init, params))
    return {
        leaf: tuple(
            _only(follows[leaf, axis]) if size > 1 and all(shape) else UNKNOWN
            for axis, size in enumerate(shape)
        )
        for leaf, shape in shapes.items()
    }


def random_data(params: Tree, seed: int = 0) -> list[Tree]:
    rng = np.random.default_rng(seed)

    def leaf(struct: jax.ShapeDtypeStruct) -> np.ndarray:
        values = rng.standard_normal(struct.shape)
        if jnp.issubdtype(struct.dtype, jnp.complexfloating):
            values = values + 1j * rng.standard_normal(struct.shape)
        return np.asarray(values, struct.dtype)

    return [jax.tree.map(leaf, params) for _ in range(1 + STEPS)]
