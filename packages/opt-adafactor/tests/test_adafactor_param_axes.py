"""Factor rules from logical axes, and the logical axes of the state."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from flax.core import FrozenDict
from jax.sharding import PartitionSpec as P
from opt_adafactor import (
    HEURISTIC_RULE,
    Adafactor,
    FactorDim,
    standard_logical_factor_rules,
)
from opt_adafactor.errors import FactorRuleError, ParamAxesError, UnknownNameError
from opt_core import Optimizer
from opt_core.errors import HyperParamError

ROW, COLUMN, BATCH, NONE = FactorDim.ROW, FactorDim.COLUMN, FactorDim.BATCH, FactorDim.NONE
PARAMS = {
    "query": jnp.ones((6, 3, 2, 4)),
    "wi": jnp.ones((6, 3, 8)),
    "scale": jnp.ones((6, 3)),
    "embedding": jnp.ones((12, 6)),
    "square": jnp.ones((6, 6)),
    "gate": jnp.ones((1,)),
    "temperature": jnp.ones(()),
}
AXES = {
    "query": P("embed", "layers", "heads", "kv"),
    "wi": P("embed", "layers", "mlp"),
    "scale": P("embed", "layers"),
    "embedding": P("vocab", "embed"),
    "square": P("embed", "mlp"),
    "gate": P("mlp"),
    "temperature": P(),
}


def make(**options: Any) -> Adafactor:
    rules = standard_logical_factor_rules()
    return Adafactor(0.1, logical_factor_rules=rules, min_dim_size_to_factor=4, **options)


def rules_of(axes: Any, **options: Any) -> dict[str, Any]:
    return dict(make(**options).with_param_axes(axes).hyper_params.factor_map)


def test_rules() -> None:
    assert rules_of(AXES) == {
        "query": (ROW, BATCH, COLUMN, COLUMN),
        "wi": (ROW, BATCH, COLUMN),
        "scale": (NONE, BATCH),
        "embedding": (COLUMN, ROW),
        "square": (ROW, COLUMN),
        "gate": (NONE,),
        "temperature": (),
    }


def test_axes_without_names_and_with_several() -> None:
    axes = {
        "none": P(None, "embed", "mlp"),
        "several": P("layers", ("heads", "kv"), "embed"),
        "unnamed": None,
        "tuple": ("embed", None),
    }
    with pytest.raises(FactorRuleError, match=r"`none` with axes \(-, embed, mlp\) would be"):
        rules_of(axes)
    del axes["none"]
    assert rules_of(axes) == {
        "several": (BATCH, COLUMN, ROW),
        "unnamed": HEURISTIC_RULE,
        "tuple": (NONE, NONE),
    }
    with pytest.raises(FactorRuleError, match=r"\('heads', 'embed'\) share one dimension of `w`"):
        rules_of({"w": P(("heads", "embed"))})


def test_told_by_t5xs_method() -> None:
    definition = make()
    jax.eval_shape(lambda: definition.set_param_axes(AXES))  # the trainer does it while tracing
    before = hash(definition)
    definition.set_param_axes(FrozenDict(AXES))  # again and again
    assert hash(definition) == before
    expected = make().with_param_axes(AXES).create(PARAMS)
    assert definition == expected.optimizer_def
    chex.assert_trees_all_equal(definition.create(PARAMS).state, expected.state)


def shapes_after(optimizer: Optimizer, grads: Any, **overrides: Any) -> Optimizer:
    stepped: Optimizer = jax.eval_shape(lambda: optimizer.apply_gradient(grads, **overrides))
    return stepped


def test_a_second_model_needs_a_definition_of_its_own() -> None:
    definition = make()
    definition.set_param_axes(AXES)
    first = definition.create(PARAMS)
    for captured in (definition.hyper_params, make().hyper_params):  # after, and before
        shapes_after(first, PARAMS, hyper_params=captured)
    axes = {"wi": P("layers", "embed", "mlp")}
    with pytest.raises(
        HyperParamError, match=r"before with different axes\. Use `with_param_axes`"
    ):
        definition.set_param_axes(axes)
    second = definition.with_param_axes(axes).create({"wi": jnp.ones((6, 3, 8))})
    assert second.state.param_states["wi"].v_row.shape == (6, 3)
    assert second.state.param_states["wi"].v_col.shape == (6, 8)
    stepped = shapes_after(first, PARAMS)
    assert stepped.state.param_states["wi"].v_col.shape == (3, 8)


def test_without_rules() -> None:
    definition = Adafactor(0.1)
    definition.set_param_axes(AXES)  # T5X's trainer tells every Adafactor
    assert definition == Adafactor(0.1)
    with pytest.raises(HyperParamError, match=r"`with_param_axes` needs `logical_factor_rules`"):
        definition.with_param_axes(AXES)
    unfactored = make(factored=False).with_param_axes(AXES)
    assert unfactored.create(PARAMS).state.param_states["wi"].v.shape == (6, 3, 8)


def test_unknown_names() -> None:
    with pytest.raises(UnknownNameError) as caught:
        rules_of({"decoder": {"moe": P("expert", "embed")}})
    message = str(caught.value)
    assert "no rule for the axis `expert` of `decoder/moe`" in message
    assert "whose axes are (expert, embed)" in message
    assert "known axes are `embed`, `layers`" in message


def test_axes_must_fit_the_parameters() -> None:
    axes = {**AXES, "wi": P("embed", "mlp"), "more": P("embed")}
    del axes["query"]
    with pytest.raises(ParamAxesError) as caught:
        make().with_param_axes(axes).create(PARAMS)
    message = str(caught.value)
    assert "query: no axes given" in message
    assert "wi: expected 3 axes, one per dimension of (6, 3, 8), found 2" in message
    assert "`with_param_axes`" in message
    with pytest.raises(ParamAxesError, match=r"`param_axes` of `wi` must be .*found a int"):
        make().with_param_axes({"wi": 3})
    with pytest.raises(UnknownNameError, match="`embed`: `rows` is not a factor dimension"):
        Adafactor(logical_factor_rules={"embed": "rows"})
    with pytest.raises(FactorRuleError, match=r"of the axis `embed` must be .*found 2"):
        Adafactor(logical_factor_rules={"embed": 2})


# The axes of the state.


def derive(definition: Adafactor, axes: Any = AXES, params: Any = PARAMS) -> Any:
    optimizer = jax.eval_shape(definition.create, params)
    derived = definition.derive_logical_axes(optimizer, axes)
    assert derived.state.step is None
    assert derived.optimizer_def is definition
    return derived


def test_factors_have_the_axes_of_what_they_keep() -> None:
    derived = derive(make().with_param_axes(AXES))
    assert derived.target == AXES
    found = {path: (s.v_row, s.v_col, s.v, s.m) for path, s in derived.state.param_states.items()}
    assert found == {
        "query": (P("embed", "layers"), P("layers", "heads", "kv"), None, None),
        "wi": (P("embed", "layers"), P("layers", "mlp"), None, None),
        "scale": (None, None, P("embed", "layers"), None),
        "embedding": (P("embed"), P("vocab"), None, None),
        "square": (P("embed"), P("mlp"), None, None),
        "gate": (None, None, P("mlp"), None),
        "temperature": (None, None, P(), None),
    }
