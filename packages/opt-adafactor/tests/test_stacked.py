"""Stacked layers are updated as the same layers would be one by one."""

from typing import Any

import pytest
from adafactor_testing import apply_compiled, largest_difference, normal
from jax.sharding import PartitionSpec as P
from opt_adafactor import Adafactor, standard_logical_factor_rules


@pytest.mark.sample(1)
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
