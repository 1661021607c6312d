"""The facade of `t5x.adafactor`: what T5X's own modules lean on, against what T5X wrote."""

from typing import Any

import adafactor_goldens as g
import jax
import jax.numpy as jnp
import opt_adafactor
import pytest
from flax.core import FrozenDict
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec as P
from opt_adafactor import t5x

ROW, COLUMN, BATCH, NONE = t5x.FactorDim.ROW, t5x.FactorDim.COLUMN, t5x.FactorDim.BATCH, None
RULES = {**t5x.standard_logical_factor_rules(), "expert": BATCH, "expert_mlp": COLUMN}
PARAMS: Any = {
    "expert": {"wi": {"kernel": jnp.ones((4, 6, 8))}},
    "mlp": {"wi": {"kernel": jnp.ones((6, 8)), "bias": jnp.ones(8)}},
    "gate": jnp.ones((1,)),
    "scale": jnp.ones(()),
}
AXES = {
    "expert": {"wi": {"kernel": P("expert", "embed", "expert_mlp")}},
    "mlp": {"wi": {"kernel": P("embed", "mlp"), "bias": P("mlp")}},
    "gate": P("mlp"),
    "scale": P(),
}


def make(kind: type[opt_adafactor.Adafactor] = t5x.Adafactor, **options: Any) -> Any:
    definition = kind(0.1, logical_factor_rules=RULES, min_dim_size_to_factor=4, **options)
    definition.set_param_axes(AXES)
    return definition


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", g.case_ids("derived_logical_axes"))
def test_axes_are_those_that_t5x_derived(name: str) -> None:
    case = g.load(name)
    definition = case.definition(t5x.Adafactor)
    optimizer = definition.create(case.params)
    derived = definition.derive_logical_axes(optimizer, case.param_axes)
    found = {p: x if x is None else list(x) for p, x in g.flatten(derived.state_dict()).items()}
    assert found == case.index["derived_logical_axes"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", g.case_ids("factor_map"))
def test_the_factor_map_is_the_plain_dict_of_t5x(name: str) -> None:
    case = g.load(name)
    found = case.definition(t5x.Adafactor).hyper_params.factor_map
    assert type(found) is dict
    assert {type(rule) for rule in found.values()} == {tuple}
    named = {path: [dim.name for dim in rule] for path, rule in found.items()}
    assert named == case.index["factor_map"]


@pytest.mark.parametrize("wrap", [dict, FrozenDict])
@pytest.mark.parametrize("is_abstract", [False, True])
def test_a_partitioner_of_experts_changes_axes_and_restores_them(
    wrap: Any, is_abstract: bool
) -> None:
    """T5X writes axes into a state dict, prepends `expert`, and restores into the arrays."""
    definition = make()
    create = definition.create
    optimizer = jax.eval_shape(create, wrap(PARAMS)) if is_abstract else create(wrap(PARAMS))
    derived = definition.derive_logical_axes(optimizer, wrap(AXES))
    flat = flatten_dict(derived.state_dict(), sep="/")
    for path in flat:
        if "expert" in path and path.rpartition("/")[2].startswith("v_"):
            flat[path] = P("expert", *(flat[path] or ()))
    for reference in (optimizer, derived):
        restored = reference.restore_state(unflatten_dict(flat, sep="/"))
        assert type(restored.target) is wrap
        assert flatten_dict(restored.state_dict(), sep="/") == flat
        expert = restored.state.param_states["expert"]["wi"]["kernel"]
        assert (expert.v_row, expert.v_col) == (P("expert"), P("expert"))
        assert restored.state.param_states["mlp"]["wi"]["kernel"].v_row is None


def test_a_map_that_is_changed_after_the_axes_is_not_ignored() -> None:
    definition = make()
    definition.hyper_params.factor_map["expert/wi/kernel"] = None
    state = definition.create(PARAMS).state.param_states["expert"]["wi"]["kernel"]
    assert state.v.shape == PARAMS["expert"]["wi"]["kernel"].shape
