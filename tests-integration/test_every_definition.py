"""Every optimizer as an `OptimizerDef`: all that Optax exports, wrapped, and our own."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_accumulate
import opt_adafactor
import opt_legacy_stax
import opt_optax_bridge
import optax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from opt_checkpoint import Schema, TrainingState, named_state, plan_restore
from opt_core import MultiOptimizer, Optimizer, OptimizerDef
from opt_core.extend import read_record, record_data
from opt_optax_bridge import OptaxWrapper
from opt_partition import logical_to_mesh
from optax_table import TABLE, Case, exported
from partition_oracles import (
    QUICK,
    extras_of,
    is_key,
    loss,
    names,
    path_of,
    random_data,
    structs,
)

Tree = Any
SHAPES: dict[str, Any] = {
    "scalar": (),
    "bias": (8,),
    "square": (8, 8),
    "layers": {"w": (2, 8, 4)},
    "empty": (0, 8),
}


def _groups(matrices: OptimizerDef, rest: OptimizerDef) -> OptimizerDef:
    return MultiOptimizer((("square|layers/.*", matrices), ("scalar|bias|empty", rest)))


def _guarded() -> OptimizerDef:
    skip = opt_accumulate.skip_not_finite
    return OptaxWrapper(opt_accumulate.MultiSteps(optax.adamw(1e-2), 2, should_skip_update_fn=skip))


# What each dimension of a stack of matrices is; other parameters go by their sizes.
_STACKED = opt_adafactor.HParamMap(
    [("layers", ("batch", "row", "column")), (".*", opt_adafactor.HEURISTIC_RULE)]
)
OURS: dict[str, Callable[[], OptimizerDef]] = {
    "our Adafactor": lambda: opt_adafactor.Adafactor(
        1e-2, factor_map=_STACKED, min_dim_size_to_factor=4
    ),
    "our Adafactor: unfactored": lambda: opt_adafactor.Adafactor(
        1e-2, beta1=0.9, factored=False, dtype_momentum=jnp.bfloat16
    ),
    "our MultiOptimizer": lambda: _groups(
        opt_optax_bridge.adam(1e-2), opt_optax_bridge.sgd(0.1, momentum=0.9)
    ),
    "our MultiOptimizer: Adafactor": lambda: _groups(
        opt_adafactor.Adafactor(1e-2, factor_map=_STACKED), opt_optax_bridge.adam(1e-2)
    ),
    "our MultiSteps": _guarded,
    "our triple": lambda: opt_legacy_stax.to_optimizer_def(opt_legacy_stax.momentum(0.1, 0.9)),
}
NAMES = (*TABLE, *OURS)
_OWN_CASE = Case(lambda params: optax.identity())


def case_of(name: str) -> Case:
    """How an optimizer must be treated."""
    return TABLE.get(name, _OWN_CASE)


@functools.cache
def definition_of(name: str) -> OptimizerDef:
    """The definition for parameters of `SHAPES`."""
    if name in OURS:
        return OURS[name]()
    return OptaxWrapper(TABLE[name].build(param_structs(name)))


@functools.cache
def param_structs(name: str) -> Tree:
    """The parameters as shapes."""
    return structs(SHAPES, case_of(name))


@functools.cache
def optimizer_structs(name: str) -> Optimizer:
    """The optimizer as shapes, without running its `init`."""
    created: Optimizer = jax.eval_shape(definition_of(name).create, param_structs(name))
    return created


def random_params(name: str, seed: int) -> Tree:
    return jax.tree.map(jnp.asarray, random_data(param_structs(name), seed)[0])


def random_bits(tree: Tree, seed: int) -> Tree:
    """Arrays of any bits at all in the place of shapes: NaN, infinities and -0 among them."""
    rng = np.random.default_rng(seed)

    def leaf(struct: jax.ShapeDtypeStruct) -> jax.Array:
        if is_key(struct):
            data = leaf(jax.eval_shape(jax.random.key_data, struct))
            key: jax.Array = jax.random.wrap_key_data(data, impl="threefry2x32")
            return key
        if struct.dtype == bool:
            return jnp.array(rng.integers(0, 2, struct.shape).astype(bool))
        if jnp.issubdtype(struct.dtype, jnp.integer):  # counts are not negative
            return jnp.array(rng.integers(0, 2**31, struct.shape).astype(struct.dtype))
        raw = rng.bytes(int(np.prod(struct.shape)) * struct.dtype.itemsize)
        return jnp.array(np.frombuffer(raw, struct.dtype).reshape(struct.shape))

    return jax.tree.map(leaf, tree)


def bits(tree: Tree) -> list[tuple[Any, ...]]:
    """What two trees have in common if they are equal, to the bit."""

    def of(leaf: Any) -> tuple[Any, ...]:
        kind = (type(leaf) if np.isscalar(leaf) else leaf.dtype, getattr(leaf, "weak_type", False))
        data = jax.random.key_data(leaf) if hasattr(leaf, "dtype") and is_key(leaf) else leaf
        return *kind, np.shape(data), np.asarray(data).tobytes()

    return [of(leaf) for leaf in jax.tree.leaves(tree)]


def assert_same(found: Any, expected: Any) -> None:
    structure: Any = jax.tree.structure(found)
    assert structure == jax.tree.structure(expected)
    assert bits(found) == bits(expected)


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", NAMES)
def test_a1_state_dict_and_restore_state_are_bit_equal(name: str) -> None:
    """A state dict of every optimizer restores every leaf to the bit, and the same treedef."""
    structs = optimizer_structs(name)
    saved, other = random_bits(structs, 0), random_bits(structs, 1)
    state_dict = jax.tree.map(np.asarray, saved.state_dict())
    restored = other.restore_state(state_dict)
    treedef: Any = jax.tree.structure(saved)
    assert jax.tree.structure(restored) == treedef
    assert bits(restored) == bits(saved)


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_comes_back_by_its_names(name: str) -> None:
    """Into a target that has nothing but shapes."""
    abstract = optimizer_structs(name)
    optimizer = random_bits(abstract, 0)
    named = named_state(optimizer)
    data = json.loads(json.dumps(record_data(named.schema)))
    assert read_record(Schema, data, "schema", ValueError) == named.schema
    assert list(named_state(abstract)) == list(named)
    plan = plan_restore(named, abstract)
    assert plan.is_exact
    assert_same(plan.apply(), optimizer)
    assert_same(plan_restore(dict(named), abstract).apply(), optimizer)
    tx, state = getattr(definition_of(name), "optax_optimizer", None), optimizer.state
    if isinstance(tx, optax.GradientTransformation):  # what nothing wraps has the same names
        plain = TrainingState(tx, optimizer.target, state.param_states, state.step)
        assert_same(dict(named_state(plain)), dict(named))
        assert_same(plan_restore(named, plain).apply(), plain)


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", NAMES)
def test_c6_the_state_is_sharded_like_the_parameters(name: str) -> None:
    """What mirrors a parameter has its spec exactly, scalars are replicated, factors are valid."""
    params = param_structs(name)
    optimizer = optimizer_structs(name)
    mesh = AbstractMesh((2, 2, 2), ("layers", "data", "model"))
    # The last dimensions of a parameter lie over (layers, data, model).
    rules = [
        (f"{path_of(path)}:{dim}", mesh.axis_names[dim - leaf.ndim])
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        for dim in range(leaf.ndim)
    ]
    definition = definition_of(name)
    axes: Any = definition.derive_logical_axes(optimizer, names(params))
    axes = jax.tree.map(lambda _, spec: P() if spec is None else spec, optimizer, axes)
    lie = logical_to_mesh(axes, rules, mesh, optimizer)

    of_params = {
        path_of(path): (leaf.shape, mesh.axis_names[3 - leaf.ndim :])
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    for row in lie.rows:
        spec = tuple(row.spec)
        used = [axis for axis in spec if axis is not None]
        assert len(spec) == len(row.shape), row
        assert len(used) == len(set(used)), row
        # The parameter whose path is in that of the leaf; any, where the state is a plain list.
        owners = [path for path in of_params if f"/{path}/" in f"/{row.path}/"]
        kept = {(size, axis) for size, axis in zip(row.shape, spec, strict=True) if axis}
        candidates = [max(owners, key=len)] if owners else list(of_params)
        sizes = {pair for path in candidates for pair in zip(*of_params[path], strict=True)}
        assert kept <= sizes, row
        if owners and row.shape == of_params[candidates[0]][0]:
            assert spec == tuple(of_params[candidates[0]][1]), row
        if not row.shape:
            assert spec == (), row


def test_what_optax_exports_has_a_twin() -> None:
    twins = {*opt_optax_bridge.optimizer_names(), *opt_optax_bridge.building_block_names()}
    names = {name.removeprefix("contrib.") for name, says in exported().items() if says}
    inject = {"inject_hyperparams", "inject_stateful_hyperparams"}
    left = {name for name in names - twins if "." not in name}
    assert left <= {"chain", "with_extra_args_support", *inject}


def training_step(name: str, optimizer: Optimizer, targets: Tree) -> Optimizer:
    """One step towards `targets`, with whatever extra arguments the optimizer wants."""
    case = case_of(name)

    def value_fn(params: Tree) -> jax.Array:
        return loss(params, case.fast(targets))

    grads, extras = extras_of(case, value_fn, optimizer.target)
    return optimizer.apply_gradient(case.gradients(grads), **extras)


# One grows its state, one takes gradients that the contract does not.
STEPS = [name for name in NAMES if not case_of(name).grows and name != "lookahead"]


@pytest.mark.sample(8)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_changes_no_shape_dtype_or_weak_type(name: str, dtype: Any) -> None:
    """Of bfloat16 too, which Optax's numbers would promote."""
    params = jax.tree.map(
        lambda leaf: leaf.update(dtype=dtype) if leaf.dtype == jnp.float32 else leaf,
        param_structs(name),
    )
    optimizer = jax.eval_shape(definition_of(name).create, params)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(optimizer))
    targets = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), params)
    stepped = jax.eval_shape(functools.partial(training_step, name), optimizer, targets)
    assert avals(stepped.state) == avals(optimizer.state)


