import functools
import inspect
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import jax.numpy as jnp
import opt_optax_bridge
import optax
import optax.contrib
import pytest
from bridge_testing import arguments_of, constructor_of
from opt_optax_bridge import (
    _constructors,
    optimizer_names,
    t5x,
    wrap_optax_optimizer,
)

NAMES = optimizer_names()


def forget() -> None:
    _constructors._exported.cache_clear()
    _constructors.wrapped_constructor.cache_clear()
    t5x._wrapped.cache_clear()


@pytest.fixture
def other_optax(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Lets a test change what Optax exports."""
    forget()
    with monkeypatch.context() as patch:
        yield patch
    forget()


@pytest.mark.parametrize("name", NAMES)
def test_a_twin_has_the_signature_and_the_docstring_of_optax(name: str) -> None:
    for module in (opt_optax_bridge, t5x):
        wrapped, original = getattr(module, name), constructor_of(name)
        assert inspect.signature(wrapped) == inspect.signature(original)
        assert wrapped.__doc__ == original.__doc__
        assert wrapped.__name__ == name
        assert wrapped.__wrapped__ is original
        made = wrapped(**arguments_of(name, original))
        assert type(made) is module.OptaxWrapper
        assert isinstance(made.optax_optimizer, optax.GradientTransformation)


def test_no_optimizer_is_forgotten() -> None:
    """Tries everything that takes a learning rate, whatever its type and annotations."""
    found = set()
    for name, value in {**vars(optax), **vars(optax.contrib)}.items():
        if name.startswith(("_", "scale_by_")) or not callable(value):
            continue
        try:
            made = value(**arguments_of(name, value))
            parameters = inspect.signature(value).parameters
        except (LookupError, TypeError, ValueError):
            continue
        if hasattr(made, "update") and any("learning_rate" in p for p in parameters):
            found.add(name)
    assert found <= set(NAMES)
    assert {"adam", "nadam", "dog", "muon", "schedule_free", "lbfgs", "adafactor"} <= found


@pytest.mark.parametrize("module", [opt_optax_bridge, t5x], ids=lambda m: m.__name__)
def test_a_name_that_optax_does_not_have(module: Any) -> None:
    assert hasattr(module, "clip") == (module is opt_optax_bridge)  # T5X has optimizers alone
    with pytest.raises(AttributeError) as caught:
        module.adamw2  # noqa: B018
    assert str(caught.value) == (
        f"module '{module.__name__}' has no attribute 'adamw2': optax {optax.__version__} exports "
        "no optimizer of that name (`opt_optax_bridge.optimizer_names()` lists them)"
    )

    if module is opt_optax_bridge:
        with pytest.raises(AttributeError, match=r"write `opt_optax_bridge\.muon\(\.\.\.\)` for"):
            module.contrib.muon  # noqa: B018


def test_stubs_are_shipped() -> None:
    for name in ("__init__.pyi", "_t5x_constructors.pyi"):
        assert files("opt_optax_bridge").joinpath(name).is_file()


def test_a_new_optimizer_of_optax_is_found(other_optax: pytest.MonkeyPatch) -> None:
    def brand_new(learning_rate: float) -> optax.GradientTransformation:
        return optax.sgd(learning_rate)

    other_optax.setattr(optax, "brand_new", brand_new, raising=False)
    other_optax.setattr(
        optax.contrib, "newer", functools.partial(brand_new, learning_rate=0.5), raising=False
    )
    assert set(optimizer_names()) == {*NAMES, "brand_new", "newer"}
    bridge: Any = opt_optax_bridge
    facade: Any = t5x
    assert bridge.brand_new(0.5) == wrap_optax_optimizer(brand_new)(0.5)
    assert bridge.newer().hyper_params.learning_rate == 0.5
    assert facade.newer.__name__ == "newer"


def test_a_constructor_of_your_own() -> None:
    @wrap_optax_optimizer
    def mine(rate: Any, /, power: float = 1.0, *, clip: float = 9.0, **rest: Any) -> Any:
        """Of mine."""
        return optax.chain(optax.clip(clip), optax.scale(-rate * power * rest.get("extra", 1.0)))

    assert mine.__doc__ == "Of mine."
    assert mine.__name__ == "mine"
    assert list(inspect.signature(mine).parameters) == ["rate", "power", "clip", "rest"]
    made = mine(0.5, extra=2.0)
    fields = {name: getattr(made.hyper_params, name) for name in ("rate", "power", "clip", "extra")}
    assert fields == {"rate": 0.5, "power": 1.0, "clip": 9.0, "extra": 2.0}
    optimizer, grads = made.create({"w": jnp.zeros(1)}), {"w": jnp.full(1, 4.0)}
    assert optimizer.apply_gradient(grads).target["w"].item() == -4.0
    for overrides, wanted in [
        ({"rate": 0.25}, -2.0),
        ({"power": 3.0}, -12.0),
        ({"clip": 1.0}, -1.0),
        ({"extra": 0.5}, -1.0),
        ({"rate": 1.0, "power": 0.5, "clip": 2.0, "extra": 4.0}, -4.0),
    ]:
        assert optimizer.apply_gradient(grads, **overrides).target["w"].item() == wanted


def test_a_constructor_that_is_not_a_function() -> None:
    class Builder:
        def __call__(self, learning_rate: float) -> Any:
            return optax.sgd(learning_rate)

    for constructor in (Builder(), functools.partial(optax.sgd, momentum=0.5)):
        optimizer = wrap_optax_optimizer(constructor)(0.5).create({"w": jnp.ones(1)})
        stepped = optimizer.apply_gradient({"w": jnp.ones(1)}, learning_rate=0.25)
        assert stepped.target["w"].item() == 0.75
