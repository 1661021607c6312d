"""What applying a plan does with arrays."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import SingleDeviceSharding
from opt_checkpoint import Rename, errors, named_state, plan_restore
from opt_core import Optimizer
from opt_core.state_changes import all_survive
from opt_optax_bridge import OptaxWrapper

optax: Any = importlib.import_module("optax")  # much of it is not exported explicitly
pytestmark = pytest.mark.usefixtures("optax_promotion")


def params() -> dict[str, Any]:
    return {"b": jnp.arange(3.0), "w": jnp.arange(6.0).reshape(2, 3)}


def leaves(tree: Any) -> list[Any]:
    found: list[Any] = jax.tree.leaves(tree)
    return found


def test_the_result_can_be_donated_and_the_rest_stays() -> None:
    old = opt.adam(0.1).create(params())
    saved, target = named_state(old), opt.adam(0.1).create(params())
    restored = plan_restore(saved, target).apply()
    step = jax.jit(lambda o: o.apply_gradient(o.target), donate_argnums=0)
    step(restored)
    assert not any(x.is_deleted() for x in (*leaves(old), *leaves(target)))
    again = plan_restore(saved, target, rules=[(".*", "keep")]).apply()
    step(again)
    assert not any(x.is_deleted() for x in (*leaves(old), *leaves(target)))


def test_abstract_targets_become_arrays_where_they_say() -> None:
    place = SingleDeviceSharding(jax.devices()[0])
    shapes = jax.eval_shape(lambda: opt.adam(0.1).create(params()))
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes)
    restored = plan_restore(named_state(opt.adam(0.1).create(params())), target).apply()
    assert all(x.sharding == place and x.committed for x in leaves(restored))


def test_strong_types_and_no_second_compilation() -> None:
    old = opt.adam(0.1).create(params())
    traces: list[None] = []

    @jax.jit
    def step(optimizer: Optimizer) -> Optimizer:
        traces.append(None)
        return optimizer.apply_gradient(optimizer.target)

    step(old)
    step(plan_restore(named_state(old), old).apply())
    step(plan_restore(named_state(old), old, rules=[("state/.*", "initialise")]).apply())
    assert len(traces) == 1


def test_nothing_is_read_before_apply() -> None:
    class Source:
        def __init__(self, named: Any) -> None:
            self.named, self.wanted = named, list[str]()

        @property
        def schema(self) -> Any:
            return self.named.schema

        def read(self, wanted: Any) -> Any:
            self.wanted += list(wanted)
            return self.named.read(wanted)

    source = Source(named_state(opt.adam(0.1).create(params())))
    target = opt.sgd(0.1).create(params())
    plan = plan_restore(source, target, allow={"drop", "optimizer"})
    assert str(plan)
    assert plan.table()
    assert source.wanted == []
    plan.apply()
    assert sorted(source.wanted) == ["params/b", "params/w", "state/step"]  # what is dropped is not


def test_what_is_initialised_sees_the_restored_parameters() -> None:
    def copying() -> Any:
        def init_fn(tree: Any) -> Any:
            return {"start": jax.tree.map(jnp.copy, tree)}

        return optax.GradientTransformation(init_fn, lambda u, s, p=None: (u, s))

    old = OptaxWrapper(optax.identity()).create(params())
    target = OptaxWrapper(copying()).create(jax.tree.map(jnp.zeros_like, params()))
    restored = plan_restore(named_state(old), target, allow={"initialise", "optimizer"}).apply()
    np.testing.assert_array_equal(restored.state.param_states["start"]["w"], params()["w"])


def test_an_abstract_source_has_no_values() -> None:
    optimizer = opt.adam(0.1).create(params())
    abstract = named_state(jax.eval_shape(lambda: optimizer))
    assert plan_restore(abstract, optimizer).is_exact
    with pytest.raises(errors.LeafError, match="the named state is abstract"):
        plan_restore(abstract, optimizer).apply()


# JAX 0.12 warns of it where the shape is read.
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")
def test_what_jax_cannot_hold_is_an_error() -> None:
    target = OptaxWrapper(optax.identity()).create({"x": jnp.zeros(1)})
    wide = target.replace(target={"x": jax.ShapeDtypeStruct((1,), np.float64)})
    with pytest.raises((errors.LeafError, errors.PlanError), match="params/x"):
        plan_restore(named_state(wide), target).apply()


def test_a_reshaped_cast_and_renamed_leaf() -> None:
    old = OptaxWrapper(optax.identity()).create({"x": jnp.arange(6.0).reshape(2, 3)})
    target = OptaxWrapper(optax.identity()).create({"y": jnp.zeros((3, 2), jnp.int32)})
    rules = [("params/y", Rename("params/x"))]
    plan = plan_restore(named_state(old), target, rules=rules, allow={"cast", "reshape"})
    assert plan.apply().target["y"].tolist() == [[0, 1], [2, 3], [4, 5]]
    for allow in ({"cast"}, {"reshape"}, set[str]()):
        assert not plan_restore(named_state(old), target, rules=rules, allow=allow).is_ok


INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32")


@settings(deadline=None, max_examples=60)  # an example may compile
@given(
    st.sampled_from(INTEGERS),
    st.sampled_from((*INTEGERS, "float16", "bfloat16", "float32", "bool")),
    st.data(),
)
def test_integers_fit_exactly_or_not_at_all(old: str, new: str, data: Any) -> None:
    limits = np.iinfo(old)
    value = data.draw(
        st.sampled_from([int(limits.min), int(limits.max), 0, 1, 127, int(limits.max) // 2 + 1])
        | st.integers(int(limits.min), int(limits.max))
    )
    before = jnp.asarray(np.array(value, old))
    after = before.astype(new)
    kept = float(after.astype(jnp.float32)) if new in ("float16", "bfloat16") else after.item()
    assert bool(all_survive(before, after)) == (kept == value)


@settings(deadline=None, max_examples=60)
@given(st.floats(width=32, allow_subnormal=False), st.sampled_from((*INTEGERS, "bool")))
def test_floats_fit_integers_exactly_or_not_at_all(value: float, new: str) -> None:
    before = jnp.float32(value)
    low, high = (0, 1) if new == "bool" else (np.iinfo(new).min, np.iinfo(new).max)
    expected = np.isfinite(value) and value == int(value) and low <= int(value) <= high
    assert bool(all_survive(before, before.astype(new))) == expected
