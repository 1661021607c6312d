"""What every run of the tests shares, those of a wheel alone included."""

import contextlib
import ctypes
import functools
import gc
import importlib.util
import os
import random
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest


def compiles_for_cpus_alone() -> bool:
    """Whether JAX has no plugin for an accelerator, or is told not to use it."""
    plugins = map(importlib.util.find_spec, ("jax_plugins", "libtpu"))
    return os.environ.get("JAX_PLATFORMS") == "cpu" or not any(plugins)


# Good machine code takes longer to make than these tests to run; `test-all` makes it. Compilers for
# accelerators obey the same flags, and their programs have to be those that users get.
if compiles_for_cpus_alone():
    os.environ.setdefault(
        "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    )

_PROGRAMS = "OPT_TEST_PROGRAMS"  # a folder


def pytest_configure(config: pytest.Config) -> None:
    """A program is compiled once, however many tests make it: half of the time was XLA's."""
    import jax

    if _PROGRAMS not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="programs-")
        config.add_cleanup(folder.cleanup)
        os.environ[_PROGRAMS] = folder.name  # for the workers
        config.add_cleanup(functools.partial(os.environ.pop, _PROGRAMS))
    jax.config.update("jax_compilation_cache_dir", os.environ[_PROGRAMS])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if config.getoption("numprocesses", None):  # several workers, and this is not one of them
        config.pluginmanager.register(_Progress(config))


class _Progress:
    """A line every ten seconds: of several workers, dots do not say how much is left."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.start, self.ended = config, time.monotonic(), threading.Event()
        self.collected = self.run = 0

    def pytest_sessionstart(self) -> None:
        threading.Thread(target=self._write, daemon=True).start()

    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.collected = len(ids)

    def pytest_runtest_logfinish(self) -> None:
        self.run += 1

    def pytest_sessionfinish(self) -> None:
        self.ended.set()

    def _write(self) -> None:
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        while reporter and not self.ended.wait(10):
            seconds = time.monotonic() - self.start
            reporter.write_line(f"{seconds:.0f} s: {self.run} of {self.collected or '?'} tests")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All but `n` cases of a test marked `sample(n)` are `slow`; its name is the seed."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for name, found in cases.items():
        marker = found[0].get_closest_marker("sample")
        assert marker is not None
        left_out = max(0, len(found) - marker.args[0])
        for item in random.Random(name.rpartition("::")[2]).sample(found, left_out):
            item.add_marker(pytest.mark.slow)


# Whose own code is tested without implicit promotion of types.
_STRICT = {"opt-adafactor", "opt-checkpoint", "opt-core", "opt-optax-bridge"}


@pytest.fixture
def optax_promotion() -> None:
    """For tests of optimizers whose own code needs JAX's standard promotion.

    Optax's bias correction is `0.9 ** count` with an int32 count: that is the whole Adam family.
    """


@pytest.fixture(autouse=True)
def _promotion(request: pytest.FixtureRequest) -> Iterator[None]:
    import jax

    folder = request.path.parent
    is_strict = folder.name == "tests" and folder.parent.name in _STRICT
    if not is_strict or "optax_promotion" in request.fixturenames:
        yield
        return
    with jax.numpy_dtype_promotion("strict"):
        yield


def pytest_collection_finish() -> None:
    """What has been imported stays: nothing of it needs to be looked through for garbage."""
    gc.collect()
    gc.freeze()


_resident_after_drop = 0


def _resident() -> int:
    """Bytes in memory; 0 where that is not Linux."""
    with contextlib.suppress(OSError):
        pages = Path("/proc/self/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    return 0


def pytest_runtest_teardown() -> None:
    """Programs are dropped before they fill 2 GB, or most of the 65,530 mappings of a process."""
    global _resident_after_drop
    if _resident() < max(1_200_000_000, _resident_after_drop + 400_000_000):
        return
    import jax

    jax.clear_caches()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # it keeps for itself most of what was freed
    _resident_after_drop = _resident()
