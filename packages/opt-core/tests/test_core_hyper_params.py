import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import pytest
from core_testing import Momentum, MomentumHyperParams
from opt_core import OptimizerDef, replace_hyper_params
from opt_core.errors import HyperParamError


@dataclasses.dataclass(frozen=True)
class Plain:
    learning_rate: float
    beta: float = 0.9


@flax.struct.dataclass
class Struct:
    learning_rate: Any
    beta: Any = 0.9


@pytest.mark.parametrize("cls", [Plain, Struct])
def test_named_fields_are_replaced(cls: Any) -> None:
    defaults = cls(0.1)
    assert replace_hyper_params(defaults) is defaults
    assert replace_hyper_params(defaults, beta=0.5, learning_rate=None) == cls(None, 0.5)
    assert defaults == cls(0.1, 0.9)


@pytest.mark.parametrize(
    ("hyper_params", "words"),
    [
        (Plain(0.1), "this optimizer has `learning_rate`, `beta`"),
        (None, "this optimizer has none to override"),
        ({"lr": 1}, "this optimizer has none to override"),
    ],
    ids=repr,
)
def test_unknown_names_are_errors(hyper_params: Any, words: str) -> None:
    definition = OptimizerDef(hyper_params)
    assert definition.update_hyper_params() is hyper_params
    with pytest.raises(HyperParamError) as caught:
        definition.update_hyper_params(lr=0.2, eps=1e-8)
    assert str(caught.value) == f"no such hyper-parameter: `lr`, `eps`; {words}"


def test_overrides_hold_for_one_update() -> None:
    optimizer = Momentum(learning_rate=1.0, beta=0.0).create({"w": jnp.zeros(1)})
    grads = {"w": jnp.ones(1)}
    other = MomentumHyperParams(learning_rate=4.0)
    for overrides, moved in [
        ({}, -1.0),
        ({"learning_rate": 2.0}, -2.0),
        ({"hyper_params": other}, -4.0),
        ({"hyper_params": other, "learning_rate": 8.0}, -8.0),
        ({"learning_rate": jnp.float32(2)}, -2.0),
    ]:
        first = jax.jit(lambda o, kw: o.apply_gradient(grads, **kw))(optimizer, overrides)
        assert first.target["w"].tolist() == [moved]
        assert first.optimizer_def == optimizer.optimizer_def
