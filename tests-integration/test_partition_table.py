"""The derived axes of every transformation of Optax, held against what we did not write.

1. Sizes: one dimension of one parameter is changed, and the state's dimensions that move follow it.
2. Values: parameters and gradients vary along one dimension of one parameter only, and after real
   updates so do those dimensions of the state that index it. That tells equal sizes apart.
3. Devices: a training step with the derived shardings runs on eight, keeps them, computes what one
   device computes, and no device holds a byte more than the layout says.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec
from jax.tree_util import keystr
from opt_partition import Explanation, Layout, explain, logical_to_mesh
from optax_table import NOT_CONSTRUCTORS, TABLE, Case, exported

Shape = tuple[int, ...]
Tree = Any
# For each dimension of each state leaf its logical name, `None` or `UNKNOWN`, by path.
Axes = dict[str, tuple[Any, ...]]
UNKNOWN = "?"
STEPS = 3  # two mini-steps fill an accumulator, a third leaves something in it

# Within a parameter, sizes differ by more than the probe changes them; none comes near MIN_DIM.
DISTINCT: dict[str, Any] = {
    "scalar": (),
    "bias": (20,),
    "kernel": (32, 44),
    "small": (5, 12),
    "conv": (3, 24, 40),
    "row": (1, 40),
    "layers": {"w": (4, 60, 36), "b": (4, 48)},
    "empty": (0, 28),
}
# Sizes that repeat, within a parameter and among them; some that do not divide by the mesh.
EQUAL: dict[str, Any] = {
    "scalar": (),
    "bias": (16,),
    "square": (16, 16),
    "odd": (6, 10),
    "layers": {"w": (8, 8, 8)},
    "empty": (0, 16),
}
CHANGE = 2


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


def test_the_table_has_every_constructor_that_optax_exports() -> None:
    tried = {name.partition(":")[0] for name in TABLE}
    assert set(exported()) - tried - NOT_CONSTRUCTORS == set()
    assert all(not exported()[name] for name in NOT_CONSTRUCTORS & set(exported()))


# 1. Sizes


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


@pytest.mark.parametrize("name", TABLE)
def test_a_dimension_of_the_state_is_named_after_the_one_it_moves_with(name: str) -> None:
    case = TABLE[name]
    params = structs(DISTINCT, case)
    tx = case.build(params)
    explanation = explain(tx, params, names(params))
    assert disagreements(derived(explanation), axes_by_sizes(tx.init, params)) == []


class Block(NamedTuple):
    kernel: Any
    bias: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: Any
    bias: Any
    name: str = dataclasses.field(default="layer", metadata={"static": True})


class Module(eqx.Module):
    linear: eqx.nn.Linear
    table: Any
    activation: Callable[[Any], Any] = jax.nn.relu


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


CONTAINERS: dict[str, Tree] = {
    "array": struct(20, 32),
    "FrozenDict": flax.core.freeze({"a": {"w": struct(20, 32), "b": struct(32)}}),
    "list": [struct(20, 32), [struct(32), struct(3, 20, 32)]],
    "tuple": (struct(20, 32), (struct(36),)),
    "NamedTuple": {"a": Block(struct(20, 32), struct(32)), "b": Block(struct(24, 36), struct(36))},
    "dataclass": [Layer(struct(20, 32), struct(32)), Layer(struct(24, 36), struct(36))],
    "None": {"a": struct(20, 32), "b": None, "c": (None, struct(12))},
    "mixed dtypes": {"a": struct(20, 32, dtype=jnp.bfloat16), "b": struct(20, 32), "c": struct(20)},
    "Equinox": eqx.filter(
        eqx.filter_eval_shape(
            lambda key: Module(eqx.nn.Linear(20, 32, key=key), jnp.zeros((12, 24))),
            jax.random.key(0),
        ),
        lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct),
    ),
}
IN_CONTAINERS = (
    "adamw",
    "adafactor: momentum",
    "sm3",
    "lbfgs",
    "flatten",
    "masked",
    "partition",
    "MultiSteps: factored",
    "inject_hyperparams: adafactor",
    "contrib.muon",
    "contrib.schedule_free: factored",
    "user: in a chain",
)


@pytest.mark.parametrize("name", IN_CONTAINERS)
@pytest.mark.parametrize("container", CONTAINERS)
def test_parameters_may_be_in_any_container(container: str, name: str) -> None:
    params = CONTAINERS[container]
    tx = TABLE[name].build(params)
    explanation = explain(tx, params, names(params))
    structure: Any = jax.tree.structure(explanation.axes)
    assert structure == jax.tree.structure(jax.eval_shape(tx.init, params))
    assert disagreements(derived(explanation), axes_by_sizes(tx.init, params)) == []


# 2. Values


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


def step_of(case: Case, tx: Any) -> Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]:
    def step(params: Tree, state: Tree, targets: Tree) -> tuple[Tree, Tree]:
        def value_fn(p: Tree) -> jax.Array:
            return loss(p, case.fast(targets))

        value, grad = jax.value_and_grad(value_fn)(case.fast(params))
        grad = jax.tree.map(jnp.conj, grad)
        known = {
            "value": value,
            "grad": grad,
            "value_fn": value_fn,
            "obj_fn": value_fn,
            "grad_fn": lambda p, _: jax.grad(value_fn)(p),
            "sum_sq_diff_grads": jax.tree.map(jnp.square, grad),
            "sample_size": 4,
        }
        extras = {extra: known[extra] for extra in case.extras}
        updates, state = tx.update(case.gradients(grad), state, params, **extras)
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


def axes_by_shifts(name: str, params: Tree) -> Axes:
    """Shift all data along one dimension of one parameter; see which dimension is shifted.

    Up to signs, for those of singular vectors are anybody's.
    """
    data = random_data(params)
    before = numbers(train(name, data)[1])
    follows = defaultdict(list)
    for path, dim in dimensions(params):
        size = leaf_shapes(params)[path][dim]

        def shifted(at: Any, leaf: Any, path: str = path, dim: int = dim) -> Any:
            return np.roll(leaf, 1, axis=dim) if path_of(at) == path else leaf

        changed = [jax.tree_util.tree_map_with_path(shifted, tree) for tree in data]
        after = numbers(train(name, changed)[1])
        for leaf, array in before.items():
            for axis in range(array.ndim):
                if array.shape[axis] == size and array.size:
                    expected = np.abs(np.roll(array, 1, axis=axis))
                    same = np.allclose(expected, np.abs(after[leaf]), rtol=1e-2, atol=1e-4)
                    if same and not np.allclose(expected, np.abs(array), rtol=1e-2, atol=1e-4):
                        follows[leaf, axis].append(f"{path}:{dim}")
    return {
        leaf: tuple(
            _only(follows[leaf, axis]) if array.size else UNKNOWN for axis in range(array.ndim)
        )
        for leaf, array in before.items()
    }


ORACLES = {"variation": axes_by_variation, "shifts": axes_by_shifts}


@functools.cache
def explained(name: str) -> Explanation:
    params = structs(EQUAL, TABLE[name])
    return explain(TABLE[name].build(params), params, names(params))


@pytest.mark.parametrize("name", TABLE)
def test_a_dimension_of_the_state_varies_with_the_one_it_is_named_after(name: str) -> None:
    params = structs(EQUAL, TABLE[name])
    theirs = ORACLES[TABLE[name].oracle](name, params)
    assert disagreements(derived(explained(name)), theirs) == []


# 3. Devices

# What is summed over shards is summed in another order: that moves a few units in the last place
# of float32, 6e-8, and three steps that divide differences of such sums make up to 2e-5 of it
# (measured). A collective that is missing or done twice is off by a factor. A value that is rounded
# to bfloat16 can fall to either side: one unit in the last place there is 2**-8.
RTOL = 1e-4
RTOL_BFLOAT16 = 2.0**-7


def mesh_of(kind: AxisType) -> Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))


def layouts(name: str, mesh: Mesh) -> tuple[Layout, Layout]:
    """Where parameters and state lie: the last two dimensions over `data` and `model`."""
    params = structs(EQUAL, TABLE[name])
    sizes = leaf_shapes(params)
    rules = [
        (f"{path}:{dim}", [None, "data", "model"][max(0, dim - max(0, len(sizes[path]) - 2) + 1)])
        for path, dim in dimensions(params)
    ]
    state = explained(name)
    return (
        logical_to_mesh(names(params), rules, mesh, params),
        logical_to_mesh(state.axes, rules, mesh, state.state),
    )


def shard_bytes(tree: Tree) -> list[int]:
    """Bytes of what each device holds."""
    held = dict.fromkeys(jax.devices(), 0)
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            data = jax.random.key_data(shard.data) if is_key(leaf) else shard.data
            held[shard.device] += data.nbytes
    return list(held.values())


def assert_lies_as(layout: Layout, tree: Tree) -> None:
    def assert_leaf(path: Any, leaf: jax.Array, sharding: Any) -> None:
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), (path_of(path), leaf.sharding)

    jax.tree_util.tree_map_with_path(assert_leaf, tree, layout.shardings)
    assert shard_bytes(tree) == [layout.bytes_per_device] * 8


def assert_close(ours: Tree, theirs: Tree, rtol: float) -> None:
    if any(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(theirs)):
        rtol = RTOL_BFLOAT16
    expected = numbers(theirs)
    for path, array in numbers(ours).items():
        scale = np.max(np.abs(expected[path]), initial=1e-30)
        np.testing.assert_allclose(
            array / scale, expected[path] / scale, rtol=0, atol=rtol, err_msg=path
        )


@functools.cache
def reference(name: str) -> tuple[list[Tree], tuple[Tree, Tree]]:
    """Random data, and what one device makes of it."""
    data = random_data(structs(EQUAL, TABLE[name]))
    return data, train(name, data)


@pytest.mark.parametrize("name", [name for name in TABLE if not TABLE[name].grows])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_a_step_keeps_the_shardings_and_computes_what_one_device_does(
    name: str, kind: AxisType
) -> None:
    case = TABLE[name]
    if kind == AxisType.Explicit and case.explicit:
        pytest.skip(case.explicit)
    if not explained(name).rows:
        pytest.skip("it has no state")
    mesh = mesh_of(kind)
    params_layout, state_layout = layouts(name, mesh)
    lie = params_layout.shardings, state_layout.shardings
    data, expected = reference(name)
    params, *targets = (jax.device_put(tree, lie[0]) for tree in data)
    state = jax.device_put(first_state(name, data[0]), lie[1])
    assert_lies_as(state_layout, state)
    with jax.set_mesh(mesh):
        step = jax.jit(
            training_step(name),
            in_shardings=(*lie, lie[0]),
            out_shardings=lie if kind == AxisType.Auto else None,
            compiler_options=QUICK,
        )
        for target in targets:
            params, state = step(params, state, target)
    assert_lies_as(params_layout, params)
    assert_lies_as(state_layout, state)
    assert_close((params, state), expected, case.rtol or RTOL)