def avals(tree: Tree) -> Any:
    leaves = jax.tree.leaves(tree)
    return jax.tree.structure(tree), [(x.shape, x.dtype, x.weak_type) for x in leaves]


@functools.cache
def donated_step(names: tuple[str, ...]) -> Any:
    """One step of several optimizers, all of them donated."""

    def step(optimizers: dict[str, Optimizer], targets: dict[str, Any]) -> dict[str, Optimizer]:
        return {
            name: training_step(name, optimizer, targets[name])
            for name, optimizer in optimizers.items()
        }

    return jax.jit(step, donate_argnums=0, compiler_options=QUICK)


CHUNKS = [NAMES[start : start + 4] for start in range(0, len(NAMES), 4)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("names", CHUNKS, ids=lambda names: names[0])
def test_f6_the_first_step_can_be_donated(names: tuple[str, ...]) -> None:
    """Right after `create`, and right after a restore, no buffer is donated twice."""
    targets = {name: random_params(name, 1) for name in names}
    created = {name: definition_of(name).create(random_params(name, 0)) for name in names}
    dicts = {name: jax.tree.map(np.array, o.state_dict()) for name, o in created.items()}
    others = {name: definition_of(name).create(random_params(name, 2)) for name in names}
    restored = {name: other.restore_state(dicts[name]) for name, other in others.items()}
    # A restored one may not share buffers with the one that it is restored over, either.
    assert twice({"created": created}) == []
    assert twice({"restored": restored, "others": others}) == []
    names = tuple(name for name in names if name in STEPS)
    created, restored, targets = (
        {name: tree[name] for name in names} for tree in (created, restored, targets)
    )
    step = donated_step(names)
    first, second = step(created, targets), step(restored, targets)
    assert step._cache_size() == 1
    assert bits(first) == bits(second)


def twice(tree: Any) -> list[Any]:
    """Which leaves share a buffer."""
    found: dict[int, list[str]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        data = jax.random.key_data(leaf) if is_key(leaf) else leaf
        if data.size:
            pointer = data.unsafe_buffer_pointer()
            found.setdefault(pointer, []).append(jax.tree_util.keystr(path))
    return [paths for paths in found.values() if len(paths) > 1]
