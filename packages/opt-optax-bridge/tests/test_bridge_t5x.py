"""The basics of `opt_optax_bridge.t5x`; what T5X's own modules do with it is tested elsewhere."""

import warnings
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import opt_core
import optax
import pytest
from bridge_testing import assert_close, assert_same_bits, grads_of, make_params, through_bytes
from jax.sharding import PartitionSpec as P
from opt_core.errors import GroupError, HyperParamError, RestoreError
from opt_optax_bridge import OptaxWrapper, scale_learning_rate, t5x

pytestmark = pytest.mark.usefixtures("optax_promotion")


NAMES = """
Dtype MultiOptimizer Optimizer OptimizerDef OptimizerDefType OptimizerState OptimizerStateType
OptimizerType
OptaxWrapper _OptaxWrapperHyperParams chain freeze unfreeze wrap_optax_optimizer
adabelief adagrad adam adamw fromage lars lamb lion noisy_sgd radam rmsprop sgd yogi dpsgd
"""


def test_the_names_of_t5x_are_there() -> None:
    for name in NAMES.split():
        assert hasattr(t5x, name), name
    assert t5x.Optimizer is t5x.OptimizerType is opt_core.Optimizer
    assert t5x.OptimizerDef is opt_core.OptimizerDef
    assert issubclass(t5x.OptaxWrapper, OptaxWrapper)


@pytest.mark.parametrize(
    "made", [t5x.sgd(0.5), t5x.OptaxWrapper(optax.sgd(0.5)), t5x.chain([optax.sgd(0.5)])]
)
def test_the_learning_rate_of_the_trainer_is_ignored(made: t5x.OptaxWrapper) -> None:
    optimizer = made.create(make_params())
    assert vars(made.hyper_params) == {"learning_rate": None}
    plain = optimizer.apply_gradient(make_params())
    for rate in (9.0, jnp.float32(9.0), None, lambda count: 9.0):
        assert_same_bits(optimizer.apply_gradient(make_params(), learning_rate=rate), plain)
    assert_close(plain.target, jax.tree.map(lambda p: p / 2, make_params()))
    with pytest.raises(HyperParamError, match="no `learning_rate` to scale"):
        scale_learning_rate(optimizer, 0.5)  # it would be ignored


def test_a_definition_taken_over_is_not_the_facades() -> None:
    """Once hashed, as a compiled step has it, it must not pass for the one it was made of."""
    ignoring = t5x.sgd(0.1)
    hash(ignoring)
    assert OptaxWrapper(ignoring) != ignoring


def test_parameters_may_come_back_in_another_precision() -> None:
    optimizer = t5x.adam(0.1).create(make_params()).apply_gradient(make_params())
    saved = through_bytes(optimizer.state_dict())
    saved["target"] = jax.tree.map(lambda x: x.astype(jnp.bfloat16), saved["target"])
    restored = optimizer.restore_state(saved)
    assert {x.dtype for x in jax.tree.leaves(restored.target)} == {jnp.dtype(jnp.bfloat16)}
    assert_same_bits(restored.state, optimizer.state)
    plain = OptaxWrapper(optax.adam(0.1)).create(make_params())
    with pytest.raises(RestoreError, match="target/w: dtype"):  # in the package itself
        plain.restore_state({**plain.state_dict(), "target": saved["target"]})


def test_extra_arguments_and_chains_are_taken_as_t5x_does() -> None:
    optimizer = t5x.polyak_sgd().create(make_params())
    grads = grads_of("polyak_sgd", optimizer.target)
    one, two = (optimizer.apply_gradient(grads, learning_rate=1.0, value=v) for v in (0.1, 0.2))
    assert not jnp.array_equal(one.target["w"], two.target["w"])
    made: Any = t5x.chain(transformations=[optax.clip(0.5), optax.sgd(1.0)])  # as gin binds it
    stepped = made.create({"w": jnp.ones(1)}).apply_gradient({"w": jnp.full(1, 4.0)})
    assert stepped.target["w"].item() == 0.5


