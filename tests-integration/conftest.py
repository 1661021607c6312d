"""Integration tests run on 8 virtual CPU devices; some need an accelerator besides."""

import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `golden_cases`

jax.config.update("jax_num_cpu_devices", 8)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if jax.default_backend() == "cpu":
        skip = pytest.mark.skip(reason="no accelerator on this machine")
        for item in items:
            if item.get_closest_marker("accelerator"):
                item.add_marker(skip)
