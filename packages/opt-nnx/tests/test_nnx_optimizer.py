"""What `opt_nnx.Optimizer` does besides what Flax's does."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_core
import opt_nnx
import opt_optax_bridge as opt
import optax
import pytest
from flax import nnx
from nnx_testing import (
    CONTRIB,
    assert_same,
    bare,
    copied,
    gradients,
    loss,
    make_model,
    train_step,
)
from opt_core import FROZEN, MultiOptimizer
from opt_core.errors import (
    HyperParamError,
    RestoreError,
    TreeMismatchError,
)


def trained(tx: Any, steps: int = 2) -> tuple[Any, opt_nnx.Optimizer[Any]]:
    model = make_model()
    optimizer = opt_nnx.Optimizer(model, tx)
    for _ in range(steps):
        train_step(model, optimizer)
    return model, optimizer


def grouped() -> MultiOptimizer:
    rules: Any = [("kernels", r".*/kernel", opt.adam(0.1)), ("inner", "inner/bias", opt.sgd(0.1))]
    return MultiOptimizer.from_rules(rules, rest=FROZEN)


# Definitions and their hyper-parameters.


def test_hyper_parameters_at_run_time_are_compiled_once() -> None:
    model, optimizer = trained(opt.adamw(0.1), steps=0)
    traces: list[None] = []

    @nnx.jit
    def step(model: Any, optimizer: Any, rate: Any, decay: Any) -> Any:
        traces.append(None)
        grads = nnx.grad(loss)(model)
        return optimizer.update(model, grads, learning_rate=rate, weight_decay=decay)

    for rate, decay in ((0.1, 0.0), (0.05, 0.5), (0.0, 0.0)):
        params, state = bare(nnx.state(model, nnx.Param)), bare(optimizer.opt_state)
        built = jax.jit(optax.adamw(rate, weight_decay=decay).update)
        expected, _ = built(bare(gradients(model)), state, params)
        updates = step(model, optimizer, rate, decay)
        for a, b in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4)
    assert len(traces) == 1


def test_a_keyword_that_nothing_takes_is_an_error() -> None:
    model, optimizer = trained(opt.adam(0.1), steps=0)
    grads = gradients(model)
    before = copied((model, optimizer))
    with pytest.raises(HyperParamError, match=r"learning_rat.*`learning_rate`"):
        optimizer.update(model, grads, learning_rat=0.1)
    plain = opt_nnx.Optimizer(model, optax.adam(0.1))  # would ignore it
    with pytest.raises(HyperParamError, match="learning_rate"):
        plain.update(model, grads, learning_rate=0.1)
    strict = opt_nnx.Optimizer(model, optax.GradientTransformation(optax.sgd(0.1).init, _update))
    with pytest.raises(HyperParamError, match="value"):
        strict.update(model, grads, value=0.1)
    assert_same(nnx.state((model, optimizer)), before)


def _update(updates: Any, state: Any, params: Any = None) -> Any:
    return updates, state


def times(updates: Any, state: Any, params: Any = None, *, value: Any) -> Any:
    return jax.tree.map(lambda u: u * value, updates), state


def test_keywords_may_be_variables_and_gradients_may_be_none() -> None:
    update: Any = times
    scaled = optax.GradientTransformationExtraArgs(lambda _: (), update)
    model, optimizer = trained(scaled, steps=0)
    before = model.inner.bias[...]
    updates = optimizer.update(model, bare(_ones(model)), value=nnx.Variable(jnp.float32(2.0)))
    assert (updates["inner"]["bias"] == 2.0).all()
    assert (model.inner.bias[...] == before + 2.0).all()


def _ones(model: Any) -> Any:
    return jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))


def test_gradients_and_models_must_be_those_of_the_optimizer() -> None:
    model, optimizer = trained(optax.adam(0.1), steps=0)
    grads = gradients(model)
    del grads["inner"]["bias"]
    with pytest.raises(TreeMismatchError, match=r"inner/bias: expected .* found nothing"):
        optimizer.update(model, grads)
    other = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    with pytest.raises(
        TreeMismatchError, match=r"another model than `model`(.|\n)*`0/mu/bias`: exp"
    ):
        optimizer.update(other, gradients(other))
    # Shapes that broadcast would change those of the model, or of the state.
    small, large = nnx.Linear(1, 1, rngs=nnx.Rngs(0)), nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    for of_state, model in ((large, small), (small, large)):
        for tx in (optax.adam(0.1), opt.sgd(0.1, momentum=0.9), optax.sgd(0.1, momentum=0.9)):
            optimizer = opt_nnx.Optimizer(of_state, tx, wrt=nnx.Param)
            before = copied(model), copied(optimizer)
            with pytest.raises(TreeMismatchError, match=r"another model(.|\n)*/kernel`: exp"):
                optimizer.update(model, _ones(model))
            assert_same((copied(model), copied(optimizer)), before)
    optimizer = opt_nnx.Optimizer(small, optax.sgd(0.1), wrt=nnx.Param)
    with pytest.raises(TreeMismatchError, match="kernel"):
        optimizer.update(small, _ones(large))


def test_groups() -> None:
    model, optimizer = trained(grouped(), steps=0)
    before = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))
    optimizer.update(model, gradients(model), group_overrides={"inner": {"learning_rate": 0.0}})
    same = jax.tree.map(lambda a, b: bool((a == b).all()), before, nnx.state(model, nnx.Param))
    found = {jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(same)}
    assert [path for path, is_same in found.items() if not is_same] == [
        "['inner']['kernel'].value",
        "['outer']['kernel'].value",
    ]
    assert len(jax.tree.leaves(optimizer.opt_state)) == 5  # a count, two moments of two
    with pytest.raises(HyperParamError, match="no_such"):
        optimizer.update(model, gradients(model), group_overrides={"no_such": {}})


# The parameters to evaluate.


def test_the_average_is_evaluated_and_the_trained_parameters_come_back() -> None:
    model, optimizer = trained(CONTRIB.schedule_free_adamw(0.1), steps=3)
    before = copied(model)

    def losses(model: Any, optimizer: Any) -> Any:
        with optimizer.evaluating(model) as averaged:
            assert averaged is model
            value = loss(averaged)
        return value, loss(model)

    other = nnx.clone(model)
    params = bare(nnx.state(other, nnx.Param))
    nnx.update(other, CONTRIB.schedule_free_eval_params(bare(optimizer.opt_state), params))
    assert not np.isclose(loss(other), loss(model), rtol=1e-3)
    for found in (losses(model, optimizer), nnx.jit(losses)(model, optimizer)):
        np.testing.assert_allclose(found, [loss(other), loss(model)], rtol=1e-6)
    assert_same(nnx.state(model), before)


# Types.


def grow(dtype: Any) -> optax.GradientTransformation:
    """Its state comes back in another dtype than `init` makes."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return updates, jax.tree.map(lambda s, u: s + u.astype(dtype), state, updates)

    return optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), update)


