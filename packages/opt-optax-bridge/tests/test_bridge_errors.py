"""The words of errors: what, where, expected, found, what to do."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_optax_bridge
import optax
import pytest
from jax.sharding import PartitionSpec as P
from opt_core.errors import (
    HyperParamError,
    StateChangedError,
    TreeMismatchError,
)
from opt_optax_bridge import OptaxWrapper, overridable_hyper_params, resolve_hyper_params, t5x
from opt_partition.errors import AxesError

pytestmark = pytest.mark.usefixtures("optax_promotion")

GRADS = {"w": jnp.ones(2)}
ADAMW = opt_optax_bridge.adamw(0.1).create(GRADS)
MUON = opt_optax_bridge.muon(0.1).create({"w": jnp.ones((2, 2))})
ADAGRAD = opt_optax_bridge.adagrad(0.1).create(GRADS)
SGD: Any = opt_optax_bridge.sgd(0.1, momentum=0.9).create(GRADS)
OLD: Any = t5x.sgd(0.1).create(GRADS)
OPAQUE = OptaxWrapper(optax.sgd(0.1)).create(GRADS)
NOT_OVERRIDABLE = (
    "What is already built has no hyper-parameters. Wrap its constructor: "
    "`wrap_optax_optimizer(constructor)(...)`. Those of Optax, among its arguments too, are "
    "wrapped in opt_optax_bridge: `opt_optax_bridge.adamw(...)` for `optax.adamw(...)`, "
    "`opt_optax_bridge.chain(...)` for `optax.chain(...)`"
)
CLOSED = OptaxWrapper(
    optax.GradientTransformation(lambda params: (), lambda u, s, params=None: (u, s))
).create(GRADS)


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
    "no extra arguments": (
        lambda: CLOSED.apply_gradient(GRADS, value=0.5),
        HyperParamError,
        (
            "`value`: neither a hyper-parameter of this optimizer (it has none) nor an extra "
            "argument that its transformation takes. " + NOT_OVERRIDABLE
        ),
    ),
    "other hyper-parameters": (
        lambda: SGD.apply_gradient(GRADS, hyper_params=ADAGRAD.optimizer_def.hyper_params),
        HyperParamError,
        (
            "`hyper_params` must be a sgd_hyper_params; got adagrad_hyper_params. Use "
            "`optimizer_def.hyper_params.replace(...)`."
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
    "not asked of a wrapper": (
        lambda: overridable_hyper_params(SGD.replace(optimizer_def=None)),
        TypeError,
        "`optimizer` must be one of an `OptaxWrapper`; its definition is a NoneType",
    ),
    "gradients": (
        lambda: SGD.apply_gradient({"v": jnp.ones(2)}),
        TreeMismatchError,
        (
            "`grads` do not match the parameters:\n"
            "  w: expected an array of shape (2,), found nothing\n"
            "  v: expected nothing, found an array of shape (2,)\n"
            "Differentiate with respect to the optimizer's own `target`, or convert the gradients' "
            "containers to those of the parameters."
        ),
    ),
    "axes": (
        lambda: SGD.optimizer_def.derive_logical_axes(SGD, {"v": P()}),
        AxesError,
        (
            "`param_axes` do not match `params`:\n"
            "  w: no axes given\n"
            "  v: axes given, but not a parameter"
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
    "T5X, a structural argument": (
        lambda: OLD.apply_gradient(GRADS, nesterov=True),
        HyperParamError,
        (
            "`nesterov` cannot be overridden at run time: only arguments that are a float or a "
            "schedule can. Of this optimizer these may be: none (`learning_rate` is ignored; "
            "those of `opt_optax_bridge` override it)"
        ),
    ),
}


REFUSED: list[tuple[Any, dict[str, Any]]] = [
    (ADAMW, {"learning_rate": None}),
    (ADAMW, {"learning_rate": True}),
    (ADAMW, {"learning_rate": 1j}),
    (ADAMW, {"learning_rate": np.ones(1)}),
    (ADAMW, {"learning_rate": jax.random.key(0)}),
    (ADAMW, {"learning_rate": optax.constant_schedule(0.1)}),
    (SGD, {"momentum": None}),
    (ADAMW, {"lerning_rate": 0.1}),
    (ADAMW, {"mask": {"w": True}}),
    (ADAMW, {"mu_dtype": jnp.bfloat16}),
    (ADAMW, {"params": 1.0}),
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


def test_the_words_are_the_same_while_tracing() -> None:
    call, error, words = CASES["at the start only"]
    with pytest.raises(error) as caught:
        jax.jit(call)()
    assert str(caught.value) == words
