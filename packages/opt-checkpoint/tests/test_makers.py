import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from opt_checkpoint._naming.makers import makers, transformation_name


def params() -> dict[str, Any]:
    return {"w": jnp.ones(2)}


def factories(tx: Any) -> dict[str, str]:
    return {"/".join(path): made.factory for path, made in makers(tx.init, params()).items()}


def with_init(init: Any) -> Any:
    return optax.GradientTransformation(init, lambda u, s, p=None: (u, s))


def averaging() -> Any:
    def init_fn(tree: Any) -> Any:
        return {"mean": jax.tree.map(jnp.zeros_like, tree)}

    return with_init(init_fn)


def averaging_compiled() -> Any:
    def init_fn(tree: Any) -> Any:
        return {"mean": jax.tree.map(jnp.zeros_like, tree)}

    return with_init(jax.jit(init_fn))


def rebuilding(inner: Any) -> Any:
    def init_fn(tree: Any) -> Any:
        return {"inner": jax.tree.map(jnp.copy, inner.init(tree))}

    return with_init(init_fn)


def test_states_of_one_type_have_their_own_makers() -> None:
    tx = optax.chain(optax.scale_by_adam(), optax.scale_by_yogi(), optax.scale_by_amsgrad())
    assert factories(tx) == {
        "0": "scale_by_adam",
        "1": "scale_by_yogi",
        "2": "scale_by_amsgrad",
        "": "chain",
    }


def test_compiled_inits_are_seen_through_each_time() -> None:
    tx = optax.chain(averaging(), averaging_compiled())
    expected = {"0": "averaging", "1": "averaging_compiled", "": "chain"}
    for _ in range(2):  # the second time, JAX has the trace
        assert factories(tx) == expected
    tx.init(params())
    assert factories(tx) == expected


def test_rebuilt_records_are_found_by_structure() -> None:
    tx = rebuilding(optax.chain(optax.scale_by_yogi(), optax.scale_by_adam()))
    assert factories(tx) == {
        "": "rebuilding",
        "inner/0": "scale_by_yogi",
        "inner/1": "scale_by_adam",
    }


def test_turns_are_those_of_the_inits() -> None:
    tx = optax.named_chain(("z", optax.trace(0.9)), ("a", optax.scale_by_adam()))
    made = makers(tx.init, params())
    assert [path for path, _ in sorted(made.items(), key=lambda item: item[1].turn)][:2] == [
        ("z",),
        ("a",),
    ]


def init_with(tree: Any, scale: float) -> Any:
    return {"mean": jax.tree.map(lambda x: x * scale, tree)}


def test_classes_and_partial_functions() -> None:
    class Averager:
        def init(self, tree: Any) -> Any:
            return {"mean": tree}

        def update(self, updates: Any, state: Any, params: Any = None) -> Any:
            return updates, state

    assert factories(Averager()) == {"": "Averager"}
    assert factories(with_init(functools.partial(init_with, scale=2.0))) == {"": "init_with"}


def test_schedules_make_no_part_of_a_state() -> None:
    tx = optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1.0, 0.0, 3))
    assert "WrappedSchedule" not in factories(tx).values()


def test_a_profiler_goes_on() -> None:
    def profiler(*_: Any) -> None:
        pass

    before = sys.getprofile()
    sys.setprofile(profiler)
    try:
        makers(optax.adam(0.1).init, params())
        assert sys.getprofile() is profiler
        with pytest.raises(ZeroDivisionError):
            makers(lambda _: 1 // 0, params())
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(before)


@pytest.mark.parametrize(
    ("factory", "name"),
    [
        ("scale_by_adam", "adam"),
        ("ScaleByAdamState", "adam"),
        ("EmaState", "ema"),
        ("MultiSteps", "multi_steps"),
        ("MultiStepsState", "multi_steps"),
        ("OptaxWrapper", "optax_wrapper"),
        ("scale_by_", "scale_by_"),
        ("_", "_"),
    ],
)
def test_names(factory: str, name: str) -> None:
    assert transformation_name(factory) == name
