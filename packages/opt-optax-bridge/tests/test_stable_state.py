"""A state keeps its structure, shapes, dtypes and weak types, and can be donated from the start."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge
import optax
import pytest
from bridge_testing import (
    Jitted,
    assert_close,
    assert_same_bits,
    avals,
    block,
    block_names,
    copied,
    definition,
    extra_args_of,
    grads_of,
    make_params,
    step,
    structure,
    through_bytes,
    trained,
    transformation,
)
from opt_core import Optimizer
from opt_core.errors import StateChangedError
from opt_optax_bridge import OptaxWrapper
from opt_optax_bridge._stable_state import keep_avals, same_shapes, stable_leaves

NAMES = opt_optax_bridge.optimizer_names()
PRECISIONS = {
    "float32": (jnp.float32, jnp.float32),
    "bfloat16": (jnp.bfloat16, jnp.bfloat16),
    "float32 grads on bfloat16": (jnp.bfloat16, jnp.float32),
}


def is_weak(tree: Any) -> bool:
    return any(getattr(leaf, "weak_type", False) for leaf in jax.tree.leaves(tree))


def abstract_step(name: str, optimizer: Optimizer, grad_dtype: Any, **overrides: Any) -> Any:
    """The avals after a step; nothing is compiled."""

    def stepped(optimizer: Optimizer, overrides: Any) -> Optimizer:
        grads = grads_of(name, optimizer.target)
        extra_args = extra_args_of(name, optimizer.target, grads)
        grads = jax.tree.map(lambda g: g.astype(grad_dtype), grads)
        return optimizer.apply_gradient(grads, **extra_args, **overrides)

    return jax.eval_shape(stepped, optimizer, overrides)


def optax_can(name: str, tx: Any, param_dtype: Any, grad_dtype: Any) -> bool:
    """Whether the bare transformation makes a step; some have branches of different dtypes."""

    def stepped(params: Any) -> Any:
        grads = grads_of(name, params)
        extra_args = extra_args_of(name, params, grads)
        grads = jax.tree.map(lambda g: g.astype(grad_dtype), grads)
        return tx.update(grads, tx.init(params), params, **extra_args)

    try:
        jax.eval_shape(stepped, make_params(param_dtype))
    except (TypeError, FutureWarning):
        return False
    return True


@pytest.mark.sample(60)
@pytest.mark.usefixtures("optax_promotion")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", NAMES)
def test_a_step_changes_no_aval(name: str, precision: str) -> None:
    param_dtype, grad_dtype = PRECISIONS[precision]
    optimizer = definition(name).create(make_params(param_dtype))
    assert not is_weak(optimizer)
    assert avals(optimizer.state.step) == avals(jnp.zeros((), jnp.int32))
    raw = transformation(name).init(make_params(param_dtype))
    dtypes = [jnp.asarray(leaf).dtype for leaf in jax.tree.leaves(raw)]
    assert [leaf.dtype for leaf in jax.tree.leaves(optimizer.state.param_states)] == dtypes
    if not optax_can(name, transformation(name), param_dtype, grad_dtype):
        with pytest.raises((TypeError, FutureWarning)):
            abstract_step(name, optimizer, grad_dtype)
        return
    assert avals(abstract_step(name, optimizer, grad_dtype)) == avals(optimizer)
    first = next(iter(optimizer.optimizer_def.hyper_params.__dataclass_fields__), None)
    if first not in (None, "learning_rate" if name == "rprop" else None):
        assert avals(abstract_step(name, optimizer, grad_dtype, **{first: 0.5})) == avals(optimizer)


@pytest.mark.usefixtures("optax_promotion")
@pytest.mark.parametrize("name", block_names())
def test_a_step_of_a_building_block_changes_no_aval(name: str) -> None:
    optimizer = OptaxWrapper(block(name)).create(make_params(jnp.bfloat16))
    assert not is_weak(optimizer)
    assert avals(abstract_step(name, optimizer, jnp.bfloat16)) == avals(optimizer)


def lenient(tx: Any) -> Any:
    """The transformation under the promotion that Optax is written for."""

    def init(params: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return tx.init(params)

    def update(*args: Any, **extra_args: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return tx.update(*args, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_ours_promotes_nothing(name: str) -> None:
    with pytest.raises(ValueError, match="promotion"):  # so it is strict outside of Optax
        jnp.float32(1) + jnp.bfloat16(1)
    optimizer = OptaxWrapper(lenient(transformation(name))).create(make_params(jnp.bfloat16))
    if optax_can(name, lenient(transformation(name)), jnp.bfloat16, jnp.bfloat16):
        assert avals(abstract_step(name, optimizer, jnp.bfloat16)) == avals(optimizer)


@pytest.mark.sample(14)
@pytest.mark.usefixtures("optax_promotion")
@pytest.mark.parametrize("name", NAMES)
def test_donated_right_after_create_and_after_restore_and_compiled_once(name: str) -> None:
    made = definition(name)
    optimizer = made.create(make_params())
    donating = Jitted(lambda optimizer: step(name, optimizer), donate_argnums=0)
    params = optimizer.target
    first = donating(optimizer)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params)), "nothing was donated"
    second = donating(first)
    assert_same_bits(second, trained(name))  # of another definition that is equal
    restored = made.create(make_params()).restore_state(through_bytes(second.state_dict()))
    assert_same_bits(donating(restored), donating(second))
    assert donating.traces == 1


def test_optax_itself_cannot_be_donated() -> None:
    """What the test before is about: the state of some optimizers is the parameters."""
    params = make_params()
    tx = transformation("dog")
    with pytest.raises(jax.errors.JaxRuntimeError, match="donate the same buffer twice"):
        jax.jit(lambda p, s: (p, s), donate_argnums=(0, 1))(params, tx.init(params))
    optimizer = definition("dog").create(make_params())
    jax.jit(lambda o: o, donate_argnums=0)(optimizer)


@pytest.mark.usefixtures("optax_promotion")
@pytest.mark.parametrize(
    "name",
    [n for n in block_names() if n in ("mechanize", "sam", "scale_by_madgrad", "add_noise")],
)
def test_building_blocks_that_keep_what_they_are_given_can_be_donated(name: str) -> None:
    wrapper = OptaxWrapper(block(name))
    donating = Jitted(lambda optimizer: step(name, optimizer), donate_argnums=0)
    for _ in range(2):  # the second time from the same definition
        optimizer = donating(wrapper.create(make_params()))
        restored = wrapper.create(make_params()).restore_state(optimizer.state_dict())
        donating(copied(restored))
    assert donating.traces == 1


def test_arrays_of_the_transformation_survive_a_donation() -> None:
    key = jax.random.key(7)
    wrapper = opt_optax_bridge.noisy_sgd(0.1, key=key)
    jax.jit(lambda o: o, donate_argnums=0)(wrapper.create(make_params()))
    assert not key.is_deleted()
    assert wrapper == opt_optax_bridge.noisy_sgd(0.1, key=jax.random.key(7))
    assert_same_bits(wrapper.create(make_params()), wrapper.create(make_params()))


class Growing(NamedTuple):
    seen: dict[str, Any]


def growing() -> optax.GradientTransformation:
    """Like `optax.monitor`: notes what it sees under new names."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        count = len(state.seen)
        return updates, Growing({**state.seen, f"norm_{count}": jnp.zeros(())})

    return optax.GradientTransformation(lambda params: Growing({}), update)


