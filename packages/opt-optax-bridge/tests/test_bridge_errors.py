"""Errors of overrides and wrappers: what, where, expected, found, what to do."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import opt_optax_bridge as opt
import optax
import pytest
from opt_core.errors import HyperParamError, StateChangedError
from opt_optax_bridge import OptaxWrapper, resolve_hyper_params

pytestmark = pytest.mark.usefixtures("optax_promotion")

GRADS = {"w": jnp.ones(2)}
ADAMW = opt.adamw(0.1).create(GRADS)
ADAGRAD = opt.adagrad(0.1).create(GRADS)
MUON = opt.muon(0.1).create({"w": jnp.ones((2, 2))})
SGD: Any = opt.sgd(0.1, momentum=0.9).create(GRADS)
OPAQUE = OptaxWrapper(optax.sgd(0.1)).create(GRADS)

REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (SGD, {"nesterov": True}, "only arguments that are a float or a schedule can"),
    (
        ADAGRAD,
        {"initial_accumulator_value": 0.5},
        "it acts only when the state is created, .*may be: `learning_rate`, `eps`",
    ),
    (SGD, {"learning_rate": "0.1"}, "must be a real number or a scalar array; got '0.1'"),
    (ADAMW, {"learning_rate": None}, "got None"),
    (ADAMW, {"learning_rate": np.ones(1)}, "a real number or a scalar array"),
    (
        ADAMW,
        {"learning_rate": optax.constant_schedule(0.1)},
        "A schedule can replace only a schedule",
    ),
    (SGD, {"momentun": 0.5}, r"neither a hyper-parameter .*\(`learning_rate`, `momentum`\) nor"),
    (ADAMW, {"value": 1.0}, "nor an extra argument that its transformation takes"),
    (ADAMW, {"hyper_params": 0.1}, "`hyper_params`"),
    (MUON, {"ns_coeffs": (2.0, -1.5, 0.5)}, "cannot be overridden at run time"),
]


@pytest.mark.parametrize(("optimizer", "overrides", "words"), REFUSED, ids=lambda x: repr(x)[:40])
def test_a_step_and_the_question_before_it_refuse_the_same(
    optimizer: Any, overrides: dict[str, Any], words: str
) -> None:
    with pytest.raises(HyperParamError, match=f"`{next(iter(overrides))}`") as refused:
        optimizer.apply_gradient(optimizer.target, **overrides)
    assert refused.match(words)
    with pytest.raises(HyperParamError) as caught:
        resolve_hyper_params(optimizer, **overrides)
    assert str(caught.value) == str(refused.value)


def reshape(params: Any) -> Any:
    return optax.GradientTransformation(lambda p: p, lambda u, s, p=None: (u, {"w": s["w"][None]}))


def test_what_a_wrapper_cannot_do() -> None:
    words = r"it has none\).*`wrap_optax_optimizer\(constructor\).*`opt_optax_bridge.adamw\("
    with pytest.raises(HyperParamError, match=words):
        OPAQUE.apply_gradient(GRADS, learning_rate=0.5)
    with pytest.raises(TypeError, match=r"must have .*`init` and `update`; got function. Call the"):
        OptaxWrapper(optax.sgd)
    changing = OptaxWrapper(reshape(None)).create(GRADS)
    words = r"(?s)shapes of its state:.*  `w`: expected \(2,\), found \(1, 2\).* initialises its"
    with pytest.raises(StateChangedError, match=words):
        changing.apply_gradient(GRADS)
