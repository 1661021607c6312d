import pytest
from flax.core import FrozenDict
from opt_adafactor import FactorDim, factor_name_to_factordim, standard_logical_factor_rules
from opt_adafactor.errors import UnknownNameError


def test_values_are_t5xs() -> None:
    assert [(d.name, d.value) for d in FactorDim] == [
        ("NONE", None),
        ("BATCH", 1),
        ("ROW", 2),
        ("COLUMN", 3),
    ]


def test_names() -> None:
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
