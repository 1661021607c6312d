"""What an optimizer is made of, as far as closures tell."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import opt_optax_bridge as opt
import pytest
from checkpoint_testing import LOOK_ALIKES, definition
from opt_checkpoint import Transformation
from opt_checkpoint._naming.transformations import transformations
from opt_core import MultiOptimizer, OptimizerDef
from opt_optax_bridge import OptaxWrapper

optax: Any = importlib.import_module("optax")  # much of it is no explicit export
pytestmark = pytest.mark.usefixtures("optax_promotion")


def of(definition: Any) -> tuple[Transformation, ...]:
    if not isinstance(definition, OptimizerDef):
        definition = OptaxWrapper(definition)
    return transformations(definition.create({"b": jnp.ones(3), "w": jnp.ones((2, 3))}))


def names(definition: Any) -> list[str]:
    return [found.name for found in of(definition)]


def meaning(name: str) -> tuple[Any, ...]:
    made = getattr(opt, name)(0.1)
    return tuple(
        (t.name, t.settings.get("nesterov"), t.settings.get("decoupled")) for t in of(made)
    )


def test_the_look_alikes_differ() -> None:
    assert len({meaning(name) for name in LOOK_ALIKES}) == len(LOOK_ALIKES)


def test_every_exported_optimizer_says_what_it_is() -> None:
    for name in opt.optimizer_names():
        assert of(definition(name)), name


@pytest.mark.parametrize(
    ("tx", "expected"),
    [
        (optax.chain(optax.clip(1.0), optax.chain(optax.trace(0.9))), ["clip", "trace"]),
        (optax.named_chain(("z", optax.clip(1.0)), ("a", optax.trace(0.9))), ["clip", "trace"]),
        (optax.MultiSteps(optax.trace(0.9), 2), ["MultiSteps", "trace"]),
        (
            optax.MultiSteps(optax.trace(0.9), 2).gradient_transformation(),
            ["MultiSteps", "trace"],
        ),
        (optax.masked(optax.trace(0.9), True), ["masked", "trace"]),
        (optax.apply_if_finite(optax.trace(0.9), 3), ["apply_if_finite", "trace"]),
        (optax.scale_by_novograd(), ["scale_by_novograd"]),
        (
            optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1.0, 0.0, 3)),
            ["inject_hyperparams", "scale_by_adam", "add_decayed_weights", "scale"],
        ),
        (optax.chain(optax.identity(), optax.flatten(optax.trace(0.9))), ["flatten", "trace"]),
    ],
)
def test_wrappers_are_seen_through(tx: Any, expected: list[str]) -> None:
    assert names(tx) == expected


def test_compiled_updates_and_objects_are_seen_through() -> None:
    heavy = optax.trace(0.9)
    compiled = optax.GradientTransformation(heavy.init, jax.jit(heavy.update))
    assert names(optax.chain(compiled)) == ["trace"]
    partial = optax.GradientTransformation(heavy.init, functools.partial(heavy.update))
    assert names(partial) == ["trace"]

    class Holder:
        def __init__(self, tx: Any) -> None:
            self.tx = tx

    class Outer:
        def __init__(self, inner: Any) -> None:
            self.inner, self.twice = Holder(inner), True

        def init(self, tree: Any) -> Any:
            return self.inner.tx.init(tree)

        def update(self, updates: Any, state: Any, params: Any = None) -> Any:
            return self.inner.tx.update(updates, state, params)

    found = of(Outer(heavy))
    assert [t.name for t in found] == ["Outer", "trace"]
    assert found[0].settings == {"twice": True}
    assert found[1].settings == {"accumulator_dtype": None, "decay": 0.9, "nesterov": False}


def test_groups_are_told_alike() -> None:
    transforms = {"m": optax.trace(0.9), "n": optax.clip(1.0)}
    in_optax = of(optax.partition(transforms, {"b": "n", "w": "m"}))
    table = [
        (name, pattern, OptaxWrapper(transforms[name]))
        for name, pattern in (("m", "w"), ("n", "b"))
    ]
    in_groups = of(MultiOptimizer.from_rules(table))
    assert in_optax == in_groups
    assert [(t.group, t.name) for t in in_groups] == [(("m",), "trace"), (("n",), "clip")]


def test_settings_are_plain() -> None:
    (adam, decayed, scale) = of(
        opt.adamw(optax.linear_schedule(1.0, 0.0, 3), mu_dtype=jnp.bfloat16)
    )
    assert adam.settings["mu_dtype"] == "bfloat16"
    assert adam.settings["b1"] == 0.9
    assert all(
        isinstance(value, bool | int | float | str | None)
        for t in (adam, decayed, scale)
        for value in t.settings.values()
    )
    (steps,) = (v for name, v in scale.settings.items() if name.endswith("transition_steps"))
    assert steps == 3


def test_a_definition_of_another_kind() -> None:
    class Sgd(OptimizerDef):
        def init_state(self, params: Any) -> Any:
            from opt_core import OptimizerState

            return OptimizerState(jnp.int32(0), ())

    assert [t.name for t in of(Sgd(None))] == ["sgd"]
