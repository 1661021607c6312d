"""The words of errors: what, where, expected, found, what to do."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import opt_optax_bridge
import optax
import pytest
from opt_core.errors import (
    HyperParamError,
    StateChangedError,
)
from opt_optax_bridge import OptaxWrapper, resolve_hyper_params

pytestmark = pytest.mark.usefixtures("optax_promotion")

GRADS = {"w": jnp.ones(2)}
ADAMW = opt_optax_bridge.adamw(0.1).create(GRADS)
MUON = opt_optax_bridge.muon(0.1).create({"w": jnp.ones((2, 2))})
ADAGRAD = opt_optax_bridge.adagrad(0.1).create(GRADS)
SGD: Any = opt_optax_bridge.sgd(0.1, momentum=0.9).create(GRADS)
OPAQUE = OptaxWrapper(optax.sgd(0.1)).create(GRADS)
NOT_OVERRIDABLE = (
    "What is already built has no hyper-parameters. Wrap its constructor: "
    "`wrap_optax_optimizer(constructor)(...)`. Those of Optax, among its arguments too, are "
    "wrapped in opt_optax_bridge: `opt_optax_bridge.adamw(...)` for `optax.adamw(...)`, "
    "`opt_optax_bridge.chain(...)` for `optax.chain(...)`"
)


def reshape(params: Any) -> Any:
    return optax.GradientTransformation(lambda p: p, lambda u, s, p=None: (u, {"w": s["w"][None]}))


CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no float": (
        lambda: SGD.apply_gradient(GRADS, nesterov=True),
        HyperParamError,
        (
            "`nesterov` cannot be overridden at run time: only arguments that are a float or a "
            "schedule can. Of this optimizer these may be: `learning_rate`, `momentum`"
        ),
    ),
    "at the start only": (
        lambda: ADAGRAD.apply_gradient(GRADS, initial_accumulator_value=0.5),
        HyperParamError,
        (
            "`initial_accumulator_value` cannot be overridden at run time: it acts only when the "
            "state is created, not in an update. Of this optimizer these may be: `learning_rate`, "
            "`eps`"
        ),
    ),
    "no number": (
        lambda: SGD.apply_gradient(GRADS, learning_rate="0.1"),
        HyperParamError,
        (
            "`learning_rate` must be a real number or a scalar array; got '0.1'. A schedule can "
            "replace only a schedule: otherwise build the optimizer with it."
        ),
    ),
    "misspelt": (
        lambda: SGD.apply_gradient(GRADS, momentun=0.5),
        HyperParamError,
        (
            "`momentun`: neither a hyper-parameter of this optimizer (`learning_rate`, `momentum`) "
            "nor an extra argument that its transformation takes"
        ),
    ),
    "nothing to override": (
        lambda: OPAQUE.apply_gradient(GRADS, learning_rate=0.5),
        HyperParamError,
        (
            "`learning_rate`: neither a hyper-parameter of this optimizer (it has none) nor an "
            "extra argument that its transformation takes. " + NOT_OVERRIDABLE
        ),
    ),
    "a constructor": (
        lambda: OptaxWrapper(optax.sgd),
        TypeError,
        (
            "`optax_optimizer` must have Optax's `init` and `update`; got function. Call the "
            "constructor, or wrap it with `wrap_optax_optimizer`."
        ),
    ),
    "a state that changes": (
        lambda: OptaxWrapper(reshape(None)).create(GRADS).apply_gradient(GRADS),
        StateChangedError,
        (
            "the transformation changed the structure or the shapes of its state:\n"
            "  w: was (2,), became (1, 2)\n"
            "Such a step cannot be compiled once, scanned or restored. Use a transformation that "
            "initialises its whole state, and gradients with the shapes of the parameters."
        ),
    ),
}


REFUSED: list[tuple[Any, dict[str, Any]]] = [
    (ADAMW, {"learning_rate": None}),
    (ADAMW, {"learning_rate": np.ones(1)}),
    (ADAMW, {"learning_rate": optax.constant_schedule(0.1)}),
    (ADAMW, {"lerning_rate": 0.1}),
    (ADAMW, {"value": 1.0}),
    (ADAMW, {"hyper_params": 0.1}),
    (ADAGRAD, {"initial_accumulator_value": 0.5}),
    (MUON, {"ns_coeffs": (2.0, -1.5, 0.5)}),
]


@pytest.mark.parametrize(("optimizer", "overrides"), REFUSED, ids=lambda x: repr(x)[:40])
def test_what_a_step_refuses_is_refused_when_asked(
    optimizer: Any, overrides: dict[str, Any]
) -> None:
    with pytest.raises(HyperParamError, match=f"`{next(iter(overrides))}`") as refused:
        optimizer.apply_gradient(optimizer.target, **overrides)
    with pytest.raises(HyperParamError) as caught:
        resolve_hyper_params(optimizer, **overrides)
    assert str(caught.value) == str(refused.value)


@pytest.mark.parametrize(("call", "error", "words"), CASES.values(), ids=list(CASES))
def test_the_words(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    assert str(caught.value) == words
