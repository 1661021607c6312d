"""What is said of transformations of every make: names, numbers, settings."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from opt_core import Optimizer, StateDescription, describe_state, regroup
from opt_core.errors import SurgeryError
from opt_optax_bridge import OptaxWrapper

optax: Any = importlib.import_module("optax")  # much of it is not exported explicitly
pytestmark = pytest.mark.usefixtures("optax_promotion")

MINE = __name__.partition(".")[0]  # the package of what these tests define


def params() -> dict[str, Any]:
    return {"b": jnp.arange(3.0), "w": jnp.arange(6.0).reshape(2, 3)}


def wrapped(tx: Any) -> Optimizer:
    return OptaxWrapper(tx).create(params())


def of(tx: Any) -> StateDescription:
    return describe_state(wrapped(tx))


def names(tx: Any) -> set[str]:
    return {
        "/".join((*x.group, f"{x.transformation}#{x.number}", *x.field, *(x.parameter or ())))
        for x in of(tx).leaves
    }


def acting(tx: Any) -> list[str]:
    return [made.name for made in of(tx).transformations]


ADAM = {"adam#1/count", *(f"adam#1/{m}/{x}" for m in ("mu", "nu") for x in ("b", "w"))}


def test_wrappers_do_not_change_names() -> None:
    adam = optax.adam(0.1)
    assert names(adam) == ADAM
    for tx in (
        optax.adamw(0.1),
        optax.chain(optax.clip(1.0), optax.chain(adam)),
        optax.named_chain(("z", optax.clip(1.0)), ("a", adam)),
        optax.with_extra_args_support(adam),
        optax.masked(adam, True),
        optax.masked(optax.masked(adam, True), True),
    ):
        assert names(tx) == ADAM
    for tx in (
        optax.MultiSteps(adam, 2),
        optax.apply_if_finite(adam, 3),
        optax.inject_hyperparams(optax.adam)(0.1),
        optax.conditionally_mask(adam, lambda step, **_: step > 0),
        optax.contrib.schedule_free(adam, 0.1),
    ):
        assert names(tx) > ADAM


@pytest.mark.parametrize(
    ("tx", "expected"),
    [
        (
            optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1.0, 0.0, 3)),
            ["inject_hyperparams", "adam", "add_decayed_weights", "scale"],
        ),
        (optax.chain(optax.identity(), optax.flatten(optax.trace(0.9))), ["flatten", "trace"]),
        (
            optax.contrib.sam(optax.adam(0.1), optax.chain(optax.clip(1.0), optax.sgd(0.1))),
            ["sam", "adam", "scale", "clip", "scale"],
        ),
    ],
)
def test_wrappers_are_seen_through(tx: Any, expected: list[str]) -> None:
    assert acting(tx) == expected


def test_a_placeholder_for_what_is_not_factored_has_no_role() -> None:
    leaves = of(optax.scale_by_factored_rms(min_dim_size_to_factor=2)).leaves
    roles = {(*x.field, *(x.parameter or ())): x.role for x in leaves}
    assert (roles["v_row", "w"], roles["v_col", "w"], roles["v", "w"]) == (
        *["factored"] * 2,
        "other",
    )
    assert (roles["v_row", "b"], roles["v", "b"]) == ("other", "second_moment")


# What users write.


def test_an_update_that_is_wrapped_keeps_the_names() -> None:
    adam = optax.adam(0.1)

    def clipped(tx: Any) -> Any:
        def update_fn(updates: Any, state: Any, params: Any = None) -> Any:
            return tx.update(jax.tree.map(jnp.tanh, updates), state, params)

        return optax.GradientTransformation(tx.init, update_fn)

    assert names(clipped(adam)) == ADAM
    assert acting(clipped(adam)) == [f"{MINE}.clipped", "adam", "scale"]


def halved(updates: Any, state: Any, params: Any = None) -> Any:
    return jax.tree.map(lambda u: 0.5 * u, updates), state


def signed(updates: Any, state: Any, params: Any = None) -> Any:
    return jax.tree.map(jnp.sign, updates), state


def velocity(update: Any) -> Any:
    def init_fn(tree: Any) -> Any:
        return {"v": jax.tree.map(jnp.zeros_like, tree)}

    return optax.GradientTransformation(lambda tree: init_fn(tree), update)


def test_an_update_behind_a_lambda_that_calls_another_init_is_named() -> None:
    made = f"{MINE}.velocity"
    assert acting(velocity(halved)) == [f"{MINE}.halved", made]
    with pytest.raises(SurgeryError, match=f"`{MINE}.signed`, which acts before `{made}`, is new"):
        regroup(wrapped(velocity(halved)), OptaxWrapper(velocity(signed)))


# Settings and what bears on state.


def test_settings_are_arguments() -> None:
    adam, decay, schedule = of(opt_adamw()).transformations
    assert adam.settings == {
        "amsgrad": False,
        "b1": 0.9,
        "b2": 0.999,
        "eps": 1e-8,
        "eps_root": 0.0,
        "mu_dtype": "bfloat16",
        "nesterov": False,
    }
    assert decay.settings == {"weight_decay": 1e-4}
    assert schedule.name == "schedule"
    text = str(schedule.settings)
    assert "polynomial_schedule" in text
    assert "transition_steps: 3" in text


def opt_adamw() -> Any:
    return optax.adamw(optax.linear_schedule(1.0, 0.0, 3), mu_dtype=jnp.bfloat16)


class Averaging:
    """A transformation that is an object."""

    def __init__(self, decay: float) -> None:
        self.decay, self.other = decay, 3

    def init(self, tree: Any) -> Any:
        return {"seen": jnp.int32(0), "mean": jax.tree.map(jnp.copy, tree)}

    def update(self, updates: Any, state: Any, params: Any = None) -> Any:
        return updates, state

    def describe_fields(self) -> Any:
        roles = {"seen": "count", "mean": "params_copy"}
        bearing = {"decay": {"effect": "refused"}}
        own = {"name": "averages", "settings": {"decay": self.decay}}
        return {"roles": roles, "bearing": bearing, **own}


def test_transformations_that_describe_their_fields() -> None:
    found, name = of(optax.chain(optax.clip(1.0), Averaging(0.9))), "averages"
    described = {(x.field, x.parameter): (x.transformation, x.role, x.source) for x in found.leaves}
    assert described == {
        (("seen",), None): (name, "count", "stated"),
        (("mean",), ("b",)): (name, "params_copy", "stated"),
        (("mean",), ("w",)): (name, "params_copy", "stated"),
    }
    made = found.transformations[1]
    assert (made.name, made.settings, made.source) == (name, {"decay": 0.9}, "stated")
    assert made.effect("decay") == "refused"


def test_a_state_that_is_one_number_goes_on() -> None:
    class Seen:
        def init(self, params: Any) -> Any:
            return jnp.float32(0)

        def update(self, updates: Any, state: Any, params: Any = None) -> Any:
            return updates, state + 1

        def describe_fields(self) -> Any:
            return {"name": "seen", "settings": {"rate": 1.0}}

    params = {"w": jnp.ones(2)}
    optimizer = OptaxWrapper(Seen()).create(params).apply_gradient(params)
    moved, _ = regroup(optimizer, OptaxWrapper(optax.chain(Seen(), optax.scale(2.0))))
    assert jax.tree.leaves(moved.state.param_states) == [1.0]
