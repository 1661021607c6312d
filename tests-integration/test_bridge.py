"""Wrapped transformations among the other packages: overrides, groups, chains, windows."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_matrix
import opt_optax_bridge as opt
import opt_partition as part
import optax
import optax.contrib
import pytest
from jax.sharding import PartitionSpec as P
from opt_accumulate import MultiSteps
from opt_adafactor import Adafactor
from opt_core import FROZEN, MultiOptimizer, Optimizer, describe_state, freeze
from opt_core.errors import GroupError, HyperParamError, TreeMismatchError
from opt_core.protocols import UpdatesParams
from opt_optax_bridge import OptaxWrapper, wrap_optax_optimizer

contrib: Any = optax.contrib  # it exports nothing explicitly


def wave(params: Any, step: int = 0) -> Any:
    return jax.tree.map(lambda p: jnp.cos(p + jnp.arange(p.size).reshape(p.shape) + step), params)


def assert_close(found: Any, expected: Any) -> None:
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# An override of a transformation that is already built: the error has the line that makes it work.

SQUARE = {"b": jnp.ones(3), "w": jnp.eye(3)}
MATRICES = opt_matrix.Matrices.by_rank2()
LINES: dict[str, tuple[Callable[[float], Any], str, Callable[[], Any]]] = {
    "opt_matrix.muon": (
        lambda rate: opt_matrix.muon(rate, matrices=MATRICES),
        "wrap_optax_optimizer(opt_matrix.muon)(...)",
        lambda: wrap_optax_optimizer(opt_matrix.muon)(0.1, matrices=MATRICES),
    ),
    "opt_accumulate.MultiSteps": (
        lambda rate: MultiSteps(optax.sgd(rate), 1),
        "wrap_optax_optimizer(opt_accumulate.MultiSteps)(...)",
        lambda: wrap_optax_optimizer(MultiSteps)(opt.sgd(0.1), 1),
    ),
    "optax.adamw": (
        optax.adamw,
        "`opt_optax_bridge.adamw(...)` for `optax.adamw(...)`",
        lambda: opt.adamw(0.1),
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", LINES)
def test_the_line_of_the_error_works(name: str) -> None:
    build, line, definition = LINES[name]
    step: Any = jax.jit(lambda o, rate: o.apply_gradient(SQUARE, learning_rate=rate))
    with pytest.raises(HyperParamError, match=re.escape(line)):
        step(OptaxWrapper(build(0.1)).create(SQUARE), 0.5)
    stepped = step(definition().create(SQUARE), 0.5)
    assert_close(
        stepped.target, OptaxWrapper(build(0.5)).create(SQUARE).apply_gradient(SQUARE).target
    )


# `opt_accumulate.MultiSteps`, to which the parameters are handed.


@pytest.mark.parametrize("every_k", [3, lambda step: step + 1], ids=["number", "schedule"])
def test_windows_are_described_as_optax_describes_its_own(every_k: Any) -> None:
    ours, theirs = (
        describe_state(OptaxWrapper(steps(optax.adamw(0.1), every_k)).create(SQUARE))
        for steps in (MultiSteps, optax.MultiSteps)
    )
    assert ours.leaves == theirs.leaves
    (steps, *inner), (optax_steps, *optax_inner) = ours.transformations, theirs.transformations
    assert inner == optax_inner
    assert (steps.name, steps.bearing) == (optax_steps.name, optax_steps.bearing)
    for name in steps.bearing:
        assert steps.settings[name] == optax_steps.settings[name]


def test_a_window_of_optax_goes_on_as_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its state dict; and `apply` is what is called, not `update`."""
    ours, theirs = (
        OptaxWrapper(steps(optax.adamw(0.1), 3)).create(SQUARE)
        for steps in (MultiSteps, optax.MultiSteps)
    )
    for step in range(4):
        theirs = theirs.apply_gradient(wave(SQUARE, step))
    assert isinstance(MultiSteps(optax.sgd(0.1), 2), UpdatesParams)
    assert not isinstance(optax.sgd(0.1), UpdatesParams)
    monkeypatch.setattr(MultiSteps, "update", pytest.fail)
    ours = ours.restore_state(theirs.state_dict())
    for step in (4, 5):
        ours, theirs = (o.apply_gradient(wave(SQUARE, step)) for o in (ours, theirs))
    assert_close(ours, theirs)


# Definitions in the place of transformations.

PARAMS = {"kernel": jnp.full((16, 8), 0.5), "bias": jnp.zeros(8), "frozen": jnp.ones(2)}
AXES = {"kernel": ("embed", "mlp"), "bias": ("mlp",), "frozen": (None,)}


