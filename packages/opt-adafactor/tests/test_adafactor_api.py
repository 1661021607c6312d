"""The names and signatures of T5X's module, and what works without Optax."""

import inspect
import pickle
import subprocess
import sys

import opt_adafactor
import pytest
from opt_adafactor import Adafactor, errors, t5x

# What T5X's own tests, and code that was modelled on them, import besides.
PRIVATE = ["_AdafactorHyperParams", "_AdafactorParamState"]

WITHOUT_OPTAX = """
import sys
sys.modules["optax"] = None
import jax
import jax.numpy as jnp
import opt_adafactor
import pytest
optimizer = opt_adafactor.Adafactor(0.1).create({"w": jnp.ones(3)})
optimizer = jax.eval_shape(lambda o: o.apply_gradient({"w": jnp.ones(3)}), optimizer)
for call in (
    opt_adafactor.adafactor,
    opt_adafactor.scale_by_generalized_factored_rms,
    lambda: opt_adafactor.to_optax_state(optimizer.state, ()),
    lambda: opt_adafactor.from_optax_state(()),
):
    try:
        call()
    except ImportError as error:
        print(error)
"""


def test_the_facade_has_the_names_of_t5x() -> None:
    assert len(t5x.__all__) == len(set(t5x.__all__))  # ruff sorts
    assert all(hasattr(t5x, name) for name in [*t5x.__all__, *PRIVATE])
    for name in {*t5x.__all__, *PRIVATE} - {"Adafactor", "OptimizerDef", "OptimizerState"}:
        assert getattr(t5x, name) is getattr(opt_adafactor, name)
    assert issubclass(t5x.Adafactor, Adafactor)


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


@pytest.mark.slow
def test_without_optax_the_definition_works_and_the_rest_says_what_to_install() -> None:
    command = [sys.executable, "-c", WITHOUT_OPTAX]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert len(lines) == 4
    assert all('`pip install "opt-adafactor[optax]"`' in line for line in lines)
