"""Integration tests run on 8 virtual CPU devices; those for accelerators are rehearsed there."""

import os

import jax
import pytest
from jax.sharding import AxisType, Mesh

# Processes that run at the same time, or are killed, would leave half-written programs there.
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
jax.config.update("jax_compilation_cache_dir", None)

# XLA's CPU client runs programs for several devices on the threads that also launch them, as many
# as there are devices or cores. With 32 programs in flight, a launch takes one for each device, and
# collectives wait for ever for those that are left (jaxlib 0.10.2): tests that apply an operation
# to each leaf would hang now and then. Twice as many threads as devices are enough for both.
os.environ.setdefault("NPROC", str(max(16, os.cpu_count() or 1)))
jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request: pytest.FixtureRequest) -> Mesh:
    """All devices, as 4 x 2, with axes of either type."""
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(request.param,) * 2)


# They need a framework each, which the default environment has not: `hatch run frameworks:tunix`.
collect_ignore = [] if "OPT_FRAMEWORK" in os.environ else ["frameworks"]

# Minutes each, with few tests: begun last, they would leave a worker of pytest-xdist idle.
LONGEST = ("test_train_lm.py", "test_kills.py")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where there is no accelerator, the tests for one are a rehearsal, and `slow`."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
    if jax.default_backend() != "cpu":
        return
    for item in items:
        if item.get_closest_marker("accelerator"):
            item.add_marker(pytest.mark.slow)