def reshaping() -> optax.GradientTransformation:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        return updates, {"kept": state["kept"], "norms": jnp.zeros((3, 1))}

    return optax.GradientTransformation(
        lambda params: {"kept": jnp.zeros(2), "norms": jnp.zeros(3)}, update
    )


@pytest.mark.parametrize(
    ("tx", "lines"),
    [
        (growing(), ["seen/norm_0: was absent, became ()"]),
        (reshaping(), ["norms: was (3,), became (3, 1)"]),
        (optax.chain(optax.identity(), reshaping()), ["1/norms: was (3,), became (3, 1)"]),
    ],
    ids=["structure", "shape", "nested"],
)
def test_a_state_that_changes_is_an_error_that_names_the_paths(tx: Any, lines: list[str]) -> None:
    optimizer = OptaxWrapper(tx).create(make_params())
    with pytest.raises(StateChangedError) as caught:
        optimizer.apply_gradient(make_params())
    said = str(caught.value).splitlines()
    assert [line.strip() for line in said[1:-1]] == lines
    assert said[0] == "the transformation changed the structure or the shapes of its state:"


@pytest.mark.skipif(not hasattr(optax, "monitor"), reason="this Optax has no `monitor`")
def test_monitor_changes_its_state() -> None:
    """Optax's `monitor` fills an empty dict: no step with it can be compiled once."""
    tx = optax.monitor({"norm": lambda updates: optax.tree.norm(updates)})
    before = tx.init(make_params())
    _, after = tx.update(make_params(), before, make_params())
    optimizer = OptaxWrapper(tx).create(make_params())
    if structure(before) == structure(after):
        assert avals(optimizer.apply_gradient(make_params())) == avals(optimizer)
        return
    with pytest.raises(StateChangedError, match="norm"):
        optimizer.apply_gradient(make_params())


def test_containers_without_leaves_count_too() -> None:
    with pytest.raises(StateChangedError, match="became"):
        keep_avals({"a": ()}, {"a": []})


@pytest.mark.parametrize("leaf", [1, 0.5, True, np.float32(1), np.ones(2), jnp.asarray(1.0)])
def test_initial_leaves_become_strong_arrays(leaf: Any) -> None:
    (stable,) = stable_leaves((leaf,))
    assert isinstance(stable, jax.Array)
    assert not is_weak(stable)
    assert_close(stable, jnp.asarray(leaf))


def test_numpy_leaves_are_copied() -> None:
    array = np.zeros(2, np.float32)
    stable = stable_leaves(array)
    array[:] = 1.0
    assert stable.tolist() == [0.0, 0.0]


def test_new_leaves_take_the_dtype_of_the_old() -> None:
    old = {"a": jnp.zeros(2, jnp.bfloat16), "b": jnp.zeros((), jnp.int32)}
    new = {"a": jnp.ones(2, jnp.float32), "b": 3}
    assert same_shapes(old, new)
    assert avals(keep_avals(old, new)) == avals(old)
    assert keep_avals(old, new)["b"].item() == 3


def test_new_leaves_lose_weak_types() -> None:
    new = keep_avals((jnp.zeros(()), jnp.zeros((), jnp.int32)), (jnp.asarray(1.0), 2))
    assert not is_weak(new)
    assert is_weak(jnp.asarray(1.0))


def test_shapes_are_compared_leaf_by_leaf() -> None:
    assert same_shapes([jnp.ones(2), 1], [np.ones(2), jnp.ones(())])
    assert not same_shapes([jnp.ones(2)], [jnp.ones(3)])
    assert not same_shapes([jnp.ones(2)], (jnp.ones(2),))
    assert not same_shapes({"a": 1}, {"b": 1})


def test_the_step_stops_at_the_largest_int32() -> None:
    optimizer = opt_optax_bridge.sgd(0.5).create(make_params())
    last = optimizer.state.replace(step=jnp.int32(2**31 - 1))
    stepped = optimizer.replace(state=last).apply_gradient(make_params())
    assert int(stepped.state.step) == 2**31 - 1
