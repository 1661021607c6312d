"""Names of factor dimensions, the standard rules, and maps by path."""

import pickle
from typing import Any

import jax.numpy as jnp
import pytest
from flax.core import FrozenDict
from opt_adafactor import (
    FactorDim,
    HParamMap,
    factor_name_to_factordim,
    standard_logical_factor_rules,
)
from opt_adafactor.errors import UnknownNameError


def test_names_and_values_are_t5xs() -> None:
    values = {"NONE": None, "BATCH": 1, "ROW": 2, "COLUMN": 3}
    assert {dim.name: dim.value for dim in FactorDim} == values
    names = {
        **dict.fromkeys(["row", "ROW"], FactorDim.ROW),
        **dict.fromkeys(["col", "Column"], FactorDim.COLUMN),
        "batch": FactorDim.BATCH,
        **dict.fromkeys(["none", "Unfactorized"], FactorDim.NONE),
    }
    assert {name: factor_name_to_factordim(name) for name in names} == names
    assert factor_name_to_factordim(None) is None
    with pytest.raises(UnknownNameError, match=r"`diag`.*one of `row`, `col`, `column`, `batch`"):
        factor_name_to_factordim("diag")


def test_standard_rules() -> None:
    rules = standard_logical_factor_rules()
    assert isinstance(rules, FrozenDict)
    by_dim = {dim: {n for n, d in rules.items() if d is dim} for dim in FactorDim}
    assert by_dim == {
        FactorDim.ROW: {"embed"},
        FactorDim.BATCH: {"layers", "stack"},
        FactorDim.NONE: {"relpos_buckets", "layer_norm_scale"},
        FactorDim.COLUMN: {
            *("vocab", "mlp", "heads", "kv", "joined_kv", "q_wi_fused", "o_wo_fused"),
            *("multiquery_heads", "kv_fused", "mlp_activations"),
        },
    }


def test_the_first_pattern_found_anywhere_wins() -> None:
    hparams = HParamMap((("b/kernel", 1), ("kernel$", 2), ("", 3)))
    assert [hparams[p] for p in ("a/b/kernel", "a/kernel", "kernel_2")] == [1, 2, 3]


def test_values_in_the_containers_of_the_parameters() -> None:
    hparams = HParamMap([("0", None), (".*", "x")])
    params: Any = FrozenDict({"layers": [1.0, (2.0, 3.0)], "by_key": {7: 4.0}})
    found = hparams(params)
    assert isinstance(found, FrozenDict)
    assert found["layers"] == [None, (None, "x")]
    assert found["by_key"][7] == "x"


def test_maps_are_values() -> None:
    a, b = HParamMap([("a", [1, 2])]), HParamMap(iter([("a", (1, 2))]))
    assert a == b
    assert hash(a) == hash(b)
    assert a != HParamMap([("b", (1, 2))])
    assert pickle.loads(pickle.dumps(a)) == a
    assert bool(HParamMap([]))  # a map, though without rules
    with pytest.raises(AttributeError):
        a.rules = ()  # type: ignore[misc]


def test_a_missing_rule_names_parameter_and_patterns() -> None:
    with pytest.raises(UnknownNameError, match=r"`c/d`; the patterns are `a`, `b`") as caught:
        HParamMap([("a", 1), ("b", 2)])["c/d"]
    assert isinstance(caught.value, KeyError)
    with pytest.raises(TypeError, match="`static_args`"):  # `inject_hyperparams` calls it
        HParamMap([("a", 1)])(jnp.int32(0))
    with pytest.raises(ValueError, match=r"`rules`: `\(` is not a valid regular expression"):
        HParamMap([("(", 1)])