def test_the_state_of_a_definition_has_axes_and_a_description() -> None:
    """Those that the definition derives itself, alone and inside a chain of Optax."""
    rules = [
        ("kernel", "kernel", Adafactor(0.1, min_dim_size_to_factor=4, beta1=0.9)),
        ("bias", "bias", opt.adamw(0.1)),
    ]
    definition = MultiOptimizer.from_rules(rules, rest=FROZEN)
    optimizer = definition.create(PARAMS)
    specs = {key: P(*names) for key, names in AXES.items()}
    expected = definition.derive_logical_axes(optimizer, specs).state.param_states
    found = part.derive_logical_axes(definition, PARAMS, AXES).param_states
    structure: Any = jax.tree.structure(optimizer.state.param_states)
    leaves = jax.tree.leaves(optimizer.state.param_states)
    for leaf, *pair in zip(leaves, *map(structure.flatten_up_to, (found, expected)), strict=True):
        assert leaf.size == 1 or pair[0] == pair[1]

    tx = optax.chain(optax.clip(0.5), opt.as_transformation(definition))
    rows = part.explain(tx, PARAMS, AXES, strict=True).rows
    sharded = {row.axes for row in rows if row.parameter == "kernel"}
    assert sharded >= {("embed", "mlp"), ("embed",), ("mlp",)}
    chained = OptaxWrapper(tx).create(PARAMS)
    assert ("bias",) in {leaf.parameter for leaf in describe_state(chained).leaves}
    restored = chained.restore_state(chained.state_dict())
    jax.tree.map(np.testing.assert_array_equal, restored, chained)


# Groups, against Optax alone.


def make_params() -> Any:
    shapes = {
        "embed": {"embedding": (16, 8)},
        "layer": {"kernel": (8, 32), "bias": (32,), "scale": (8,)},
        "out": {"kernel": (32, 8), "bias": (8,)},
    }
    draw = np.random.default_rng(0)
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree.map(lambda s: jnp.float32(draw.normal(size=s)), shapes, is_leaf=is_shape)


GRADS = jax.tree.map(lambda p: 0.1 * p + 0.01, make_params())
LABELS = {
    "embed": {"embedding": "tables"},
    "layer": {"kernel": "kernels", "bias": "vectors", "scale": "vectors"},
    "out": {"kernel": "kernels", "bias": "vectors"},
}
RULES = {"tables": "embed/.*", "kernels": ".*/kernel", "vectors": ".*/(bias|scale)"}
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)


def mask_of(wanted: str) -> Any:
    """A mask over all parameters, as users of Optax write one."""
    return jax.tree.map(lambda label: label == wanted, LABELS)


def ab() -> Any:
    kinds = {"tables": "a", "kernels": "b", "vectors": "a"}
    return jax.tree.map(lambda label: kinds[label], LABELS)


# One transformation per group; every kind of state.
MIXTURES: dict[str, dict[str, Any]] = {
    "three kinds": {
        "tables": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
        "kernels": lambda: optax.adamw(SCHEDULE),
        "vectors": lambda: optax.sgd(1e-2),
    },
    "masks and labels": {
        "tables": lambda: optax.adamw(1e-2, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
        "kernels": lambda: optax.partition({"a": optax.lion(1e-3), "b": optax.sgd(1e-2)}, ab()),
        "vectors": lambda: optax.masked(optax.sgd(1e-2, momentum=0.9), mask_of("tables")),
    },
    "norms and windows": {
        "tables": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.rmsprop(1e-2)),
        "kernels": lambda: contrib.muon(1e-2),
        "vectors": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    },
}


def both(mixture: str) -> tuple[Optimizer, Any]:
    """The groups, and `optax.partition`, which gives every transformation the same leaves."""
    txs: dict[Any, Any] = {name: make() for name, make in MIXTURES[mixture].items()}
    rules = [(name, RULES[name], OptaxWrapper(tx)) for name, tx in txs.items()]
    return MultiOptimizer.from_rules(rules).create(make_params()), optax.partition(txs, LABELS)


def step_of(tx: Any) -> Any:
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


