"""numpyro's optimizers, which take the triples by name, on this module instead of JAX's."""

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.example_libraries
import jax.numpy as jnp
import numpy as np
import opt_legacy_stax
import pytest

MODULE = "jax.example_libraries.optimizers"
STEPS = 60
ARGUMENTS: dict[str, dict[str, Any]] = {
    "Adam": {"step_size": 0.05},
    "Adagrad": {"step_size": 0.5},
    "ClippedAdam": {"step_size": 0.05, "clip_norm": 5.0},
    "Momentum": {"step_size": 0.001, "mass": 0.8},
    "RMSProp": {"step_size": 0.05},
    "RMSPropMomentum": {"step_size": 0.02},
    "SGD": {"step_size": 0.005},
    "SM3": {"step_size": 0.5},
}
TARGET = np.linspace(-1.0, 2.0, 5)


@pytest.fixture(scope="module")
def optim() -> Iterator[Any]:
    """`numpyro.optim`, imported with this module under the name of JAX's."""
    theirs = importlib.import_module(MODULE)
    numpyro = [name for name in sys.modules if name.partition(".")[0] == "numpyro"]
    assert not numpyro, "numpyro must not be imported before"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, MODULE, opt_legacy_stax)
        patch.setattr(jax.example_libraries, "optimizers", opt_legacy_stax, raising=False)
        found = importlib.import_module("numpyro.optim")
    assert found.optimizers is opt_legacy_stax
    assert found.optimizers is not theirs
    yield found
    for name in [n for n in sys.modules if n.partition(".")[0] == "numpyro"]:
        del sys.modules[name]


def model(data: Any) -> None:
    numpyro = importlib.import_module("numpyro")  # it has no types
    dist = importlib.import_module("numpyro.distributions")
    with numpyro.plate("places", len(TARGET)):
        mean = numpyro.sample("mean", dist.Normal(0.0, 10.0))
        numpyro.sample("data", dist.Normal(mean, 0.1), obs=data)


def fit(optimizer: Any, steps: int) -> Any:
    infer = importlib.import_module("numpyro.infer")
    guide = importlib.import_module("numpyro.infer.autoguide").AutoDelta(model)
    svi = infer.SVI(model, guide, optimizer, infer.Trace_ELBO())
    return svi.run(jax.random.key(0), steps, jnp.asarray(TARGET), progress_bar=False)


def test_every_optimizer_is_tried(optim: Any) -> None:
    made_of_triples = {
        name
        for name, value in vars(optim).items()
        if isinstance(value, type) and issubclass(value, optim._NumPyroOptim)
    } - {"_NumPyroOptim", "Minimize"}  # Minimize is SciPy's
    assert made_of_triples == set(ARGUMENTS)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_svi_over_a_vector(optim: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = fit(getattr(optim, name)(**ARGUMENTS[name]), STEPS)
    losses = np.asarray(result.losses)
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.6 * losses[0]
    assert {value.shape for value in result.params.values()} == {TARGET.shape}
    with monkeypatch.context() as patch:  # the constructors look it up when they are called
        patch.setattr(optim, "optimizers", importlib.import_module(MODULE))
        theirs = getattr(optim, name)(**ARGUMENTS[name])
    if name == "SM3":
        with pytest.raises(TypeError, match="Shapes must be 1D sequences of concrete values"):
            fit(theirs, STEPS)
    else:
        # One more scalar operation may be fused another way.
        np.testing.assert_allclose(losses, fit(theirs, STEPS).losses, rtol=1e-5)
