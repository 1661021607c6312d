"""Input at the edges: names in rules, empty tensors, boxes of Flax, huge gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_adafactor as ada
import pytest
from adafactor_testing import apply_compiled
from flax import linen as nn
from flax.linen import partitioning
from jax.sharding import PartitionSpec as P
from opt_adafactor import Adafactor, HParamMap, standard_logical_factor_rules
from opt_adafactor.errors import ParamAxesError

RULES = standard_logical_factor_rules()


def test_empty_tensors_disturb_nothing() -> None:
    rules = HParamMap([("e", ("row", "batch", "column")), ("", ada.HEURISTIC_RULE)])
    definition = Adafactor(0.1, factor_map=rules, skip_nan_updates=True, min_dim_size_to_factor=0)
    params = {"e": jnp.ones((4, 3, 0)), "z": jnp.ones((0, 5)), "w": jnp.ones(3)}
    optimizer = apply_compiled(definition.create(params), params)
    assert np.allclose(optimizer.target["w"], 0.9)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(optimizer.state))
    assert optimizer.state.param_states["e"].v.shape == (4, 3, 0)


def test_axes_in_the_boxes_of_flax() -> None:
    definition = Adafactor(logical_factor_rules=RULES)
    plain = definition.with_param_axes({"w": P("embed", "layers", "mlp")})
    names = ("embed", "layers", "mlp")
    boxed: Any = {"w": nn.Partitioned(jnp.ones((4, 3, 5)), names=names)}
    assert definition.with_param_axes(boxed) == plain
    metadata = {"w": partitioning.AxisMetadata(names=P(*names))}
    assert definition.with_param_axes(metadata) == plain
    with pytest.raises(ParamAxesError, match=r"in Flax boxes: .*`flax.linen.unbox`"):
        plain.create(boxed)


def test_the_global_norm_of_huge_gradients() -> None:
    def stepped(size: float, threshold: float = 1.0, **options: Any) -> Any:
        grads = {"a": jnp.asarray([size, size]), "b": jnp.ones(2)}
        definition = Adafactor(0.1, global_norm_clip_threshold=threshold, epsilon1=1e-3, **options)
        optimizer = definition.create({"a": jnp.ones(2), "b": jnp.ones(2)})
        return apply_compiled(optimizer, grads)

    for size, threshold in ((3e20, 1.0), (3e38, 1.0), (3e20, 2.0)):
        clipped = stepped(size, threshold).state.param_states["a"].v
        assert np.allclose(clipped, 0.5 * threshold**2 + 1e-3, rtol=1e-6)
    spoilt = stepped(np.inf, skip_nan_updates=True)
    for name in "ab":
        assert (spoilt.target[name] == 1.0).all()
        assert (spoilt.state.param_states[name].v == 0.0).all()


def test_parameters_that_would_overflow() -> None:
    options: dict[str, Any] = {"multiply_by_parameter_scale": False, "skip_nan_updates": True}
    params = {"w": jnp.full(3, 60000.0, jnp.float16)}
    grads = {"w": -jnp.ones(3, jnp.float16)}
    optimizer = Adafactor(20000.0, **options).create(params)
    assert (apply_compiled(optimizer, grads).target["w"] == params["w"]).all()
    tx: Any = ada.adafactor(20000.0, **options)
    updates, _ = tx.update(grads, tx.init(params), params)
    assert (updates["w"] == 0.0).all()