@pytest.mark.sample(1)
@pytest.mark.parametrize("mixture", MIXTURES)
def test_every_group_is_optax_on_its_leaves(mixture: str) -> None:
    optimizer, tx = both(mixture)
    params, state = make_params(), tx.init(make_params())
    step: Any = jax.jit(lambda o, grads: o.apply_gradient(grads))
    theirs = jax.jit(step_of(tx))
    for t in range(3):
        grads = jax.tree.map(lambda g, t=t: g * (t + 1), GRADS)
        optimizer = step(optimizer, grads)
        params, state = theirs(params, state, grads)
    assert_close(optimizer.target, params)
    assert step._cache_size() == 1


def test_a_compiled_step_accesses_no_more_than_optax_partition() -> None:
    optimizer, tx = both("three kinds")

    def accessed(function: Any, *operands: Any) -> float:
        found: Any = jax.jit(function).lower(*operands).compile().cost_analysis()
        return float(found["bytes accessed"])

    ours = accessed(lambda o, g: o.apply_gradient(g), optimizer, GRADS)
    reference = accessed(step_of(tx), make_params(), tx.init(make_params()), GRADS)
    # Ours counts steps besides: one int32 in, one out, and what XLA makes of the addition.
    assert ours <= reference + 32


def test_surgery_under_labels_of_all_parameters() -> None:
    params = {"kernel": jnp.ones((3, 3)), "other": jnp.ones((3, 3)), "bias": jnp.ones(3)}
    labels = {"kernel": "adam", "other": "adam", "bias": "sgd"}
    transforms: dict[Any, Any] = {"adam": optax.adam(0.1), "sgd": optax.sgd(0.1)}
    tx = OptaxWrapper(optax.multi_transform(transforms, labels))
    optimizer = MultiOptimizer.from_rules([("all", ".*", tx)]).create(params).apply_gradient(params)
    _, plan = freeze(optimizer, "bias")
    assert plan.initialised == plan.dropped == ()
    found, plan = freeze(optimizer, "other")
    assert (plan.initialised, len(plan.dropped)) == ((), 2)
    stepped, expected = (o.apply_gradient(params).target["kernel"] for o in (found, optimizer))
    assert jnp.array_equal(stepped, expected)


# Optimizers that take the loss, or the gradients of examples, in groups.

SMALL = {"k": jnp.array([1.0, 2.0, 3.0]), "b": jnp.ones(2)}


def loss(params: Any) -> jax.Array:
    value: jax.Array = jnp.sum((params["k"] - 1) ** 4) + jnp.sum(params["b"] ** 2)
    return value


def searched(optimizer: Any) -> Any:
    value, grad = jax.value_and_grad(loss)(optimizer.target)
    return optimizer.apply_gradient(grad, value=value, grad=grad, value_fn=loss)


def test_a_line_search_is_for_all_parameters() -> None:
    """Alone, or in a group that has them all; of several groups, behind `optax.partition`."""
    search = opt.chain(opt.scale(-1.0), opt.scale_by_backtracking_linesearch(10))
    alone = searched(search.create(SMALL))
    whole = searched(MultiOptimizer.from_rules([("all", ".*", search)]).create(SMALL))
    assert loss(whole.target) == loss(alone.target) < loss(SMALL)
    inner = MultiOptimizer.from_rules([("k", search)], rest=FROZEN)
    for definition in (inner, MultiOptimizer.from_rules([("all", ".*", inner)])):
        with pytest.raises(GroupError, match=r"is about all parameters.*optax\.partition"):
            searched(definition.create(SMALL))
    directions: Any = {"k": optax.scale_by_lbfgs(), "b": optax.scale(0.4)}
    tx = optax.chain(
        optax.partition(directions, {"k": "k", "b": "b"}),
        optax.scale(-1.0),
        optax.scale_by_backtracking_linesearch(10),
    )
    optimizer, step = OptaxWrapper(tx).create(SMALL), jax.jit(searched)
    for _ in range(5):
        optimizer = step(optimizer)
    assert loss(optimizer.target) < 0.1 * loss(SMALL)


def test_gradients_of_examples_are_for_all_parameters() -> None:
    private = opt.dpsgd(0.1, l2_norm_clip=1.0, noise_multiplier=0.0, seed=0)
    examples = jax.tree.map(lambda p: jnp.stack([p, p]), SMALL)
    assert private.create(SMALL).apply_gradient(examples).step == 1
    groups = MultiOptimizer.from_rules([("k", private)], rest=opt.sgd(0.1))
    with pytest.raises(TreeMismatchError) as caught:
        groups.create(SMALL).apply_gradient(examples)
    assert "b: expected shape (2,), found (2, 2)" in str(caught.value)
    assert "Groups do not take the gradients of every example" in str(caught.value)
    assert "`optax.partition`" in str(caught.value)
