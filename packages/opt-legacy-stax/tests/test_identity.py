"""Whose state a file holds: said by `save`, compared by `load`."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import opt_legacy_stax as ours
import pytest
from jax.example_libraries import optimizers as theirs
from opt_legacy_stax import errors
from stax_testing import NAMES, assert_same, triple_of

PARAMS: Any = {"w": jnp.arange(6.0).reshape(2, 3), "low": [jnp.ones((3,), jnp.bfloat16)]}
GOLDEN = Path(__file__).parent / "goldens" / "files" / "adam_unnamed.safetensors"


def saved(state: Any, optimizer: Any = None) -> io.BytesIO:
    file = io.BytesIO()
    ours.save(file, state, optimizer=optimizer)
    file.seek(0)
    return file


@pytest.mark.sample(2)
@pytest.mark.parametrize("writer", NAMES)
@pytest.mark.parametrize("module", [ours, theirs], ids=["ours", "jax"])
def test_no_optimizer_takes_the_file_of_another(writer: str, module: Any) -> None:
    """All ordered pairs: 72 are refused, 9 are taken; whichever module wrote or reads."""
    triple = triple_of(writer, module)
    state = triple.init_fn(PARAMS)
    data = saved(state, triple if module is ours else writer).getvalue()
    for reader in NAMES:
        for expecting in (triple_of(reader), triple_of(reader, theirs)):
            by_params = {"optimizer": triple_of(reader), "params": PARAMS}
            by_like = {"optimizer": reader, "like": expecting.init_fn(PARAMS)}
            for reference in (by_params, by_like):
                if reader == writer:
                    assert_same(ours.load(io.BytesIO(data), **reference), state)
                    continue
                with pytest.raises(errors.StateMismatchError) as caught:
                    ours.load(io.BytesIO(data), **reference)
                line = str(caught.value).splitlines()[1]
                assert line == f"  optimizer: expected `{reader}`, found `{writer}`"


def test_a_resumed_run_may_have_other_settings() -> None:
    state = ours.adam(0.1).init_fn(PARAMS)
    other = ours.adam(ours.constant(3.0), b1=0.5, upstream_numerics=True)
    assert_same(ours.load(saved(state, ours.adam(0.1)), optimizer=other, params=PARAMS), state)


@ours.optimizer
def halves(rate: float) -> Any:
    return lambda x: (x, x / 2), lambda i, g, s: s, lambda s: s[0]


def jitted(triple: ours.Optimizer) -> ours.Optimizer:
    init, update, get_params = triple
    return ours.Optimizer(jax.jit(init), jax.jit(update), jax.jit(get_params))


@pytest.mark.parametrize("wrap", [tuple, jitted, ours.to_optax, ours.to_optimizer_def])
@pytest.mark.parametrize("maker", [halves, ours.adam])
def test_names_are_carried_through(wrap: Callable[[Any], Any], maker: Any) -> None:
    state = maker(0.1).init_fn(PARAMS)
    file = saved(state, wrap(maker(0.1)))
    assert_same(ours.load(file, optimizer=wrap(maker(0.5)), params=PARAMS), state)
    file.seek(0)
    with pytest.raises(errors.StateMismatchError, match="optimizer: expected `"):
        ours.load(file, optimizer=wrap(ours.adamax(0.1)), params=PARAMS)


# Without a name


def test_a_file_or_an_expectation_without_a_name_loads_with_a_warning() -> None:
    triple = ours.adam(0.1)
    state = triple.init_fn(PARAMS)
    unnamed, named = saved(state).getvalue(), saved(state, triple).getvalue()
    plain = ours.Optimizer(lambda p: state, lambda i, g, s: s, lambda s: PARAMS)
    cases: list[tuple[bytes, dict[str, Any], str]] = [
        (
            unnamed,
            {"optimizer": triple, "params": PARAMS},
            "names no optimizer, this call `adam`: they were not compared",
        ),
        (unnamed, {"like": state}, "names no optimizer, this call none"),
        (
            named,
            {"optimizer": plain, "params": PARAMS},
            "names `adam`, this call none: .* Pass `optimizer`",
        ),
    ]
    for data, reference, words in cases:
        with pytest.warns(errors.UnnamedStateWarning, match=words) as caught:
            assert_same(ours.load(io.BytesIO(data), **reference), state)
        assert [w.filename for w in caught] == [__file__]
    with pytest.raises(
        errors.StateMismatchError, match=r"2: expected nothing, found bfloat16\[3\]"
    ):
        ours.load(io.BytesIO(unnamed), optimizer=ours.momentum(0.1, 0.9), params=PARAMS)


def test_a_name_that_the_state_cannot_have_is_refused() -> None:
    state = ours.adam(0.1).init_fn(PARAMS)
    saved(state, "adagrad")  # which keeps as much
    words = r"not a state of `sm3`.*: for parameter `low/0` it is a tuple of 3"
    with pytest.raises(errors.LayoutError, match=words):
        saved(state, "sm3")
    with pytest.raises(errors.LayoutError, match=r"`low/0` it is not a tuple"):
        saved(ours.sgd(0.1).init_fn(PARAMS), "adam")
    plain = ours.Optimizer(lambda p: state, lambda i, g, s: s, lambda s: PARAMS)
    without = ours.optimizer(lambda: (lambda x: x, lambda i, g, x: x, lambda x: x))()
    for unnamed in (plain, without, theirs.adam(0.1)):
        with pytest.raises(errors.SaveError, match=r"without a name: .* Pass a name instead"):
            saved(state, unnamed)
    for wrong in ("", ours.adam, {"name": "adam"}):
        with pytest.raises(TypeError, match=r"`optimizer` must be a triple \(init_fn, update_fn"):
            saved(state, wrong)


def test_a_file_of_the_first_format_is_refused() -> None:
    state = ours.adam(0.1).init_fn(PARAMS)
    with pytest.raises(errors.FormatVersionError, match="has format version 1; expected 2"):
        ours.load(GOLDEN, optimizer="adam", like=state)