def test_dtypes_are_stable() -> None:
    model = make_model()
    nnx.update(model, jax.tree.map(lambda p: p.astype(jnp.bfloat16), nnx.state(model, nnx.Param)))
    optimizer = opt_nnx.Optimizer(model, grow(jnp.float32))
    before = [leaf.dtype for leaf in jax.tree.leaves(nnx.state(optimizer))]
    train_step(model, optimizer)
    assert [leaf.dtype for leaf in jax.tree.leaves(nnx.state(optimizer))] == before


def test_equal_definitions_are_one_program() -> None:
    first, second = (opt_nnx.Optimizer(make_model(), opt.adam(0.1)) for _ in range(2))
    assert nnx.graphdef(first) == nnx.graphdef(second)
    assert hash(nnx.graphdef(first)) == hash(nnx.graphdef(second))
    assert nnx.graphdef(first) != nnx.graphdef(opt_nnx.Optimizer(make_model(), opt.adam(0.2)))


# Names of dimensions, without a mesh.


def named_model(**metadata: Any) -> Any:
    init = nnx.with_partitioning(
        nnx.initializers.lecun_normal(), ("embed", "mlp"), eager_sharding=False, **metadata
    )
    return nnx.Linear(4, 3, kernel_init=init, rngs=nnx.Rngs(0))


