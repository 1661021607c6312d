"""Errors: of which class, and their words: what, where, expected, found, what to do."""

import io
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_legacy_stax as ours
import optax
import pytest
import safetensors.numpy
from jax.example_libraries import optimizers as theirs
from opt_legacy_stax import errors

PARAMS: Any = {"mlp": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}, "scale": [jnp.ones(())]}
ZEROS = jax.tree.map(jnp.zeros_like, PARAMS)
W: Any = {"w": jnp.ones(2)}
EQUIVALENT = ours.optax_equivalent("adam", step_size=0.1)


def update(grads: Any = ZEROS, i: Any = 0) -> Any:
    triple = ours.momentum(0.1, 0.9)
    return triple.update_fn(i, grads, triple.init_fn(PARAMS))


def changing_containers() -> Any:
    triple = ours.optimizer(lambda: (lambda x: (x, x), lambda i, g, s: [s[0]], lambda s: s[0]))()
    return triple.update_fn(0, {"w": 1.0}, triple.init_fn(W))


def history(**arrays: Any) -> Any:
    return {"w": ours.JoinPoint((arrays["x"], np.zeros(2), [np.ones(2)]))}


TABLE: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "gradients of another tree": (
        lambda: update({"mlp": {"kernel": 0.0}, "scale": (0.0, 1.0)}),
        errors.TreeMismatchError,
        "mlp/bias: expected an array, found nothing\n  scale: expected a list, found a tuple\nDiff",
    ),
    "a gradient that would change a shape": (
        lambda: update({**ZEROS, "mlp": {"kernel": 0.0, "bias": jnp.ones((4, 1))}}),
        errors.StateChangedError,
        "parameter `mlp/bias` from shape (3,) to (4, 3): its gradient has shape (4, 1). Pass grad",
    ),
    "an update that changes containers": (
        changing_containers,
        errors.StateChangedError,
        "state of parameter `w`:\n  .: expected a tuple, found a list\nReturn the same containers",
    ),
    "a function as the step": (
        lambda: update(i=jnp.sin),
        errors.StepError,
        "be the step number, a real scalar; got the function `sin`. Call `update(i, grads, state)`",
    ),
    "step sizes": (
        lambda: ours.sgd(jnp.ones(2)),
        errors.ScheduleError,
        "`step_size` must be a number or a function of the step; got an array of shape (2,). For",
    ),
    "as many values as boundaries": (
        lambda: ours.piecewise_constant([1, 2], [1, 2]),
        errors.BoundariesError,
        "and `values` must have one entry more; got shapes (2,) and (2,). Pass one step size",
    ),
    "a tree without join points": (
        lambda: ours.pack_optimizer_state({"a": 1.0, "b": [ours.JoinPoint(1), "c"]}),
        errors.JoinPointError,
        "a: expected a JoinPoint, found float\n  b/1: expected a JoinPoint, found str\nPass a tree",
    ),
    "the state of another transformation": (
        lambda: EQUIVALENT.convert_state_back(W, optax.adam(0.1).init(W)),
        errors.LayoutError,
        "for `params`:\n  1: expected a ScaleByScheduleState, found an EmptyState\nPass",
    ),
    "what may be an old state of sm3": (
        lambda: ours.convert_old_layout(history(x=np.ones(2))),
        errors.LayoutError,
        "the state of `w` looks like the `(x, m, vs)` of sm3 up to jax 0.2.19. Pass `is_sm3=True`",
    ),
    "no equivalent": (
        lambda: ours.optax_equivalent("adamax", step_size=0.1),
        errors.NoEquivalentError,
        "they agree only for `eps=0`. Use `to_optax(adamax(...))`",
    ),
    "a file of another program": (
        lambda: ours.load(
            io.BytesIO(safetensors.numpy.save({"w": np.ones(2)}, metadata={"format": "pt"})),
            optimizer="adam",
            like=ours.adam(0.1).init_fn(W),
        ),
        errors.DamagedFileError,
        "its metadata have no entry `opt_legacy_stax`. Restore it from a backup.",
    ),
}


