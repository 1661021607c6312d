"""The package installs and imports alone, and exports what it says."""

import importlib.metadata
import inspect
import pickle
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import opt_adafactor
import pytest
from opt_adafactor import Adafactor, HParamMap, errors, t5x
from opt_core.protocols import DerivesLogicalAxes, TakesParamAxes

pytestmark = pytest.mark.contract

# What T5X's own tests, and code that was modelled on them, import besides.
PRIVATE = ["_AdafactorHyperParams", "_AdafactorParamState"]


def test_all_is_what_is_public() -> None:
    assert sorted(opt_adafactor.__all__) == sorted(set(opt_adafactor.__all__))
    public = {name for name in vars(opt_adafactor) if not name.startswith("_")} - {"t5x"}
    assert public == set(opt_adafactor.__all__)
    assert all(hasattr(opt_adafactor, name) for name in PRIVATE)


def test_the_facade_has_the_names_of_t5x() -> None:
    assert len(t5x.__all__) == len(set(t5x.__all__))  # ruff sorts
    assert all(hasattr(t5x, name) for name in [*t5x.__all__, *PRIVATE])
    for name in {*t5x.__all__, *PRIVATE} - {"Adafactor", "OptimizerDef", "OptimizerState"}:
        assert getattr(t5x, name) is getattr(opt_adafactor, name)
    assert issubclass(t5x.Adafactor, Adafactor)


def test_errors_export_what_they_define() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert sorted(defined) == errors.__all__


def test_errors_are_the_builtins_that_callers_catch() -> None:
    expected = {
        "ParamAxesError": ValueError,
        "FactorRuleError": ValueError,
        "StateConversionError": ValueError,
        "UnknownNameError": KeyError,
    }
    for name, builtin in expected.items():
        assert issubclass(getattr(errors, name), (errors.AdafactorError, builtin))
        assert issubclass(getattr(errors, name), builtin)
    error = errors.UnknownNameError("a\nb")
    assert str(error) == "a\nb"  # a KeyError would quote it
    assert str(pickle.loads(pickle.dumps(error))) == "a\nb"


def documented() -> Iterator[tuple[str, Any]]:
    for module in (opt_adafactor, errors, t5x):
        yield module.__name__, module
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                yield name, value
    for cls in (Adafactor, HParamMap, t5x.Adafactor):
        for member in vars(cls).values():
            if inspect.isfunction(member) and not member.__name__.startswith("_"):
                yield f"{cls.__name__}.{member.__name__}", member


@pytest.mark.parametrize("value", [pytest.param(value, id=name) for name, value in documented()])
def test_every_public_name_is_documented(value: Any) -> None:
    assert value.__doc__, "inherited words do not count"


def test_protocols() -> None:
    assert isinstance(Adafactor(), DerivesLogicalAxes)
    assert isinstance(Adafactor(), TakesParamAxes)


def test_the_signature_is_t5xs_and_then_ours() -> None:
    parameters = inspect.signature(Adafactor).parameters
    assert inspect.signature(t5x.Adafactor).parameters == parameters
    assert list(parameters) == [
        *("learning_rate", "factored", "multiply_by_parameter_scale", "beta1", "decay_rate"),
        *("step_offset", "clipping_threshold", "weight_decay_rate", "min_dim_size_to_factor"),
        *("epsilon1", "epsilon2", "dtype_momentum", "factor_map", "logical_factor_rules"),
        *("weight_decay_rate_lr_exponent", "global_norm_clip_threshold", "max_parameter_scale"),
        *("skip_nan_updates", "respect_rank2_rules"),
    ]
    both = inspect.signature(opt_adafactor.adafactor).parameters
    assert list(both)[: len(parameters)] == list(parameters)
    assert all(both[name].default == p.default for name, p in parameters.items())


def test_types_are_shipped() -> None:
    assert files("opt_adafactor").joinpath("py.typed").is_file()


def test_version_is_that_of_the_distribution() -> None:
    assert opt_adafactor.__version__ == importlib.metadata.version("opt-adafactor")
