"""Stacked layers are updated as the same layers would be one by one."""

from typing import Any

import jax.numpy as jnp
import pytest
from adafactor_testing import apply_compiled, largest_difference, normal, rule
from jax.sharding import PartitionSpec as P
from opt_adafactor import Adafactor, HParamMap, standard_logical_factor_rules

OPTIONS: dict[str, Any] = {
    "learning_rate": 0.1,
    "beta1": 0.9,
    "weight_decay_rate": 0.01,
    "max_parameter_scale": 0.9,
    "respect_rank2_rules": True,  # else the single layers would not follow the rule
}


@pytest.mark.parametrize(
    ("shape", "letters"),
    [((3, 8, 6), "brc"), ((8, 3, 6), "rbc"), ((4, 3, 2, 5), "cbcr")],
    ids=str,
)
def test_a_stack_and_its_layers(shape: tuple[int, ...], letters: str) -> None:
    axis = letters.index("b")
    layer_rule = rule(letters.replace("b", ""))
    stacked = Adafactor(**OPTIONS, factor_map=HParamMap([("", rule(letters))]))
    single = Adafactor(**OPTIONS, factor_map=HParamMap([("", layer_rule)]))

    def layer(x: Any, i: int) -> Any:
        return jnp.take(x, i, axis=axis)

    # Layers of very different size: what one sees of another would show.
    sizes = jnp.asarray([1.0, 100.0, 0.01]).reshape([-1 if r == "b" else 1 for r in letters])
    params = {"w": normal(0, shape) * sizes}
    together = stacked.create(params)
    alone = [single.create({"w": layer(params["w"], i)}) for i in range(3)]
    for t in range(3):
        grads = normal(t + 1, shape) / sizes
        together = apply_compiled(together, {"w": grads})
        alone = [apply_compiled(o, {"w": layer(grads, i)}) for i, o in enumerate(alone)]
    for i, optimizer in enumerate(alone):
        found = {"w": layer(together.target["w"], i)}
        assert largest_difference(found, optimizer.target) < 1e-6
        state, layers = together.state.param_states["w"], optimizer.state.param_states["w"]
        assert largest_difference(layer(state.m, i), layers.m) < 1e-6
        row = jnp.take(state.v_row, i, axis=letters.replace("c", "").index("b"))
        assert largest_difference(row, layers.v_row) < 1e-6


@pytest.mark.parametrize(
    ("shape", "axes", "options"),
    [
        ((130, 128), ("embed", "mlp"), {}),
        ((6,), ("embed",), {}),
        ((8, 4, 6), ("embed", "heads", "kv"), {}),
        ((6, 8), ("embed", "mlp"), {"respect_rank2_rules": True}),
    ],
    ids=str,
)
def test_the_standard_rules_of_a_stack(shape: Any, axes: Any, options: Any) -> None:
    definition = Adafactor(0.1, logical_factor_rules=standard_logical_factor_rules(), **options)
    params, grads = normal(0, (2, *shape)), normal(1, (2, *shape))
    stacked = definition.with_param_axes({"w": P("layers", *axes)}).create({"w": params})
    found = apply_compiled(stacked, {"w": grads}).target["w"]
    single = definition.with_param_axes({"w": P(*axes)})
    for i in range(2):
        layer = apply_compiled(single.create({"w": params[i]}), {"w": grads[i]})
        assert largest_difference(found[i], layer.target["w"]) < 1e-6