@pytest.mark.parametrize(("call", "error", "words"), TABLE.values(), ids=list(TABLE))
def test_of_which_class_where_and_what_to_do(
    call: Callable[[], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.TreeMismatchError, TypeError),
        (errors.StateChangedError, TypeError),
        (errors.ScheduleError, TypeError),
        (errors.BoundariesError, ValueError),
        (errors.JoinPointError, AssertionError),
        (errors.LoadError, ValueError),
        (errors.MissingExtraError, ImportError),
    ],
)
def test_errors_are_builtin_ones_too(error: type[Exception], builtin: type[Exception]) -> None:
    """The first five are those that JAX's module raises."""
    assert issubclass(error, builtin)


@pytest.mark.parametrize("module", [ours, theirs], ids=["ours", "jax"])
def test_a_state_of_an_optimizer_that_keeps_less_or_more(module: Any) -> None:
    state, triple = module.momentum(0.1, 0.9).init_fn(PARAMS), ours.adam(0.1)
    words = r"`opt_state` is not a state of `adam`, which keeps .*: for parameter `mlp/bias`"
    functions: list[Callable[[], Any]] = [
        lambda: triple.update_fn(0, ZEROS, state),
        lambda: triple.params_fn(state),
        lambda: ours.to_optimizer_def(triple).convert_state(state, 0),
    ]
    for function in functions:
        with pytest.raises(errors.LayoutError, match=words):
            function()
    ours.adagrad(0.1).update_fn(0, ZEROS, module.adam(0.1).init_fn(PARAMS))  # it keeps as much


@pytest.mark.parametrize("state", [PARAMS, (1, 2, 3)], ids=["params", "tuple"])
def test_what_is_not_a_state(state: Any) -> None:
    triple = ours.adam(0.1)
    from_optax = ours.from_optax(optax.adam(0.1))
    functions: list[Callable[[], Any]] = [
        lambda: triple.update_fn(0, ZEROS, state),
        lambda: from_optax.params_fn(state),
        lambda: ours.unpack_optimizer_state(state),
        lambda: EQUIVALENT.convert_state(state, 0),
        lambda: ours.to_optax(triple).convert_state(state, 0),
        lambda: ours.to_optimizer_def(triple).convert_state(state, 0),
        lambda: ours.save(io.BytesIO(), state),
    ]
    for function in functions:
        with pytest.raises(errors.LayoutError, match=r"`(opt_)?state` must be an OptimizerState; "):
            function()
    with pytest.raises(errors.LayoutError, match="is not a state of the equivalent of `adam`"):
        EQUIVALENT.convert_state_back(W, state)


def test_states_that_fit_neither_triple_nor_parameters() -> None:
    from_optax = ours.from_optax(optax.adam(0.1))
    with pytest.raises(errors.LayoutError, match="must be a state of a `from_optax` triple"):
        from_optax.params_fn(ours.adam(0.1).init_fn(W))

    @ours.optimizer
    def pairs() -> Any:
        return lambda x: (x, jnp.zeros(3)), lambda i, g, s: s, lambda s: s[0]

    words = r"not a state of the triple:\n  w/1: expected shape \(3,\), found \(2,\)\n"
    for convert in (ours.to_optax, ours.to_optimizer_def):
        with pytest.raises(errors.LayoutError, match=words):
            convert(pairs()).convert_state(ours.momentum(0.1, 0.9).init_fn(W), 0)
        convert(pairs()).convert_state(pairs().init_fn(W), 0)
        with pytest.raises(errors.StepError, match=r"got -3\. Pass a whole number\."):
            convert(pairs()).convert_state(pairs().init_fn(W), np.int32(-3))
    with pytest.raises(errors.LayoutError, match=r"0/mu/w: expected shape \(2,\), found \(3,\)"):
        EQUIVALENT.convert_state_back(W, EQUIVALENT.transformation.init({"w": jnp.ones(3)}))


def test_what_jax_refuses_is_noted_with_its_parameter() -> None:
    triple = ours.adam(0.1)
    with pytest.raises((TypeError, ValueError)) as caught:
        triple.update_fn(0, {"w": jnp.ones((4, 3))}, triple.init_fn({"w": jnp.ones((2, 3))}))
    assert "While computing the update of parameter `w`." in caught.value.__notes__
    with pytest.raises(TypeError) as caught:
        triple.init_fn({"layers": [1.0, "text"]})
    assert "While computing the state of parameter `layers/1`." in caught.value.__notes__
