import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `adafactor_testing` and `adafactor_goldens`


@pytest.fixture(scope="module", autouse=True)
def _strict_promotion() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"):
        yield
