"""The words of errors: what, where, expected, found, what to do."""

import functools
from collections import OrderedDict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_legacy_stax as ours
import pytest
from opt_legacy_stax import errors

PARAMS = {"mlp": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}, "scale": [jnp.ones(())]}
DO = (
    "\nDifferentiate with respect to `get_params(opt_state)`, or convert the gradients to the "
    "containers of the parameters."
)
HEAD = (
    "`grad_tree` does not have the tree structure of the parameters that the optimizer was "
    "initialized with:\n"
)


def update(grads: Any, i: Any = 0, params: Any = PARAMS) -> Any:
    triple = ours.momentum(0.1, 0.9)
    return triple.update_fn(i, grads, triple.init_fn(params))


@pytest.mark.parametrize(
    ("grads", "lines"),
    [
        (
            {"mlp": {"kernel": 0.0}, "scale": [0.0, 1.0]},
            [
                "mlp/bias: expected an array, found nothing",
                "scale/1: expected nothing, found an array",
            ],
        ),
        (
            {"mlp": OrderedDict(bias=0.0, kernel=1.0), "scale": (0.0,)},
            ["mlp: expected a dict, found an OrderedDict", "scale: expected a list, found a tuple"],
        ),
        (
            {"mlp": {"kernel": 0.0, "bias": None}, "scale": [0.0]},
            ["mlp/bias: expected an array, found None"],
        ),
        (0.0, [".: expected a dict, found an array"]),
        (
            {"mlp": {"kernel": 0.0, "bias": 0.0}, "scale": [0.0], **dict.fromkeys("abcdefg", 1.0)},
            [f"{c}: expected nothing, found an array" for c in "abcde"] + ["and 2 more"],
        ),
    ],
)
def test_gradients_of_another_tree(grads: Any, lines: list[str]) -> None:
    with pytest.raises(errors.TreeMismatchError) as caught:
        update(grads)
    assert str(caught.value) == HEAD + "\n".join(f"  {line}" for line in lines) + DO


def test_a_gradient_that_would_change_a_shape() -> None:
    grads = {"mlp": {"kernel": 0.0, "bias": jnp.ones((4, 1))}, "scale": [0.0]}
    with pytest.raises(errors.StateChangedError) as caught:
        update(grads)
    assert str(caught.value) == (
        "the update changed parameter `mlp/bias` from shape (3,) to (4, 3): its gradient has "
        "shape (4, 1). Pass gradients with the shapes of the parameters."
    )


def test_an_update_that_changes_containers() -> None:
    triple = ours.optimizer(lambda: (lambda x: (x, x), lambda i, g, s: [s[0]], lambda s: s[0]))()
    with pytest.raises(errors.StateChangedError) as caught:
        triple.update_fn(0, {"w": 1.0}, triple.init_fn({"w": jnp.ones(2)}))
    assert str(caught.value) == (
        "the update changed the structure of the state of parameter `w`:\n  .: expected a tuple, "
        "found a list\nReturn the same containers as `init` does."
    )


AXES = (
    "`i` must be a scalar; got an array of shape {}. Index it, or map the update over it with "
    "`jax.vmap` or `jax.lax.scan`."
)
FIRST = "Call `update(i, grads, state)`: the step comes first."


@pytest.mark.parametrize(
    ("i", "words"),
    [
        (jnp.sin, f"`i` must be the step number; got the function `sin`. {FIRST}"),
        (
            functools.partial(int),
            f"`i` must be the step number; got the function `partial`. {FIRST}",
        ),
        (jnp.arange(3), AXES.format("(3,)")),
        (np.ones((2, 2)), AXES.format("(2, 2)")),
        (
            PARAMS,
            "`i` must be the step number, as a Python, NumPy or JAX scalar; got dict. " + FIRST,
        ),
        (
            "1",
            f"`i` must be the step number, as a Python, NumPy or JAX scalar; got str. {FIRST}",
        ),
        (jnp.array(1j), "`i` must be an integer or a float; got an array of dtype complex64."),
    ],
)
def test_steps_that_are_none(i: Any, words: str) -> None:
    with pytest.raises(errors.StepError) as caught:
        update(jax.tree.map(jnp.zeros_like, PARAMS), i)
    assert str(caught.value) == words


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("x", "str"),
        (None, "NoneType"),
        ([0.1], "list"),
        (jnp.ones(2), "an array of shape (2,)"),
        (np.ones((1, 2)), "an array of shape (1, 2)"),
    ],
)
def test_step_sizes_that_are_none(value: Any, found: str) -> None:
    with pytest.raises(errors.ScheduleError) as caught:
        ours.sgd(value)
    assert str(caught.value) == (
        f"`step_size` must be a number or a function of the step; got {found}. For a list of "
        "values use `piecewise_constant`."
    )


def test_boundaries() -> None:
    with pytest.raises(errors.BoundariesError) as caught:
        ours.piecewise_constant([[1, 2]], [1, 2, 3])
    assert str(caught.value) == (
        "`boundaries` and `values` must be one-dimensional; got shapes (1, 2) and (3,). Pass two "
        "sequences of numbers."
    )
    with pytest.raises(errors.BoundariesError) as caught:
        ours.piecewise_constant([1, 2], [1, 2])
    assert str(caught.value) == (
        "`values` must have one entry more than `boundaries`; got 2 values and 2 boundaries. Pass "
        "one step size up to each boundary and one for after the last."
    )


def test_trees_without_join_points() -> None:
    with pytest.raises(errors.JoinPointError) as caught:
        ours.pack_optimizer_state({"a": 1.0, "b": [ours.JoinPoint(1), "c"]})
    assert str(caught.value) == (
        "`marked_pytree` must have a JoinPoint in place of every leaf:\n  a: expected a "
        "JoinPoint, found float\n  b/1: expected a JoinPoint, found str\nPass a tree returned by "
        "`unpack_optimizer_state`."
    )


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
def test_errors_are_the_builtins_that_callers_catch(
    error: type[Exception], builtin: type[Exception]
) -> None:
    assert issubclass(error, builtin)
