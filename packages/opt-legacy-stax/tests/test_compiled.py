"""What is compiled: the same programs as of JAX's module, and no more of them."""

import re
from collections import Counter
from typing import Any

import chex
import jax
import jax.numpy as jnp
import opt_legacy_stax as ours
import pytest
from jax.example_libraries import optimizers as theirs

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "sgd": (0.1,),
    "momentum": (0.1, 0.9),
    "nesterov": (0.1, 0.9),
    "adagrad": (0.1,),
    "rmsprop": (0.1,),
    "rmsprop_momentum": (0.1,),
    "adam": (0.1,),
    "adamax": (0.1,),
    "sm3": (0.1,),
}
# Their step saturates by default.
COUNTING = ("adam", "adamax")
PARAMS = {"w": jnp.full((4, 3), 0.5), "b": [jnp.zeros(3), jnp.asarray(1.0, jnp.float32)]}
LOW = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
SCHEDULE = ("exponential_decay", 0.1, 10, 0.5)


def lowered(module: Any, name: str, params: Any, schedule: bool, **options: Any) -> Any:
    rate, *rest = ARGUMENTS[name]
    if schedule:
        maker, *arguments = SCHEDULE
        rate = getattr(module, maker)(*arguments)
    triple = getattr(module, name)(rate, *rest, **options)
    return jax.jit(triple.update_fn).lower(jnp.int32(0), params, triple.init_fn(params))


def program(low: Any) -> str:
    """The optimized program, its names in the order of their appearance, without source lines."""
    text = re.sub(r", metadata=\{[^}]*\}", "", low.compile().as_text())
    text = re.sub(r"\n(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*", "\n", text)
    text = re.sub(r"^(ENTRY )?(%[\w.-]+) \(.*$", r"\1\2", text, flags=re.MULTILINE)
    names: dict[str, str] = {}
    return re.sub(r"%[\w.-]+", lambda m: names.setdefault(m[0], f"%{len(names)}"), text)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("schedule", [False, True], ids=["number", "schedule"])
def test_a_compiled_update_is_that_of_jax(name: str, schedule: bool) -> None:
    options = {"upstream_numerics": True} if name in COUNTING else {}
    expected = lowered(theirs, name, PARAMS, schedule)
    found = lowered(ours, name, PARAMS, schedule, **options)
    assert program(found) == program(expected)


@pytest.mark.parametrize("name", [n for n in ARGUMENTS if n not in COUNTING])
def test_low_precision_compiles_to_the_same_where_nothing_is_promoted(name: str) -> None:
    found, expected = (lowered(module, name, LOW, False) for module in (ours, theirs))
    assert program(found) == program(expected)


@pytest.mark.parametrize("name", COUNTING)
def test_saturation_is_one_scalar_operation(name: str) -> None:
    found, expected = (operations(lowered(m, name, PARAMS, False)) for m in (ours, theirs))
    corrections = 2 if name == "adam" else 1
    leaves = len(jax.tree.leaves(PARAMS))
    assert found - expected == Counter({"minimum tensor<i32>": corrections * leaves})
    # JAX's converts the exponent besides, and does not use it.
    assert all(op.startswith("convert ") for op in expected - found)


def operations(low: Any) -> Counter[str]:
    """How often each operation occurs with each result, constants apart."""
    found = re.findall(r"= stablehlo\.(\w+) .*?(tensor<[^>]*>)$", low.as_text(), re.MULTILINE)
    return Counter(f"{op} {result}" for op, result in found if op != "constant")


@pytest.mark.parametrize("name", ARGUMENTS)
def test_one_trace_for_all_steps_and_no_dtype_changes(name: str) -> None:
    triple = getattr(ours, name)(*ARGUMENTS[name])
    step = jax.jit(chex.assert_max_traces(triple.update_fn, 1))
    # One bfloat16, one weakly typed, one Python number among the parameters; float32 gradients.
    params = {"w": LOW["w"], "a": jnp.full(3, 1.0), "s": 2.0}
    state = triple.init_fn(params)
    kinds = jax.tree.map(jnp.result_type, state)
    for i in range(3):
        grads = jax.tree.map(lambda p: jnp.ones(jnp.shape(p), jnp.float32), params)
        state = step(i, grads, state)
        assert jax.tree.map(jnp.result_type, state) == kinds


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_python_steps_compile_nothing_new(name: str, caplog: pytest.LogCaptureFixture) -> None:
    triple = getattr(ours, name)(ours.exponential_decay(0.1, 10, 0.5), *ARGUMENTS[name][1:])
    # A shape of its own: nothing of it is compiled yet.
    params = jnp.ones(100 + list(ARGUMENTS).index(name))
    state = triple.init_fn(params)
    compiled = []
    with jax.log_compiles():
        for i in range(5):
            state = triple.update_fn(i, params, state)
            compiled.append(sum("Compiling" in r.message for r in caplog.records))
            caplog.clear()
    assert compiled[0] > 0
    assert compiled[2:] == [0, 0, 0]


@pytest.mark.parametrize("step", [0, jnp.int32(0)], ids=["number", "array"])
def test_arrays_that_are_alike_are_traced_once(step: Any) -> None:
    seen = []
    rate = {"now": 0.5}

    @ours.optimizer
    def signs() -> Any:
        def update(i: Any, g: Any, x: Any) -> Any:
            seen.append(g.shape)
            return x - rate["now"] * jnp.sign(g)

        return lambda x: x, update, lambda x: x

    triple = signs()
    params = [jnp.ones(2 + n % 3) for n in range(12)]
    state = triple.init_fn(params)
    for now in 0.5, 0.25:
        rate["now"] = now
        seen.clear()
        new = jax.jit(lambda *args: triple.update_fn(*args))(step, params, state)
        assert sorted(seen) == [(2,), (3,), (4,)]
        chex.assert_trees_all_equal(triple.params_fn(new), [x - now for x in params])
    seen.clear()
    triple.update_fn(step, params, state)
    assert len(seen) == len(params)  # outside of a trace it runs as it is