def names(variable: Any) -> Any:
    metadata = variable.get_metadata()
    return metadata.get("out_sharding", metadata.get("sharding_names"))


def test_names_of_the_state_are_those_of_what_it_follows_and_hooks_are_not() -> None:
    tx = optax.adafactor(0.1, min_dim_size_to_factor=2, momentum=0.9)
    model = named_model(tag="kept")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Flax: they are deprecated
        model.hooked = nnx.Param(jnp.ones(2), on_set_value=lambda variable, value: value * 2)
    optimizer = opt_nnx.Optimizer(model, tx)
    factored, momentum = optimizer.opt_state[0], optimizer.opt_state[4]
    assert names(factored.v_row["kernel"]) == ("mlp",)
    assert names(factored.v_col["kernel"]) == ("embed",)
    assert names(momentum.ema["kernel"]) == ("embed", "mlp")
    assert momentum.ema["kernel"].get_metadata()["tag"] == "kept"
    assert names(factored.v["bias"]) is None
    assert "on_set_value" not in momentum.ema["hooked"].get_metadata()


# There and back.


def test_to_core_and_back() -> None:
    model, optimizer = trained(opt.adam(0.1))
    core = optimizer.to_core(model)
    assert core.optimizer_def is optimizer.tx
    assert (core.state.step.dtype, int(core.state.step)) == (jnp.int32, 2)
    step = jax.jit(lambda core, grads: core.apply_gradient(grads))
    after = step(core, bare(gradients(model)))
    other = make_model()
    again = opt_nnx.Optimizer(other, opt.adam(0.1))
    again.load_core(other, after)
    train_step(model, optimizer)
    assert int(again.step[...]) == 3
    assert again.step[...].dtype == jnp.uint32
    pair = nnx.state(again), nnx.state(optimizer)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), *pair)


def test_surgery() -> None:
    model, optimizer = trained(opt.adam(0.1))
    frozen, plan = opt_core.freeze(optimizer.to_core(model), "inner/.*")
    assert plan.kept
    optimizer.load_core(model, frozen)
    assert isinstance(optimizer.tx, MultiOptimizer)
    before = model.inner.kernel[...]
    train_step(model, optimizer)
    assert (model.inner.kernel[...] == before).all()
    assert optimizer.step[...] == 3
    with pytest.raises(TreeMismatchError, match="`core`"):
        optimizer.load_core(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), frozen)


@pytest.mark.parametrize(
    "tx", [opt.adamw(0.1), optax.adamw(0.1), grouped()], ids=["twin", "optax", "groups"]
)
def test_state_dicts(tx: Any) -> None:
    model, optimizer = trained(tx)
    saved = optimizer.to_core(model).state_dict()
    assert set(saved) == {"target", "state"}
    other = make_model()
    again = opt_nnx.Optimizer(other, tx)
    core = again.to_core(other)
    again.load_core(other, core.restore_state(jax.tree.map(np.asarray, saved)))
    assert_same(nnx.state(again), nnx.state(optimizer))
    assert_same(nnx.state(other, nnx.Param), nnx.state(model, nnx.Param))
    del saved["target"]["inner"]["bias"]
    before = copied((other, again))
    with pytest.raises(RestoreError, match="target/inner/bias: missing"):
        core.restore_state(saved)
    assert_same(nnx.state((other, again)), before)
