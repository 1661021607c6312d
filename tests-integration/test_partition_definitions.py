"""opt-partition takes definitions and optimizers of opt-core, which it does not import."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import opt_optax_bridge as opt
import opt_partition as part
import pytest
from jax.sharding import PartitionSpec as P
from opt_adafactor import Adafactor
from opt_core import FROZEN, MultiOptimizer

PARAMS = {
    "dense": {"kernel": jnp.ones((16, 8)), "bias": jnp.ones(8)},
    "embedding": jnp.ones((32, 16)),
}
AXES = {
    "dense": {"kernel": ("embed", "mlp"), "bias": ("mlp",)},
    "embedding": ("vocab", "embed"),
}
RULES = [("vocab", "model"), ("mlp", "model"), ("embed", "data")]


def groups() -> MultiOptimizer:
    rules = [
        ("kernels", r".*/kernel", opt.adamw(1e-3)),
        ("embedding", "embedding", Adafactor(1e-3, min_dim_size_to_factor=8)),
    ]
    return MultiOptimizer.from_rules(rules, rest=FROZEN)


DEFINITIONS: dict[str, Callable[[], Any]] = {
    "chain": lambda: opt.chain(opt.clip_by_global_norm(1.0), opt.adamw(1e-3)),
    "adafactor": lambda: Adafactor(1e-3, min_dim_size_to_factor=8),
    "groups": groups,
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_axes_are_those_that_the_definition_derives(name: str) -> None:
    definition = DEFINITIONS[name]()
    optimizer = definition.create(PARAMS)
    specs = jax.tree.map(lambda names: P(*names), AXES, is_leaf=lambda x: isinstance(x, tuple))
    expected = definition.derive_logical_axes(optimizer, specs).state.param_states
    found = part.derive_logical_axes(optimizer, None, AXES)
    structure: Any = jax.tree.structure(optimizer.state.param_states)
    leaves = jax.tree.leaves(optimizer.state.param_states)
    pairs = zip(*map(structure.flatten_up_to, (found.param_states, expected)), strict=True)
    for leaf, (own, derived) in zip(leaves, pairs, strict=True):
        if leaf.size > 1:
            assert own == derived
