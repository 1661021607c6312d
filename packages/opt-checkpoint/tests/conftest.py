import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `checkpoint_testing` and `old_optax`


def pytest_configure(config: pytest.Config) -> None:
    # Optax's `dpsgd` takes nothing but a seed, and hands it to a function that wants a key.
    config.addinivalue_line("filterwarnings", 'ignore:"seed" is deprecated')
    config.addinivalue_line("filterwarnings", "ignore:`optimistic_adam` is deprecated")


@pytest.fixture
def optax_promotion() -> None:
    """For tests of optimizers whose own code needs JAX's standard promotion.

    Optax's bias correction is `0.9 ** count` with an int32 count: that is the whole Adam family.
    """


@pytest.fixture(autouse=True)
def _promotion(request: pytest.FixtureRequest) -> Iterator[None]:
    """Strict for what is ours."""
    mode = "standard" if "optax_promotion" in request.fixturenames else "strict"
    with jax.numpy_dtype_promotion(mode):
        yield