@pytest.mark.parametrize(
    ("name", "words"),
    [("amos", "jestimator"), ("Adafactor", "opt_adafactor"), ("adamq", "no optimizer")],
)
def test_what_is_missing_says_why(name: str, words: str) -> None:
    with pytest.raises(AttributeError, match=words):
        getattr(t5x, name)


PAIRS = [("w", t5x.sgd(0.5)), ("b", t5x.sgd(0.5))]


@pytest.mark.parametrize("kind", [t5x.MultiOptimizer, opt_core.MultiOptimizer])
def test_the_trainers_rate_is_ignored_in_groups_and_a_groups_own_acts(kind: Any) -> None:
    definition = kind(PAIRS, names=["matrices", "vectors"])
    optimizer = definition.create(make_params())
    plain = optimizer.apply_gradient(make_params())
    assert_same_bits(optimizer.apply_gradient(make_params(), learning_rate=9.0), plain)
    matrices, vectors = definition.hyper_params
    given: dict[str, Any] = {"hyper_params": [matrices.replace(learning_rate=0.25), vectors]}
    by_name: dict[str, Any] = {"group_overrides": {"matrices": {"learning_rate": 0.25}}}
    for overrides in (given, by_name, {**given, "learning_rate": 9.0}):
        found = optimizer.apply_gradient(make_params(), **overrides)
        assert_close(found.target["w"], 0.75 * make_params()["w"])
        assert_same_bits(found.target["b"], plain.target["b"])


def traversal(is_everything: bool) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return flax.traverse_util.ModelParamTraversal(lambda path, _: is_everything)


@pytest.mark.parametrize("is_first", [False, True])
def test_a_traversal_may_match_nothing(is_first: bool) -> None:
    pairs = [(traversal(True), t5x.adam(0.5)), (traversal(False), t5x.sgd(0.25))]
    # Configurations of T5X bind the pairs by name.
    definition = t5x.MultiOptimizer(traversals_and_optimizers=pairs[::-1] if is_first else pairs)
    optimizer = definition.create(make_params())
    assert len(definition.sub_optimizers) == len(definition.hyper_params) == 2
    alone = t5x.adam(0.5).create(make_params())
    grads = jax.tree.map(jnp.sin, make_params())
    for _ in range(2):
        given = {"hyper_params": list(definition.hyper_params)}
        optimizer = optimizer.apply_gradient(grads, learning_rate=9.0, **given)
        alone = alone.apply_gradient(grads)
    assert_same_bits(optimizer.target, alone.target)
    fresh = definition.create(make_params())
    assert_same_bits(fresh.restore_state(through_bytes(optimizer.state_dict())), optimizer)
    axes = {"b": P("mlp"), "w": P("embed", "mlp")}
    definition.set_param_axes(axes)
    derived = definition.derive_logical_axes(definition.create(make_params()), axes)
    assert derived.target == axes
    assert [len(row.paths) for row in opt_core.describe(fresh).rows] == (
        [0, 2] if is_first else [2, 0]
    )


def test_only_a_traversal_may() -> None:
    sgd = t5x.sgd(0.5)
    for pattern in ("embedding", lambda path, leaf: False):
        definition = t5x.MultiOptimizer([(traversal(True), sgd), (pattern, sgd)])
        with pytest.raises(GroupError, match="matches no parameter"):
            definition.create(make_params())


@pytest.mark.parametrize("kind", [t5x.MultiOptimizer, opt_core.MultiOptimizer])
def test_a_rate_that_cannot_act_in_a_group_is_an_error(kind: Any) -> None:
    opaque = kind([("w|b", t5x.OptaxWrapper(optax.sgd(0.5)))])
    optimizer = opaque.create(make_params())
    assert_same_bits(
        optimizer.apply_gradient(make_params(), learning_rate=9.0),
        optimizer.apply_gradient(make_params()),
    )
    with pytest.raises(HyperParamError, match="group `0`: `learning_rate` cannot be given to a"):
        optimizer.apply_gradient(make_params(), group_overrides={"0": {"learning_rate": 0.1}})
    with pytest.raises(HyperParamError, match=r"group `0`: .*`typo`"):
        optimizer.apply_gradient(make_params(), group_overrides={"0": {"typo": 0.1}})
