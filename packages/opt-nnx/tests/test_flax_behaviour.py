"""What `flax.nnx.Optimizer` does, done by both."""

from typing import Any

import jax
import jax.numpy as jnp
import opt_nnx
import optax
import pytest
from flax import nnx
from nnx_testing import (
    TRANSFORMATIONS,
    assert_same,
    bare,
    flat,
    gradients,
    loss,
    make_model,
    train_step,
)

CLASSES: list[Any] = [nnx.Optimizer, opt_nnx.Optimizer]
HAS_MODES = hasattr(nnx, "as_pure")  # Flax 0.12.0 has graph mode alone, and returns no updates


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_paths_values_and_updates_are_those_of_flax(name: str) -> None:
    found = []
    for kind in CLASSES:
        model: Any = make_model()
        optimizer = kind(model, TRANSFORMATIONS[name](), wrt=nnx.Param)
        returned = [train_step(model, optimizer) for _ in range(3)]
        found.append((nnx.state(model), optimizer, returned[-1]))
    (model, theirs, updates), (our_model, ours, our_updates) = found
    assert_same(model, our_model)
    if updates is not None:  # Flax 0.12.0 returns none
        assert_same(updates, our_updates)
    expected, state = flat(theirs), flat(ours)
    assert {k: type(v) for k, v in state.items()} == {k: type(v) for k, v in expected.items()}
    for path, variable in expected.items():
        assert isinstance(state[path], nnx.OptState)
        assert_same(bare(state[path]), in_lists(bare(variable)))


def in_lists(value: Any) -> Any:
    """Flax makes a `State` of a list that a variable holds, as of SM3's rows, in its `jit`."""
    return [value[n] for n in sorted(value)] if isinstance(value, nnx.State) else value


@pytest.mark.skipif(not HAS_MODES, reason="Flax 0.12.0 has graph mode alone")
def test_a_step_without_a_graph() -> None:
    model = make_model()
    optimizer: Any = opt_nnx.Optimizer(model, optax.adam(0.05), wrt=nnx.Param, graph=False)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> Any:
        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model=model, grads=grads)
        return value

    values = [float(step(model, optimizer)) for _ in range(3)]
    assert values == sorted(values, reverse=True)
    assert optimizer.step[...] == 3
    with pytest.raises(TypeError, match="grads"):
        optimizer.update(model)


def test_a_line_search() -> None:
    model = make_model()
    optimizer = opt_nnx.Optimizer(model, optax.lbfgs(), wrt=nnx.Param)
    parts: Any = nnx.split(model, nnx.Param, ...)
    graphdef, _, others = parts

    def loss_of_params(params: Any) -> jax.Array:
        return loss(nnx.merge(graphdef, params, others))

    @nnx.jit
    def step(model: Any, optimizer: Any) -> Any:
        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads, grad=grads, value=value, value_fn=loss_of_params)
        return value

    values = [float(step(model, optimizer)) for _ in range(3)]
    assert values == sorted(values, reverse=True)
    assert values[-1] < values[0]


OUTER = nnx.All(nnx.Param, nnx.PathContains("outer"))
FILTERS = [
    pytest.param(nnx.LoRAParam, id="LoRAParam", marks=pytest.mark.slow),
    pytest.param((nnx.Param, nnx.LoRAParam), id="both", marks=pytest.mark.slow),
    pytest.param(OUTER, id="path"),
]


@pytest.mark.parametrize("wrt", FILTERS)
def test_only_what_is_trained_changes(wrt: Any) -> None:
    model = nnx.LoRA(4, 2, 3, base_module=make_model(), rngs=nnx.Rngs(1))
    optimizer = opt_nnx.Optimizer(model, optax.adam(0.1), wrt=wrt)
    before = jax.tree.map(jnp.copy, nnx.state(model, wrt, ...))
    optimizer.update(model, gradients(model, wrt))
    # Once more: the factor that starts at zero hides the gradient of the other.
    optimizer.update(model, gradients(model, nnx.Param if HAS_MODES else wrt))  # of all
    after = nnx.state(model, wrt, ...)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), before, after)
    assert not any(jax.tree.leaves(same[0]))
    assert all(jax.tree.leaves(same[1]))


class Tied(nnx.Module):
    def __init__(self) -> None:
        self.embed = nnx.Linear(4, 3, use_bias=False, rngs=nnx.Rngs(0))
        self.unembed = self.embed

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.embed(x) + self.unembed(-x / 2)


def test_shared_variables_have_one_state() -> None:
    model = Tied()
    optimizer = opt_nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    assert len(jax.tree.leaves(nnx.state(optimizer, nnx.OptVariable))) == 2
    optimizer.update(model, gradients(model))
    assert model.embed is model.unembed


@pytest.mark.slow
def test_a_subclass_with_metrics() -> None:
    base: Any = opt_nnx.Optimizer

    class TrainState(base):  # type: ignore[misc]
        def __init__(self, model: Any, tx: Any) -> None:
            self.metrics = nnx.metrics.Average()
            super().__init__(model, tx, wrt=nnx.Param)

        def update(self, model: Any, grads: Any, value: Any) -> None:
            self.metrics.update(values=value)
            super().update(model, grads)

    model = make_model()
    state = TrainState(model, optax.adam(0.1))

    @nnx.jit
    def step(model: Any, state: Any) -> None:
        value, grads = nnx.value_and_grad(loss)(model)
        state.update(model, grads, value)

    step(model, state)
    before = state.metrics.compute()
    step(model, state)
    assert state.metrics.compute() < before
